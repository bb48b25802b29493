"""The layouts of packed records, for Python and for the Lua scripts; the scripts, and the constants that they need.

See `lua_literals` and `lua_constants`.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple

from shoal.clients import redis
from shoal.clients.redis import Answer, RedisClient, ScriptFolder, Word
from shoal.frontier import host_policy, rules


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
