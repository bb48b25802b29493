"""A task as it travels through the broker: read as strictly as a request to the API, and compared with its session.

Data only: nothing in it is executed. Whoever can write to the broker can have no page fetched that its session does not
have, with no other headers, and through no proxy.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shoal.batch.session import Session
from shoal.batch.spider import ERRBACK, PLACE, SITE
from shoal.errors import RequestError
from shoal.http import Request
from shoal.ports import Lease
from shoal.urls.normalize import host_of

LARGEST_TASK = 512 * 1024
"""Characters of a lease in a task. A batch's headers and cookies have 16 KB at most, its URLs 8 KB."""
_MOST_REDIRECTS = 100
_LONGEST_STORE = 2000


class _Travelling(Struct, array_like=True, forbid_unknown_fields=True):
    """All of it but the deadline, which is one of the sender's clock."""

    request: Request
    fingerprint: Annotated[bytes, Meta(min_length=16, max_length=16)]
    token: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    attempt: Annotated[int, Meta(ge=1, le=1000)]
    host: Annotated[str, Meta(max_length=300)]
    learned_delay: Annotated[float, Meta(ge=0, le=1e9)]


class _Task(Struct, forbid_unknown_fields=True):
    """The arguments of a task."""

    session_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    lease: Annotated[str, Meta(max_length=LARGEST_TASK)]
    store: Annotated[str, Meta(max_length=_LONGEST_STORE, pattern=r"^[\x20-\x7e]*$")]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Travelling).decode


def pack(lease: Lease) -> str:
    travelling = _Travelling(
        lease.request, lease.fingerprint, lease.token, lease.attempt, lease.host, lease.learned_delay
    )
    return b64encode(_encode(travelling)).decode()


def unpack(text: str) -> Lease:
    """It is good for nothing but to be reissued. RequestError for what is none."""
    try:
        found = _decode(b64decode(text, validate=True))
    except (ValueError, msgspec.MsgspecError) as exc:
        raise RequestError(f"not a lease: {exc}") from exc
    if found.host != host_of(found.request.url):
        raise RequestError(f"not a lease: {found.host!r} is not the host of its request")
    return Lease(found.request, found.fingerprint, found.token, found.attempt, found.host, 0.0, found.learned_delay)


def read_task(session_id: object, lease: object, store: object) -> Lease:
    """The lease of a task. RequestError for arguments that the API does not send."""
    try:
        task = msgspec.convert({"session_id": session_id, "lease": lease, "store": store}, _Task)
    except msgspec.ValidationError as exc:
        raise RequestError(f"not a task of Shoal: {exc}") from exc
    return unpack(task.lease)


def check_fits(lease: Lease, session: Session) -> None:
    """RequestError unless the request is one that the session could have made."""
    request, options = lease.request, session.options
    plain = request.method == "GET" and not request.body and request.proxy is None and request.callback is None
    if not plain or request.errback != ERRBACK or request.timeout != options.timeout:
        raise _misfit(lease, "is not as its session makes them")
    if not _is_part(request.headers, options.headers) or not _is_part(request.cookies, options.cookies):
        raise _misfit(lease, "has headers or cookies that its session has not")
    if request.depth > options.depth or len(request.redirects) > _MOST_REDIRECTS:
        raise _misfit(lease, "is further away than its session goes")
    _check_url(lease, session)


def _check_url(lease: Lease, session: Session) -> None:
    """The URL, or the one that led to it by redirects, is one of the session's, or on the site of one."""
    request = lease.request
    first = request.redirects[0] if request.redirects else request.url
    given = session.given
    if request.meta.keys() == {PLACE}:
        place = request.meta[PLACE]
        if not isinstance(place, int) or not 0 <= place < len(given.normal) or given.normal[place] != first:
            raise _misfit(lease, "is not at that place of its session")
    elif request.meta.keys() != {SITE} or not session.options.depth or request.meta[SITE] != host_of(first):
        raise _misfit(lease, "is not of its session")


def _is_part(some: Mapping[str, str], whole: Mapping[str, str]) -> bool:
    return all(whole.get(name) == value for name, value in some.items())


def _misfit(lease: Lease, why: str) -> RequestError:
    return RequestError(f"the request {lease.request.url!r:.200} of a task {why}; it is not worked on")
