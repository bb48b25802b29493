"""What a client of a store on a server remembers, to detect that the store went back in time.

A completion that the store acknowledged is a receipt: its request stays done, under its token. A store in which that is
not so has lost the completion: it was restored from a backup, a replica lagged, or the power failed. All changes of a
store have one order, so the newest receipt speaks for all earlier ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, NamedTuple, TypeVar

from shoal.errors import ShoalError, StoreRewoundError
from shoal.ports import Lease, Leased
from shoal.system import clock

_INTERVAL = 0.1  # seconds between two of the older receipts
_MAX_OLDER = 600

Proof = TypeVar("Proof")


class Receipt(NamedTuple, Generic[Proof]):
    """A completion that the store acknowledged."""

    order: int
    """Of two completions of a run, the later one has the higher number."""
    sent: float
    """When the client made the call: never later than the completion."""
    proof: Proof
    """Identifies the request and its token. The client presents it to the store."""


class Call(NamedTuple):
    """A call that a client began."""

    epoch: int
    sent: float


class Notice(NamedTuple):
    """A rewind, as the client noticed it."""

    at: float
    age: float | None
    """Seconds since the newest lost change was acknowledged; None: not known."""


class Receipts(Generic[Proof]):
    """What one frontier object remembers of the store's acknowledgements.

    After a rewind was noticed, all calls raise StoreRewoundError until `clear`.
    """

    def __init__(self) -> None:
        self._newest: Receipt[Proof] | None = None
        self._older: deque[Receipt[Proof]] = deque(maxlen=_MAX_OLDER)
        self._confirmed: dict[str, float] = {}
        self._epoch = 0
        """How often it was cleared. The answer to a call of an earlier epoch proves nothing."""
        self.notice: Notice | None = None
        self.has_recorded = False
        """Whether this client recorded a rewind. If the store loses that record, it was rewound again."""

    @property
    def proof(self) -> Proof | None:
        """What the client presents to the store."""
        return None if self._newest is None else self._newest.proof

    def check(self) -> None:
        """StoreRewoundError after a rewind was noticed, until `clear`."""
        if self.notice is not None:
            raise StoreRewoundError("the store went back in time; nothing was changed. Call recover() first")

    def begin(self) -> Call:
        """Begin a call. StoreRewoundError as `check`."""
        self.check()
        return Call(self._epoch, clock.now())

    @contextmanager
    def watch(self, what: str = "", *, proven: bool = False) -> Iterator[Call]:
        """Use it around a call that may find out that the store was rewound. ``what``: the role or log that the call
        continues. ``proven``: the call presents the newest receipt."""
        call = self.begin()
        try:
            yield call
        except StoreRewoundError:
            self._note_rewind(call, what, proven=proven)
            raise

    def _note_rewind(self, call: Call, what: str, *, proven: bool) -> None:
        if self.notice is not None or call.epoch != self._epoch:
            return
        now, confirmed_at = clock.now(), []
        if what in self._confirmed:
            confirmed_at.append(self._confirmed[what])
        if proven and self._newest is not None:
            confirmed_at.append(self._newest.sent)
        self.notice = Notice(now, now - min(confirmed_at) if confirmed_at else None)

    def completed(self, call: Call, order: int, proof: Proof) -> None:
        """Record that the store acknowledged a completion. Answers may arrive in another order; the store's counts."""
        if call.epoch != self._epoch or (self._newest is not None and order <= self._newest.order):
            return
        self._newest = Receipt(order, call.sent, proof)
        if not self._older or call.sent - self._older[-1].sent >= _INTERVAL:
            self._older.append(self._newest)

    def confirmed(self, call: Call, what: str) -> None:
        """Record that the store has this role or log as the client knows it."""
        if call.epoch == self._epoch:
            self._confirmed[what] = call.sent

    def ages(self) -> list[tuple[float, Proof]]:
        """For each receipt, newest first: how many seconds old it was when the rewind was noticed, and its proof."""
        if self.notice is None:
            return []
        receipts = dict.fromkeys(filter(None, (self._newest, *reversed(self._older))))
        return [(self.notice.at - receipt.sent, receipt.proof) for receipt in receipts]

    def clear(self) -> None:
        """Forget all receipts after the store has recorded the rewind, and continue with the store as it is."""
        self.has_recorded = True
        self._newest = self.notice = None
        self._older.clear()
        self._confirmed.clear()
        self._epoch += 1


class ServerClock:
    """Computes until when, by the server's clock, the client waits for a call.

    A server that was frozen finds old calls in its sockets. A `lease` that it executes then would block hosts and use
    up attempts until it expires, as its client has given up. So each call carries the server time after which the
    server must ignore it.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds after which the client gives up."""
        self._timeout = timeout
        self._offset: float | None = None

    def observe(self, sent: float, server: float) -> None:
        """Record the server time in the answer to a call that was ``sent`` at this time of `shoal.system.clock`."""
        self._offset = server - sent

    @property
    def not_after(self) -> float | None:
        """The server time when the client gives up a call that it makes now. None until the first answer."""
        return None if self._offset is None else clock.now() + self._offset + self._timeout


Granted = TypeVar("Granted", bound="Leased | list[Lease | None]")
"""What ``lease`` and ``reissue`` return."""


async def release_if_cancelled(
    call: Coroutine[object, None, Granted], release: Callable[..., Awaitable[object]]
) -> Granted:
    """Return the result of a call that grants leases. If the caller is cancelled, finish the call and ``release`` them.

    A call that was sent to a store happens even if its caller is cancelled. Without this, nobody would work on those
    leases until they expire.
    """
    job = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        with suppress(ShoalError):
            granted = await job
            if isinstance(granted, Leased):
                await release(granted.leases)
            else:  # the former holders of reissued leases may have contacted the hosts
                await release([lease for lease in granted if lease], contacted=True)
        raise
