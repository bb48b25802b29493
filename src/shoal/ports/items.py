"""Items on their way to outputs: the item log of a run, and sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct


class LoggedItem(Struct, frozen=True):
    """An item in the item log of a run. ``key`` is the same however often its page was tried."""

    seq: int
    fingerprint: bytes
    index: int
    payload: bytes
    token: int = 0
    """Token of the lease under which its page was completed. Together with ``seq`` it identifies this entry, also in a
    store that was rewound and has other items under the same numbers. 0 in stores that cannot be rewound."""

    @property
    def key(self) -> str:
        return f"{self.fingerprint.hex()}-{self.index}"


class ItemLog(Protocol):
    """The items of a run in the order in which their pages were completed."""

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        """Up to ``limit`` items with a sequence number above ``after``, in order. With ``max_bytes``: as many as have
        no more bytes together, but at least one. The store does not read the others.

        ``last``: the item ``after`` as the caller read it. StoreRewoundError if the log ends before it, or has another
        item in its place. A trimmed item is not checked."""
        ...

    async def trim_items(self, through: int, *, cursors: Mapping[str, bytes] | None = None) -> None:
        """Forget the items through this sequence number; the count of items stays. With ``cursors``: only if these
        roles have these cursors. Otherwise the caller's view is outdated, and nothing is forgotten."""
        ...


class SinkOptions(Struct, frozen=True):
    """What a sink of a plugin gets besides its URL."""

    run_id: str = ""
    """The run whose items it writes. Empty in exports of a program."""
    on_reject: Callable[[int], None] | None = None
    """Call it in ``flush`` with the number of items that the output cannot hold."""


class OutputCount(Struct, frozen=True, kw_only=True):
    """What an output has of a run, counted in the output itself."""

    items: int | None
    """Lines, rows or documents of the run. None: this output cannot be counted."""
    position: int | None = None
    """The number of its last item, by its own record. None: it keeps no record."""
    rejected: int = 0
    """Items that it could not take."""
    key: tuple[str, ...] = ()
    """Items with equal values in these fields share a row, so there may be fewer rows than items."""


class Sink(Protocol):
    """An output for items.

    It is opened at the state that its last ``flush`` returned. Whatever was written after that flush is undone or
    overwritten, so repeating a write changes nothing.

    The output itself refuses an old writer: once it was opened under a newer epoch, calls of a sink with an older one
    raise OutputTakenError (or another SinkError) and change nothing, however late they arrive.
    """

    async def open(self, state: bytes, epoch: int = 0) -> int | None:
        """Open the output under this epoch. OutputTakenError if it has a newer one.

        None: the output has everything up to ``state``. Otherwise it was set back, for example restored from a backup:
        the number of the last item that it has, and the next ``flush`` returns the state there."""
        ...

    async def write(self, items: Sequence[LoggedItem]) -> None:
        """Write items in order. SinkError with a cause if the output was set back since ``open``: open it again."""
        ...

    async def flush(self) -> bytes:
        """Make everything written so far durable, and return the state to open at."""
        ...

    async def close(self, *, finished: bool) -> None:
        """``finished``: the run is over, and all its items were written. SinkError if the output no longer has them."""
        ...

    async def count(self, state: bytes) -> OutputCount:
        """Count the items of the run in the output. It need not be open, and another process may be writing it."""
        ...
