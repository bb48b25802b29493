"""The parts of a Redis URL."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, TypeAlias, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from shoal.config import mask
from shoal.errors import StoreError
from shoal.stores.timeouts import timeout_seconds

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
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", place)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError(f"{place!r} is not host:port")
    return found[1].strip("[]"), int(found[2] or port)


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
    known = _OWN | (_TLS if secure else frozenset()) | (_SENTINEL if kind == "sentinel" else frozenset())
    if wrong := sorted(query.keys() - known):
        tls = " (TLS options need rediss://)" if wrong[0] in _TLS else ""
        raise ValueError(f"unknown option {wrong[0]!r}{tls}; known options: {', '.join(sorted(known))}")
