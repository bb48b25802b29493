"""A client for a Redis server: connections, scripts, and errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from hashlib import sha1
from importlib.resources import files
from math import inf
from typing import Any, NamedTuple, TypeAlias

from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, NoScriptError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shoal.errors import ShoalError, StoreError, StoreFullError
from shoal.stores.redis.address import Arguments, RedisAddress
from shoal.stores.redis.errors import explain
from shoal.stores.severity import FULL_FOR

log = logging.getLogger("shoal.frontier")

MIN_VERSION = (6, 2)
_MAX_CONNECTIONS = 32
_HEALTH_CHECK_SECONDS = 30.0
_MISSING_KEY = "never"
"""A key that never exists. While a cluster moves a slot, it refuses a script with several keys if one of them is on
another node. So no script sees, or leaves, half of a store that is being moved."""

Word: TypeAlias = bytes | str | int | float
"""An argument of a command."""
Answer: TypeAlias = Any
"""What a command or a script returns."""
Info: TypeAlias = dict[str, Answer]

_COMMENT_TEXT_OR_NAME = re.compile(r"--.*|'[^'\n]*'|\b[A-Z]\w*")
_warned: set[str] = set()


def storable_bytes(text: str) -> bytes:
    """Text as UTF-8. What UTF-8 cannot encode is replaced: a website may have sent anything."""
    return text.encode(errors="replace")


class ScriptFolder(NamedTuple):
    """The folder ``lua`` of a package, and what is prepended to its scripts."""

    package: str
    library: tuple[str, ...]
    """Scripts that are prepended to all others."""
    constants: tuple[tuple[str, str], ...] = ()
    """Names, and the statements that define them. A script gets those that it names."""
    parts: tuple[tuple[str, str], ...] = ()
    """Scripts, and what is prepended to each of them only."""
    literals: tuple[tuple[str, str], ...] = ()
    """Names, and the numbers and texts that replace them. As local variables they would cost time in each call: Lua
    searches all variables that functions use whenever it makes a function."""


class Script(NamedTuple):
    """A step that Redis executes atomically."""

    text: str
    sha: str


@cache
def _texts(package: str) -> dict[str, str]:
    """All scripts of a package by name, read together: an upgrade while this process runs must not mix versions."""
    folder = files(package) / "lua"
    return {each.name.removesuffix(".lua"): each.read_text("utf-8") for each in folder.iterdir()}


@cache
def load_script(folder: ScriptFolder, name: str, store: str = "") -> Script:
    """The script of that name, with the library in front. With ``store`` its hash differs for each store: so a server
    that knows the script has run it for this store since it was started."""
    texts = _texts(folder.package)
    names = (*folder.library, *(part for script, part in folder.parts if script == name), name)
    text = "\n".join(texts[part] for part in names)
    literals = dict(folder.literals)
    text = _COMMENT_TEXT_OR_NAME.sub(lambda found: literals.get(found[0], found[0]), text)
    words = set(re.findall(r"\w+", text))
    text = "\n".join((*(statement for word, statement in folder.constants if word in words), text))
    if store:
        text += f"\n-- {store}"
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class RedisClient:
    """Runs scripts on a Redis server. Many tasks may use it at the same time. It reconnects by itself."""

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self._sentinel: Sentinel | None = None
        self._client: Redis | RedisCluster = self._connect()
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._closed = False
        self._full_at = -inf

    @property
    def was_full(self) -> bool:
        """Whether it refused a call in the last seconds because it has no room."""
        return time.monotonic() - self._full_at < FULL_FOR

    @classmethod
    async def open(cls, address: RedisAddress, *, warn: bool = True) -> RedisClient:
        """Connect. StoreAwayError if the server cannot be reached now, StoreError if Shoal cannot use it.

        ``warn``: log a warning about settings with which the server may lose data.
        """
        client = cls(address)
        try:
            info = await client._check()
            if warn:
                client._warn(info)
        except BaseException:
            await client.close()
            raise
        return client

    def _connect(self) -> Redis | RedisCluster:
        """Create redis-py's client. It must not retry: a call that timed out may have been executed."""
        at = self.address
        never = Retry(NoBackoff(), 0)
        sockets: Arguments = {
            "socket_timeout": at.timeout, "socket_connect_timeout": at.timeout, "socket_keepalive": True,
            "health_check_interval": _HEALTH_CHECK_SECONDS, "retry": never, "protocol": 2,
        }  # fmt: skip
        login: Arguments = {"username": at.username, "password": at.password}
        if at.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in at.nodes]
            return RedisCluster(startup_nodes=nodes, **sockets, **login, **at.tls)
        if at.kind == "sentinel":
            make: Callable[..., Sentinel] = Sentinel  # its constructor has no types
            self._sentinel = make(at.nodes, sentinel_kwargs={**sockets, **at.sentinel, **at.tls})
            master: Redis = self._sentinel.master_for(at.service, db=at.db, **sockets, **login, **at.tls)
            return master
        (host, port), *_ = at.nodes
        tls = {name: value for name, value in at.tls.items() if name != "ssl"}
        pool = ConnectionPool(
            connection_class=SSLConnection if at.tls else Connection, host=host, port=port, db=at.db,
            **sockets, **login, **tls,
        )  # fmt: skip
        return Redis.from_pool(pool)

    # -- checks when the connection is opened

    async def _check(self) -> Info:
        """Check the server, and return its answer to INFO; empty if the user may not run INFO."""
        try:
            info = await self._client.execute_command("INFO")
        except NoPermissionError:
            log.debug("the Redis user may not run INFO: its version and settings are not checked")
            return {}
        except (RedisError, RedisClusterException, OSError) as exc:
            raise await self._diagnose(exc) from exc
        known = info if isinstance(info, dict) else {}
        self._check_version(known)
        return known

    def _check_version(self, known: Info) -> None:
        where = self.address.shown
        version = str(known.get("redis_version", ""))
        if known.get("redis_mode") == "sentinel":
            raise StoreError(f"{where} is a sentinel; write redis+sentinel://host:26379/name-of-the-master/0")
        found = re.match(r"(\d+)\.(\d+)", version)
        if found is None:
            raise StoreError(f"the server at {where} is not Redis; check host and port")
        if (int(found[1]), int(found[2])) < MIN_VERSION:
            raise StoreError(f"{where} is Redis {version}; Shoal needs 6.2 or later: upgrade it")

    def _warn(self, info: Info) -> None:
        """Warn about settings with which the server may lose data. Once per process."""
        if self.address.shown in _warned:
            return
        _warned.add(self.address.shown)
        where, policy = self.address.shown, info.get("maxmemory_policy", "noeviction")
        if info.get("maxmemory") and policy != "noeviction":
            log.warning(
                "%s may drop requests when its memory is full (maxmemory-policy %s). Set maxmemory-policy noeviction",
                where,
                policy,
            )
        if not info.get("aof_enabled", True):
            log.warning(
                "%s does not write each change to disk (appendonly no): when it stops, changes since its last snapshot "
                "are lost. Set appendonly yes",
                where,
            )

    async def _diagnose(self, exc: Exception) -> ShoalError:
        """Find out what kind of server did not answer: some are silent when a client speaks another protocol."""
        if isinstance(exc, RedisTimeoutError) and self.address.tls and await self._answers(b"PING\r\n", b"+PONG", b"-"):
            return StoreError(f"{self.address.shown} does not speak TLS on this port; write redis://")
        ssl_request = bytes.fromhex("0000000804d2162f")
        if type(exc) is RedisConnectionError and await self._answers(ssl_request, b"S", b"N"):
            return StoreError(f"the server at {self.address.shown} is PostgreSQL, not Redis; check host and port")
        return explain(exc, self.address)

    async def _answers(self, message: bytes, *beginnings: bytes) -> bool:
        """Whether the server's answer to these bytes begins like one of these."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(min(2.0, self.address.timeout)):
                reader, writer = await asyncio.open_connection(*self.address.nodes[0])
                try:
                    writer.write(message)
                    return (await reader.read(64)).startswith(beginnings)
                finally:
                    writer.close()
        return False

    # -- calls

    async def run_script(
        self,
        folder: ScriptFolder,
        name: str,
        *arguments: Word,
        store: str = "",
        before_loading: Callable[[], Awaitable[object]] | None = None,
    ) -> Answer:
        """Run a script atomically. It gets the prefix of the keys, then the arguments.

        ``before_loading`` is called first if the server does not know the script.
        """
        text, sha = load_script(folder, name, store)
        prefix = self.address.prefix
        keys = (f"{prefix}store", f"{prefix}{_MISSING_KEY}") if self.address.kind == "cluster" else (f"{prefix}store",)
        given = (len(keys), *keys, prefix, *arguments)
        try:
            return await self._call("EVALSHA", sha, *given)
        except NoScriptError:  # the server is new, was restarted, or took over
            if before_loading is not None:
                await before_loading()
            return await self._call("EVAL", text, *given)

    async def follow(self, stream: str, after: str) -> str:
        """Wait for entries of a stream after this one, on a connection of its own. Returns the last entry, or
        ``after`` if none came within most of the timeout of a call."""
        milliseconds = max(1, round(800 * self.address.timeout))  # 0 would block for ever
        found = await self._call("XREAD", "BLOCK", milliseconds, "STREAMS", f"{self.address.prefix}{stream}", after)
        return found[0][1][-1][0].decode() if found else after

    async def _call(self, *words: Word) -> Answer:
        """The server's answer. Errors are Shoal's, except NoScriptError, which `run_script` handles."""
        if self._closed:
            raise StoreError(f"the connection to {self.address.shown} is closed")
        task = asyncio.current_task()
        cancels = 0 if task is None else task.cancelling()
        try:
            await self._wait_for_connection()
            try:
                answer = await self._client.execute_command(*words)
            finally:
                self._connections.release()
        except NoScriptError:
            raise
        except (RedisError, RedisClusterException, OSError) as exc:
            error = explain(exc, self.address)
            if isinstance(error, StoreFullError):
                self._full_at = time.monotonic()
            raise error from exc
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError  # asyncio.wait_for, used by redis-py, loses it before Python 3.12
        return answer

    async def _wait_for_connection(self) -> None:
        if not self._connections.locked():
            await self._connections.acquire()
            return
        try:
            async with asyncio.timeout(self.address.timeout):
                await self._connections.acquire()
        except TimeoutError:
            raise RedisTimeoutError(f"all {_MAX_CONNECTIONS} connections wait for an answer") from None

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
