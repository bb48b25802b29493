"""The contract of `shoal.ports.Sink` as tests. Use it to test a sink of your own.

Write a harness that makes sinks for one empty output, and reads that output. Then subclass `SinkContract`::

    from shoal.testing import SinkContract, SinkHarness

    class MyHarness(SinkHarness):
        replaces = False                                  # a new run adds to the output, and does not replace it

        def make(self, run_id="run", on_reject=None):
            return MySink("my://output", run_id, on_reject)

        async def read(self):
            return [...]                                  # the items in the output, as dicts, in order

        async def save(self):
            return ...                                    # a copy of the whole output, as a backup has it

        async def restore(self, saved):
            ...                                           # set the output back to that copy

    class TestMySink(SinkContract):
        @pytest.fixture
        def harness(self):
            return MyHarness()

The items have the fields ``n`` (a number) and ``text``. The suite compares them as text, so an output without types
passes. It needs pytest and pytest-asyncio. Like a drainer, it calls ``open``, ``write``, ``flush`` and ``close`` one
at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from shoal.errors import OutputTakenError, SinkError
from shoal.item import Record, encode_item
from shoal.ports import LoggedItem, Sink


class SinkHarness(ABC):
    """One output under test. It is empty at first."""

    replaces: ClassVar[bool]
    """Whether a new run replaces the output, as in a file. False: it adds to the output, as in a database."""

    rejected_item: ClassVar[Record | None] = None
    """An item that the sink rejects; None if it writes every item."""

    stops_when_set_back: ClassVar[bool] = False
    """Whether an output that was set back is an error, as for a file. False: the missing items are written again."""

    @abstractmethod
    def make(self, run_id: str = "run", on_reject: Callable[[int], None] | None = None) -> Sink:
        """A new sink for the output, as in another process of this run. ``on_reject`` is called with the number
        of items that the sink rejected."""

    @abstractmethod
    async def read(self) -> list[Record]:
        """The items in the output. Those of one run are in the order of writing."""

    @abstractmethod
    async def save(self) -> object:
        """A copy of the output, with everything that sinks store there."""

    @abstractmethod
    async def restore(self, saved: Any) -> None:
        """Set the output back to a copy. A sink may be open meanwhile."""

    async def close(self) -> None:  # noqa: B027 - most outputs need nothing
        """Clean up after the test."""

    async def open(
        self, state: bytes = b"", run_id: str = "run", on_reject: Callable[[int], None] | None = None, epoch: int = 0
    ) -> Sink:
        sink = self.make(run_id, on_reject)
        assert await sink.open(state, epoch) is None, "the output was not set back"
        return sink

    async def numbers(self) -> list[int]:
        """The field ``n`` of each item."""
        rows = await self.read()
        assert all(str(row["text"]) == f"item {row['n']}" for row in rows), "an item was damaged"
        return [int(row["n"]) for row in rows]


def logged(numbers: Sequence[int], first_seq: int = 1) -> list[LoggedItem]:
    """Items with these numbers, each from a page of its own."""
    return [
        LoggedItem(seq, number.to_bytes(16, "big"), 0, encode_item({"n": number, "text": f"item {number}"}))
        for seq, number in enumerate(numbers, first_seq)
    ]


async def _written(harness: SinkHarness, numbers: range, epoch: int) -> bytes:
    """The state after these items were written, by a process that has ended."""
    sink = await harness.open(epoch=epoch)
    await sink.write(logged(numbers))
    state = await sink.flush()
    await sink.close(finished=False)
    return state


async def _successor(harness: SinkHarness, old: Sink, state: bytes) -> Sink | None:
    """A sink of the process that took over. None if the output cannot be opened while the old writer has it open."""
    try:
        return await harness.open(state, epoch=3)
    except SinkError:
        await old.close(finished=False)
    await (await harness.open(state, epoch=3)).close(finished=False)
    return None


async def _write(sink: Sink, items: Sequence[LoggedItem]) -> None:
    await sink.write(items)
    await sink.flush()


async def _open_and_write(sink: Sink, state: bytes, items: Sequence[LoggedItem]) -> None:
    await sink.open(state, 2)
    await _write(sink, items)


async def _continue(harness: SinkHarness, state: bytes, kept: int) -> None:
    """Open an output that had nine items and was set back to ``kept``, and write the missing ones."""
    sink = harness.make()
    if harness.stops_when_set_back:
        before = await harness.numbers()
        with pytest.raises(SinkError):
            await sink.open(state, 7)
        await sink.close(finished=False)
        assert await harness.numbers() == before
        return
    last = await sink.open(state, 7)
    assert last is not None
    assert last <= kept
    state = await sink.flush()
    await sink.close(finished=False)
    sink = await harness.open(state, epoch=8)
    await sink.write(logged(range(last + 1, 13), last + 1))
    await sink.flush()
    await sink.close(finished=True)
    assert await harness.numbers() == list(range(1, 13))


class SinkContract:
    """Subclass it, and give it a ``harness`` fixture that returns a `SinkHarness`."""

    pytestmark = pytest.mark.asyncio

    @pytest_asyncio.fixture(autouse=True)
    async def closing(self, harness: SinkHarness) -> AsyncIterator[None]:
        yield
        await harness.close()

    # -- order

    async def test_items_are_written_in_order(self, harness: SinkHarness) -> None:
        sink = await harness.open()
        await sink.write(logged([3, 1]))
        await sink.write([])
        await sink.write(logged([2, 5, 4], 3))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [3, 1, 2, 5, 4]

    async def test_a_run_without_items(self, harness: SinkHarness) -> None:
        sink = await harness.open()
        await sink.flush()
        await sink.close(finished=True)
        sink = await harness.open()
        await sink.write(logged([1]))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [1]

    # -- exactly once

    async def test_a_repeated_write_changes_nothing(self, harness: SinkHarness) -> None:
        sink = await harness.open()
        await sink.write(logged([1, 2, 3]))
        await sink.write(logged([1, 2, 3]))
        await sink.write(logged([2, 3, 4], 2))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [1, 2, 3, 4]

    async def test_reopened_at_a_saved_state(self, harness: SinkHarness) -> None:
        """The process died after a write, before its flush. The next one writes in other batches."""
        sink = await harness.open()
        await sink.write(logged(range(1, 6)))
        state = await sink.flush()
        await sink.write(logged(range(6, 13), 6))
        await sink.close(finished=False)
        sink = await harness.open(state)
        await sink.write(logged(range(6, 9), 6))
        await sink.write(logged(range(9, 16), 9))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == list(range(1, 16))

    async def test_a_flush_whose_state_was_lost(self, harness: SinkHarness) -> None:
        """The process died after a flush, before the cursor moved."""
        sink = await harness.open()
        await sink.write(logged(range(1, 4)))
        state = await sink.flush()
        await sink.write(logged(range(4, 8), 4))
        await sink.flush()
        await sink.close(finished=False)
        sink = await harness.open(state)
        await sink.write(logged(range(4, 10), 4))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == list(range(1, 10))

    async def test_the_first_flush_was_lost(self, harness: SinkHarness) -> None:
        sink = await harness.open()
        await sink.write(logged(range(1, 8)))
        await sink.flush()
        await sink.close(finished=False)
        sink = await harness.open()
        await sink.write(logged(range(1, 10)))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == list(range(1, 10))

    async def test_other_items_after_a_rewind(self, harness: SinkHarness) -> None:
        """The store went back in time, and now has other items under the same numbers of the log."""
        sink = await harness.open()
        await sink.write(logged([1, 2]))
        state = await sink.flush()
        await sink.write(logged([3, 4, 5], 3))
        await sink.flush()
        await sink.close(finished=True)
        sink = await harness.open(state)
        await sink.write(logged([5, 6], 3))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [1, 2, 5, 6]

    @pytest.mark.parametrize("seed", range(4))
    async def test_random_crashes(self, harness: SinkHarness, seed: int) -> None:
        random, total = Random(seed), 120
        saved, state = 0, b""
        sink, written = await harness.open(), 0
        while saved < total:
            match random.choice(["write", "write", "flush", "lost flush", "crash"]):
                case "write":
                    count = min(random.randint(1, 15), total - written)
                    await sink.write(logged(range(written + 1, written + count + 1), written + 1))
                    written += count
                case "flush":
                    saved, state = written, await sink.flush()
                case "lost flush":
                    await sink.flush()
                case _:
                    await sink.close(finished=False)
                    sink, written = await harness.open(state), saved
        await sink.close(finished=True)
        assert await harness.numbers() == list(range(1, total + 1))

    # -- a writer that lost its role

    async def test_a_late_writer_changes_nothing(self, harness: SinkHarness) -> None:
        """Its write was held in the network, or the process was frozen, until its successor had written."""
        state = await _written(harness, range(1, 4), epoch=1)
        old = await harness.open(state, epoch=2)
        new = await _successor(harness, old, state)
        if new is None:
            return
        await new.write(logged(range(4, 11), 4))
        await new.flush()
        with pytest.raises(SinkError):
            await _write(old, logged([4, 5], 4))
        await old.close(finished=False)
        await new.write(logged([11, 12], 11))
        await new.flush()
        await new.close(finished=True)
        assert await harness.numbers() == list(range(1, 13))

    async def test_a_late_flush_changes_nothing(self, harness: SinkHarness) -> None:
        """The old writer had written items after the state, and does not know of its successor."""
        state = await _written(harness, range(1, 4), epoch=1)
        old = await harness.open(state, epoch=2)
        await old.write(logged([4, 5, 6], 4))
        new = await _successor(harness, old, state)
        if new is None:
            return
        await new.write(logged([4, 5, 16, 17], 4))
        await new.flush()
        for step in (old.flush, partial(old.close, finished=True), partial(old.close, finished=False)):
            with suppress(SinkError):
                await step()
        assert await harness.numbers() == [1, 2, 3, 4, 5, 16, 17]
        await new.write(logged([18], 8))
        await new.flush()
        await new.close(finished=True)
        assert await harness.numbers() == [1, 2, 3, 4, 5, 16, 17, 18]

    async def test_a_writer_that_opens_late_is_refused(self, harness: SinkHarness) -> None:
        """It was frozen between its claim and this call. Its state is older than that of its successor."""
        before = await _written(harness, range(1, 4), epoch=1)
        sink = await harness.open(before, epoch=3)
        await sink.write(logged(range(4, 8), 4))
        state = await sink.flush()
        late = harness.make()
        with pytest.raises(SinkError) as raised:
            await _open_and_write(late, before, logged([4], 4))
        await late.close(finished=False)
        if isinstance(raised.value, OutputTakenError):
            assert raised.value.epoch == 3
        await sink.write(logged([8], 8))
        state = await sink.flush()
        await sink.close(finished=False)
        sink = await harness.open(state, epoch=4)
        await sink.close(finished=True)
        assert await harness.numbers() == list(range(1, 9))

    # -- an output that was set back

    @pytest.mark.parametrize("kept", [0, 5])
    async def test_set_back_between_two_processes(self, harness: SinkHarness, kept: int) -> None:
        """The output was restored from a backup while no process wrote it."""
        backup = await harness.save()
        state = b""
        if kept:
            state = await _written(harness, range(1, kept + 1), epoch=1)
            backup = await harness.save()
        sink = await harness.open(state, epoch=2)
        await sink.write(logged(range(kept + 1, 10), kept + 1))
        state = await sink.flush()
        await sink.close(finished=False)
        await harness.restore(backup)
        await _continue(harness, state, kept)

    async def test_set_back_while_it_is_open(self, harness: SinkHarness) -> None:
        sink = await harness.open(epoch=1)
        await sink.write(logged(range(1, 6)))
        await sink.flush()
        backup = await harness.save()
        await sink.write(logged(range(6, 10), 6))
        state = await sink.flush()
        await harness.restore(backup)
        with pytest.raises(SinkError):
            await _write(sink, logged([10, 11], 10))
        await sink.close(finished=False)
        await _continue(harness, state, 5)

    async def test_set_back_to_items_of_another_history(self, harness: SinkHarness) -> None:
        """The store went back in time, so its log now has other items under the same numbers. Then the output was
        restored from a backup that has the items of before."""
        sink = await harness.open(epoch=1)
        await sink.write(logged([1, 2, 3]))
        state = await sink.flush()
        await sink.write(logged([14, 15, 16], 4))
        await sink.flush()
        backup = await harness.save()
        await sink.close(finished=False)
        sink = await harness.open(state, epoch=2)
        await sink.write(logged(range(4, 10), 4))
        state = await sink.flush()
        await sink.close(finished=False)
        await harness.restore(backup)
        await _continue(harness, state, 3)

    async def test_set_back_before_the_end(self, harness: SinkHarness) -> None:
        """Nothing is written after the output was set back, so only the end can notice it."""
        sink = await harness.open(epoch=1)
        await sink.write(logged(range(1, 6)))
        await sink.flush()
        backup = await harness.save()
        await sink.write(logged(range(6, 10), 6))
        state = await sink.flush()
        await harness.restore(backup)
        with pytest.raises(SinkError):
            await sink.close(finished=True)
        await sink.close(finished=False)
        await _continue(harness, state, 5)

    # -- count

    async def test_items_are_counted_in_the_output(self, harness: SinkHarness) -> None:
        sink = await harness.open(epoch=1)
        await sink.write(logged([1, 2, 3]))
        state = await sink.flush()
        assert (await harness.make().count(state)).items == 3
        backup = await harness.save()
        await sink.write(logged([4, 5], 4))
        state = await sink.flush()
        await sink.close(finished=True)
        count = await harness.make().count(state)
        assert (count.items, count.rejected) == (5, 0)
        assert count.position in (None, 5)
        await harness.restore(backup)
        assert (await harness.make().count(state)).items == 3

    # -- close

    async def test_an_unfinished_close_keeps_the_flushed_items(self, harness: SinkHarness) -> None:
        sink = await harness.open()
        await sink.write(logged([1, 2, 3]))
        state = await sink.flush()
        await sink.write(logged([4, 5], 4))
        await sink.close(finished=False)
        await sink.close(finished=False)
        sink = await harness.open(state)
        await sink.close(finished=True)
        assert await harness.numbers() == [1, 2, 3]

    async def test_a_sink_can_be_reopened(self, harness: SinkHarness) -> None:
        """A drainer reopens the same sink after an error."""
        sink = await harness.open()
        await sink.write(logged([1, 2]))
        state = await sink.flush()
        await sink.write(logged([3], 3))
        await sink.close(finished=False)
        await sink.open(state)
        await sink.write(logged([3, 4], 3))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [1, 2, 3, 4]

    async def test_a_run_continues_after_its_end(self, harness: SinkHarness) -> None:
        sink = await harness.open()
        await sink.write(logged([1, 2]))
        state = await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [1, 2]
        sink = await harness.open(state)
        await sink.write(logged([3], 3))
        await sink.flush()
        await sink.close(finished=True)
        assert await harness.numbers() == [1, 2, 3]

    async def test_a_state_that_cannot_be_read(self, harness: SinkHarness) -> None:
        sink = harness.make()
        with pytest.raises(SinkError):
            await sink.open(b"\xc1 not a state")
        await sink.close(finished=False)

    # -- rejected items

    async def test_rejected_items_do_not_stop_the_others(self, harness: SinkHarness) -> None:
        """They are counted once, even if they are written again before the flush."""
        if harness.rejected_item is None:
            return
        rejected: list[int] = []
        good, rejected_item = logged([1, 2, 3]), LoggedItem(4, b"\xff" * 16, 0, encode_item(harness.rejected_item))
        sink = await harness.open(on_reject=rejected.append)
        await sink.write([*good, rejected_item])
        await sink.close(finished=False)
        assert rejected == []
        sink = await harness.open(on_reject=rejected.append)
        await sink.write([*good, rejected_item, *logged([5], 5)])
        await sink.flush()
        await sink.close(finished=True)
        assert sum(rejected) == 1
        assert await harness.numbers() == [1, 2, 3, 5]

    # -- two runs

    async def test_two_runs_in_one_output(self, harness: SinkHarness) -> None:
        states = {}
        for run_id, numbers in (("one", [1, 2, 3]), ("two", [2, 3, 4])):
            sink = await harness.open(run_id=run_id)
            await sink.write(logged(numbers))
            states[run_id] = await sink.flush()
            await sink.close(finished=True)
        if harness.replaces:
            assert await harness.numbers() == [2, 3, 4]
            sink = harness.make("one")
            with pytest.raises(SinkError):  # the output is not its own any more
                await sink.open(states["one"])
            await sink.close(finished=False)
            assert await harness.numbers() == [2, 3, 4]
        else:
            assert sorted(await harness.numbers()) == [1, 2, 2, 3, 3, 4]
            sink = await harness.open(states["one"], "one")
            await sink.write(logged([9], 4))
            await sink.flush()
            await sink.close(finished=True)
            assert sorted(await harness.numbers()) == [1, 2, 2, 3, 3, 4, 9]

    async def test_the_state_of_another_run(self, harness: SinkHarness) -> None:
        """A sink that replaces its output refuses a state of another run."""
        if not harness.replaces:
            return
        sink = await harness.open(run_id="one")
        await sink.write(logged([1]))
        state = await sink.flush()
        await sink.close(finished=True)
        sink = harness.make("two")
        with pytest.raises(SinkError):
            await sink.open(state)
        await sink.close(finished=False)
        assert await harness.numbers() == [1]
