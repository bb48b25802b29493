"""The ZooKeeper coordinator beyond the contract: its URL, authentication, and sessions."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from itertools import count
from typing import Any
from uuid import uuid4

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError, NoNodeError

from shoal.errors import CoordinatorAwayError, CoordinatorError, NameTakenError, SessionLostError, ShoalError
from shoal.ports import Counts
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.zookeeper import ZookeeperCoordinator
from shoal.runs.cluster.zookeeper_session import ZookeeperAddress
from shoal.testing.coordination import COUNTS, TTL, holders, names, select_events
from tests.acceptance.faults import Wire, wire
from tests.support.databases import PostgresServer, RedisServer, ZookeeperServer, free_port, shared
from tests.support.patience import allowance

_paths = (f"/t{uuid4().hex[:8]}-{number}" for number in count(1))


@contextmanager
def running() -> Iterator[ZookeeperServer]:
    """A server of one's own, to do harm to."""
    server = ZookeeperServer()
    try:
        yield server
    finally:
        server.thaw()
        server.close()


@asynccontextmanager
async def opened(url: str, cluster: str = "cluster", ttl: float = 10.0) -> AsyncIterator[ZookeeperCoordinator]:
    made = await ZookeeperCoordinator.open(url, cluster, ttl)
    try:
        yield made
    finally:
        await made.close()


@contextmanager
def raw(server: ZookeeperServer, login: str = "") -> Iterator[Any]:
    """The server itself, as others see it."""
    client = KazooClient(f"127.0.0.1:{server.port}", auth_data=[("digest", login)] if login else None)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


def below(client: Any, path: str) -> Iterator[str]:
    """All znodes under a path, and itself."""
    yield path
    for name in client.get_children(path):
        yield from below(client, f"{path}/{name}")


async def eventually(step: Callable[[], Awaitable[Any]]) -> Any:
    """Again and again, until the server is there."""
    async with asyncio.timeout(30):
        while True:
            with suppress(CoordinatorAwayError):
                return await step()
            await asyncio.sleep(0.05)


@pytest.fixture
def path() -> str:
    """One that nobody has on the server that the tests share."""
    return next(_paths)


@pytest.fixture
def url(path: str) -> str:
    return f"{shared(ZookeeperServer).url}{path}"


# -- URLs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("zookeeper://h", (("h:2181",), None, "", 5.0)),
        ("zookeeper://a,b:1/", (("a:2181", "b:1"), None, "", 5.0)),
        ("zookeeper://u:p%40ss@h:7/x/y%20z?timeout=0.5", (("h:7",), ("u", "p@ss"), "/x/y z", 0.5)),
        ("zookeeper://[::1]:7,[::2]", (("[::1]:7", "[::2]:2181"), None, "", 5.0)),
    ],
)
def test_urls(url: str, expected: tuple[object, ...]) -> None:
    address = ZookeeperAddress.parse(url)
    assert (address.hosts, address.login, address.chroot, address.timeout) == expected


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://", "zookeeper://h:0", "zookeeper://h:99999", "zookeeper://h:x", "zookeeper://a,,b", "zookeeper://[::1",
        "zookeeper://h//x", "zookeeper://h/./x", "zookeeper://h/..", "zookeeper://h/%00", "zookeeper://h/a%2Fb",
        "zookeeper://h?timeout=0", "zookeeper://h?timeout=soon", "zookeeper://h?x", "zookeeper://h?prefix=y",
        "zookeeper://h/x#part", "zookeeper://a b",
    ],
)  # fmt: skip
async def test_what_is_no_zookeeper_url_is_refused(url: str) -> None:
    with pytest.raises(CoordinatorError, match="zookeeper://") as caught:
        await open_coordinator(url.replace("://", "://user:hunter2@"), "cluster")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("login", ["user", "user:", ":hunter2", "us%3Aer:hunter2"])
def test_a_login_is_a_user_and_a_password(login: str) -> None:
    with pytest.raises(CoordinatorError, match="user") as caught:
        ZookeeperAddress.parse(f"zookeeper://{login}@h")
    assert "hunter2" not in str(caught.value)


async def test_one_of_several_hosts_is_dead() -> None:
    port = shared(ZookeeperServer).port
    for places in (f"127.0.0.1:{free_port()},127.0.0.1:{port}", f"127.0.0.1:{port},nowhere.invalid"):
        async with opened(f"zookeeper://{places}{next(_paths)}") as member:
            await member.join("a", COUNTS)
            assert names(await member.beat()) == ["a"]


async def test_one_of_several_hosts_is_silent(path: str) -> None:
    with wire(shared(ZookeeperServer).port) as silent:
        silent.fall_silent()
        places = f"127.0.0.1:{silent.port},127.0.0.1:{shared(ZookeeperServer).port}"
        for _ in range(4):  # each time in another order
            async with opened(f"zookeeper://{places}{path}?timeout=3", ttl=TTL) as member:
                assert member.ttl == TTL


async def test_a_path_is_made_and_kept_apart(url: str, path: str) -> None:
    async with opened(f"{url}/deep/er") as first, opened(url) as second:
        await first.join("a", COUNTS)
        await second.join("a", COUNTS)
        assert names(await first.beat()) == names(await second.beat()) == ["a"]
        with raw(shared(ZookeeperServer)) as client:
            assert client.get_children(f"{path}/deep/er/shoal/cluster/members") == ["a"]


async def test_the_session_is_as_long_as_the_server_grants(url: str) -> None:
    async with opened(url, ttl=100) as member:
        assert member.ttl == 60


# -- who answers there


@pytest.mark.parametrize("place", ["127.0.0.1:{port}", "nowhere.invalid"])
async def test_nobody_answers(place: str) -> None:
    url = f"zookeeper://user:hunter2@{place.format(port=free_port())}?timeout=1"
    with pytest.raises(CoordinatorAwayError, match="cannot reach") as caught:
        await ZookeeperCoordinator.open(url, "cluster", TTL)
    assert "hunter2" not in str(caught.value)


async def test_something_else_answers(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CoordinatorError, match="is not ZooKeeper") as caught:
        await ZookeeperCoordinator.open(f"zookeeper://127.0.0.1:{shared(RedisServer).port}?timeout=1", "cluster", TTL)
    assert not isinstance(caught.value, CoordinatorAwayError)
    assert caplog.records == []


async def test_something_else_says_nothing() -> None:
    with pytest.raises(CoordinatorAwayError, match="check host and port"):
        await ZookeeperCoordinator.open(
            f"zookeeper://127.0.0.1:{shared(PostgresServer).port}?timeout=1", "cluster", TTL
        )


async def test_only_the_user_gets_in(path: str) -> None:
    server = shared(ZookeeperServer)
    place = f"127.0.0.1:{server.port}{path}"
    async with opened(f"zookeeper://user:hunter2@{place}") as member:
        await member.join("a", COUNTS)
        await member.take(0)
        await member.beat()
        with raw(server, "user:hunter2") as client:
            made = list(below(client, path))
            assert f"{path}/shoal/cluster/slots/0" in made
            for each in made:
                (entry,) = client.get_acls(each)[0]
                assert (entry.id.scheme, entry.id.id.partition(":")[0]) == ("digest", "user")
        with raw(server) as stranger:
            for each in made:
                with pytest.raises(NoAuthError):
                    stranger.get(each)
        for login in ("", "user:hunter3@", "other:hunter2@"):
            with pytest.raises(CoordinatorError, match="denied access") as caught:
                await ZookeeperCoordinator.open(f"zookeeper://{login}{place}", "cluster", TTL)
            assert "hunter" not in str(caught.value)
            async with opened(f"zookeeper://{login}127.0.0.1:{server.port}{path}x") as other:
                with pytest.raises(CoordinatorError, match="no cluster"):
                    await other.observe()
        async with opened(f"zookeeper://user:hunter2@{place}") as operator:
            assert names(await operator.observe()) == ["a"]


async def test_a_znode_that_something_else_has_changed(url: str, path: str) -> None:
    async with opened(url) as member:
        await member.join("a", COUNTS)
        with raw(shared(ZookeeperServer)) as client:
            client.set(f"{path}/shoal/cluster/config", b"{}")
        with pytest.raises(CoordinatorError, match="another program has changed it"):
            await member.beat()


CRAFTED = (
    b"", b"\xff", b"null", b"7", b"[]", b"{}", b"[" * 100_000, b'{"x":' * 100_000, b"9" * 5000,
    b'{"runner": 1e308, "backup": -1}', b'{"runner": 1000000000000000000, "backup": 0}', b'{"name": 7, "epoch": "x"}',
    b'{"name": "../../x", "epoch": 99999999999999999999999999}', b'{"fit": [], "doing": {}}', b"x" * 900_000,
)  # fmt: skip


async def test_crafted_znodes_raise_only_errors_of_shoal(url: str, path: str) -> None:
    """Whatever their data and their names. When they are as before, the cluster works as before."""
    top, wrong, refused = f"{path}/shoal/cluster", [], 0

    async def use(member: ZookeeperCoordinator) -> None:
        await member.beat()
        await member.observe()
        await member.events()
        await member.take(0)

    async def attempt(what: str) -> int:
        async with opened(url) as other:
            for member in (first, other):
                try:
                    await asyncio.wait_for(use(member) if member is first else other.observe(), 30)
                except ShoalError as exc:
                    if len(str(exc)) > 2000:
                        wrong.append(f"{what}: a message of {len(str(exc))} characters")
                    return 1
                except Exception as exc:
                    wrong.append(f"{what}: {type(exc).__name__} {exc!s:.150}")
        return 0

    async with opened(url) as first:
        await first.join("a", COUNTS)
        assert await first.take(0) is not None
        with raw(shared(ZookeeperServer)) as client:
            for place in ["", *client.get_children(top)]:
                node = f"{top}/{place}".rstrip("/")
                below = [f"{node}/{each}" for each in client.get_children(node)] if place else []
                for each in [node, *below]:
                    original = client.get(each)[0]
                    for data in CRAFTED:
                        client.set(each, data)
                        refused += await attempt(f"{each} {data[:30]!r}")
                    client.set(each, original)
                for name in ("abc", "-1", "9" * 30, "%2e%2e%2f", "\u202e") if place else ():
                    client.create(f"{node}/{name}", b"{}")
                    refused += await attempt(f"{node}/{name}")
                    with suppress(NoNodeError):  # a member that was never there is lost
                        client.delete(f"{node}/{name}")
        assert not wrong, "\n".join(wrong)
        assert refused > 20
        await first.beat()
        assert names(await first.observe()) == ["a"]


# -- sessions


async def test_behind_a_wire_that_is_mended_too_late(path: str) -> None:
    server = shared(ZookeeperServer)
    with closing(Wire(server.port)) as way:
        async with (
            opened(f"zookeeper://127.0.0.1:{way.port}{path}", ttl=TTL) as cut,
            opened(f"{server.url}{path}") as other,
        ):
            await cut.join("cut", COUNTS)
            await other.join("other", COUNTS)
            epoch = await cut.take(0)
            way.fall_silent()
            while "cut" in names(await other.beat()):
                await other.wait(TTL)
            assert (await other.take(0) or 0) > (epoch or 0)
            with pytest.raises(CoordinatorAwayError):
                await cut.beat()
            way.mend()
            for step in (cut.beat, lambda: cut.take(1)):
                with pytest.raises(SessionLostError):
                    await eventually(step)
            await cut.retire()
            assert holders(await other.beat()) == {0: "other"}
            await cut.join("cut", COUNTS)
            assert await cut.take(1) is not None
            assert holders(await other.beat()) == {0: "other", 1: "cut"}
            told_of = select_events(await other.events(), "joined", "lost", "left")
            assert told_of == [("joined", "cut"), ("joined", "other"), ("lost", "cut"), ("joined", "cut")]


async def test_behind_a_wire_that_is_mended_in_time(path: str) -> None:
    with closing(Wire(shared(ZookeeperServer).port)) as way:
        async with opened(f"zookeeper://127.0.0.1:{way.port}{path}", ttl=4) as member:
            await member.join("a", COUNTS)
            epoch = await member.take(0)
            way.fall_silent()
            way.mend()
            with pytest.raises(CoordinatorAwayError):
                await member.beat()
            assert holders(await eventually(member.beat)) == {0: "a"}
            assert await member.take(0) == epoch


async def test_the_server_is_killed_and_comes_back_in_time(caplog: pytest.LogCaptureFixture) -> None:
    with running() as server:
        async with opened(server.url, ttl=20) as member, opened(server.url, ttl=20) as other:
            await member.join("a", COUNTS)
            await other.join("b", COUNTS)
            epoch = await member.take(0)
            server.kill()
            for step in (member.beat, member.retire, member.leave, member.observe, lambda: member.take(0)):
                with pytest.raises(CoordinatorAwayError):
                    await step()
            server.start()
            assert holders(await eventually(member.beat)) == {0: "a"}
            assert names(await eventually(other.beat)) == ["a", "b"]
            assert await member.take(0) == epoch
            assert select_events(await member.events(), "lost") == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_the_server_has_lost_its_data() -> None:
    with running() as server:
        async with opened(server.url) as member:
            await member.join("a", COUNTS)
            epoch = await member.take(0)
            server.kill()
            shutil.rmtree(server.folder / "data")
            server.start()
            with pytest.raises(SessionLostError):
                await eventually(member.beat)
            await member.join("a", COUNTS)
            assert (await member.take(0) or 0) > (epoch or 0)


async def test_the_server_is_frozen_for_longer_than_the_session() -> None:
    with running() as server:
        url = f"{server.url}?timeout=1"
        async with opened(url, ttl=TTL) as first, opened(url, ttl=TTL) as second:
            await first.join("a", Counts(1, 1))
            await second.join("b", COUNTS)
            epoch = await first.take(0) or 0
            with server.frozen():
                started = time.monotonic()
                with pytest.raises(CoordinatorAwayError):
                    await first.beat()
                assert time.monotonic() - started < allowance(3)
                await asyncio.sleep(2 * TTL)
            kept = []
            for name, member in (("a", first), ("b", second)):
                try:
                    await eventually(member.beat)
                    kept.append(name)
                except SessionLostError:  # the server has not heard of it, and says who lives
                    await eventually(lambda member=member, name=name: member.join(name, COUNTS))  # type: ignore[misc]
            assert names(await first.beat()) == ["a", "b"]
            if "a" in kept:
                assert await first.take(0) == epoch
            else:
                assert (await second.take(0) or 0) > epoch


async def test_a_step_whose_answer_was_lost_is_done_once() -> None:
    with running() as server:
        async with opened(f"{server.url}?timeout=1", ttl=20) as member:
            await member.join("a", COUNTS)
            await member.beat()
            with server.frozen(), pytest.raises(CoordinatorAwayError):
                await member.take(0)
            epoch = await eventually(lambda: member.take(0))
            assert epoch is not None
            assert await member.take(0) == epoch
            with server.frozen(), pytest.raises(CoordinatorAwayError):
                await member.leave()
            await eventually(member.leave)
            assert select_events(await member.events(), "elected", "left", "lost") == [("elected", "a"), ("left", "a")]


async def test_a_member_that_hangs_is_lost(url: str) -> None:
    """Kazoo's threads go on when nothing else does."""
    async with opened(url, ttl=TTL) as hangs, opened(url) as other:
        await hangs.join("hangs", COUNTS)
        await hangs.beat()
        await other.join("other", COUNTS)
        until = time.monotonic() + 5 * TTL
        while "hangs" in names(await eventually(other.beat)):
            assert time.monotonic() < until
            await other.wait(TTL / 5)
        with pytest.raises(SessionLostError):
            await eventually(hangs.beat)
        await hangs.join("hangs", COUNTS)
        for _ in range(10):
            await asyncio.sleep(TTL / 5)
            await asyncio.gather(eventually(hangs.beat), eventually(other.beat))
        assert names(await eventually(hangs.beat)) == ["hangs", "other"]


async def test_one_that_only_looks_keeps_its_session(url: str) -> None:
    async with opened(url, ttl=TTL) as member, opened(url, ttl=30) as other:
        await other.join("other", COUNTS)
        await member.join("a", COUNTS)
        await member.leave()
        before = member._session.id
        await asyncio.sleep(3 * TTL)
        assert names(await member.observe()) == ["other"]
        assert member._session.id == before


async def test_closing_does_not_wait_for_a_server() -> None:
    with running() as server:
        members = [await ZookeeperCoordinator.open(server.url, "cluster", 20) for _ in range(2)]
        server.freeze()
        started = time.monotonic()
        await members[0].close()
        server.kill()
        await members[1].close()
        assert time.monotonic() - started < allowance(3)


async def test_closing_ends_the_session(url: str) -> None:
    async with opened(url, ttl=20) as other:
        await other.join("other", COUNTS)
        async with opened(url, ttl=20) as member:
            await member.join("a", COUNTS)
            await member.take(0)
            assert holders(await other.beat()) == {0: "a"}
        view = await other.beat()
        assert (names(view), holders(view)) == (["other"], {})


# -- events and waiting


async def test_a_loss_is_told_once(url: str) -> None:
    others = [await ZookeeperCoordinator.open(url, "cluster", TTL) for _ in range(5)]
    try:
        for number, other in enumerate(others):
            await other.join(f"m{number}", COUNTS)
        await others[0].close()
        for _ in range(3):
            await asyncio.gather(*(other.beat() for other in others[1:]))
        assert select_events(await others[1].events(), "lost") == [("lost", "m0")]
    finally:
        await asyncio.gather(*(other.close() for other in others))


async def test_a_loss_that_nobody_saw_is_told_later(url: str) -> None:
    for name in ("a", "a", "b"):
        async with opened(url) as member, asyncio.timeout(30):
            while True:  # a session that is closed on a busy machine may end a moment later
                with suppress(NameTakenError):
                    await member.join(name, COUNTS)
                    break
                await asyncio.sleep(0.05)
            await member.beat()
    async with opened(url) as member, asyncio.timeout(30):
        await member.join("c", COUNTS)
        while names(await member.beat()) != ["c"]:
            await asyncio.sleep(0.05)
        # The second session of "a" may end after that of "b".
        assert sorted(select_events(await member.events(), "lost")) == [("lost", "a"), ("lost", "a"), ("lost", "b")]


async def test_little_is_kept_after_many_events(url: str, path: str) -> None:
    async with opened(url) as member:
        await member.join("a", COUNTS)
        for _ in range(250):
            await member.take(0)
            await member.retire()
        assert len(await member.events(1000)) >= 100
    with raw(shared(ZookeeperServer)) as client:
        sizes = [len(client.get(each)[0]) for each in below(client, path)]
    assert len(sizes) < 140
    assert max(sizes) < 200


async def test_waiting_can_be_cancelled_and_misses_nothing(url: str) -> None:
    async with opened(url, ttl=10) as member, opened(url, ttl=10) as other:
        await member.join("a", COUNTS)
        await member.beat()
        for number in range(20):
            waiting = asyncio.create_task(member.wait(5))
            await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await (other.join("b", COUNTS) if number % 2 == 0 else other.leave())
            started = time.monotonic()
            while ("b" in names(await member.beat())) != (number % 2 == 0):
                await member.wait(5)
            assert time.monotonic() - started < allowance(2)
