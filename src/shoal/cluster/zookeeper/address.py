"""What a ZooKeeper URL says: where the ensemble is, who logs in, and under which path the clusters are."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from shoal.config import mask
from shoal.errors import CoordinatorError

_PORT = 2181
_TIMEOUT = 5.0
_FORM = "write zookeeper://user:password@host:2181,host2:2181/path?timeout=seconds, where only one host is a must"


class Address(NamedTuple):
    """A ZooKeeper URL, taken apart."""

    hosts: tuple[str, ...]
    """Each as ``host:port``."""
    login: tuple[str, str] | None
    chroot: str
    """The path above everything of Shoal's, or nothing."""
    timeout: float
    """Seconds that a call may take."""
    shown: str
    """The URL without its password."""


def parse_url(url: str) -> Address:
    """CoordinatorError for what is no ZooKeeper URL. It never shows the password."""
    shown = mask(url).partition("?")[0]
    try:
        parts = urlsplit(url)
        if parts.scheme != "zookeeper" or parts.fragment:
            raise ValueError("it is of another form")
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        if wrong := sorted(query.keys() - {"timeout"}):
            raise ValueError(f"there is no option {wrong[0]!r}, only timeout")
        login, at, places = parts.netloc.rpartition("@")
        return Address(
            hosts=tuple(_host(place) for place in places.split(",")),
            login=_login(login) if at else None,
            chroot=_chroot(parts.path),
            timeout=_seconds(query.get("timeout")),
            shown=shown,
        )
    except ValueError as exc:
        raise CoordinatorError(f"can't use {shown}: {exc}; {_FORM}") from None  # its cause may show the password


def _host(place: str) -> str:
    found = urlsplit(f"//{place}")
    if not found.hostname or re.search(r"[\s/?#@]", place) or found.port == 0:
        raise ValueError(f"{place!r} is no host:port")
    host = f"[{found.hostname}]" if ":" in found.hostname else found.hostname
    return f"{host}:{found.port or _PORT}"


def _login(text: str) -> tuple[str, str]:
    user, _, password = text.partition(":")
    if not user or not password:
        raise ValueError("a login is a user and a password")
    if ":" in unquote(user):
        raise ValueError("a user can't have a colon in the name")
    return unquote(user), unquote(password)


def _chroot(path: str) -> str:
    names = [unquote(name) for name in path.rstrip("/").split("/")[1:]]
    for name in names:
        if name in ("", ".", "..") or not name.isprintable() or "/" in name:
            raise ValueError(f"{name!r} can't be a part of its path")
    return "".join(f"/{name}" for name in names)


def _seconds(text: str | None) -> float:
    if text is None:
        return _TIMEOUT
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]+)?", text) or float(text) <= 0:
        raise ValueError(f"the timeout {text!r} is no number of seconds")
    return float(text)
