"""The parts of a ZooKeeper URL."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from shoal.config import mask
from shoal.errors import CoordinatorError
from shoal.stores.timeouts import timeout_seconds

_PORT = 2181
_TIMEOUT = 5.0
_FORM = "write zookeeper://user:password@host:2181,host2:2181/path?timeout=seconds; only one host is required"


class ZookeeperAddress(NamedTuple):
    """Where the servers are, the login, and the path of Shoal's znodes."""

    hosts: tuple[str, ...]
    """Each as ``host:port``."""
    login: tuple[str, str] | None
    chroot: str
    """The path above Shoal's znodes, or empty."""
    timeout: float
    """Seconds that a call may take."""
    shown: str
    """The URL without its password, for messages."""

    @classmethod
    def parse(cls, url: str) -> ZookeeperAddress:
        """CoordinatorError if it is not a valid ZooKeeper URL. The message never shows the password."""
        shown = mask(url).partition("?")[0]
        try:
            parts = urlsplit(url)
            if parts.scheme != "zookeeper" or parts.fragment:
                raise ValueError("it is not a zookeeper:// URL")
            query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
            if wrong := sorted(query.keys() - {"timeout"}):
                raise ValueError(f"unknown option {wrong[0]!r}; the only option is timeout")
            login, at, places = parts.netloc.rpartition("@")
            return cls(
                hosts=tuple(_host(place) for place in places.split(",")),
                login=_login(login) if at else None,
                chroot=_chroot(parts.path),
                timeout=timeout_seconds(query.get("timeout"), _TIMEOUT),
                shown=shown,
            )
        except ValueError as exc:
            raise CoordinatorError(f"cannot use {shown}: {exc}; {_FORM}") from None  # the cause may show the password


def _host(place: str) -> str:
    found = urlsplit(f"//{place}")
    if not found.hostname or re.search(r"[\s/?#@]", place) or found.port == 0:
        raise ValueError(f"{place!r} is not host:port")
    host = f"[{found.hostname}]" if ":" in found.hostname else found.hostname
    return f"{host}:{found.port or _PORT}"


def _login(text: str) -> tuple[str, str]:
    user, _, password = text.partition(":")
    if not user or not password:
        raise ValueError("the login needs a user and a password")
    if ":" in unquote(user):
        raise ValueError("the user name has a colon")
    return unquote(user), unquote(password)


def _chroot(path: str) -> str:
    names = [unquote(name) for name in path.rstrip("/").split("/")[1:]]
    for name in names:
        if name in ("", ".", "..") or not name.isprintable() or "/" in name:
            raise ValueError(f"invalid path element {name!r}")
    return "".join(f"/{name}" for name in names)
