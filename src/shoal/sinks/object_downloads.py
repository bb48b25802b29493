"""Files in object storage. Needs obstore."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shoal.clients.object_urls import ObjectPlace
from shoal.clients.objects import CONFLICTS, ERRORS, ObjectClient, explain, is_too_large
from shoal.errors import FileStoreError, FileTooLargeError


class ObjectFileStore:
    """Files in object storage. Each is written with one call, so it is complete or missing."""

    def __init__(self, place: ObjectPlace) -> None:
        self._place = place
        self._opened: ObjectClient | None = None

    @property
    def _client(self) -> ObjectClient:
        if self._opened is None:
            self._opened = ObjectClient(self._place)
        return self._opened

    async def check(self) -> None:
        async with self._errors():
            await self._client.check()

    async def put(self, path: str, data: bytes, content_type: str, *, replace: bool = False) -> None:
        kind = content_type or "application/octet-stream"
        async with self._errors():
            if replace:
                await self._client.replace(path, data, kind)
            else:
                with suppress(*CONFLICTS):  # it is there already, with this content
                    await self._client.put(path, data, kind)

    async def get(self, path: str) -> bytes | None:
        async with self._errors():
            return await self._client.get(path)

    async def exists(self, path: str) -> bool:
        async with self._errors():
            return await self._client.version(path) is not None

    @asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            yield
        except ERRORS as exc:
            text, retryable = explain(exc, self._place)
            message = f"can't store a file in {self._place.name}: {text} (files.store)"
            if is_too_large(exc):
                raise FileTooLargeError(message) from exc
            raise FileStoreError(message, retryable=retryable) from exc
