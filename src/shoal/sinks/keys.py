"""Which row of a table an item becomes, and how far a run got in its tables.

Every row carries three columns of its own: ``_key`` (the primary key), ``_run`` (the run that wrote it) and ``_seq``
(the item's number in the run's item log). By default ``_key`` is made of the run, the page and the index of the item,
so runs never replace each other's rows. With ``?key=field,...`` it is made of the values of these fields: a newer item
replaces the row, whichever run wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from shoal.errors import ItemError, SinkError
from shoal.item import as_text
from shoal.ports import LoggedItem

KEY, RUN, SEQ = "_key", "_run", "_seq"
OWN = (KEY, RUN, SEQ)
REGISTRY = "_shoal_tables"
"""The table that names the tables made for types of items. A rewound run must find them all."""
MAX_COLUMNS = 500
"""For fields of items, unless the output says otherwise."""

_LONGEST_KEY = 200
_PLAIN = re.compile(r"[\x20-\x26\x28-\x5b\x5d-\x7e]*")  # ASCII that no database has to escape or convert
_UNFIT_RUN = re.compile(r"\0|\s+\Z")
_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class TableOptions(msgspec.Struct, frozen=True):
    """What an output with tables needs to know beside its address."""

    table: str | None = None
    """One table for all items; None: one for each type."""
    run_id: str = ""
    key: tuple[str, ...] = ()
    """The fields that identify a row; empty: the run, the page and the index."""
    max_columns: int = MAX_COLUMNS
    on_reject: Callable[[int], None] | None = None
    """Called with the number of items that could not be written."""

    @property
    def run(self) -> str:
        """The run as it stands in a row."""
        if len(self.run_id) <= _LONGEST_KEY and not _UNFIT_RUN.search(self.run_id):
            return self.run_id
        return f"{_UNFIT_RUN.sub('_', self.run_id)[:150]}_{_digest(self.run_id)}"

    def row_key(self, item: LoggedItem, data: dict[str, Any]) -> str:
        """ItemError if a field of the key has no value."""
        if not self.key:
            return _short(f"{self.run_id}-{item.key}" if self.run_id else item.key)
        values = []
        for field in self.key:
            value = data.get(field)
            if value is None:
                raise ItemError(f"it has no value in the field {field!r}, which ?key= makes part of its key")
            values.append(_text(value))
        return _short(_encode_sorted(values).decode())


def _text(value: Any) -> str:
    """The same for values that a column does not tell apart: 1, 1.0 and "1"."""
    if isinstance(value, dict | list):
        return _encode_sorted(value).decode()
    text = as_text(value)
    return text.removesuffix(".0") if type(value) is float else text


def _short(key: str) -> str:
    return key if len(key) <= _LONGEST_KEY and _PLAIN.fullmatch(key) else _digest(key)


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()


# -- how far


class _Saved(msgspec.Struct):
    """The state of an output with tables at a flush."""

    seq: int
    key: list[str] = []


_encode_saved = msgspec.msgpack.Encoder().encode
_decode_saved = msgspec.msgpack.Decoder(_Saved).decode


class Progress:
    """How far the run got in its tables, and from where on its rows are void.

    A store that was rewound opens an output at an older state: rows behind it come from pages that are crawled again.
    They are deleted by the first write, not when the output is opened: only a write is sure to happen under a role that
    was renewed a moment ago. A process that was frozen on its way here must not delete the rows of its successor.
    """

    def __init__(self, name: str, key: Sequence[str]) -> None:
        self._name = name
        self._key = list(key)
        self._saved: _Saved | None = None
        self._seq = 0
        self._voided = False

    def open(self, state: bytes) -> None:
        try:
            saved = _decode_saved(state) if state else None
        except msgspec.MsgspecError as exc:
            raise SinkError(f"the saved position in {self._name} can't be read: {exc}") from exc
        if saved is not None and saved.key != self._key:
            raise SinkError(
                f"this run began to write {self._name} with {_option(saved.key)}, and now it has {_option(self._key)}: "
                "rows would be there twice. Use the same key as before, or another table"
            )
        self._saved, self._seq, self._voided = saved, saved.seq if saved is not None else 0, False

    def void_behind(self, items: Sequence[LoggedItem] = ()) -> int | None:
        """The number behind which rows of this run are void, before a write or at the end; None if none are.

        Without a state these are the rows from the first item on. Rows whose items the log does not have any more
        (``items.keep = false``) stay.
        """
        if self._voided:
            return None
        if self._saved is not None:
            return self._saved.seq
        return items[0].seq - 1 if items else None

    def wrote(self, items: Sequence[LoggedItem]) -> None:
        self._seq, self._voided = max(self._seq, items[-1].seq), True

    def flush(self) -> bytes:
        return _encode_saved(_Saved(self._seq, self._key)) if self._voided or self._saved is not None else b""


def _option(key: Sequence[str]) -> str:
    return f"?key={','.join(key)}" if key else "no ?key="
