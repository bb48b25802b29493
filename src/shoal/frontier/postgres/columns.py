"""Packs batches into columns, the arguments of the functions in the database; and the constants of these functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

import msgspec

from shoal.clients import postgres
from shoal.clients.postgres import storable_text
from shoal.clients.postgres_schema import Component, Repair
from shoal.frontier import host_policy, rules
from shoal.http import Request
from shoal.ports import Completion, Failure, Lease
from shoal.urls.normalize import host_of

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Request).decode
_MAX_STATUS = 32_767

_USUAL = (200, True, False, 0, 0, None, "", None, "", 0, 0, 0)
"""The usual values of the columns of a lease that ends, from its status on. `finish` has the same ones."""

# A Request in msgpack begins with the number of its fields, in three bytes, and its URL, which is stored in a column of
# its own. Its payload is all the rest.
_COUNT, _URL = 3, b"\xa3url"
_BEFORE_URL = _COUNT + len(_URL)


def read_request(url: str, payload: bytes) -> Request:
    """A stored request. One of `DECODING_ERRORS` or ValueError if another program wrote it."""
    return _decode(b"".join((payload[:_COUNT], _URL, _encode(url), payload[_COUNT:])))


class RequestColumns:
    """Requests to enqueue, each with the position of its owner in the batch, from 1."""

    def __init__(self) -> None:
        self._hosts: dict[str, int] = {}
        self._rows: list[tuple[int, bytes, int, float, str, bytes]] = []
        """Of each: its owner, its fingerprint, the position of its host, its rank, its URL, and the rest of it."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, owner: int, requests: Iterable[tuple[bytes, Request]]) -> None:
        """Add requests. RequestError if one cannot be encoded."""
        hosts, append = self._hosts, self._rows.append
        for fingerprint, request in requests:
            url = request.url
            try:
                encoded, rank = _encode(request), 0.0 - request.priority
            except rules.ENCODING_ERRORS as exc:
                raise rules.cannot_store(request, exc) from exc
            name = host_of(url)
            host = hosts.get(name) or hosts.setdefault(name, len(hosts) + 1)
            payload = encoded[:_COUNT] + encoded[_BEFORE_URL + len(_encode(url)) :]
            append((owner, fingerprint, host, rank, url, payload))

    def as_push(self) -> tuple[object, ...]:
        hosts, _, *columns = self.as_children()
        return hosts, *columns

    def as_children(self) -> tuple[object, ...]:
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * 6
        return list(self._hosts), *columns


class EndingColumns:
    """Leases that end, in order. The second of two equal ones is left out: it is stale."""

    def __init__(self) -> None:
        self.places: list[int] = []
        """The position of each in the batch."""
        self._seen: set[tuple[int, bytes]] = set()
        self.tokens: list[int] = []
        self._rows: list[tuple[object, ...]] = []
        self._item_of: list[int] = []
        self._item_at: list[int] = []
        self._item: list[bytes] = []
        self._children = RequestColumns()
        self.staged: dict[int, Completion | Failure] = {}
        """Pages whose links are uploaded first, by position in the batch."""

    def add(self, place: int, ended: Completion | Failure) -> None:
        lease = ended.lease
        key = (lease.token, lease.fingerprint)
        if key in self._seen:
            return
        self._seen.add(key)
        self.places.append(place)
        self.tokens.append(lease.token)
        children = ended.children
        # A redirect is not staged: its child enters a full queue too, and staged links do not.
        is_large = bool(children) and len(self._children) + len(children) > rules.MAX_LINKS
        stages = is_large and not rules.is_redirect(ended)
        self._rows.append(self._row(ended, stages))
        nth = len(self._rows)
        if ended.items:
            for at, item in enumerate(ended.items):
                self._item_of.append(nth)
                self._item_at.append(at)
                self._item.append(item)
        if stages:
            self.staged[place] = ended
        elif children:
            parent = lease.fingerprint
            links = ((rules.child_fingerprint(child, parent, index), child) for index, child in enumerate(children))
            self._children.add(nth, links)

    @staticmethod
    def _row(ended: Completion | Failure, stages: bool) -> tuple[object, ...]:
        """Token, fingerprint, status, contacted, redirected, duplicates, item errors, kind, reason, retry in, its text
        in the event, number of items, and numbers of staged chunks and links."""
        lease, children, items = ended.lease, len(ended.children), len(ended.items)
        status = ended.status if 0 <= ended.status <= _MAX_STATUS else _MAX_STATUS * (ended.status > 0)
        staged = (-(-children // rules.CHUNK), children) if stages else (0, 0)
        duplicates = 0 if stages else children
        if isinstance(ended, Completion):
            duplicates, note = duplicates + ended.duplicates, storable_text(ended.note)
            return (
                lease.token, lease.fingerprint, status, ended.contacted, ended.redirected, duplicates,
                ended.item_errors, None, note, None, "", items, *staged,
            )  # fmt: skip
        waits = "" if ended.retry_in is None else rules.WAITS_DETAIL % ended.retry_in
        return (
            lease.token, lease.fingerprint, status, ended.contacted, False, duplicates, ended.item_errors,
            storable_text(ended.kind), storable_text(ended.reason), ended.retry_in, waits, items, *staged,
        )  # fmt: skip

    def bury(self, lease: Lease, kind: str, reason: str) -> None:
        """Add a lease whose request cannot be used. Nothing was fetched for it."""
        self.add(len(self.places), Failure(lease=lease, kind=kind, reason=reason, contacted=False))

    def as_arguments(self) -> tuple[object, ...]:
        """The arguments of `finish`. The driver checks each entry of an array, so a column that has only its usual
        value is passed as an empty array."""
        tokens, fingerprints, *others = zip(*self._rows, strict=True)
        columns = (
            () if column.count(usual) == len(column) else column for column, usual in zip(others, _USUAL, strict=True)
        )
        return (
            tokens, fingerprints, *columns, bool(self.staged), self._item_of, self._item_at, self._item,
            *self._children.as_children(),
        )  # fmt: skip


def first_places(leases: Sequence[Lease]) -> list[int]:
    """The position of each in the batch. The second of two equal ones is left out: it is stale."""
    places: dict[tuple[int, bytes], int] = {}
    for place, lease in enumerate(leases):
        places.setdefault((lease.token, lease.fingerprint), place)
    return list(places.values())


def tokens_of(leases: Iterable[Lease]) -> tuple[list[int], list[bytes]]:
    pairs = [(lease.token, lease.fingerprint) for lease in leases]
    return [token for token, _ in pairs], [fingerprint for _, fingerprint in pairs]


# The constants and rules that the SQL functions share with Python: ``{NAME}`` in ``functions/*.sql``.


ALREADY_DONE = len(rules.STATE_NAMES)
"""The state that ``finish`` returns for a request that was done under the same token before."""


LOST = -1
"""The state of a request whose lease was lost, inside ``finish``."""


_MAX_FULL_LANES = 8
"""How many of the lanes that wait for a full host are checked when it is freed."""


class Place(IntEnum):
    """Where a lane is: without requests, ready to be leased from, waiting for its time, or with a full host."""

    EMPTY, OPEN, LATER, FULL = range(4)


def _literal(text: str) -> str:
    return f"'{text}'"


_TEXTS = {
    "LOST_KIND": rules.LOST_KIND, "LOST_EVENT": rules.LOST_EVENT, "LOST_REASON": rules.LOST_REASON,
    "NOTE_EVENT": rules.NOTE_EVENT, "FAILED_EVENT": rules.FAILED_EVENT, "RETRIED_EVENT": rules.RETRIED_EVENT,
    "RETRIED_DETAIL": rules.RETRIED_DETAIL, "SEED_ROLE": rules.SEED_ROLE, "DEFAULT_HOST": host_policy.DEFAULT_HOST,
    "NO_RUN": postgres.NO_RUN, "QUEUE_FULL": postgres.QUEUE_FULL, "FENCED": postgres.FENCED,
    "REWOUND": postgres.REWOUND,
    "CONFLICT": postgres.CONFLICT, "FULL_KIND": rules.FULL_KIND, "FULL_REASON": rules.FULL_REASON,
    "ADMITTED_DETAIL": rules.ADMITTED_DETAIL,
}  # fmt: skip
CONSTANTS = {
    **{name.upper(): str(number) for number, name in enumerate(rules.STATE_NAMES)},
    **{place.name: str(place.value) for place in Place},
    "ALREADY_DONE": str(ALREADY_DONE),
    "LOST": str(LOST),
    "MAX_LEASES": str(rules.MAX_LEASES),
    "MAX_FULL_LANES": str(_MAX_FULL_LANES),
    "HEARD_GAP": str(rules.HEARD_GAP),
    "MAX_HELD": str(rules.MAX_HELD),
    "HALTED": ", ".join(map(_literal, sorted(rules.HALTED))),
    "RESTING": ", ".join(map(_literal, sorted(rules.RESTING))),
    **{name: _literal(text) for name, text in _TEXTS.items()},
    **host_policy.sql(),
}
_GENERATED_LANES = Repair(
    1,
    (None, "ab91e726651705e8"),
    "SELECT attgenerated = 's' FROM pg_attribute WHERE attrelid = '{schema}.lane'::regclass AND attname = 'id'",
    "ALTER TABLE lane ALTER COLUMN id DROP EXPRESSION",
)
"""The key of a lane was a generated column."""
COMPONENT = Component("frontier", "shoal.frontier.postgres", tuple(CONSTANTS.items()), (_GENERATED_LANES,))
