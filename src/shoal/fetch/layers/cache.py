"""An HTTP cache for development: a page that was fetched once is read from the disk the next time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.config import CacheSettings
from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.system import clock, threads

log = logging.getLogger("shoal.cache")


class _Entry(msgspec.Struct, array_like=True):
    stored_at: float
    url: str
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Cache:
    """One file per page. It keeps answers to GET and HEAD with a 2xx or 3xx status, unless they were odd. They never
    expire without a ``ttl``: the cache is for developing a spider, not for fresh pages."""

    def __init__(self, config: CacheSettings, keeps: Callable[[Response], bool] = lambda response: True) -> None:
        """``keeps``: whether a page may be stored."""
        self._keeps = keeps
        self._folder = Path(config.folder)
        self._ttl = config.ttl

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        if request.method not in ("GET", "HEAD") or request.body:
            return await fetch(request)
        path = self._path(request)
        entry = await threads.call(self._load, path)
        if entry is not None:
            return Response(
                request.url, status=entry.status, headers=entry.headers, body=entry.body, request=request,
                from_cache=True,
            )  # fmt: skip
        response = await fetch(request)
        if 200 <= response.status < 400 and not response.flags and self._keeps(response):
            headers = [(str(name), _encodable(value)) for name, value in response.headers.items()]
            entry = _Entry(clock.time(), response.url, response.status, headers, response.body)
            try:
                await threads.call(_save, path, msgspec.msgpack.encode(entry))
            except OSError as error:
                log.warning("can't cache %s: %s", response.url, error)
        return response

    def _path(self, request: Request) -> Path:
        name = request.fingerprint().hex()
        return self._folder / name[:2] / name

    def _load(self, path: Path) -> _Entry | None:
        try:
            entry = msgspec.msgpack.decode(path.read_bytes(), type=_Entry)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("can't read the cached page %s: %s", path, error)
            return None
        expired = self._ttl is not None and entry.stored_at + self._ttl < clock.time()
        return None if expired else entry


def _encodable(value: str) -> str:
    """The value without bytes that are not UTF-8."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _save(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        # Only this user may read it: it may be a page behind a login, with cookies.
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)  # atomic
    finally:
        part.unlink(missing_ok=True)
