"""What a Redis URL says: where the server is, how to reach it, and under which prefix the store's keys are."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from shoal.config import mask
from shoal.errors import StoreError

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


class Address(NamedTuple):
    """A Redis URL, taken apart."""

    kind: Kind
    nodes: tuple[tuple[str, int], ...]
    """The server; or some nodes of the cluster, or the sentinels."""
    service: str
    """The name that the sentinels know the server by."""
    db: int
    username: str | None
    password: str | None
    prefix: str
    timeout: float
    tls: dict[str, Any]
    """Empty without TLS."""
    sentinel: dict[str, str]
    """How to log in at the sentinels."""
    shown: str
    """The URL without its passwords."""


def parse_url(url: str) -> Address:
    """StoreError for what is no Redis URL."""
    shown = _shown(url)
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        secure, kind = _scheme(parts.scheme)
        login, _, places = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        path = parts.path.strip("/").split("/")
        service = unquote(path.pop(0)) if kind == "sentinel" else ""
        if len(path) > 1 or parts.fragment or (kind == "sentinel" and not service):
            raise ValueError("its path is wrong")
        nodes = tuple(_node(place, _PORTS[kind]) for place in places.split(","))
        if len(nodes) > 1 and kind == "server":
            raise ValueError("it names several servers")
        db = _number(path[0]) if path and path[0] else 0
        if db and kind == "cluster":
            raise ValueError("a cluster has no numbered databases")
        return Address(
            kind=kind,
            nodes=nodes,
            service=service,
            db=db,
            username=unquote(username) or None,
            password=unquote(password) or None,
            prefix=_prefix(query.get("prefix", "shoal")),
            timeout=_seconds(query.get("timeout")),
            tls=_tls_options(query) if secure else {},
            sentinel={
                name.removeprefix("sentinel_"): query[name] for name in _SENTINEL & query.keys() if kind == "sentinel"
            },
            shown=_check_names(query, kind, secure, shown),
        )
    except ValueError as exc:
        raise StoreError(f"can't use {shown}: {exc}; write {_EXAMPLES}") from exc


def _shown(url: str) -> str:
    """Without passwords, and without the query, where more of them may be."""
    return mask(url).partition("?")[0]


def _scheme(scheme: str) -> tuple[bool, Kind]:
    base, plus, kind = scheme.partition("+")
    if base not in ("redis", "rediss") or (plus and kind not in ("sentinel", "cluster")):
        raise ValueError(f"there is no {scheme}://")
    return base == "rediss", kind or "server"  # type: ignore[return-value]


def _node(place: str, port: int) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", place)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise ValueError(f"{place!r} is no host:port")
    return found[1].strip("[]"), int(found[2] or port)


def _number(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ValueError(f"{text!r} is no number of a database")
    return int(text)


def _prefix(name: str) -> str:
    """In braces: Redis Cluster keeps all keys with the same text in braces in one place."""
    if not re.fullmatch(r"[^{}\s]{1,100}", name):
        raise ValueError(f"the prefix {name!r} is empty, too long, or has blanks or braces in it")
    return "{" + name + "}:"


def _seconds(text: str | None) -> float:
    if text is None:
        return _TIMEOUT
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) or float(text) <= 0:
        raise ValueError(f"the timeout {text!r} is no number of seconds")
    return float(text)


def _tls_options(query: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {name: query[name] for name in _TLS & query.keys()}
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() in ("1", "true", "yes")
    return {"ssl": True, **options}


def _check_names(query: dict[str, str], kind: Kind, secure: bool, shown: str) -> str:
    known = _OWN | (_TLS if secure else frozenset()) | (_SENTINEL if kind == "sentinel" else frozenset())
    if wrong := sorted(query.keys() - known):
        tls = " (those of TLS go with rediss://)" if wrong[0] in _TLS else ""
        raise ValueError(f"there is no option {wrong[0]!r}{tls}, only {', '.join(sorted(known))}")
    return shown
