"""The connection to object storage, with errors that say what to do. Needs obstore."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from shoal.clients.object_urls import CREDENTIALS, ObjectPlace

if TYPE_CHECKING:
    from obstore import Attributes, ObjectMeta, PutMode, PutResult, UpdateVersion
    from obstore.store import AzureConfig, ClientConfig, RetryConfig, S3Config

ERRORS = (BaseError, OSError, NotImplementedError, ValueError)
"""What a call of the client may raise. `explain` says what it means."""
CONFLICTS = (AlreadyExistsError, PreconditionError)
"""Another process wrote the object."""
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,80})</Code>")
_URL = re.compile(r"\bhttps?://\S+")
_NO_CONNECTION = ("error sending request", "HTTP error", "error decoding response", "connection closed")
_BAD_REGION = ("without LOCATION", "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint")
_NO_CREDENTIALS = ("169.254.169.254", "169.254.170.2", "metadata.google", "CredentialsNotLoaded", "instance metadata")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_TOO_LARGE = ("EntityTooLarge", "RequestBodyTooLarge", "413 Payload Too Large", "413 Request Entity Too Large")
_AWAY_STATUSES = frozenset({408, 409, 412, 425, 429})
"""Temporary, like those from 500 on, except 501. 409 and 412: another process wrote the object. 507: it is full."""
_AWAY_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "ServerBusy", "InternalError", "OperationAborted", "OperationTimedOut",
     "ThrottlingException", "Throttling", "KMS.ThrottlingException", "KMS.InternalException", "RequestLimitExceeded",
     "RateLimitExceeded", "UserRateLimitExceeded", "TooManyRequests", "BadDigest", "IncompleteBody",
     "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "QuotaExceeded"}
)  # fmt: skip
"""Temporary, whatever their status is: S3 answers 400 or 403 to some of them."""
_NO_OBJECT = "shoal-check"
_MAX_TEXT = 160


class Version(NamedTuple):
    """A version of an object, to replace only this one."""

    e_tag: str
    """Without quotes."""
    version: str | None = None


class ObjectClient:
    """Calls for the objects of one place. Paths are relative to it. Calls raise ``ERRORS``."""

    def __init__(self, place: ObjectPlace) -> None:
        self.place = place
        limit = timedelta(seconds=place.timeout)
        client: ClientConfig = {"timeout": limit, "connect_timeout": min(limit, timedelta(seconds=10))}
        if place.endpoint.startswith("http://"):
            client["allow_http"] = True
        retry: RetryConfig = {"max_retries": 1, "retry_timeout": limit}  # the caller tries again, and says so
        prefix, options = place.path or None, place.options
        self._store: S3Store | GCSStore | AzureStore
        match place.scheme:
            case "s3":
                s3 = cast("S3Config", options)
                self._store = S3Store(place.bucket, prefix=prefix, client_options=client, retry_config=retry, config=s3)
            case "gs":
                self._store = GCSStore(place.bucket, prefix=prefix, client_options=client, retry_config=retry)
            case "az":
                names = {"account": "account_name"}
                azure = cast("AzureConfig", {names.get(name, name): value for name, value in options.items()})
                self._store = AzureStore(
                    place.bucket, prefix=prefix, client_options=client, retry_config=retry, config=azure
                )

    async def put(self, path: str, data: bytes, content_type: str, replaces: Version | None = None) -> Version:
        """Write a new object, or replace this version of it. One of ``CONFLICTS`` if another process wrote it.

        A server without conditional writes replaces any version."""
        if not self.place.conditional:
            return await self.replace(path, data, content_type)
        mode: Literal["create"] | UpdateVersion = "create"
        if replaces is not None:
            mode = {"e_tag": f'"{replaces.e_tag}"'}
            if replaces.version:
                mode["version"] = replaces.version
        return await self._put(path, data, content_type, mode)

    async def replace(self, path: str, data: bytes, content_type: str) -> Version:
        """Write an object. Replace any existing version."""
        return await self._put(path, data, content_type, "overwrite")

    async def _put(self, path: str, data: bytes, content_type: str, mode: PutMode) -> Version:
        attributes: Attributes = {"Content-Type": content_type}
        return _version_of(
            await obstore.put_async(self._store, path, data, attributes=attributes, mode=mode, use_multipart=False)
        )

    async def version(self, path: str) -> Version | None:
        """The current version of an object; None if there is none."""
        try:
            return _version_of(await obstore.head_async(self._store, path))
        except FileNotFoundError:
            return None

    async def get(self, path: str) -> bytes | None:
        """The content of an object; None if there is none."""
        content = await self.read(path)
        return None if content is None else content[0]

    async def read(self, path: str) -> tuple[bytes, Version] | None:
        """The content of an object with its version; None if there is none."""
        try:
            answer = await obstore.get_async(self._store, path)
            return bytes(await answer.bytes_async()), _version_of(answer.meta)
        except FileNotFoundError:
            return None

    async def check(self) -> None:
        """Raise an error if the bucket does not exist or the server does not answer. Writes nothing."""
        try:
            await obstore.get_async(self._store, _NO_OBJECT)
        except FileNotFoundError as exc:
            if any(mark in str(exc) for mark in _NO_BUCKET):
                raise

    async def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        with suppress(FileNotFoundError):
            await obstore.delete_async(self._store, path)

    async def list(self, folder: str) -> AsyncIterator[tuple[str, int]]:
        """The path and the size of each object in a folder."""
        async for batch in obstore.list(self._store, folder):
            for entry in batch:
                yield entry["path"], entry["size"]


def _version_of(meta: ObjectMeta | PutResult) -> Version:
    return Version((meta["e_tag"] or "").strip('"'), meta["version"])


def is_too_large(exc: Exception) -> bool:
    """Whether the service refused an object for its size."""
    text = str(exc)
    return any(mark in text for mark in _TOO_LARGE)


def explain(exc: Exception, place: ObjectPlace) -> tuple[str, bool]:
    """What an error means and what to do, in one line without secrets; and whether a retry can help."""
    text = str(exc)
    found = _STATUS.search(text)
    status = int(found[1] or found[2]) if found else 0
    name = match[1] if (match := _CODE.search(text)) else ""
    code = f" ({name})" if name else ""
    bucket = "container" if place.scheme == "az" else "bucket"
    if any(mark in text for mark in _NO_CREDENTIALS):
        return f"no credentials found; set {CREDENTIALS[place.scheme]} in the environment", False
    if any(mark in text for mark in _BAD_REGION):
        return f"the {bucket} {place.bucket} is in another region; set AWS_REGION, or add region=NAME", False
    if status == 404 or isinstance(exc, FileNotFoundError):
        return f"the {bucket} {place.bucket} does not exist; create it first, or check its name and the endpoint", False
    if name in _AWAY_CODES:
        return f"the server answered {status}{code}", True
    if name == "RequestTimeTooSkewed":
        return "the clock of this machine is wrong; set it, for example with NTP", False
    if status in (401, 403):
        return (
            f"access to the {bucket} {place.bucket} is denied{code}; check {CREDENTIALS[place.scheme]}, and that "
            "they may list, read, write and delete objects"
        ), False
    if status == 501 or isinstance(exc, NotImplementedError):
        return "the server does not support conditional writes; add conditional=no", False
    if status:
        return f"the server answered {status}{code}", status >= 500 or status in _AWAY_STATUSES
    if isinstance(exc, OSError) or any(mark in text for mark in _NO_CONNECTION):
        return f"no connection to {_shown(place.endpoint)}: {_cause(text)}; check the endpoint", True
    if isinstance(exc, CONFLICTS):
        return "another process wrote the same object", True
    return _URL.sub("...", text.partition("\n")[0])[:_MAX_TEXT], not isinstance(exc, ValueError)


def _shown(endpoint: str) -> str:
    """An endpoint without anything that may be a secret."""
    scheme, mark, rest = endpoint.partition("://")
    return f"{scheme}{mark}{rest.partition('?')[0].rpartition('@')[2]}" if mark else "the storage"


def _cause(text: str) -> str:
    """The reason of a failed connection, from the details that the library adds."""
    for mark, meaning in (
        ("ConnectionRefused", "connection refused"),
        ("dns error", "the host is unknown"),
        ("TimedOut", "timed out"),
        ("Timeout", "timed out"),
        ("certificate", "its certificate is not trusted"),
        ("ConnectionReset", "connection reset"),
    ):
        if mark in text:
            return meaning
    return "the connection failed"
