"""The layouts of packed records, for Python and for the Lua scripts, and the constants that scripts need.

A script gets those that it names as local variables: see `lua_constants`.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from shoal.frontier import host_policy, rules
from shoal.stores.redis import errors


class Field(NamedTuple):
    """A type of values, as ``struct`` and as Lua's struct library name it."""

    python: str
    lua: str


U8, U16, U32, U64 = Field("B", "B"), Field("H", "I2"), Field("I", "I4"), Field("Q", "I8")
I32, F64 = Field("i", "i4"), Field("d", "d")
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

    def span(self, name: str) -> str:
        """The first and the last byte of a field, as the arguments of ``string.sub``."""
        names = list(self.fields)
        before = Layout(**{each: self.fields[each] for each in names[: names.index(name)]})
        return f"{before.size + 1}, {before.size + Layout(**{name: self.fields[name]}).size}"


PROGRESS = Layout(state=U8, attempts=U16, status=U16, items=U32)
HEAD = PROGRESS + Layout(at=F64, sequence=U64, host=U32, token=TOKEN, worker=U16)
"""The part of a request's record that changes with its state. ``worker`` is the number of who leased it last."""
RANK = Layout(rank=F64)
FIXED = RANK + Layout(parent=FINGERPRINT)
"""The part that never changes. The payload follows."""
RECORD = HEAD + FIXED
OFFER_HEAD = Layout(size=U32, fingerprint=FINGERPRINT, host=U32)
"""Before a request that is pushed: the size of the rest, its fingerprint, the index of the name of its host."""
OFFER = OFFER_HEAD + FIXED
LEASE = Layout(fingerprint=FINGERPRINT, token=TOKEN)
ENDING = LEASE + Layout(
    outcome=U8, contacted=U8, redirected=U8, status=U16, duplicates=U32, retry_in=F64, items=U32, children=U32,
    chunks=U32, links=U32, kind=TEXT, text=TEXT,
)  # fmt: skip
HOST = Layout(
    delay=F64, crawl_delay=F64, learned_delay=F64, blocked_until=F64, ended_at=F64, concurrency=I32, in_flight=I32,
    name=TEXT, block_reason=TEXT,
)  # fmt: skip
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
LEARNED = Layout(host=U32, delay=F64)
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

WORKER = Layout(epoch=U64, session=F64, beat_at=F64, pid=U32, machine=TEXT)
"""A worker that sends heartbeats."""

COUNTERS = ("pushed", *rules.STATE_NAMES, "duplicates", "items", "rewinds", "incoming")
"""The counters of a run that `Stats` has too, in the order in which ``stats.lua`` returns them."""

MAX_ATTEMPTS = 65_535
"""The largest number of attempts that a record can hold."""
FOREVER = 1e9
"""Seconds: the longest time that a store can add to its clock."""


def read_text(blob: bytes, at: int) -> tuple[str, int]:
    """A text at this offset, and the offset behind it."""
    (size,) = SIZE.unpack_from(blob, at)
    at += SIZE.size
    return blob[at : at + size].decode(errors="replace"), at + size


def lua_constants() -> dict[str, str]:
    """For each name that a script may use, the statement in Lua that defines it."""
    formats = {
        "PROGRESS": PROGRESS, "HEAD": HEAD, "HEAD_AND_RANK": HEAD + RANK, "FIXED": FIXED, "OFFER": OFFER_HEAD + RANK,
        "LEASE": LEASE, "ENDING": ENDING, "HOST": HOST, "EVENT": EVENT, "TEXT": CAUSE, "RUN_OPTIONS": OPTIONS,
        "UPDATE": UPDATE, "LEARNED": LEARNED, "ITEM_KEY": ITEM_KEY, "KNOWN_ITEM": KNOWN_ITEM, "CHUNK": CHUNK,
        "REWIND": REWIND, "SIZE": SIZE, "ROLE": ROLE, "WORKER": WORKER,
    }  # fmt: skip
    numbers = {
        **{name.upper(): number for number, name in enumerate(rules.STATE_NAMES)},
        "HEAD_SIZE": HEAD.size, "MIN_SIZE": RECORD.size, "OFFER_SIZE": OFFER_HEAD.size,
        "OPTIONS_SIZE": OPTIONS.size, "ROLE_SIZE": ROLE.size, "TOKEN_SIZE": 8, "FINGERPRINT_SIZE": 16,
        "MAX_ATTEMPTS": MAX_ATTEMPTS, "KEEP": KEEP, "SET": SET, "HEARD_GAP": rules.HEARD_GAP,
        "MAX_WORKERS": rules.MAX_WORKERS,
    }  # fmt: skip
    texts = {
        "LOST_KIND": rules.LOST_KIND, "LOST_EVENT": rules.LOST_EVENT, "LOST_REASON": rules.LOST_REASON,
        "NOTE_EVENT": rules.NOTE_EVENT, "FAILED_EVENT": rules.FAILED_EVENT, "WAITS_DETAIL": rules.WAITS_DETAIL,
        "RETRIED_EVENT": rules.RETRIED_EVENT, "RETRIED_DETAIL": rules.RETRIED_DETAIL, "UNREADABLE": rules.UNREADABLE,
        "FULL_KIND": rules.FULL_KIND, "FULL_REASON": rules.FULL_REASON, "ADMITTED_DETAIL": rules.ADMITTED_DETAIL,
        "SEED_ROLE": rules.SEED_ROLE, "DEFAULT_HOST": host_policy.DEFAULT_HOST,
        "NO_RUN": errors.NO_RUN, "REWOUND": errors.REWOUND, "FENCED": errors.FENCED,
    }  # fmt: skip
    spans = {
        "record_token": (RECORD, "token"), "record_parent": (RECORD, "parent"), "role_token": (ROLE, "token"),
        "lease_fingerprint": (LEASE, "fingerprint"), "lease_token": (LEASE, "token"),
    }  # fmt: skip
    values = {name: _quoted(layout.lua) for name, layout in formats.items()}
    values |= {name: str(number) for name, number in numbers.items()}
    values |= {name: _quoted(text) for name, text in texts.items()}
    values["STATS"] = f"{{{', '.join(map(_quoted, COUNTERS))}}}"
    values["STATE_NAMES"] = f"{{[0] = {', '.join(map(_quoted, rules.STATE_NAMES))}}}"
    values["CLAIMED"] = f"{{{', '.join(f'[{state}] = true' for state in sorted(rules.CLAIMED))}}}"
    values["HALTED"] = f"{{{', '.join(f'{state} = true' for state in sorted(rules.HALTED))}}}"
    functions = {
        name: f"local function {name}(packed) return string.sub(packed, {layout.span(field)}) end"
        for name, (layout, field) in spans.items()
    }
    return {name: f"local {name} = {value}" for name, value in values.items()} | functions | host_policy.lua()


def _quoted(text: str) -> str:
    return f"'{text}'"
