"""A client for a Redis server: connections, scripts, and errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha1
from importlib.resources import files
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from redis import exceptions
from redis.asyncio import Connection, ConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, NoScriptError, RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shoal.clients.errors import FULL_FOR, Meaning, Severity, timeout_seconds
from shoal.config import mask
from shoal.errors import (
    FencedError,
    FrontierError,
    RunError,
    ShoalError,
    StoreAwayError,
    StoreError,
    StoreFullError,
    StoreRewoundError,
)
from shoal.system import clock

# The parts of a Redis URL.


_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}
_TLS = frozenset({"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})
_SENTINEL = frozenset({"sentinel_username", "sentinel_password"})
_OWN = frozenset({"prefix", "timeout"})
_TIMEOUT = 10.0
_EXAMPLES = (
    "redis://host:6379/0, rediss://host:6379/0 (TLS), redis+sentinel://host:26379,host2:26379/name/0 "
    "or redis+cluster://host:6379"
)

Kind = Literal["server", "sentinel", "cluster"]
Arguments: TypeAlias = dict[str, Any]
"""Keyword arguments for redis-py."""


class RedisAddress(NamedTuple):
    """Where a Redis server is, how to connect to it, and the prefix of Shoal's keys."""

    kind: Kind
    nodes: tuple[tuple[str, int], ...]
    """The server, some nodes of the cluster, or the sentinels."""
    service: str
    """The name of the server in the configuration of the sentinels."""
    db: int
    username: str | None
    password: str | None
    prefix: str
    timeout: float
    """Seconds that a connection or a call may take."""
    tls: Arguments
    """Empty without TLS."""
    sentinel: dict[str, str]
    """The login for the sentinels."""
    shown: str
    """The URL without passwords, for messages."""

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Parse a Redis URL. StoreError if it is invalid; the message never shows a password."""
        shown = mask(url).partition("?")[0]  # the query may have passwords too
        try:
            parts = urlsplit(url)
            query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            secure, kind = _scheme(parts.scheme)
            _check_options(query, kind, secure)
            login, _, places = parts.netloc.rpartition("@")
            username, _, password = login.partition(":")
            service, db = _path(parts.path, kind)
            if parts.fragment:
                raise ValueError("it has a fragment (#)")
            nodes = tuple(_node(place, _PORTS[kind]) for place in places.split(","))
            if len(nodes) > 1 and kind == "server":
                raise ValueError("it names several servers")
            return cls(
                kind=kind,
                nodes=nodes,
                service=service,
                db=db,
                username=unquote(username) or None,
                password=unquote(password) or None,
                prefix=_prefix(query.get("prefix", "shoal")),
                timeout=timeout_seconds(query.get("timeout"), _TIMEOUT),
                tls=_tls_options(query) if secure else {},
                sentinel={name.removeprefix("sentinel_"): query[name] for name in _SENTINEL & query.keys()},
                shown=shown,
            )
        except ValueError as exc:
            raise StoreError(f"cannot use {shown}: {exc}; write {_EXAMPLES}") from exc


def _scheme(scheme: str) -> tuple[bool, Kind]:
    base, plus, kind = scheme.partition("+")
    if base not in ("redis", "rediss") or (plus and kind not in ("sentinel", "cluster")):
        raise ValueError(f"unknown scheme {scheme}://")
    return base == "rediss", cast("Kind", kind or "server")


def _path(path: str, kind: Kind) -> tuple[str, int]:
    """The name of the service and the number of the database."""
    names = path.strip("/").split("/")
    service = unquote(names.pop(0)) if kind == "sentinel" else ""
    if len(names) > 1 or (kind == "sentinel" and not service):
        raise ValueError(f"invalid path {path!r}")
    number = names[0] if names and names[0] else "0"
    if not re.fullmatch("[0-9]{1,9}", number):
        raise ValueError(f"{number!r} is not a database number")
    if int(number) and kind == "cluster":
        raise ValueError("a Redis Cluster has no numbered databases")
    return service, int(number)


def _node(place: str, port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", place)
    if match is None or not 0 < int(match[2] or port) < 65536:
        raise ValueError(f"{place!r} is not host:port")
    return match[1].strip("[]"), int(match[2] or port)


def _prefix(name: str) -> str:
    """The prefix of all keys. Its braces make Redis Cluster keep the keys of a store on one node."""
    if not re.fullmatch(r"[^{}\s]{1,100}", name):
        raise ValueError(f"invalid prefix {name!r}: use 1 to 100 characters without spaces and braces")
    return "{" + name + "}:"


def _tls_options(query: dict[str, str]) -> Arguments:
    options: Arguments = {name: query[name] for name in _TLS & query.keys()}
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() in ("1", "true", "yes")
    return {"ssl": True, **options}


def _check_options(query: dict[str, str], kind: Kind, secure: bool) -> None:
    allowed = _OWN | (_TLS if secure else frozenset()) | (_SENTINEL if kind == "sentinel" else frozenset())
    if wrong := sorted(query.keys() - allowed):
        tls = " (TLS options need rediss://)" if wrong[0] in _TLS else ""
        raise ValueError(f"unknown option {wrong[0]!r}{tls}; known options: {', '.join(sorted(allowed))}")


# Turns the errors of redis-py into Shoal's errors. No other module handles redis-py's exceptions.


NO_RUN, REWOUND, FENCED = "NORUN", "REWOUND", "FENCED"
"""The first words of errors that Shoal's own scripts return."""

_NOTHING = "nothing was changed"
_AWAY, _FINAL = Severity.AWAY, Severity.FINAL
CODES = {
    "ASK": Meaning(_AWAY),  # a cluster moves the store to another node
    "BUSY": Meaning(_AWAY),  # another script takes too long
    "CLUSTERDOWN": Meaning(_AWAY),
    "INPROG": Meaning(_AWAY),  # a failover is under way
    "IOERR": Meaning(_AWAY),
    "LOADING": Meaning(_AWAY),
    "MASTERDOWN": Meaning(_AWAY),
    "MISCONF": Meaning(_AWAY, f"cannot write to its disk; {_NOTHING}. Check the disk", is_full=True),
    "NOGOODSLAVE": Meaning(_AWAY),
    "NOMASTERLINK": Meaning(_AWAY),
    "NOREPLICAS": Meaning(_AWAY),
    "NOSCRIPT": Meaning(_AWAY),  # it was restarted between two calls: the client sends the whole script
    "OOM": Meaning(_AWAY, f"is out of memory (maxmemory); {_NOTHING}. Raise maxmemory or delete runs", is_full=True),
    "READONLY": Meaning(_AWAY),  # a failover is under way
    "REDIRECT": Meaning(_AWAY),  # the same, in Valkey
    "TRYAGAIN": Meaning(_AWAY),
    "UNBLOCKED": Meaning(_AWAY),  # a call that waited when the server became a replica
    "UNKILLABLE": Meaning(_AWAY),  # another script takes too long, and has written
    "CROSSSLOT": Meaning(_FINAL, "is a node of a Redis Cluster; write redis+cluster://host:port"),
    "DENIED": Meaning(_FINAL),  # protected mode
    "EXECABORT": Meaning(_FINAL),
    "MOVED": Meaning(_FINAL, "is a node of a Redis Cluster; write redis+cluster://host:port"),
    "NOAUTH": Meaning(_FINAL, "refuses the login; give user and password as redis://user:password@host"),
    "NOPERM": Meaning(
        _FINAL,
        "refuses a command of this user, which lacks permissions; "
        "run ACL SETUSER name on >password ~{prefix}* +@all -@dangerous +info",
    ),
    "NOPROTO": Meaning(_FINAL),
    "WRONGPASS": Meaning(_FINAL, "refuses the login; give user and password as redis://user:password@host"),
    "WRONGTYPE": Meaning(
        _FINAL,
        "has a key under the prefix {prefix!r} that another program has written; "
        "choose another prefix with ?prefix=name",
    ),
}
"""First words of the errors of Redis and Valkey. ``ERR`` is final: the server did not understand a command. Another
word is uncertain."""

_CODE = re.compile(rf"\b({'|'.join((NO_RUN, REWOUND, FENCED, *CODES))})\b")


def explain(exc: Exception, address: RedisAddress) -> ShoalError:
    """The error to raise instead: it says what failed, why, and what to do."""
    where = address.shown
    if isinstance(exc, exceptions.RedisClusterException):  # the answer of a node is its cause
        exc = next((cause for cause in _chain(exc) if isinstance(cause, exceptions.RedisError)), exc)
    if address.tls and (problem := _tls_problem(exc)):
        return StoreError(f"no TLS connection to {where}: {problem}")
    code, text = _code_of(exc), _text_of(exc)
    if error := _script_error(code, text, where):
        return error
    if isinstance(exc, exceptions.AuthenticationError):
        code = "NOAUTH"
    if code == "MOVED" and address.kind == "cluster":
        code = "ASK"  # the client follows these itself, as often as it may
    if code not in CODES:
        return _other_error(exc, text, address)
    meaning = CODES[code]
    if meaning.severity is Severity.AWAY and not meaning.advice:
        return meaning.error(f"{where} is not ready ({text}); try again in a moment")
    advice = meaning.advice.format(prefix=address.prefix) or "refuses the command"
    return meaning.error(f"{where} {advice} ({text})")


def _script_error(code: str, text: str, where: str) -> ShoalError | None:
    """Errors that Shoal's own scripts return."""
    if code == NO_RUN:
        return RunError("the run no longer exists: it was deleted, or the server lost its data")
    if code == REWOUND:
        return StoreRewoundError(
            f"{where} went back in time: a change that it had acknowledged is missing (a restored backup, a replica "
            "that lagged, a power cut). Nothing was changed; call recover()"
        )
    if code == FENCED:
        return FencedError(f"{text.removeprefix(FENCED).lstrip()}; calls under earlier epochs are refused")
    return None


def _other_error(exc: Exception, text: str, address: RedisAddress) -> ShoalError:
    where = address.shown
    if isinstance(exc, exceptions.InvalidResponse):
        return StoreError(f"the server at {where} is not Redis; check host and port")
    if isinstance(exc, exceptions.ConnectionError | exceptions.TimeoutError | OSError | TimeoutError):
        hint = "Is Redis running?" + (" If it requires TLS, write rediss://" if re.search("closed|reset", text) else "")
        return StoreAwayError(f"cannot reach {where}: {text}" + ("" if address.tls else f". {hint}"))
    if isinstance(exc, exceptions.RedisClusterException | exceptions.ClusterError):
        return StoreAwayError(f"cannot reach the cluster at {where}: {text}")
    if "cluster support disabled" in text:
        return StoreError(f"{where} is not a node of a cluster; write redis://host:port/0")
    if "unknown command 'SENTINEL'" in text:
        return StoreError(f"{where} is not a sentinel; write redis://host:port/0")
    if "user_script" in text:
        return StoreError(f"cannot read the data at {where} ({text}): another program has changed it")
    if re.match(r"[A-Z]{3,}\b(?!:)", text):  # a code that this version does not know
        return FrontierError(f"{where} refuses the command: {text}; {_NOTHING}")
    return StoreError(f"{where} refuses the command: {text}")


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _code_of(exc: Exception) -> str:
    """The first word of the server's answer. Before Redis 7 it is in the middle if a script failed."""
    status = getattr(exc, "status_code", None)
    if status not in (None, "ERR"):
        return str(status)
    match = _CODE.search(str(exc)) if isinstance(exc, exceptions.ResponseError) else None
    return match[1] if match else ""


def _text_of(exc: Exception) -> str:
    """The text of the error, without details of the script."""
    if isinstance(exc, MasterNotFoundError):  # its text shows the login
        return "no sentinel that answers knows a master of that name"
    text = re.sub(r" script: [0-9a-f]{40}.*", "", str(exc), flags=re.DOTALL).strip().rstrip(".")
    return text or type(exc).__name__


def _tls_problem(exc: Exception) -> str:
    for cause in _chain(exc):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({cause.verify_message}); name its CA with ?ssl_ca_certs=file"
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "the server does not speak TLS on this port; write redis:// instead of rediss://"
        if isinstance(cause, ssl.SSLError) and cause.reason and "CERTIFICATE" in cause.reason:
            return f"{cause.reason.lower().replace('_', ' ')}; see ?ssl_certfile= and ?ssl_keyfile="
        if isinstance(cause, FileNotFoundError | PermissionError):
            return f"cannot read a file that the URL names ({cause.strerror})"
    return ""


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
    return {file.name.removesuffix(".lua"): file.read_text("utf-8") for file in folder.iterdir()}


@cache
def load_script(folder: ScriptFolder, name: str, store: str = "") -> Script:
    """The script of that name, with the library in front. With ``store`` its hash differs for each store: so a server
    that knows the script has run it for this store since it was started."""
    texts = _texts(folder.package)
    names = (*folder.library, *(part for script, part in folder.parts if script == name), name)
    text = "\n".join(texts[part] for part in names)
    literals = dict(folder.literals)
    text = _COMMENT_TEXT_OR_NAME.sub(lambda match: literals.get(match[0], match[0]), text)
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
        return clock.monotonic() - self._full_at < FULL_FOR

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
            "socket_timeout": at.timeout,
            "socket_connect_timeout": at.timeout,
            "socket_keepalive": True,
            "health_check_interval": _HEALTH_CHECK_SECONDS,
            "retry": never,
            "protocol": 2,
        }
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
            connection_class=SSLConnection if at.tls else Connection,
            host=host,
            port=port,
            db=at.db,
            **sockets,
            **login,
            **tls,
        )
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
        answer = info if isinstance(info, dict) else {}
        self._check_version(answer)
        return answer

    def _check_version(self, info: Info) -> None:
        where = self.address.shown
        version = str(info.get("redis_version", ""))
        if info.get("redis_mode") == "sentinel":
            raise StoreError(f"{where} is a sentinel; write redis+sentinel://host:26379/name-of-the-master/0")
        match = re.match(r"(\d+)\.(\d+)", version)
        if match is None:
            raise StoreError(f"the server at {where} is not Redis; check host and port")
        if (int(match[1]), int(match[2])) < MIN_VERSION:
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
        words = (len(keys), *keys, prefix, *arguments)
        try:
            return await self._call("EVALSHA", sha, *words)
        except NoScriptError:  # the server is new, was restarted, or took over
            if before_loading is not None:
                await before_loading()
            return await self._call("EVAL", text, *words)

    async def follow(self, stream: str, after: str) -> str:
        """Wait for entries of a stream after this one, on a connection of its own. Returns the last entry, or
        ``after`` if none came within most of the timeout of a call."""
        milliseconds = max(1, round(800 * self.address.timeout))  # 0 would block for ever
        streams = await self._call("XREAD", "BLOCK", milliseconds, "STREAMS", f"{self.address.prefix}{stream}", after)
        return streams[0][1][-1][0].decode() if streams else after

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
                self._full_at = clock.monotonic()
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
