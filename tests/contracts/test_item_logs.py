"""After a rewind, the item log has other items under the same numbers. No cursor may skip them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from shoal.errors import StoreRewoundError
from shoal.ports import Completion, Frontier, LoggedItem
from shoal.testing import Harness
from shoal.testing.steps import all_items, lease_one, page, push
from tests.contracts.postgres_harness import PostgresHarness
from tests.contracts.redis_harness import RedisHarness

OTHERS = {
    "another lease": lambda item: msgspec.structs.replace(item, token=item.token + 1),
    "another page": lambda item: msgspec.structs.replace(item, fingerprint=bytes(16)),
    "another place on its page": lambda item: msgspec.structs.replace(item, index=item.index + 1),
    "behind the end": lambda item: msgspec.structs.replace(item, seq=item.seq + 99),
}


@pytest_asyncio.fixture(params=[RedisHarness, PostgresHarness], ids=["redis", "postgresql"])
async def frontier(request: pytest.FixtureRequest) -> AsyncIterator[Frontier]:
    """A run with four items, of two pages."""
    harness: Harness = request.param()
    frontier = await harness.open()
    await push(frontier, 1, 2)
    for _ in range(2):
        await frontier.complete([Completion(lease=await lease_one(frontier), items=[b"one", b"two"])])
    yield frontier
    await harness.close()


async def test_a_cursor_moves_over_items_that_are_there(frontier: Frontier) -> None:
    items = await all_items(frontier)
    claim = await frontier.claim("sink:x", 60)
    assert claim is not None
    for place, item in enumerate(items):
        assert await frontier.advance(claim, b"%d" % place, 60, last=item)
        claim = claim.moved_to(b"%d" % place)
        assert len(await frontier.read_items(item.seq, 9, last=item)) == 3 - place
    assert await frontier.read_items(items[-1].seq, 0, last=items[-1]) == []


@pytest.mark.parametrize("how", OTHERS)
async def test_a_cursor_does_not_move_over_other_items(frontier: Frontier, how: str) -> None:
    item: LoggedItem = OTHERS[how]((await all_items(frontier))[2])
    claim = await frontier.claim("sink:x", 60)
    assert claim is not None
    with pytest.raises(StoreRewoundError):
        await frontier.advance(claim, b"over it", 60, last=item)
    await frontier.recover()
    (role,) = [role for role in await frontier.roles() if role.role == "sink:x"]
    assert role.cursor == b""
    with pytest.raises(StoreRewoundError):
        await frontier.read_items(item.seq, 0, last=item)
    await frontier.recover()


async def test_a_log_is_trimmed_only_where_its_outputs_are(frontier: Frontier) -> None:
    claim = await frontier.claim("sink:x", 60)
    assert claim is not None
    await frontier.advance(claim, b"here", 60)
    for cursors in ({"sink:x": b"further"}, {"sink:x": b"here", "sink:gone": b""}):
        await frontier.trim_items(3, cursors=cursors)
        assert len(await all_items(frontier)) == 4
    await frontier.trim_items(3, cursors={"sink:x": b"here"})
    assert [item.seq for item in await all_items(frontier)] == [4]
    assert await frontier.find(page(1)) is not None
