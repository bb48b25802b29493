"""Encodes, decodes and checks the tasks in the broker.

A worker validates a task as strictly as the API validates a request, and compares it with its session. Tasks are data:
nothing in them is executed. So someone who can write to the broker cannot make a worker fetch a page that the session
does not have, send other headers, or use a proxy.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shoal.api.batch.session import Session
from shoal.api.batch.spider import ERRBACK, POSITION, SITE
from shoal.errors import DECODING_ERRORS, RequestError
from shoal.http import Request
from shoal.ports import Lease
from shoal.urls.normalize import host_of, normalize_url

MAX_LEASE_LENGTH = 512 * 1024
"""Characters of an encoded lease. Headers and cookies of a batch have at most 16 KB, its URLs 8 KB."""
_MAX_REDIRECTS = 100
_MAX_STORE_LENGTH = 2000


class _EncodedLease(Struct, array_like=True, forbid_unknown_fields=True):
    """A lease without its deadline, which is a time of the sender's clock."""

    request: Request
    fingerprint: Annotated[bytes, Meta(min_length=16, max_length=16)]
    token: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    attempt: Annotated[int, Meta(ge=1, le=1000)]
    host: Annotated[str, Meta(max_length=300)]
    learned_delay: Annotated[float, Meta(ge=0, le=1e9)]


class _Task(Struct, forbid_unknown_fields=True):
    """The arguments of a task."""

    session_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    lease: Annotated[str, Meta(max_length=MAX_LEASE_LENGTH)]
    store: Annotated[str, Meta(max_length=_MAX_STORE_LENGTH, pattern=r"^[\x20-\x7e]*$")]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_EncodedLease).decode


def pack(lease: Lease) -> str:
    encoded = _EncodedLease(
        lease.request, lease.fingerprint, lease.token, lease.attempt, lease.host, lease.learned_delay
    )
    return b64encode(_encode(encoded)).decode()


def unpack(text: str) -> Lease:
    """The lease in a task. It must be reissued before use. RequestError if it is invalid."""
    try:
        encoded = _decode(b64decode(text, validate=True))
    except (ValueError, *DECODING_ERRORS) as exc:
        raise RequestError(f"invalid lease: {exc}") from exc
    if encoded.host != host_of(encoded.request.url):
        raise RequestError(f"invalid lease: {encoded.host!r} is not the host of its request")
    return Lease(
        encoded.request, encoded.fingerprint, encoded.token, encoded.attempt, encoded.host, 0.0, encoded.learned_delay
    )


def read_task(session_id: object, lease: object, store: object) -> Lease:
    """The lease of a task. RequestError if its arguments are invalid."""
    try:
        task = msgspec.convert({"session_id": session_id, "lease": lease, "store": store}, _Task)
    except msgspec.ValidationError as exc:
        raise RequestError(f"invalid task: {exc}") from exc
    return unpack(task.lease)


def check_belongs(lease: Lease, session: Session) -> None:
    """Raise RequestError unless the session could have made the request."""
    request, options = lease.request, session.options
    is_plain = request.method == "GET" and not request.body and request.proxy is None and request.callback is None
    if not is_plain or request.errback != ERRBACK or request.timeout != options.timeout:
        raise _foreign(lease, "its method, body, proxy, callbacks or timeout differ")
    if not _is_subset(request.headers, options.headers) or not _is_subset(request.cookies, options.cookies):
        raise _foreign(lease, "the session does not have its headers or cookies")
    if request.depth > options.depth or len(request.redirects) > _MAX_REDIRECTS:
        raise _foreign(lease, "its depth or its redirects exceed the limits")
    _check_url(lease, session)


def _check_url(lease: Lease, session: Session) -> None:
    """RequestError unless the URL, or the one that was redirected to it, is a URL of the session or a link on its
    site."""
    request = lease.request
    first = request.redirects[0] if request.redirects else request.url
    urls = session.urls.normalized
    if request.meta.keys() == {POSITION}:
        position = request.meta[POSITION]
        if not isinstance(position, int) or not 0 <= position < len(urls) or urls[position] != normalize_url(first):
            raise _foreign(lease, "the session has another URL at that position")
    elif request.meta.keys() != {SITE} or not session.options.depth or request.meta[SITE] != host_of(first):
        raise _foreign(lease, "it is not a URL or a link of the session")


def _is_subset(some: Mapping[str, str], whole: Mapping[str, str]) -> bool:
    return all(whole.get(name) == value for name, value in some.items())


def _foreign(lease: Lease, reason: str) -> RequestError:
    return RequestError(f"the request {lease.request.url!r:.200} of a task does not belong to its session: {reason}")
