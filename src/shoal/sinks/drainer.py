"""Copies a run's item log into a sink, each item exactly once.

A drainer holds the role of its sink in the run. Its cursor is a position in the log and the state of the sink there.
The drainer reads the log after the cursor and writes to the sink. Then the sink flushes, and only then the cursor
moves. If anything fails in between, the sink is reopened at the state in the cursor, and later items are written again.

The role's epoch fences the output: a drainer that lost its role cannot change the output any more, however late its
writes arrive. An output that was set back has fewer items than the cursor says. Then the cursor goes back too, and the
later items are written again. If the log no longer has them, the drainer stops and names them.

The numbers of items have no gaps, and only the first items are ever deleted on purpose. If another item is missing in
the log, the drainer writes the rest, names the missing numbers, and keeps them in its cursor. At the end of the run, it
fails.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TypeVar

import msgspec

from shoal.errors import (
    DECODING_ERRORS,
    FencedError,
    FrontierError,
    OutputChangedError,
    OutputTakenError,
    SinkError,
    StoreAwayError,
    StoreRewoundError,
)
from shoal.ports import Claim, ItemSource, LoggedItem, Sink
from shoal.sinks.patience import Patience
from shoal.sinks.storage import OutputExistsError
from shoal.system import chance, clock

T = TypeVar("T")

log = logging.getLogger("shoal.sinks")

FLUSH_EVERY = 0.5
MAX_UNFLUSHED = 20_000  # items: if flushes are rare, the cursor must still not get so far behind that the engine pauses
PATIENCE = 300.0
_FRONTIER_DELAYS = (0.25, 0.75, 2.0, 5.0)
_CLAIM_POLL = 0.25
_AWAY_POLL = 0.5
_encode_cursor = msgspec.msgpack.Encoder().encode
_NONCE_BYTES = 16
PREFIX = "sink:"
"""The names of drainers' roles begin with this."""
_IDENTITY = re.compile(r"(.+)#(([A-Za-z0-9.-]+)-[0-9a-f]{8})", re.DOTALL)
_MAX_NAMED = 10
_MAX_KEPT = 100
"""Gaps in the log that a cursor keeps."""
_MAX_TAKEOVERS = 3
"""How often a drainer that still holds its role takes its output from another writer before it gives up."""


COLLECTORS = "sink:collect-"
"""The beginning of the roles of programs that collect items themselves. No later process continues such a role."""


class RoleTakenError(SinkError):
    """Another process of the run holds the role of this output."""


class ItemsLostError(SinkError):
    """The item log lacks items. The output has all others, and is closed."""


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """How far a drainer is: the position in the log, and the state of the sink there."""

    position: int = 0
    state: bytes = b""
    is_closed: bool | None = None
    """Whether the sink was closed with all items after the run had ended. None: an earlier version did not say so."""
    lost: tuple[tuple[int, int], ...] = ()
    """The items up to the position that the log lacked, as the first and the last number of each gap."""


_decode_cursor = msgspec.msgpack.Decoder(Cursor).decode


def read_cursor(cursor: bytes) -> Cursor:
    """Decode a cursor. One that can't be read counts as empty."""
    try:
        return _decode_cursor(cursor) if cursor else Cursor()
    except DECODING_ERRORS:
        return Cursor()


def position_of(cursor: bytes) -> int:
    """The position of this cursor in the log. 0 if the cursor can't be read."""
    return read_cursor(cursor).position


def split_role(role: str) -> tuple[str, str]:
    """The output that a role names, and the identity of its file, or "" without one. See `shoal.sinks.identity`."""
    name = role.removeprefix(PREFIX)
    match = _IDENTITY.fullmatch(name)
    return (match[1], match[2]) if match is not None else (name, "")


def host_of(role: str) -> str:
    """The machine on which the file of this role got its identity. Empty if it has none."""
    return split_role(role)[1].rpartition("-")[0]


def output_name(role: str) -> str:
    """The output of a role for people, such as ``/out/books.jsonl (web1)``."""
    name, host = split_role(role)[0], host_of(role)
    return f"{name} ({host})" if host else name


class Drainer:
    """Drains one run's item log into one sink: ``start``, then ``run`` as a task, then ``finish`` or ``abandon``.

    You may cancel ``run`` at any time, and call ``finish`` while ``run`` is active. The drainer retries a sink that
    fails while its ``patience`` lasts. Then it raises a SinkError.
    """

    def __init__(
        self,
        frontier: ItemSource,
        sink: Sink,
        role: str,
        *,
        ttl: float = 60.0,
        batch: int = 500,
        poll: float = 1.0,
        patience: Patience | None = None,
    ) -> None:
        """``role`` is what `shoal.sinks.identity.output_role` returns. ``poll``: without a nudge, seconds between reads
        of the log. A sink may have its own ``flush_every``, in seconds.
        """
        self._frontier = frontier
        self._sink = sink
        self._role = PREFIX + role
        self._name = output_name(role)
        self._ttl = ttl
        self._batch = batch
        self._poll = poll
        self._patience = Patience(PATIENCE) if patience is None else patience
        self._flush_every = getattr(sink, "flush_every", FLUSH_EVERY)
        self._claim: Claim | None = None
        self._position = 0
        self._state = b""
        self._written = 0
        self._lost: set[tuple[int, int]] = set()
        """The first and the last number of each gap in the log."""
        self._last: LoggedItem | None = None
        """The last item that was read. It lets the store detect that its log was rewound."""
        self._unconfirmed: tuple[int, bytes] | None = None
        """The cursor that was sent to the store and not answered."""
        self._is_broken = False
        self._is_caught_up = False
        """Whether the sink has got every item of the log since it was opened."""
        self._takeovers = 0
        self._flush_at = self._renew_at = 0.0
        self._lock = asyncio.Lock()
        self._woken = asyncio.Event()
        self._is_stopping = False
        self._failure: BaseException | None = None

    @property
    def role(self) -> str:
        """The role that it takes in the run."""
        return self._role

    @property
    def position(self) -> int:
        """The number of the last item that is durable in the sink. The log may be trimmed up to this item."""
        return self._position

    def nudge(self) -> None:
        """Tell the drainer that there are new items."""
        self._woken.set()

    # -- start

    async def start(self, *, wait: float | None = None) -> None:
        """Take the role and open the sink at the cursor of the last holder.

        Waits while another process holds the role, by default until the role of a dead process expires. Then raises a
        SinkError.
        """
        await self._open(await self._take_role(self._ttl + 1 if wait is None else wait))

    async def try_start(self) -> bool:
        """Like ``start``, but without waiting. Return False if another process holds the role."""
        claim = await self._try_role()
        if claim is None:
            return False
        await self._open(claim)
        return True

    async def _try_role(self) -> Claim | None:
        self._renew_at = clock.monotonic() + self._ttl / 3
        return await self._persist(
            partial(self._frontier.claim, self._role, self._ttl, nonce=chance.token_bytes(_NONCE_BYTES))
        )

    async def start_over(self) -> None:
        """Continue from the cursor that the store has after a rewind. Call this while ``run`` is not active. Then call
        ``run`` again."""
        async with self._lock:
            self._failure, self._is_broken, self._is_stopping, self._unconfirmed = None, False, False, None
            self._patience.worked()
            if self._claim is not None:
                await self._close_unfinished()
                await self._persist(partial(self._frontier.relinquish, self._claim))  # else `start` waits for it
                self._claim = None
            await self.start()

    async def _open(self, claim: Claim) -> None:
        self._claim = claim
        try:
            cursor = _decode_cursor(claim.cursor) if claim.cursor else Cursor()
            self._position, self._state, self._lost = cursor.position, cursor.state, set(cursor.lost)
            await self._open_sink()
        except BaseException as exc:
            if isinstance(exc, OutputChangedError):
                await self._name_trimmed(exc)
            await self._release_role()
            if isinstance(exc, OutputExistsError) and not claim.cursor:  # this never was an output of the run
                with suppress(FrontierError):
                    await self._frontier.forget(self._role)
            if isinstance(exc, DECODING_ERRORS):
                raise SinkError(f"can't read the saved cursor of {self._name}: {exc}") from exc
            raise

    async def _open_sink(self) -> None:
        """Open the sink at the cursor. If the output was set back, move the cursor back."""
        was_taken = False
        while True:
            assert self._claim is not None, "not started"
            try:
                last = await self._sink.open(self._state, self._claim.epoch)
                break
            except OutputTakenError as exc:
                await self._claim_above(exc)
                was_taken = True
        if was_taken and last is not None:  # a backup has an older epoch, not a newer one
            raise self._other_store()
        if last is not None and last < self._position:
            await _until_back(partial(self._go_back, last))
        self._written, self._last, self._is_broken, self._is_caught_up = self._position, None, False, False

    async def _claim_above(self, error: OutputTakenError) -> None:
        """Claim the role again, with an epoch above that of the output. RoleTakenError if another process has the role.

        A drainer that still holds its role finds a newer epoch in two cases: its store was rewound, or another store
        has a run of the same name."""
        await _until_back(self._renew)
        assert self._claim is not None
        if self._takeovers == _MAX_TAKEOVERS:
            raise self._other_store() from None
        self._takeovers += 1
        await _until_back(partial(self._frontier.relinquish, self._claim))
        nonce = chance.token_bytes(_NONCE_BYTES)
        claim = partial(self._frontier.claim, self._role, self._ttl, nonce=nonce, above=error.epoch)
        self._claim = await _until_back(claim)
        if self._claim is None:
            raise RoleTakenError(str(error)) from None

    def _other_store(self) -> SinkError:
        return SinkError(
            f"another store has a run of the same name, which also writes to {self._name}, or two outputs of this run "
            "are the same one. Stop one of them, and give its run another name or another output"
        )

    async def _go_back(self, last: int) -> None:
        """Continue after item ``last``, because the output has no later item. The cursor moves first, so that no
        process deletes the later items from the log."""
        before, state = self._position, self._state
        await self._check_log(last)
        log.error("%s was set back: it ends with item %d of %d; writing the others again", self._name, last, before)
        await self._move(last, await self._sink.flush())
        try:
            await self._check_log(last)
        except SinkError:  # the items were deleted meanwhile: the cursor must still fit a newer backup of the output
            await self._move(before, state)
            raise

    async def _check_log(self, last: int) -> None:
        """SinkError unless the log has the item after ``last``."""
        first = await first_after(self._frontier, last)
        if first > last + 1:
            raise SinkError(
                f"{self._name} was set back: it ends with item {last}, but the log begins with item {first}, because "
                f"items.keep is false. Items {last + 1} to {first - 1} are missing. Restore a newer backup of the "
                f"output, or continue without them: `shoal outputs RUN forget '{self._role.removeprefix(PREFIX)}'`"
            )

    async def _name_trimmed(self, error: OutputChangedError) -> None:
        """Add to the error which items only the output had."""
        with suppress(FrontierError):
            first = await first_after(self._frontier, 0)
            if first > 1:
                error.add(f"Items 1 to {first - 1} are no longer in the item log, because items.keep is false")

    async def _take_role(self, wait: float) -> Claim:
        deadline = clock.monotonic() + wait
        has_warned = False
        while True:
            claim = await self._try_role()
            if claim is not None:
                return claim
            seconds_left = deadline - clock.monotonic()
            if seconds_left <= 0:
                raise SinkError(f"another process of this run is writing to {self._name}; stop it first")
            if not has_warned and seconds_left > _CLAIM_POLL:
                has_warned = True
                log.warning("another process is writing to %s, or died; waiting up to %g s", self._name, seconds_left)
            await asyncio.sleep(min(seconds_left, _CLAIM_POLL))

    # -- run

    async def run(self) -> None:
        """Drain until ``finish`` or ``abandon``. SinkError: the role was lost, or all retries of the sink failed."""
        try:
            while not self._is_stopping:
                async with self._lock:
                    if self._is_stopping:
                        return
                    self._woken.clear()
                    is_full = await self._turn() == self._batch
                if not is_full:
                    await self._sleep()
        except Exception as exc:
            self._failure = exc
            raise

    async def _turn(self) -> int:
        """Write one batch, and flush if that is due. Return the number of items."""
        count = await self._persist(self._drain)
        is_due = clock.monotonic() >= self._flush_at or self._written - self._position >= MAX_UNFLUSHED
        if self._has_unsaved and is_due:
            await self._persist(self._save)
        await asyncio.sleep(0)  # with a frontier in memory, nothing above may have yielded to other tasks
        return count

    async def _sleep(self) -> None:
        """Sleep until a nudge, the next poll, or the next flush."""
        now = clock.monotonic()
        due = min(self._renew_at, self._flush_at) if self._has_unsaved else self._renew_at
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(self._poll, due - now))):
                await self._woken.wait()

    @property
    def _has_unsaved(self) -> bool:
        return self._written > self._position

    async def _drain(self) -> int:
        now = clock.monotonic()
        if now >= self._renew_at:  # never write with a role that may have expired
            await self._renew()
        items = await self._frontier.read_items(self._written, self._batch, last=self._last)
        if items:
            if gaps := find_gaps(self._written, items):
                await self._report_gaps(gaps)
            await self._sink.write(items)
            if not self._has_unsaved:
                self._flush_at = now + self._flush_every
            self._written, self._last = items[-1].seq, items[-1]
        return len(items)

    async def _report_gaps(self, gaps: list[tuple[int, int]]) -> None:
        """Name the items that the log lacks, before the items that were read and among them."""
        trimmed = (await self._frontier.stats()).trimmed
        if gaps[0][0] <= trimmed:
            last = min(gaps[0][1], trimmed)
            lost = f"items {gaps[0][0]} to {last} of this run are no longer in its log (items.keep is false)"
            if self._state:
                raise SinkError(f"can't write {self._name}: {lost}")
            log.warning("%s: %s, so this output begins with item %d", self._name, lost, last + 1)
        self._report_lost(not_trimmed(gaps, trimmed))

    def _report_lost(self, gaps: list[tuple[int, int]]) -> None:
        if not self._lost.issuperset(gaps):  # else these gaps are read again
            log.error("%s lacks %s, which the item log of this run does not have", self._name, name_items(gaps))
            self._lost.update(gaps)

    async def _check_end(self) -> None:
        """Check that the log has its last item."""
        last = (await self._frontier.stats()).items
        if last > self._written and not await self._frontier.read_items(self._written, 1):
            self._report_lost([(self._written + 1, last)])

    async def _save(self) -> None:
        """Flush the sink and move the cursor, without a write in between."""
        await self._confirm()
        if self._has_unsaved:
            await self._move(self._written, await self._sink.flush())
            self._patience.worked()
            self._takeovers = 0

    async def _renew(self) -> None:
        if not await self._confirm():
            await self._move(self._position, self._state)

    async def _check_role(self) -> None:
        """Raise RoleTakenError if the role was lost: then the output refuses because another process writes it."""
        try:
            await self._renew()
        except (StoreRewoundError, FencedError):
            raise
        except FrontierError as exc:
            log.debug("can't check the role of %s: %s", self._name, exc)

    async def _confirm(self) -> bool:
        """Send the cursor again if its answer was lost. Return False if none was."""
        if self._unconfirmed is None:
            return False
        await self._move(*self._unconfirmed)
        return True

    async def _move(self, position: int, state: bytes, *, is_closed: bool = False) -> None:
        assert self._claim is not None, "not started"
        renew_at = clock.monotonic() + self._ttl / 3
        lost = tuple(sorted(gap for gap in self._lost if is_closed or gap[1] <= position))[:_MAX_KEPT]
        cursor = _encode_cursor(Cursor(position, state, is_closed, lost))
        self._unconfirmed = (position, state)
        has_role = await self._frontier.advance(self._claim, cursor, self._ttl, last=self._item_at(position))
        self._unconfirmed = None
        if not has_role:
            raise RoleTakenError(f"another process of this run took over {self._name}")
        self._claim = self._claim.moved_to(cursor)
        self._position, self._state, self._renew_at = position, state, renew_at

    def _item_at(self, position: int) -> LoggedItem | None:
        """The item at this position, if it was read since the sink was opened. A rewound store may have another item at
        this position. Then the store must refuse to move the cursor."""
        return self._last if self._last is not None and self._last.seq == position else None

    async def _reopen(self) -> None:
        """Reopen the sink at the saved cursor."""
        await self._renew()
        await self._close_unfinished()
        await self._open_sink()
        self.nudge()

    async def _persist(self, step: Callable[[], Awaitable[T]]) -> T:
        """Run a step, with retries when the sink or the frontier fails: a full disk may have space again soon."""
        frontier_failures = 0
        while True:
            try:
                if self._is_broken:
                    await self._reopen()
                return await step()
            except StoreAwayError as exc:  # no limit: the engine decides when to give up
                log.debug("the output waits until the frontier's server responds: %s", exc)
                if self._patience.is_hurried and not await self._patience.pause(exc):
                    raise
                await asyncio.sleep(_AWAY_POLL)
            except (StoreRewoundError, FencedError, RoleTakenError):  # the process must start over, or join again
                raise
            except FrontierError as exc:
                if frontier_failures == len(_FRONTIER_DELAYS):
                    raise SinkError(f"gave up after {frontier_failures + 1} attempts: {exc}") from exc
                delay = _FRONTIER_DELAYS[frontier_failures]
                frontier_failures += 1
                log.warning("the frontier failed, retrying in %g s: %s", delay, exc)
                await asyncio.sleep(delay)
            except OutputTakenError:
                self._is_broken = True  # so that it is opened again, which checks the role
            except OutputChangedError as exc:
                await self._name_trimmed(exc)
                raise
            except (SinkError, OSError) as exc:
                await self._pause(exc)
            except asyncio.CancelledError:  # during a write, the sink may have dropped its connection
                self._is_broken = True
                raise

    async def _pause(self, error: SinkError | OSError) -> None:
        """Pause before the sink is opened again. Raise an error if that can't help, or if the patience ends."""
        if not is_retryable(error):
            await self._check_role()
            raise error
        self._is_broken = True
        if not await self._patience.pause(error):
            raise SinkError(f"gave up after {self._patience.spent}: {error}") from error

    @property
    def failing_since(self) -> float | None:
        """When the sink began to fail, on the monotonic clock. None if it works."""
        return self._patience.failing_since

    def hurry(self) -> None:
        """Do not wait long for a sink that fails: the process stops."""
        self._patience.hurry()

    # -- end

    async def finish(self, finished: bool) -> None:
        """Drain the rest of the log, flush, move the cursor, close the sink, and release the role.

        ``finished``: the run is over, so the sink may complete its output. If the run is resumed later, the role can be
        taken again. If ``run`` or this method fails, it ends like ``abandon`` and raises the error. ItemsLostError if
        the run is over and its log lacked items.
        """
        self._stop()
        async with self._lock:
            if self._claim is None:
                return
            try:
                if self._failure is not None:
                    raise self._failure
                while True:
                    await self._catch_up()
                    if await self._persist(partial(self._close_sink, finished)):
                        break
                if finished:
                    self._is_broken = False
                    await _until_back(self._check_end)
                    await _until_back(partial(self._move, self._position, self._state, is_closed=True))
            except BaseException:
                await self._close_unfinished()
                raise
            finally:
                await self._release_role()
            if finished and self._lost:
                lost = name_items(sorted(self._lost))
                raise ItemsLostError(
                    f"{self._name} lacks {lost}, which the item log of this run does not have: another program changed "
                    "the store. The output has all others; `shoal audit` counts what is missing"
                )

    async def abandon(self) -> None:
        """Close the sink without a flush and release the role. The next holder writes the items after the cursor.

        Waits for the current step of ``run``. If the sink hangs, cancel ``run`` first.
        """
        self._stop()
        async with self._lock:
            if self._claim is not None:
                await self._close_unfinished()
                await self._release_role()

    def _stop(self) -> None:
        self._is_stopping = True
        self._woken.set()

    async def _catch_up(self) -> None:
        while True:
            if await self._turn():
                continue
            if not self._has_unsaved:
                self._is_caught_up = True
                return
            await self._persist(self._save)  # this may reopen the sink, so read the log again

    async def _close_sink(self, finished: bool) -> bool:
        """Close the sink. Return False if it was reopened after it had every item: it may have been set back."""
        if not self._is_caught_up:
            return False
        await self._while_held(self._sink.close(finished=finished))
        return True

    async def _while_held(self, work: Coroutine[object, None, None]) -> None:
        """Renew the role while ``work`` runs."""
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._ttl / 3))[0]:
                try:
                    await self._renew()
                except FrontierError as exc:
                    log.warning("can't renew the role of %s: %s", self._name, exc)
        finally:
            await asyncio.wait({task})
            error = task.exception()  # it counts unless the role is lost
        if error is not None:
            raise error

    async def _close_unfinished(self) -> None:
        try:
            await self._sink.close(finished=False)
        except (SinkError, OSError) as exc:
            log.warning("can't close the output %s: %s", self._name, exc)

    async def _release_role(self) -> None:
        if self._claim is not None:
            claim, self._claim = self._claim, None
            try:
                await self._frontier.relinquish(claim)
            except FrontierError as exc:
                log.warning("can't release the role of %s, which expires in %g s: %s", self._name, self._ttl, exc)


async def _until_back(step: Callable[[], Awaitable[T]]) -> T:
    """Repeat a step while the frontier's server is away."""
    while True:
        try:
            return await step()
        except StoreAwayError as exc:
            log.debug("the output waits until the frontier's server responds: %s", exc)
            await asyncio.sleep(_AWAY_POLL)


async def first_after(frontier: ItemSource, seq: int) -> int:
    """The number of the first item that the log has after ``seq``, or of the next one that it will get."""
    items = await frontier.read_items(seq, 1)
    return items[0].seq if items else (await frontier.stats()).items + 1


def find_gaps(after: int, items: Sequence[LoggedItem]) -> list[tuple[int, int]]:
    """The first and the last number of each gap in items that were read after number ``after``."""
    if not items or items[-1].seq - after == len(items):
        return []
    numbers = [after, *(item.seq for item in items)]
    return [(before + 1, number - 1) for before, number in pairwise(numbers) if number > before + 1]


def not_trimmed(gaps: Sequence[tuple[int, int]], trimmed: int) -> list[tuple[int, int]]:
    """The gaps without the first ``trimmed`` items: these were deleted on purpose."""
    return [(max(first, trimmed + 1), last) for first, last in gaps if last > trimmed]


def name_items(gaps: Sequence[tuple[int, int]]) -> str:
    """The items in these gaps for people, such as "items 3, 5 to 7 and 9". A long list is shortened."""
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in gaps[:_MAX_NAMED]]
    if len(gaps) > _MAX_NAMED:
        shown.append(f"{len(gaps) - _MAX_NAMED} more gaps")
    if len(shown) > 1:
        return f"items {', '.join(shown[:-1])} and {shown[-1]}"
    return f"{'items' if gaps[0][0] < gaps[0][1] else 'item'} {shown[0]}"


def is_retryable(error: SinkError | OSError) -> bool:
    """Whether a retry can help. It can't if the sink itself refuses (no cause is set), or if a pipe has no reader."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return cause is not None and not isinstance(cause, BrokenPipeError)


async def export(
    frontier: ItemSource, sink: Sink, *, batch: int = 1000, on_progress: Callable[[int], None] | None = None
) -> int:
    """Write a run's whole item log into a new output, without a role or a cursor. Return the number of items. If the
    item log lacks items, log an error that names them.

    StoreRewoundError if the store was rewound meanwhile: the log is another one now, and the output is incomplete."""
    await sink.open(b"")
    count, last = 0, None
    try:
        while items := await frontier.read_items(last.seq if last else 0, batch, last=last):
            if gaps := find_gaps(last.seq if last else 0, items):
                lost = not_trimmed(gaps, (await frontier.stats()).trimmed)
                if lost:
                    log.error("the log of this run does not have %s", name_items(lost))
            await sink.write(items)
            last = items[-1]
            count += len(items)
            if on_progress is not None:
                on_progress(count)
        await sink.flush()
    except BaseException as exc:
        with suppress(SinkError, OSError):
            await sink.close(finished=False)
        if isinstance(exc, StoreRewoundError):
            raise StoreRewoundError(
                "the store went back in time during the export, so the output is incomplete; export again"
            ) from exc
        raise
    await sink.close(finished=True)
    return count
