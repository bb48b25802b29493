"""The faults that an audit may find, with the same words on every backend. See `shoal.ports.Fault`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shoal.frontier.rules import STATE_NAMES
from shoal.ports import Fault, Stats


class _Meaning(NamedTuple):
    one: str
    """What a single one is."""
    many: str
    """What several are, after their number."""
    repairable: bool = True


_MEANINGS = {
    "requests": _Meaning(
        "the record of a request is gone, and its URL with it",
        "requests are gone: their records are missing",
        repairable=False,
    ),
    "unreadable": _Meaning(
        "the record of a request cannot be read", "records of requests cannot be read", repairable=False
    ),
    "counters": _Meaning("a stored counter differs from the requests", "stored counters differ from the requests"),
    "states": _Meaning(
        "a request has no state: no worker can get it", "requests have no state: no worker can get them"
    ),
    "ready": _Meaning(
        "a ready request is in no queue: no worker can get it", "ready requests are in no queue: no worker can get them"
    ),
    "lanes": _Meaning(
        "the queue of a host is not scheduled: workers cannot get its requests, or not in time",
        "queues of hosts are not scheduled: workers cannot get their requests, or not in time",
    ),
    "waiting": _Meaning(
        "a waiting request is not scheduled: it never becomes ready",
        "waiting requests are not scheduled: they never become ready",
    ),
    "leases": _Meaning(
        "the lease of a request in flight is missing: if its worker is gone, nobody continues it",
        "leases of requests in flight are missing: if their workers are gone, nobody continues them",
    ),
    "stray leases": _Meaning(
        "a lease belongs to no request in flight, and blocks its host",
        "leases belong to no request in flight, and block their hosts",
    ),
    "in flight": _Meaning(
        "a host counts other requests in flight than there are", "hosts count other requests in flight than there are"
    ),
    "hosts": _Meaning(
        "the record of a host is missing: its delay and its limits are lost",
        "records of hosts are missing: their delays and limits are lost",
    ),
    "failures": _Meaning(
        "the reason of a failed request is missing", "reasons of failed requests are missing, or miscounted"
    ),
    "refused": _Meaning(
        "a refused link is missing in its list: `shoal retry-failed` cannot queue it again",
        "refused links are missing in their list: `shoal retry-failed` cannot queue them again",
    ),
    "known": _Meaning(
        "a URL is missing in the index of known URLs: it may be fetched twice",
        "URLs are missing in the index of known URLs: they may be fetched twice",
    ),
    "holders": _Meaning(
        "the worker of a lease is missing: its lease can only expire",
        "workers of leases are missing: their leases can only expire",
    ),
    "links": _Meaning(
        "a link of a large page was lost before it entered the queue",
        "links of large pages were lost before they entered the queue",
        repairable=False,
    ),
    "items": _Meaning("an item is missing in the item log", "items are missing in the item log", repairable=False),
    "roles": _Meaning(
        "a role is missing: its cursor is lost, and it begins again",
        "roles are missing: their cursors are lost, and they begin again",
    ),
    "rewinds": _Meaning("the record of a rewind is missing", "records of rewinds are missing"),
    "run": _Meaning(
        "a value of the run's own record is missing", "values of the run's own record are missing", repairable=False
    ),
    "store": _Meaning("a value that all runs share is missing", "values that all runs share are missing"),
    "documents": _Meaning(
        "a document of the store is missing, or its place in their list",
        "documents of the store are missing, or their places in the list",
    ),
    "inventory": _Meaning(
        "a role, document or host is not in the inventory: nothing would notice its loss",
        "roles, documents or hosts are not in the inventory: nothing would notice their loss",
    ),
}
_LOSSES = {
    "role": "the cursor of role {}: it begins again",
    "document": "the document {}",
    "host": "the settings of host {}, if it had any",
    "rewind": "when the store went back in time, and how far: record {}",
    "counter": "the counter {}: it counts from 0 again",
    "estimate": "the counter {}: it was counted again by the status of each page, so it may be inexact",
}


def describe_losses(lost: Iterable[tuple[str, str]]) -> list[str]:
    """What a repair could not restore, as sentences for people, from (kind, name)."""
    return [_LOSSES.get(kind, "what another program wrote as {}").format(name) for kind, name in lost]


def make_fault(kind: str, count: int, example: str = "") -> Fault:
    meaning = _MEANINGS[kind]
    what = meaning.one if count == 1 else f"{count} {meaning.many}"
    return Fault(kind=kind, count=count, what=what, example=example, repairable=meaning.repairable)


def make_faults(counted: Iterable[tuple[str, int, str]]) -> tuple[Fault, ...]:
    """The faults of (kind, count, example), without those that do not occur. If two checks found faults of one kind,
    they may be the same ones: the larger count stands."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for name, count, example in counted:
        kind = name if name in _MEANINGS else "inventory"  # another program wrote one of another kind
        if count:
            counts[kind] = max(counts.get(kind, 0), count)
            examples[kind] = examples.get(kind) or example
    order = list(_MEANINGS)
    return tuple(make_fault(kind, counts[kind], examples[kind]) for kind in sorted(counts, key=order.index))


def compare_counters(stored: Stats, counted: Stats, requests: int) -> list[tuple[str, int, str]]:
    """What differs between the stored counters and the recount, for `make_faults`. ``requests``: how many there are."""
    links = "links", max(0, stored.incoming - counted.incoming), ""
    if stored.pushed > requests:
        return [("requests", stored.pushed - requests, ""), links]
    pairs = {"pushed": (stored.pushed, requests)}
    pairs |= {name: (getattr(stored, name), getattr(counted, name)) for name in map(str, STATE_NAMES)}
    differing = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    shown = ", ".join(f"{name} {before} instead of {after}" for name, (before, after) in differing.items())
    return [("counters", len(differing), shown), links]
