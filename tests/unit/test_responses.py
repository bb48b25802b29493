"""Large answers are encoded piece by piece."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.batch.results import Entry
from shoal.frontier.memory.store import MemoryStore
from shoal.ports import Frontier, LoggedItem
from shoal.server import responses
from shoal.server.budgets import AnswerBudgets, Budget, BusyError, Share
from shoal.server.responses import EntryEncoder, json_pieces
from shoal.server.routes.runs import _item_portions
from tests.unit.test_batch import session_of, work

TEXT = st.text(max_size=40)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(TEXT, inner, max_size=8),
    max_leaves=30,
)


@given(VALUES)
def test_the_pieces_of_a_value_are_its_json(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "_SLICE", 6)
        pieces = list(json_pieces(value))
    assert b"".join(pieces) == msgspec.json.encode(value)


def test_pieces_are_small() -> None:
    value = {"text": "\x01" * 1_500_000, "links": ["http://ex.com/"] * 50_000, "png": b"x" * 500_000}
    assert max(map(len, json_pieces(value))) <= 6 * 240_000


def budgets_of(whole: int) -> AnswerBudgets:
    decoded, wholes = Budget("bytes", 1 << 30, 1 << 30), Budget("bytes", whole, whole)
    return AnswerBudgets(Budget("answers", 9, 9), decoded, wholes, asyncio.Lock())


def test_a_share_of_a_budget_grows_if_there_is_room() -> None:
    budget = Budget("things", 5, 8)
    with Share(budget, "ann") as ann, Share(budget, "bob") as bob:
        assert ann.change(5)
        assert not ann.change(6)
        assert not bob.change(4)
        assert ann.change(4)
        assert bob.change(4)
    assert (budget._sum, budget._held) == (0, {})


def test_a_budget_has_a_share_for_each_caller_and_an_end() -> None:
    budget = Budget("things", 2, 3)
    budget.take("ann", 2)
    with pytest.raises(BusyError, match="your requests hold too many things") as refused:
        budget.take("ann")
    assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "5"})
    budget.take("bob")
    with pytest.raises(BusyError, match="all requests hold too many things") as refused:
        budget.take("bob")
    assert refused.value.status_code == 503
    budget.give_back("ann", 2)
    budget.take("bob")


class CountedLog:
    """The item log of a frontier, which counts what is read from it."""

    def __init__(self, frontier: Frontier) -> None:
        self._frontier = frontier
        self.bytes_read = 0

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        items = await self._frontier.read_items(after, limit, last=last, max_bytes=max_bytes)
        self.bytes_read += sum(len(item.payload) for item in items)
        return items


async def test_a_page_of_items_reads_what_it_returns() -> None:
    """The sizes of items differ: the log is read a few at a time."""
    session = await session_of(MemoryStore(), *(f"http://ex.com/{number}" for number in range(60)))
    for number in range(60):
        await work(session, 1, 1_000_000 if number % 7 == 3 else 100)
    log = CountedLog(session.frontier)
    encoder = EntryEncoder(budgets_of(1 << 30), "me", max_bytes=2_500_000)
    pieces = [piece async for piece in encoder.page({"run_id": "x"}, "items", _item_portions(log, 0, 1000), 1000, 0)]
    page = msgspec.json.decode(b"".join(pieces))
    assert [item["seq"] for item in page["items"]] == list(range(1, 18))
    assert (page["run_id"], page["next"]) == ("x", 17)
    assert log.bytes_read < 8_000_000
    everything = [entry.number async for portion in _item_portions(log, 5, 40) for entry in portion]
    assert everything == list(range(6, 46))


SIZES = st.lists(st.sampled_from([0, 10, 50_000, 100_000, 131_000, 140_000, 300_000, 2_500_000]), max_size=12)


async def portions_of(entries: list[Entry]) -> AsyncGenerator[list[Entry]]:
    for start in range(0, len(entries), 5):
        yield entries[start : start + 5]


def texts_of(sizes: list[int]) -> tuple[list[str], list[Entry]]:
    contents = [chr(97 + number) * size for number, size in enumerate(sizes)]
    entries = [
        Entry(number, size, lambda whole, content=content: {"content": content if whole else None})  # type: ignore[misc]
        for number, (size, content) in enumerate(zip(sizes, contents, strict=True), 1)
    ]
    return contents, entries


@settings(deadline=None)
@given(
    SIZES, st.integers(1, 14) | st.none(), st.sampled_from([1, 200_000, 700_000, 10**9]),
    st.sampled_from([0, 2_000_000, 1 << 30]),
)  # fmt: skip
async def test_a_page_has_whole_results_within_its_limits(
    sizes: list[int], limit: int | None, max_bytes: int, whole: int
) -> None:
    contents, entries = texts_of(sizes)
    budgets = budgets_of(whole)
    encoder = EntryEncoder(budgets, "me", max_bytes)
    pieces = [
        piece async for piece in encoder.elements({"id": 1}, "list", portions_of(entries), lambda: {"end": 1}, limit)
    ]
    assert all(len(piece) > 200_000 for piece in pieces[:-1])
    answer = msgspec.json.decode(b"".join(pieces))
    assert answer["end"] == 1
    results = [each["content"] for each in answer["list"]]
    if limit is None:
        assert len(results) == len(entries)
    assert all(result in (None, content) for result, content in zip(results, contents, strict=False))
    sent = sum(len(result) for result in results if result is not None)
    assert sent <= max_bytes
    if limit is not None:
        assert None not in results[1:]  # the list ends there
        more = contents[len(results) : limit]
        assert not more or sent + len(more[0]) > max_bytes - 20 * len(results) - 20
    assert [budget._sum for budget in budgets[:3]] == [0, 0, 0]


class Reader:
    """A client that waits before it reads the rest."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reads = asyncio.Event()

    async def send(self, message: Any) -> None:
        if self.messages and self.messages[-1].get("body"):
            await self.reads.wait()
        self.messages.append(message)


async def test_an_answer_that_the_budget_has_room_for_is_sent_at_once_and_counts_until_it_is_read() -> None:
    """In pieces it costs more time. Without room, it is sent in pieces."""
    _, entries = texts_of([300_000] * 4)
    budgets = budgets_of(8_000_000)  # JSON may have six bytes for a stored one

    async def answer() -> tuple[Reader, asyncio.Task[None]]:
        encoder = EntryEncoder(budgets, "me")
        response = await encoder.respond(encoder.page({"id": 1}, "results", portions_of(entries), 100, 0))
        reader = Reader()
        task = asyncio.create_task(response({"type": "http"}, Mock(), reader.send))
        await asyncio.sleep(0.01)
        return reader, task

    whole, first = await answer()
    start, body = whole.messages
    assert (b"content-length", b"%d" % len(body["body"])) in start["headers"]
    assert budgets.whole._sum == len(body["body"]) > 1_200_000
    pieces, second = await answer()
    assert len(pieces.messages[1]["body"]) < 400_000
    for reader, task in ((whole, first), (pieces, second)):
        reader.reads.set()
        await task
        sent = b"".join(message.get("body", b"") for message in reader.messages)
        assert [len(each["content"]) for each in msgspec.json.decode(sent)["results"]] == [300_000] * 4
    assert [budget._sum for budget in budgets[:3]] == [0, 0, 0]


async def test_an_answer_that_json_makes_larger_than_its_limit_is_sent_in_pieces() -> None:
    text = "\x01" * 300_000
    entry = Entry(1, len(text), lambda whole: {"content": text if whole else None})
    for max_bytes, content in ((1_700_000, None), (1_900_000, text)):
        encoder = EntryEncoder(budgets_of(1_500_000), "me", max_bytes)
        pieces = [piece async for piece in encoder.page({"id": 1}, "results", portions_of([entry]), 100, 0)]
        assert len(pieces) > 1 or content is None
        assert msgspec.json.decode(b"".join(pieces)) == {"id": 1, "results": [{"content": content}], "next": 1}


def test_memory_of_large_answers_is_used_again() -> None:
    """In a process of its own: malloc adapts to what a process did before."""
    script = """
import resource
from shoal.server.process import keep_freed_memory
keep_freed_memory()
def answer():
    page = b"x" * 3_000_000
    page + page[:2_000_000]
answer()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    answer()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * 200  # 20 * 1,900 without
