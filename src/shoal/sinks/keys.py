"""Which row of a table an item becomes, and how much of a run is in its tables.

Every row has three system columns: ``_key`` (the primary key), ``_run`` (the run that wrote it) and ``_seq`` (the
item's number in the run's item log). By default ``_key`` consists of the run, the page and the index of the item, so
runs never replace each other's rows. With ``?key=field,...`` it consists of the values of these fields: a newer item
replaces the row, even if another run wrote it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from shoal.errors import DECODING_ERRORS, ItemError, SinkError
from shoal.item import as_text
from shoal.ports import LoggedItem, Takeovers, common_position, with_takeover

# Items that an output can't write. They do not stop the others, and each is logged or counted.


log = logging.getLogger("shoal.sinks")

T = TypeVar("T")

_MAX_LOGGED = 20


class Reject(NamedTuple):
    """An item that was not written, and why."""

    item: LoggedItem
    reason: str


class Rejects:
    """Logs the first rejected items and counts all of them.

    It does so at the next flush, so that items that are written again do not count twice.
    """

    def __init__(self, name: str, on_reject: Callable[[int], None] | None = None) -> None:
        """``on_reject`` is called with the number of newly rejected items."""
        self._name = name
        self._on_reject = on_reject
        self._pending: list[Reject] = []
        self._count = 0

    def open(self) -> None:
        """Drop what was rejected since the last flush: those items are written again."""
        self._pending.clear()

    def add(self, rejects: Sequence[Reject]) -> None:
        self._pending += rejects

    def flush(self) -> None:
        rejects, self._pending = self._pending, []
        if not rejects:
            return
        for item, reason in rejects[: max(0, _MAX_LOGGED - self._count)]:
            log.error("item %s not written to %s: %s", item.key, self._name, reason)
        if self._count < _MAX_LOGGED <= self._count + len(rejects):
            log.error("%s: further rejected items are counted, but not logged", self._name)
        self._count += len(rejects)
        if self._on_reject is not None:
            self._on_reject(len(rejects))

    def finish(self) -> None:
        """Log the total when the run is finished."""
        self.flush()
        if self._count:
            log.error("%s: %d items were not written; they are in the run's item log", self._name, self._count)
            self._count = 0


Export: TypeAlias = Literal["", "all", "missing"]

KEY, RUN, SEQ = "_key", "_run", "_seq"
SYSTEM_COLUMNS = (KEY, RUN, SEQ)
REGISTRY = "_shoal_tables"
"""The table that lists the tables created for types of items. A rewound run must find them all."""
OUTPUTS = "_shoal_outputs"
"""The table that fences outputs: by run, output and log, the epoch of the newest writer, the number of the last item,
and how many items did not fit."""
MAX_COLUMNS = 500
"""The default limit for fields of items."""

_MAX_KEY_LENGTH = 200
_PLAIN = re.compile(r"[\x20-\x26\x28-\x5b\x5d-\x7e]*")  # ASCII that no database has to escape or convert
_UNFIT_RUN = re.compile(r"\0|\s+\Z")
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class TableOptions(msgspec.Struct, frozen=True):
    """The options of an output with tables or columns."""

    table: str | None = None
    """One table for all items; None: one for each type of item."""
    run_id: str = ""
    key: tuple[str, ...] = ()
    """The fields that identify a row. If empty, the run, the page and the index do."""
    max_columns: int = MAX_COLUMNS
    on_reject: Callable[[int], None] | None = None
    """Called with the number of items that could not be written."""
    replaces: bool = True
    """Whether a file that another run wrote is replaced."""
    formulas: bool = False
    """Whether CSV cells may be formulas."""
    export: Export = ""
    """How an export writes a table: ``all`` items, or only those that are ``missing``. Empty: the run itself writes."""

    @property
    def run(self) -> str:
        """The value of ``_run``."""
        if len(self.run_id) <= _MAX_KEY_LENGTH and not _UNFIT_RUN.search(self.run_id):
            return self.run_id
        return f"{_UNFIT_RUN.sub('_', self.run_id)[:150]}_{_digest(self.run_id)}"

    def row_key(self, item: LoggedItem, data: dict[str, object]) -> str:
        """The value of ``_key``. ItemError if a field of the key has no value."""
        if not self.key:
            return _short(f"{self.run_id}-{item.key}" if self.run_id else item.key)
        values = []
        for field in self.key:
            value = data.get(field)
            if value is None:
                raise ItemError(f"its field {field!r} has no value, but ?key= makes it part of the key")
            values.append(_text(value))
        return _short(_encode_sorted(values).decode())


def _text(value: object) -> str:
    """Equal for values that are equal in a column: 1, 1.0 and "1"."""
    if isinstance(value, dict | list):
        return _encode_sorted(value).decode()
    text = as_text(value)
    return text.removesuffix(".0") if type(value) is float else text


def _short(key: str) -> str:
    return key if len(key) <= _MAX_KEY_LENGTH and _PLAIN.fullmatch(key) else _digest(key)


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()


# -- progress


class SavedProgress(msgspec.Struct):
    """The state of an output with tables at a flush."""

    seq: int
    key: list[str] = []
    rejected: int = 0
    is_fenced: bool = False
    """Whether the output has a row in ``_shoal_outputs``. States of earlier versions have none."""
    takeovers: Takeovers = []


_encode_saved = msgspec.msgpack.Encoder().encode
decode_progress = msgspec.msgpack.Decoder(SavedProgress).decode


def read_state(state: bytes, decode: Callable[[bytes], T], name: str) -> T | None:
    """Decode a state; None if there is none. SinkError if it can't be read. ``name`` is the output in messages."""
    try:
        return decode(state) if state else None
    except DECODING_ERRORS as exc:
        raise SinkError(f"can't read the saved position in {name}: {exc}") from exc


class WriteProgress:
    """How much of the run is in its tables, and which rows are stale.

    A store that was rewound opens an output at an older state. Later rows of the run are stale then: their pages are
    crawled again. The first write deletes them, after the output has the epoch of this writer.
    """

    def __init__(self, name: str, key: Sequence[str]) -> None:
        self._name = name
        self._key = list(key)
        self._saved: SavedProgress | None = None
        self._takeovers: Takeovers = []
        self._seq = 0
        self._has_written = False
        self.first_written = 0
        """The number of the first item that was written since ``open``."""
        self.epoch = 0
        self.position = 0
        """The number of the last item in the output, as the output must have recorded it."""
        self.rejected = 0
        """Items that the output could not take."""

    def open(self, state: bytes, epoch: int) -> None:
        saved = read_state(state, decode_progress, self._name)
        if saved is not None and saved.key != self._key:
            raise SinkError(
                f"this run started to write {self._name} with {_option(saved.key)}, but now it has "
                f"{_option(self._key)}: rows would be written twice. Use the same key as before, or another table"
            )
        self._saved, self._seq, self._has_written = saved, saved.seq if saved is not None else 0, False
        self.epoch, self.position, self.rejected = epoch, 0, saved.rejected if saved is not None else 0
        self._takeovers = with_takeover(saved.takeovers if saved is not None else [], epoch, self._seq)

    @property
    def of_earlier_version(self) -> int | None:
        """The saved position, if a version wrote it that kept no record in the output."""
        return self._saved.seq if self._saved is not None and not self._saved.is_fenced else None

    def common_position(self, epoch: int, seq: int) -> int:
        """Up to which item the output has the items of the log, if it is as the writer of this epoch left it."""
        return common_position([] if self._saved is None else self._saved.takeovers, epoch, seq)

    def resume(self, position: int, rejected: int) -> int | None:
        """Continue where the output is. Return its position if that is before the saved one: it was set back."""
        self.position = position
        if self._saved is None or position >= self._saved.seq:
            return None
        self._saved, self._seq, self.rejected = SavedProgress(position, self._key), position, rejected
        return position

    def stale_after(self, items: Sequence[LoggedItem] = ()) -> int | None:
        """The number after which rows of this run are stale; None if none are. Ask before each write, and at the end.

        Without a saved state, all rows from the first item on are stale. Rows whose items are no longer in the log
        (``items.keep = false``) stay.
        """
        if self._has_written:
            return None
        if self._saved is not None:
            return self._saved.seq
        return items[0].seq - 1 if items else None

    def after(self, items: Sequence[LoggedItem], rejects: Iterable[Reject]) -> tuple[int, int]:
        """The position and the number of rejected items after these items are written."""
        return max(self._seq, items[-1].seq), self.rejected + sum(reject.item.seq > self._seq for reject in rejects)

    def wrote(self, items: Sequence[LoggedItem], rejects: Iterable[Reject]) -> None:
        if not self._has_written:
            self.first_written = items[0].seq
        self._seq, self.rejected = self.after(items, rejects)
        self._has_written = True

    @property
    def last_written(self) -> int | None:
        """The number of the last item that was written since ``open``."""
        return self._seq if self._has_written else None

    def flush(self) -> bytes:
        if not self._has_written and self._saved is None:
            return b""
        return _encode_saved(SavedProgress(self._seq, self._key, self.rejected, True, self._takeovers))


def _option(key: Sequence[str]) -> str:
    return f"?key={','.join(key)}" if key else "no ?key="
