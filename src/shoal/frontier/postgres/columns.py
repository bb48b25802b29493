"""Packs batches into columns: the arguments of the functions in the database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from shoal.frontier.rules import CHUNK, ENCODING_ERRORS, MAX_LINKS, WAITS_DETAIL, cannot_store, child_fingerprint
from shoal.http import Request
from shoal.ports import Completion, Failure, Lease
from shoal.stores.postgres.client import storable_text
from shoal.urls.normalize import host_of

_encode = msgspec.msgpack.Encoder().encode


class RequestColumns:
    """Requests to enqueue, each with the position of its owner in the batch, from 1."""

    def __init__(self) -> None:
        self._hosts: dict[str, int] = {}
        self._owner: list[int] = []
        self._fingerprint: list[bytes] = []
        self._host: list[int] = []
        self._rank: list[float] = []
        self._payload: list[bytes] = []

    def __len__(self) -> int:
        return len(self._owner)

    def add(self, owner: int, named: Iterable[tuple[bytes, Request]]) -> None:
        """RequestError if one cannot be encoded."""
        hosts = self._hosts
        for fingerprint, request in named:
            try:
                payload, rank = _encode(request), 0.0 - request.priority
            except ENCODING_ERRORS as exc:
                raise cannot_store(request, exc) from exc
            host = host_of(request.url)
            self._owner.append(owner)
            self._fingerprint.append(fingerprint)
            self._host.append(hosts.get(host) or hosts.setdefault(host, len(hosts) + 1))
            self._rank.append(rank)
            self._payload.append(payload)

    def as_push(self) -> tuple[object, ...]:
        return list(self._hosts), self._fingerprint, self._host, self._rank, self._payload

    def as_children(self) -> tuple[object, ...]:
        return list(self._hosts), self._owner, self._fingerprint, self._host, self._rank, self._payload


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
        nth = len(self.places)
        stages = len(self._children) + len(ended.children) > MAX_LINKS
        self.tokens.append(lease.token)
        self._rows.append(self._row(ended, stages))
        for at, item in enumerate(ended.items):
            self._item_of.append(nth)
            self._item_at.append(at)
            self._item.append(item)
        if stages:
            self.staged[place] = ended
        elif ended.children:
            parent = lease.fingerprint
            named = ((child_fingerprint(child, parent, index), child) for index, child in enumerate(ended.children))
            self._children.add(nth, named)

    @staticmethod
    def _row(ended: Completion | Failure, stages: bool) -> tuple[object, ...]:
        """Token, fingerprint, status, contacted, duplicates, kind, reason, retry in, its text in the event, number of
        items, and numbers of staged chunks and links."""
        lease, children, items = ended.lease, len(ended.children), len(ended.items)
        staged = (-(-children // CHUNK), children) if stages else (0, 0)
        known = 0 if stages else children
        if isinstance(ended, Completion):
            known, note = known + ended.duplicates, storable_text(ended.note)
            return (
                lease.token, lease.fingerprint, ended.status, ended.contacted, known, None, note, None, "", items,
                *staged,
            )  # fmt: skip
        waits = "" if ended.retry_in is None else WAITS_DETAIL % ended.retry_in
        return (
            lease.token, lease.fingerprint, ended.status, ended.contacted, known, storable_text(ended.kind),
            storable_text(ended.reason), ended.retry_in, waits, items, *staged,
        )  # fmt: skip

    def bury(self, lease: Lease, kind: str, reason: str) -> None:
        """Add a lease whose request cannot be used. Nothing was fetched for it."""
        self.add(len(self.places), Failure(lease=lease, kind=kind, reason=reason, contacted=False))

    def as_arguments(self) -> tuple[object, ...]:
        return (
            *map(list, zip(*self._rows, strict=True)), bool(self.staged), self._item_of, self._item_at, self._item,
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
