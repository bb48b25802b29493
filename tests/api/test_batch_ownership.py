"""Admission of sessions, and which process owns one."""

from __future__ import annotations

import asyncio
import sys

import pytest

from shoal.api.batch.admission import Admission, Ownership, TooManySessionsError
from shoal.api.batch.options import BatchOptions
from shoal.api.batch.session import Session
from shoal.config import Config, ServerSettings
from shoal.frontier.memory.store import MemoryStore

URL = "http://example.com/"
TTL = 0.3


class SharedStore(MemoryStore):
    """A store that claims to be on a server, so that sessions have heartbeats."""

    shared = True


async def create(store: MemoryStore, caller: str = "me") -> Session:
    return await Session.create(store, Config(), [URL], BatchOptions(), caller=caller, distributed=False)


# -- admission


async def test_sessions_that_are_being_created_count() -> None:
    admission = Admission(Config(serve=ServerSettings(max_sessions=2)))
    with (
        admission.starting("ann"),
        admission.starting("bob"),
        pytest.raises(TooManySessionsError, match=r"serve\.max_sessions\b"),
        admission.starting("cid"),
    ):
        pass
    with admission.starting("cid"):
        pass


async def test_an_ended_session_makes_room_but_its_results_count() -> None:
    store = MemoryStore()
    admission = Admission(Config(serve=ServerSettings(max_sessions=1, max_kept_bytes=1)))
    session = await create(store)
    admission.add(session)
    assert admission.is_full
    assert admission.find(session.id) is session
    admission.end(session)
    assert not admission.is_full
    with pytest.raises(TooManySessionsError, match=r"serve\.max_kept_bytes"), admission.starting("me"):
        pass
    admission.keep_only(())
    with admission.starting("me"):
        pass


async def test_results_on_a_server_are_not_limited() -> None:
    config = Config(frontier="redis://localhost/0", serve=ServerSettings(max_sessions=1, max_kept_bytes=1))
    admission = Admission(config)
    session = await create(MemoryStore())
    admission.add(session)
    admission.end(session)
    with admission.starting("me"):
        pass


async def test_results_that_were_deleted_no_longer_count_for_their_owner() -> None:
    store = MemoryStore()
    admission = Admission(Config())
    sessions = [await create(store) for _ in range(2)]
    for session in sessions:
        admission.add(session)
    sizes = [session.quota.used for session in sessions]
    owner = sessions[0].settings.owner
    assert (admission.kept_bytes, admission._bytes_of(owner)) == (sum(sizes), sum(sizes))
    for session in sessions:
        admission.end(session)
    assert (admission.kept_bytes, admission._bytes_of(owner)) == (sum(sizes), sum(sizes))
    admission.keep_only([sessions[0].id])
    assert (admission.kept_bytes, admission._bytes_of(owner)) == (sizes[0], sizes[0])


async def test_a_new_session_costs_the_same_however_many_have_ended() -> None:
    admission = Admission(Config())
    session = await create(MemoryStore())

    def calls() -> int:
        count = 0

        def add(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(add)
        try:
            with admission.starting("me"):
                pass
        finally:
            sys.setprofile(None)
        return count

    before = calls()
    for number in range(100):
        session.id = str(number)
        admission.add(session)
        admission.end(session)
    assert calls() < before + 10


# -- ownership


async def test_a_session_is_taken_over_when_its_owner_sends_no_heartbeats() -> None:
    store = SharedStore()
    first, second = (Ownership(store, TTL, distributed=False) for _ in range(2))
    session = await create(store)
    claim = await first.claim(session)
    assert claim is not None
    heartbeat = asyncio.create_task(first.keep(session, claim, lambda: None))
    await second.watch_new({session.id}, ())
    assert second.others == [session.id]
    await asyncio.sleep(2 * TTL)
    assert await second.claim_other(session.id) is None
    heartbeat.cancel()
    async with asyncio.timeout(5):
        while await second.claim_other(session.id) is None:
            await asyncio.sleep(0.05)


async def test_an_owner_that_was_replaced_is_notified() -> None:
    store = SharedStore()
    first, second = (Ownership(store, TTL, distributed=False) for _ in range(2))
    session = await create(store)
    claim = await first.claim(session)
    assert claim is not None
    await asyncio.sleep(2 * TTL)  # it was paused, and its role has expired
    assert await second.claim(session) is not None
    lost: list[str] = []
    async with asyncio.timeout(5):
        await first.keep(session, claim, lambda: lost.append(session.id))
    assert lost == [session.id]
    assert first.is_lost(session)
    assert first.others == [session.id]  # the second may die too
    first.forget(session)
    assert not first.is_lost(session)


async def test_sessions_of_the_other_kind_are_ignored() -> None:
    store = SharedStore()
    session = await create(store)
    ownership = Ownership(store, TTL, distributed=True)
    await ownership.watch_new({session.id}, ())
    assert ownership.others == []
