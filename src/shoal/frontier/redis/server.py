"""The way to a Redis server: connections, scripts, and errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, NoScriptError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shoal.errors import ShoalError, StoreError
from shoal.frontier.redis.address import Address
from shoal.frontier.redis.failures import explained

log = logging.getLogger("shoal.frontier")

OLDEST = (6, 2)
_CONNECTIONS = 32
_IDLE_SECONDS = 30.0
_NO_KEY = "never"
"""A key that never exists. A cluster that moves a slot refuses a script with several keys of which one is not where the
script is: so no script ever sees, or leaves, half of a store that is being moved."""


class Scripts(NamedTuple):
    """A package with scripts in its folder ``lua``, and those of them that stand in front of all others."""

    package: str
    library: tuple[str, ...]


_FRONTIER = Scripts("shoal.frontier.redis", ("base", "hosts", "requests", "slots", "stages"))


_warned: set[str] = set()


class Script(NamedTuple):
    """A step that Redis takes as a whole."""

    text: str
    sha: str


@cache
def _script(scripts: Scripts, name: str, store: str = "") -> Script:
    """The file of that name, with what all scripts share in front of it. With ``store`` it is that store's alone: a
    server that knows it has leased for this store since it was started."""
    folder = files(scripts.package) / "lua"
    text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in (*scripts.library, name))
    if store:
        text += f"\n-- {store}"
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class Server:
    """Where a store is. Any number of tasks may use it at the same time; it connects again by itself."""

    def __init__(self, address: Address, offset: Callable[[], float]) -> None:
        self.address = address
        self._offset = offset
        self._sentinel: Sentinel | None = None
        self._client: Redis | RedisCluster = self._connect()
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._closed = False

    @classmethod
    async def open(cls, address: Address, *, offset: Callable[[], float] = lambda: 0.0, warns: bool = True) -> Server:
        """StoreAwayError if it can't be reached now, StoreError if it is not for us.

        ``warns`` of settings by which it may lose what it is given.
        """
        server = cls(address, offset)
        try:
            info = await server._check()
            if warns:
                server._warn(info)
        except BaseException:
            await server.close()
            raise
        return server

    def _connect(self) -> Redis | RedisCluster:
        """Nothing is sent twice by the library: what timed out may have been done."""
        at = self.address
        never = Retry(NoBackoff(), 0)
        sockets: dict[str, Any] = {
            "socket_timeout": at.timeout, "socket_connect_timeout": at.timeout, "socket_keepalive": True,
            "health_check_interval": _IDLE_SECONDS, "retry": never, "protocol": 2,
        }  # fmt: skip
        login: dict[str, Any] = {"username": at.username, "password": at.password}
        if at.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in at.nodes]
            return RedisCluster(startup_nodes=nodes, **sockets, **login, **at.tls)
        if at.kind == "sentinel":
            self._sentinel = Sentinel(  # type: ignore[no-untyped-call]
                at.nodes, sentinel_kwargs={**sockets, **at.sentinel, **at.tls}
            )
            master: Redis = self._sentinel.master_for(at.service, db=at.db, **sockets, **login, **at.tls)
            return master
        (host, port), *_ = at.nodes
        tls = {name: value for name, value in at.tls.items() if name != "ssl"}
        pool = ConnectionPool(
            connection_class=SSLConnection if at.tls else Connection, host=host, port=port, db=at.db,
            **sockets, **login, **tls,
        )  # fmt: skip
        return Redis.from_pool(pool)

    # -- what is there

    async def _check(self) -> dict[str, Any]:
        """What the server says of itself, if it does."""
        try:
            info = await self._client.execute_command("INFO")
        except NoPermissionError:
            log.debug("the Redis user may not ask for INFO: its version and settings are not checked")
            return {}
        except (RedisError, RedisClusterException, OSError) as exc:
            raise await self._seen_closer(exc) from exc
        known = info if isinstance(info, dict) else {}
        self._check_version(known)
        return known

    def _check_version(self, known: dict[str, Any]) -> None:
        where = self.address.shown
        version = str(known.get("redis_version", ""))
        if known.get("redis_mode") == "sentinel":
            raise StoreError(f"{where} is a sentinel; write redis+sentinel://host:26379/name-of-the-master/0")
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None:
            raise StoreError(f"what answers at {where} is not Redis; look at host and port")
        if (int(found[1]), int(found[2])) < OLDEST:
            raise StoreError(f"{where} is Redis {version}; Shoal needs 6.2 or later: upgrade it")

    def _warn(self, info: dict[str, Any]) -> None:
        """Of settings with which "nothing is lost" does not hold; once in a process."""
        if self.address.shown in _warned:
            return
        _warned.add(self.address.shown)
        where, policy = self.address.shown, info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory") and policy != "noeviction":
            log.warning(
                "%s may throw away what it holds when its memory is full (maxmemory-policy %s): requests would be lost."
                " Set maxmemory-policy noeviction",
                where,
                policy,
            )
        if not info.get("aof_enabled", True):
            log.warning(
                "%s does not write each change to its disk (appendonly no): when it stops, what came after its last "
                "snapshot is lost. Set appendonly yes",
                where,
            )

    async def _seen_closer(self, exc: Exception) -> ShoalError:
        """Some servers of another kind do not answer at all when they are spoken to in the wrong way."""
        if isinstance(exc, RedisTimeoutError) and self.address.tls and await self._answers(b"PING\r\n", b"+PONG", b"-"):
            return StoreError(f"no TLS with {self.address.shown}: it does not speak TLS there; write redis://")
        asks_for_tls = bytes.fromhex("0000000804d2162f")
        if type(exc) is RedisConnectionError and await self._answers(asks_for_tls, b"S", b"N"):
            return StoreError(f"what answers at {self.address.shown} is PostgreSQL, not Redis; look at host and port")
        return explained(exc, self.address)

    async def _answers(self, words: bytes, *beginnings: bytes) -> bool:
        """Whether it answers these bytes in one of these ways."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(min(2.0, self.address.timeout)):
                reader, writer = await asyncio.open_connection(*self.address.nodes[0])
                try:
                    writer.write(words)
                    return (await reader.read(64)).startswith(beginnings)
                finally:
                    writer.close()
        return False

    # -- asking

    async def run(self, name: str, run: bytes, options: bytes, *arguments: Any) -> Any:
        """Take a frontier's step of that name as a whole. ``run``: its number, perhaps with its name, or nothing."""
        words = (repr(self._offset()), run, options, *arguments)
        if name != "lease":
            return await self.run_script(_FRONTIER, name, *words)
        store = f"{self.address.db} {self.address.prefix!r}"
        return await self.run_script(
            _FRONTIER, name, *words, store=store, before_loading=lambda: self.run("restarted", b"", options)
        )

    async def run_script(
        self,
        scripts: Scripts,
        name: str,
        *arguments: Any,
        store: str = "",
        before_loading: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Take the step of that name as a whole. It is given the prefix of the keys, then the arguments.
        ``before_loading`` is done first if the server does not know the script."""
        text, sha = _script(scripts, name, store)
        prefix = self.address.prefix
        keys = (f"{prefix}store", f"{prefix}{_NO_KEY}") if self.address.kind == "cluster" else (f"{prefix}store",)
        given = (len(keys), *keys, prefix, *arguments)
        try:
            return await self._ask("EVALSHA", sha, *given)
        except NoScriptError:  # it is new, was restarted, or took over
            if before_loading is not None:
                await before_loading()
            return await self._ask("EVAL", text, *given)

    async def follow(self, stream: str, after: str) -> str:
        """Wait for what comes into a stream behind an entry, on a connection that does nothing else meanwhile. Returns
        the last entry then, or the same one after most of the time in which the server has to answer."""
        most = max(1, round(800 * self.address.timeout))  # 0 would be for ever
        found = await self._ask("XREAD", "BLOCK", most, "STREAMS", f"{self.address.prefix}{stream}", after)
        return found[0][1][-1][0].decode() if found else after

    async def _ask(self, *words: Any) -> Any:
        """What the server answers. NoScriptError is for `run_script`; all else is an error of ours."""
        if self._closed:
            raise StoreError(f"{self.address.shown} is closed")
        task = asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()
        try:
            await self._take_place()
            try:
                answer = await self._client.execute_command(*words)
            finally:
                self._places.release()
        except NoScriptError:
            raise
        except (RedisError, RedisClusterException, OSError) as exc:
            raise explained(exc, self.address) from exc
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError  # which asyncio.wait_for, in the library, loses before Python 3.12
        return answer

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        try:
            async with asyncio.timeout(self.address.timeout):
                await self._places.acquire()
        except TimeoutError:
            raise RedisTimeoutError("others wait for its answers") from None

    async def close(self) -> None:
        self._closed = True
        with suppress(RedisError, RedisClusterException, OSError):
            await self._client.aclose()
        if isinstance(self._client, Redis):
            with suppress(RedisError, OSError):
                await self._client.connection_pool.disconnect()
        if self._sentinel is not None:
            with suppress(RedisError, OSError):
                await asyncio.gather(*(sentinel.aclose() for sentinel in self._sentinel.sentinels))
