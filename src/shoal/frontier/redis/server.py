"""The way to a Redis server: connections, scripts, and errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import BlockingConnectionPool, Connection, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, NoScriptError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shoal.errors import ShoalError, StoreError
from shoal.frontier.redis.address import Address, parse_url
from shoal.frontier.redis.failures import explained

log = logging.getLogger("shoal.frontier")

OLDEST = (6, 2)
_CONNECTIONS = 32
_IDLE_SECONDS = 30.0
_LIBRARY = ("base", "hosts", "requests")


class Script(NamedTuple):
    """A step that Redis takes as a whole."""

    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """The file of that name, with what all scripts share in front of it."""
    folder = files("shoal.frontier.redis") / "lua"
    text = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in (*_LIBRARY, name))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class Server:
    """Where a store is. Any number of tasks may use it at the same time; it connects again by itself."""

    def __init__(self, address: Address, offset: Callable[[], float]) -> None:
        self.address = address
        self._offset = offset
        self._sentinel: Sentinel | None = None
        self._client: Redis | RedisCluster = self._connect()
        self._closed = False

    @classmethod
    async def open(cls, url: str, offset: Callable[[], float]) -> Server:
        """StoreAwayError if it can't be reached now, StoreError if it is not for us."""
        server = cls(parse_url(url), offset)
        try:
            await server._check()
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
        pool = BlockingConnectionPool(
            max_connections=_CONNECTIONS, timeout=at.timeout, connection_class=SSLConnection if at.tls else Connection,
            host=host, port=port, db=at.db, **sockets, **login, **tls,
        )  # fmt: skip
        return Redis.from_pool(pool)

    # -- what is there

    async def _check(self) -> None:
        try:
            info = await self._client.execute_command("INFO")
        except NoPermissionError:
            log.debug("the Redis user may not ask for INFO: its version and settings are not checked")
            return
        except (RedisError, RedisClusterException, OSError) as exc:
            raise await self._seen_closer(exc) from exc
        self._check_version(info)
        self._warn(info)

    def _check_version(self, info: Any) -> None:
        where = self.address.shown
        known = info if isinstance(info, dict) else {}
        version = str(known.get("redis_version", ""))
        if known.get("redis_mode") == "sentinel":
            raise StoreError(f"{where} is a sentinel; write redis+sentinel://host:26379/name-of-the-master/0")
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None:
            raise StoreError(f"what answers at {where} is not Redis; look at host and port")
        if (int(found[1]), int(found[2])) < OLDEST:
            raise StoreError(f"{where} is Redis {version}; a frontier needs 6.2 or later: upgrade it")

    def _warn(self, info: dict[str, Any]) -> None:
        where, policy = self.address.shown, info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory") and policy != "noeviction":
            log.warning(
                "%s may throw away what it holds when its memory is full (maxmemory-policy %s): requests would be lost."
                " Set maxmemory-policy noeviction",
                where,
                policy,
            )
        if not info.get("aof_enabled"):
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

    async def run(self, name: str, run: int | None, options: bytes, *arguments: Any) -> Any:
        """Take the step of that name as a whole."""
        text, sha = script(name)
        given = (
            1, f"{self.address.prefix}store", self.address.prefix, repr(self._offset()), "" if run is None else run,
            options, *arguments,
        )  # fmt: skip
        if self._closed:
            raise StoreError(f"{self.address.shown} is closed")
        task = asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()
        try:
            try:
                answer = await self._client.execute_command("EVALSHA", sha, *given)
            except NoScriptError:  # it is new, was restarted, or took over
                answer = await self._client.execute_command("EVAL", text, *given)
        except (RedisError, RedisClusterException, OSError) as exc:
            raise explained(exc, self.address) from exc
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError  # which asyncio.wait_for, in the library, loses before Python 3.12
        return answer

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
