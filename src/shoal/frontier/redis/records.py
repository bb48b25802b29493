"""Packs and reads requests, hosts and leases, with the same layouts as the Lua scripts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from struct import error as LayoutError
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shoal.clients.redis import storable_bytes
from shoal.errors import DECODING_ERRORS, StoreError
from shoal.frontier.host_policy import DEFAULT_HOST, RivalDelay, host_state
from shoal.frontier.redis.layouts import (
    CHUNK,
    ENDING,
    EVENT,
    HAS_PARENT,
    HAS_RANK,
    HEAD,
    HOST,
    ITEM_KEY,
    KEEP,
    KNOWN_ITEM,
    LEARNED,
    LEASE,
    MAX_ATTEMPTS,
    OFFER,
    OPTIONS,
    PARENT,
    RANK,
    RESET,
    REWIND,
    SET,
    SIZE,
    UPDATE,
    read_text,
)
from shoal.frontier.rules import DEAD, ENCODING_ERRORS, UNREADABLE, cannot_store, moment, read_event, token_base
from shoal.http import Request
from shoal.ports import Document, Event, FrontierOptions, HostState, HostUpdate, Lease, LoggedItem, Rewind
from shoal.ports.documents import check_document
from shoal.urls.normalize import host_of

_HAS = {
    (has_rank, has_parent): bytes([has_rank * HAS_RANK + has_parent * HAS_PARENT])
    for has_rank in (False, True)
    for has_parent in (False, True)
}
_PAYLOAD_AT = tuple(
    HEAD.size + 1 + bool(has & HAS_RANK) * RANK.size + bool(has & HAS_PARENT) * PARENT.size for has in range(256)
)
"""Where the payload of a record begins, by the byte after its head."""

_LEASED = HEAD.only("host", "attempts", "token")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode


class RecordHead(NamedTuple):
    """The fixed part of a request's record."""

    state: int
    status: int
    items: int
    at: float
    host: bytes
    attempts: int
    sequence: int
    token: int
    worker: int


class UnreadableError(ValueError):
    """A record that another program wrote."""


def read_record(record: bytes) -> tuple[RecordHead, Request]:
    """Read the record of a request. UnreadableError if another program wrote it."""
    return read_head(record), _read_request(record)


def _read_request(record: bytes) -> Request:
    try:
        return _decode(record[_PAYLOAD_AT[record[HEAD.size]] :])
    except (IndexError, ValueError, *DECODING_ERRORS) as exc:
        raise UnreadableError(f"cannot read its record in Redis ({exc}): another program wrote it") from exc


def read_head(record: bytes) -> RecordHead:
    try:
        return RecordHead._make(HEAD.unpack_from(record))
    except LayoutError as exc:
        raise UnreadableError(f"its record in Redis is incomplete ({exc}): another program wrote it") from exc


def pack_options(options: FrontierOptions) -> bytes:
    attempts = min(options.max_attempts, MAX_ATTEMPTS)
    limit = min(options.link_limit or 0, 2**32 - 1)
    return OPTIONS.pack(options.delay, min(options.concurrency_per_host, 2**31 - 1), attempts, limit)


class Parcel:
    """The packed arguments of a call: requests or endings, and the names of hosts."""

    def __init__(self) -> None:
        self._endings: list[bytes] = []
        self._parts: list[bytes] = []
        self._hosts: dict[str, int] = {}

    def add_request(self, request: Request, fingerprint: bytes, parent: bytes = b"") -> None:
        """Add a request. RequestError if it cannot be encoded."""
        try:
            payload = _encode(request)
        except ENCODING_ERRORS as exc:
            raise cannot_store(request, exc) from exc
        hosts = self._hosts
        name = host_of(request.url)
        number = hosts.get(name)
        if number is None:
            number = hosts[name] = len(hosts) + 1
        rank = 0.0 - request.priority
        if rank:
            payload = RANK.pack(rank) + (parent + payload if parent else payload)
        elif parent:
            payload = parent + payload
        self._parts.append(OFFER.pack(len(payload) + 1, fingerprint, number, rank))
        self._parts.append(_HAS[bool(rank), bool(parent)])
        self._parts.append(payload)

    def add_ending(
        self,
        lease: Lease,
        outcome: int,
        *,
        contacted: bool,
        redirected: bool = False,
        status: int = 0,
        duplicates: int = 0,
        item_errors: int = 0,
        retry_in: float = 0.0,
        kind: str = "",
        text: str = "",
        items: Sequence[bytes] = (),
        children: int = 0,
        staged: tuple[int, int] = (0, 0),
    ) -> None:
        """Add the end of a lease. ``children`` requests must follow it, or are ``staged``: numbers of chunks and
        links."""
        has_texts = bool(kind or text)
        self._endings.append(
            ENDING.pack(
                lease.fingerprint, lease.token, outcome, redirected, has_texts, len(items), children, *staged,
                contacted, min(max(status, 0), 65535), max(duplicates, 0), item_errors, retry_in,
            )
        )  # fmt: skip
        texts = (storable_bytes(kind), storable_bytes(text)) if has_texts else ()
        for piece in (*texts, *items):
            self._parts.append(SIZE.pack(len(piece)))
            self._parts.append(piece)

    def chunk(self, requests: int) -> bytes:
        """The content as a chunk of a stage."""
        names = [piece for name in self._hosts for piece in (SIZE.pack(len(name.encode())), name.encode())]
        return b"".join((CHUNK.pack(requests, len(self._hosts)), *names, *self._parts))

    def arguments(self) -> tuple[bytes, ...]:
        """The blob, then the names of the hosts."""
        return b"".join(self._parts), *(name.encode() for name in self._hosts)

    def endings(self, document: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """The document to write first, the endings, then `arguments`."""
        packed = b"".join(piece for word in document for piece in (SIZE.pack(len(word)), word))
        return packed, b"".join(self._endings), *self.arguments()


def pack_token(token: int) -> bytes:
    """A token as bytes: numbers of Lua have only 53 bits."""
    return token.to_bytes(8, "little")


def known_item(item: LoggedItem | None) -> tuple[int, bytes]:
    """How the store identifies an item that a client has read: its number; its token, fingerprint and index."""
    if item is None or not item.token:
        return 0, b""
    return item.seq, KNOWN_ITEM.pack(item.token, item.fingerprint, item.index)


def read_items(last: int, key: bytes, payloads: Sequence[bytes]) -> Iterator[LoggedItem]:
    """The items of one entry of the item log. ``last`` is the number of its last item. StoreError if another program
    wrote it."""
    try:
        fingerprint, index, token = ITEM_KEY.unpack(key)
    except LayoutError as exc:
        raise StoreError(f"cannot read item {last} of the item log ({exc}): another program wrote it") from exc
    first = last - len(payloads) + 1
    for place, payload in enumerate(payloads):
        yield LoggedItem(first + place, fingerprint, index + place, payload, token)


def document_words(key: str, value: bytes | None, replaces: bytes, version: bytes) -> tuple[bytes, ...]:
    """A document as arguments of ``put_document``. StoreError if it is too large."""
    check_document(key, value, version)
    return key.encode(), replaces, version, b"0" if value is None else b"1", value or b""


def read_document(key: bytes, record: bytes) -> Document:
    end = 1 + record[0]
    return Document(key.decode(), record[end:], record[1:end])


def pack_leases(leases: Iterable[Lease]) -> bytes:
    return b"".join(LEASE.pack(lease.fingerprint, lease.token) for lease in leases)


def read_learned(blob: bytes) -> dict[bytes, float]:
    """Learned delays by host number."""
    return dict(LEARNED.iter_unpack(blob))


# -- leases


def call_tokens(nonce: bytes, part: int) -> bytes:
    """The common part of the tokens of one part of a call: all but their first two bytes."""
    if part:
        nonce = blake2b(nonce + part.to_bytes(4, "big"), digest_size=16).digest()
    return pack_token(token_base(nonce))[2:]


def read_leases(
    fingerprints: bytes, records: Sequence[bytes], delays: Mapping[bytes, float], deadline: float
) -> tuple[list[Lease], Parcel]:
    """The leases, and the endings of those whose requests cannot be read."""
    leases, unreadable = [], Parcel()
    unpack, delay_of = _LEASED.unpack_from, delays.get
    for index, record in enumerate(records):
        fingerprint = fingerprints[16 * index : 16 * index + 16]
        host, attempts, token = unpack(record)
        try:
            request = _read_request(record)
        except UnreadableError as exc:
            lost = Lease(Request("http://unreadable/"), fingerprint, token, attempts, "", deadline)
            unreadable.add_ending(lost, DEAD, contacted=False, kind=UNREADABLE, text=str(exc))
        else:
            name = host_of(request.url)
            leases.append(Lease(request, fingerprint, token, attempts, name, deadline, delay_of(host, 0.0)))
    return leases, unreadable


# -- hosts


def pack_update(update: HostUpdate) -> bytes:
    values = (update.delay, update.crawl_delay, update.learned_delay, update.concurrency, update.block_for)
    return UPDATE.pack(*(part for value in values for part in _change(value)))


def _change(value: float | UnsetType | None) -> tuple[int, float]:
    if value is UNSET:
        return KEEP, 0.0
    return (RESET, 0.0) if value is None else (SET, min(float(value), 2.0**31 - 1))


class HostRecord(NamedTuple):
    """A host. NaN and -1 mean "not set"."""

    in_flight: int
    ended_at: float
    blocked_until: float
    delay: float
    crawl_delay: float
    learned_delay: float
    concurrency: int
    name: str
    block_reason: str


NO_HOST = HostRecord(0, 0.0, 0.0, math.nan, math.nan, math.nan, -1, DEFAULT_HOST, "")


def read_host(record: bytes) -> HostRecord:
    name, at = read_text(record, HOST.size)
    return HostRecord._make((*HOST.unpack_from(record), name, read_text(record, at)[0]))


def read_rival(delay: bytes, run_id: bytes) -> RivalDelay | None:
    return RivalDelay(float(delay), run_id.decode(errors="replace")) if delay else None


def state_of(
    host: HostRecord, every: HostRecord, options: bytes, ready: int, now: float, rival: RivalDelay | None
) -> HostState:
    """The politeness in force. ``every`` is the host ``*``."""
    configured, concurrency, *_ = OPTIONS.unpack(options)
    own, default, crawl, learned = (
        None if math.isnan(delay) else delay
        for delay in (host.delay, every.delay, host.crawl_delay, host.learned_delay)
    )
    limit, default_limit = (
        None if concurrency < 0 else concurrency for concurrency in (host.concurrency, every.concurrency)
    )
    return host_state(
        host.name, (own, default, configured, crawl, learned), (limit, default_limit, concurrency), rival=rival,
        in_flight=host.in_flight, ready=ready, blocked_for=host.blocked_until - now, block_reason=host.block_reason,
    )  # fmt: skip


# -- rewinds


def read_rewind(blob: bytes) -> Rewind:
    _, at, lost = REWIND.unpack_from(blob.ljust(REWIND.size, b"\0"))
    return Rewind(at=moment(at), lost_seconds=None if math.isnan(lost) else lost)


# -- events


def read_events(blob: bytes) -> list[Event]:
    """The events of a request, up to the first one that another program wrote."""
    events: list[Event] = []
    at = 0
    with suppress(LayoutError):
        while at < len(blob):
            (when,) = EVENT.unpack_from(blob, at)
            what, at = read_text(blob, at + EVENT.size)
            detail, at = read_text(blob, at)
            worker, at = read_text(blob, at)
            events.append(read_event(when, what, detail, worker))
    return events


def read_cause(cause: bytes) -> tuple[str, str]:
    """The kind of failure of a dead request, and its reason."""
    if not cause:
        return "", ""
    try:
        kind, at = read_text(cause, 0)
    except LayoutError:
        return UNREADABLE, "another program wrote the reason of the failure"
    return kind, cause[at:].decode(errors="replace")
