"""The records of a run on Redis: their layouts, for Python and for Lua, and how Python packs and reads them.

The scripts get the layouts and their other constants from `lua_literals` and `lua_constants`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from struct import Struct
from struct import error as LayoutError
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from shoal.clients import redis
from shoal.clients.redis import Answer, RedisClient, ScriptFolder, Word, storable_bytes
from shoal.errors import DECODING_ERRORS, StoreError
from shoal.frontier import host_policy, rules
from shoal.frontier.host_policy import DEFAULT_HOST, RivalDelay, host_state
from shoal.frontier.rules import DEAD
from shoal.http import Request
from shoal.ports import Document, Event, FrontierOptions, HostState, HostUpdate, Lease, LoggedItem, Rewind
from shoal.ports.documents import check_document
from shoal.urls.normalize import host_of


class Field(NamedTuple):
    """A type of values, as ``struct`` and as Lua's struct library name it."""

    python: str
    lua: str


U8, U16, U32, U64 = Field("B", "B"), Field("H", "I2"), Field("I", "I4"), Field("Q", "I8")
I8, I32, F64 = Field("b", "b"), Field("i", "i4"), Field("d", "d")
HOST_NUMBER = Field("4s", "c4")
"""The number of a host is bytes for scripts: they pass it on, and do not have to print it."""
FINGERPRINT = Field("16s", "c16")
TOKEN = Field("Q", "c8")
"""A token has 64 bits, more than a number of Lua: there it is a string, lowest byte first."""
TEXT = Field("", "I4c0")
"""Its size and its bytes. Python packs only the fields before the first text; see `read_text`."""


class Layout:
    """The fields of a packed record, in order."""

    def __init__(self, **fields: Field) -> None:
        self.fields = fields
        packed = Struct("<" + "".join(field.python for field in fields.values()))
        self.size = packed.size
        self.pack, self.unpack, self.unpack_from = packed.pack, packed.unpack, packed.unpack_from
        self.iter_unpack = packed.iter_unpack
        self.lua = "<" + "".join(field.lua for field in fields.values())

    def __add__(self, other: Layout) -> Layout:
        return Layout(**self.fields, **other.fields)

    def only(self, *names: str) -> Struct:
        """Reads only these fields."""
        formats = (
            field.python if name in names else f"{Struct('<' + field.python).size}x"
            for name, field in self.fields.items()
        )
        return Struct("<" + "".join(formats))

    def span(self, name: str) -> str:
        """The first and the last byte of a field, as the arguments of ``string.sub``."""
        names = list(self.fields)
        before = Layout(**{field: self.fields[field] for field in names[: names.index(name)]})
        return f"{before.size + 1}, {before.size + Layout(**{name: self.fields[name]}).size}"


_OUTCOME = Layout(state=U8, status=U16, items=U32, at=F64)
PROGRESS = _OUTCOME + Layout(host=HOST_NUMBER, attempts=U16)
HEAD = PROGRESS + Layout(sequence=U64, token=TOKEN, worker=U16)
"""The part of a request's record that changes with its state. ``worker`` is the number of its last holder."""
GRANTED_HEAD = PROGRESS + Layout(sequence=U64, lease=U16, call=Field("6s", "c6"), worker=U16)
"""The same, with the two parts of a token: the number of the lease in its call, and what the tokens of a call share."""
DONE_PART = _OUTCOME + Layout(order=U32)
"""How the head of a done request begins: with the number of its completion in place of the host."""
HAS = Layout(has=U8)
"""Begins the part of a record that never changes: whether a rank (`HAS_RANK`) and a parent (`HAS_PARENT`) follow. Most
requests have rank 0. Behind them is the payload."""
HAS_RANK, HAS_PARENT = 1, 2
RANK = Layout(rank=F64)
PARENT = Layout(parent=FINGERPRINT)
OFFER = Layout(size=U32, fingerprint=FINGERPRINT, host=U32, rank=F64)
"""Before a request that is pushed: the size of the rest, its fingerprint, the index of the name of its host, its rank.
The part of its record that never changes follows."""
LEASE = Layout(fingerprint=FINGERPRINT, token=TOKEN)
TO_END = LEASE + Layout(outcome=U8, redirected=U8, has_texts=U8, items=U32, children=U32, chunks=U32, links=U32)
HOW_ENDED = Layout(contacted=U8, status=U16, duplicates=U32, item_errors=U32, retry_in=F64)
ENDING = TO_END + HOW_ENDED
"""The end of a lease, in two parts. Its texts, items and children are in another argument: two texts (the kind of a
failure, and its reason or a note), the items as texts, and the children as offers."""
SETTLED = Layout(state=I8, added=U32, known=U32, refused=U32, order=U32)
"""The result of an ending."""
SETTINGS = Layout(delay=F64, crawl_delay=F64, learned_delay=F64, concurrency=I32)
"""What may be set for a host. Most hosts have the same settings, so a script reads them once."""
_VISITS = Layout(in_flight=I32, ended_at=F64, blocked_until=F64)
_NAMES = Layout(name=TEXT, block_reason=TEXT)
HOST = _VISITS + SETTINGS + _NAMES
PACKED_HOST = _VISITS + Layout(settings=Field(f"{SETTINGS.size}s", f"c{SETTINGS.size}")) + _NAMES
EVENT = Layout(at=F64, what=TEXT, detail=TEXT, worker=TEXT)
CAUSE = Layout(kind=TEXT)
"""Before the reason why a request is dead."""
OPTIONS = Layout(delay=F64, concurrency=U32, max_attempts=U32, link_limit=U32)
"""``link_limit`` is 0 if links always enter the queue."""
UPDATE = Layout(**{
    name: field
    for value in ("delay", "crawl_delay", "learned_delay", "concurrency", "block_for")
    for name, field in ((f"change_{value}", U8), (value, F64))
})  # fmt: skip
KEEP, SET, RESET = range(3)
"""What an update does with a value."""
LEARNED = Layout(host=HOST_NUMBER, delay=F64)
ITEM_KEY = Layout(fingerprint=FINGERPRINT, index=U32, token=TOKEN)
"""Of an entry of the item log: its request, the index of its first item, and the token of the lease."""
KNOWN_ITEM = Layout(token=TOKEN, fingerprint=FINGERPRINT, index=U32)
"""How a client names an item that it has read."""
CHUNK = Layout(links=U32, hosts=U32)
"""Before the names of hosts and the offers of a chunk."""
REWIND = Layout(noticed=F64, at=F64, lost_seconds=F64)
SIZE = Layout(size=U32)

ROLE = Layout(token=TOKEN, until=F64, finished=U8)
"""Before the cursor of a role."""
CLAIM = Layout(epoch=U64)
"""The last claim of a role, before the name of its holder."""

WORKER = Layout(epoch=U64, session=F64, beat_at=F64, pid=U32, machine=TEXT)
"""A worker that sends heartbeats."""

COUNTERS = ("pushed", *rules.STATE_NAMES, "duplicates", "items", "rewinds", "incoming", "redirects", "item_errors")
"""The counters of a run that `Stats` has too, in the order in which ``stats.lua`` returns them. New ones come last: the
counters that an earlier version stored end before them."""

FORMAT = 7
"""Version of the stored data. Data of another version is not touched."""
MAX_ATTEMPTS = 65_535
"""The largest number of attempts that a record can hold."""
FOREVER = 1e9
"""Seconds: the longest time that a store can add to its clock."""


def read_text(blob: bytes, at: int) -> tuple[str, int]:
    """A text at this offset, and the offset after it."""
    (size,) = SIZE.unpack_from(blob, at)
    at += SIZE.size
    return blob[at : at + size].decode(errors="replace"), at + size


# -- requests


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
        except rules.ENCODING_ERRORS as exc:
            raise rules.cannot_store(request, exc) from exc
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
    return pack_token(rules.token_base(nonce))[2:]


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
            unreadable.add_ending(lost, DEAD, contacted=False, kind=rules.UNREADABLE, text=str(exc))
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
    return Rewind(at=rules.moment(at), lost_seconds=None if math.isnan(lost) else lost)


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
            events.append(rules.read_event(when, what, detail, worker))
    return events


def read_cause(cause: bytes) -> tuple[str, str]:
    """The kind of failure of a dead request, and its reason."""
    if not cause:
        return "", ""
    try:
        kind, at = read_text(cause, 0)
    except LayoutError:
        return rules.UNREADABLE, "another program wrote the reason of the failure"
    return kind, cause[at:].decode(errors="replace")


# -- scripts


def lua_literals() -> dict[str, str]:
    """For each name of a number or a text that a script may use, its value in Lua."""
    formats = {
        "PROGRESS": PROGRESS, "HEAD": HEAD, "WHOLE_HEAD": HEAD + HAS, "GRANTED_HEAD": GRANTED_HEAD,
        "DONE_PART": DONE_PART, "HAS": HAS, "RANK": RANK, "OFFER": OFFER, "LEASE": LEASE, "TO_END": TO_END,
        "HOW_ENDED": HOW_ENDED, "SETTLED": SETTLED, "HOST": PACKED_HOST, "SETTINGS": SETTINGS, "EVENT": EVENT,
        "TEXT": CAUSE, "RUN_OPTIONS": OPTIONS,
        "UPDATE": UPDATE, "LEARNED": LEARNED, "ITEM_KEY": ITEM_KEY, "KNOWN_ITEM": KNOWN_ITEM, "CHUNK": CHUNK,
        "REWIND": REWIND, "SIZE": SIZE, "ROLE": ROLE, "CLAIM": CLAIM, "WORKER": WORKER,
    }  # fmt: skip
    numbers = {
        **{name.upper(): number for number, name in enumerate(rules.STATE_NAMES)},
        "HEAD_SIZE": HEAD.size, "MIN_SIZE": (HEAD + HAS).size, "DONE_SIZE": DONE_PART.size, "OFFER_SIZE": OFFER.size,
        "TO_END_SIZE": TO_END.size, "ENDING_SIZE": ENDING.size, "HAS_RANK": HAS_RANK, "HAS_PARENT": HAS_PARENT,
        "RANK_SIZE": RANK.size,
        "OPTIONS_SIZE": OPTIONS.size, "ROLE_SIZE": ROLE.size, "TOKEN_SIZE": 8, "FINGERPRINT_SIZE": 16,
        "MAX_ATTEMPTS": MAX_ATTEMPTS, "KEEP": KEEP, "SET": SET, "HEARD_GAP": rules.HEARD_GAP,
        "MAX_WORKERS": rules.MAX_WORKERS, "MAX_HELD": rules.MAX_HELD,
        "SHORT_PAUSE": host_policy.SHORT_PAUSE, "RECHECK": host_policy.RECHECK,
        "MAX_SHARING": host_policy.MAX_SHARING, "MEET_SECONDS": host_policy.MEET_SECONDS,
        "NOTED_EVERY": host_policy.NOTED_EVERY,
    }  # fmt: skip
    texts = {
        "LOST_KIND": rules.LOST_KIND, "LOST_EVENT": rules.LOST_EVENT, "LOST_REASON": rules.LOST_REASON,
        "NOTE_EVENT": rules.NOTE_EVENT, "FAILED_EVENT": rules.FAILED_EVENT, "WAITS_DETAIL": rules.WAITS_DETAIL,
        "RETRIED_EVENT": rules.RETRIED_EVENT, "RETRIED_DETAIL": rules.RETRIED_DETAIL, "UNREADABLE": rules.UNREADABLE,
        "LOST_DEATH": rules.LOST_DEATH,
        "FULL_KIND": rules.FULL_KIND, "FULL_REASON": rules.FULL_REASON, "ADMITTED_DETAIL": rules.ADMITTED_DETAIL,
        "RESTING": f" {' '.join(sorted(rules.RESTING))} ",
        "SEED_ROLE": rules.SEED_ROLE, "DEFAULT_HOST": host_policy.DEFAULT_HOST,
        "NO_RUN": redis.NO_RUN, "REWOUND": redis.REWOUND, "FENCED": redis.FENCED,
    }  # fmt: skip
    values = {name: _quoted(layout.lua) for name, layout in formats.items()}
    values |= {name: str(number) for name, number in numbers.items()}
    return values | {name: _quoted(text) for name, text in texts.items()}


def lua_constants() -> dict[str, str]:
    """For each name of a table or a function that a script may use, the statement in Lua that defines it."""
    spans = {
        "record_token": (HEAD, "token"), "role_token": (ROLE, "token"),
        "lease_fingerprint": (LEASE, "fingerprint"), "lease_token": (LEASE, "token"),
    }  # fmt: skip
    values = {
        "STATS": f"{{{', '.join(map(_quoted, COUNTERS))}}}",
        "STATE_NAMES": f"{{[0] = {', '.join(map(_quoted, rules.STATE_NAMES))}}}",
        "CLAIMED": f"{{{', '.join(f'[{state}] = true' for state in sorted(rules.CLAIMED))}}}",
        "HALTED": f"{{{', '.join(f'{state} = true' for state in sorted(rules.HALTED))}}}",
    }
    functions = {
        name: f"local function {name}(packed) return string.sub(packed, {layout.span(field)}) end"
        for name, (layout, field) in spans.items()
    }
    return {name: f"local {name} = {value}" for name, value in values.items()} | functions | host_policy.lua()


def _quoted(text: str) -> str:
    return f"'{text}'"


SCRIPTS = ScriptFolder(
    "shoal.frontier.redis",
    ("base", "hosts", "lanes", "requests", "slots", "stages"),
    tuple(lua_constants().items()),
    (
        *((script, "turns") for script in ("lease", "settle", "states")),
        ("lease", "choosing"),
        *((script, "faults") for script in ("audit", "audit_lanes", "audit_items", "repair")),
        *((script, "put") for script in ("document", "settle")),
        *((script, "beats") for script in ("beat", "leave", "silent", "fence", "delete", "waits", "upgrade")),
    ),
    tuple(lua_literals().items()),
)


class FrontierScripts:
    """The scripts of the frontiers of one store. ``offset``: seconds to add to the server's clock, for tests."""

    def __init__(self, client: RedisClient, offset: Callable[[], float] = lambda: 0.0) -> None:
        self.client = client
        self._offset = offset

    async def run(self, name: str, run: bytes, options: bytes, *arguments: Word) -> Answer:
        """Run a script. ``run``: the number of a run, perhaps with its name, or nothing."""
        words = (repr(self._offset()), run, options, *arguments)
        if name != "lease":
            return await self.client.run_script(SCRIPTS, name, *words)
        address = self.client.address
        return await self.client.run_script(
            SCRIPTS, name, *words,
            store=f"{address.db} {address.prefix!r}",
            before_loading=lambda: self.run("restarted", b"", options),
        )  # fmt: skip
