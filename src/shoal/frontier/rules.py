"""Rules that all frontiers share: states, names of requests, tokens, fencing, large pages."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, islice
from typing import NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from shoal.errors import (
    DECODING_ERRORS,
    FencedError,
    QueueFullError,
    RequestError,
    RunError,
    StoreError,
    StoreRewoundError,
)
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    Event,
    EventKind,
    Failure,
    History,
    Holder,
    Pushed,
    RequestState,
    Run,
    RunState,
)
from shoal.system import chance, clock
from shoal.urls.normalize import derived_fingerprint, normalize_url

log = logging.getLogger("shoal.frontier")

T = TypeVar("T")

_SHOWN = 200  # characters of what another program wrote
_LATEST = 1e11  # seconds since 1970, as far as a calendar goes
_decode_settings = msgspec.msgpack.Decoder(dict[str, object]).decode

# -- states

READY, WAITING, LEASED, DONE, DEAD = range(5)
STATE_NAMES: tuple[RequestState, ...] = ("ready", "waiting", "leased", "done", "dead")
CLAIMED = frozenset({LEASED, DONE, DEAD})
"""In these states, the history of a request names the worker of its last lease."""

HALTED: frozenset[RunState] = frozenset({"paused", "cancelled"})
"""A run in one of these states grants no leases."""
RESTING: frozenset[RunState] = HALTED | {"finished"}
"""A run in one of these states does not share hosts with others."""

_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    "queued": frozenset({"running", "paused", "cancelled"}),
    "running": frozenset({"queued", "paused", "finished", "cancelled"}),
    "paused": frozenset({"running", "finished", "cancelled"}),
    "finished": frozenset({"running"}),
    "cancelled": frozenset({"running"}),
}
_ENDED: frozenset[RunState] = frozenset({"finished", "cancelled"})


def count_fitting(sizes: Sequence[int], max_bytes: int) -> int:
    """How many of these sizes, from the first on, fit together. At least one, if there is one."""
    if sum(sizes) <= max_bytes:
        return len(sizes)
    return max(1, sum(total <= max_bytes for total in accumulate(sizes)))


def no_run(run_id: str) -> RunError:
    """The error for a run that does not exist."""
    return RunError(f"there is no run {run_id}")


def run_exists(run_id: str) -> RunError:
    """The error for a new run whose name is taken."""
    return RunError(f"run {run_id} already exists")


def read_run(
    run_id: str, spider: str, state: str, created_at: float, settings: bytes, project: str, ended_at: float | None
) -> Run:
    """A stored run. StoreError if another program wrote it."""
    try:
        values = {
            "run_id": run_id,
            "spider": spider,
            "state": state,
            "created_at": created_at,
            "settings": _decode_settings(settings),
            "project": project,
            "ended_at": ended_at,
        }
        return msgspec.convert(values, Run)
    except DECODING_ERRORS as exc:
        raise unreadable_run(run_id, exc) from exc


def unreadable_run(run_id: object, exc: Exception) -> StoreError:
    """The error for a run that another program wrote."""
    name, reason = str(run_id)[:_SHOWN], str(exc)[:_SHOWN]
    return StoreError(f"cannot read run {name!r} ({reason}): another program has changed it. `shoal remove` deletes it")


def readable_runs(rows: Iterable[T], read: Callable[[T], Run]) -> list[Run]:
    """The runs in these rows, without those that another program wrote: they must not hide all others."""
    runs: list[Run] = []
    for row in rows:
        try:
            runs.append(read(row))
        except StoreError as exc:
            _warn(str(exc))
    return runs


@lru_cache(1000)  # once for each
def _warn(message: str) -> None:
    log.warning("a list of runs lacks one: %s", message)


def moved(run: Run, state: RunState, among: Sequence[RunState] | None = None) -> Run:
    """The run in this state, in which it may be already. RunError if it may not change to it, or is in none of the
    states ``among``."""
    if state == run.state:
        return run
    if state not in _TRANSITIONS[run.state] or (among is not None and run.state not in among):
        raise RunError(f"run {run.run_id} is {run.state}; it cannot become {state}")
    # The time is for people.
    return msgspec.structs.replace(run, state=state, ended_at=clock.time() if state in _ENDED else None)


def belongs(run: Run, spider: str | None, project: str | None, states: Sequence[RunState] | None) -> bool:
    """Whether the run is one of this spider and this project, and in one of these states. None: any."""
    return spider in (None, run.spider) and project in (None, run.project) and (states is None or run.state in states)


def check_queue_size(max_size: int | None, queued: int, new: int) -> None:
    """QueueFullError if the new requests do not fit. A push without new requests always fits."""
    if max_size is not None and new and queued + new > max_size:
        raise queue_full(max_size)


def queue_full(max_size: int | None) -> QueueFullError:
    return QueueFullError(f"the queue holds its maximum of {max_size} requests; nothing was pushed")


def room_for_links(limit: int | None, queued: int) -> int | None:
    """How many new links may enter the queue. None: all. ``limit`` is `FrontierOptions.link_limit`."""
    return None if limit is None else max(0, limit - queued)


def is_redirect(ended: Completion | Failure) -> bool:
    """Whether the child of a page continues it, and so enters a full queue too."""
    return isinstance(ended, Completion) and ended.redirected


# -- attempts and deaths

# Lua and SQL fill in the same templates. SQL knows only %s.

LOST_KIND = "worker lost"
"""The kind of death of a request whose last attempt ended with a lost lease."""
LOST_EVENT, LOST_REASON = "lost", "its worker was lost in attempt %s"
"""The event in the history of a request whose worker was lost, and its detail. See `read_event`."""
NOTE_EVENT = "note"
"""The event for the note of a completion."""
FAILED_EVENT, WAITS_DETAIL = "failed %s", "; waits %g s"
"""The event for a failed attempt, and what follows the reason if there is another attempt."""
RETRIED_EVENT, RETRIED_DETAIL = "retried", "made ready again with all its attempts"
FULL_KIND, FULL_REASON = "queue full", "refused: the queue had its maximum of %s requests"
"""The kind of death of a link that found no room in the queue, and its reason."""
ADMITTED_DETAIL = "queued: it was refused when the queue was full"
"""The detail of the event `RETRIED_EVENT` for such a link."""
UNREADABLE = "unreadable"
LOST_DEATH = "the reason of its failure was lost in the store"
"""The kind of a dead request whose record another program wrote."""
KINDS_NOT_RETRIED = frozenset({"robots", "scope"})
"""Kinds of death that ``retry_dead`` skips unless the caller names them."""


def is_retried(kind: str, kinds: Collection[str] | None) -> bool:
    """Whether ``retry_dead(kinds)`` makes a dead request of this kind ready again."""
    return kind not in KINDS_NOT_RETRIED if kinds is None else kind in kinds


def lost_reason(attempts: int) -> str:
    """The reason in the history of a request whose worker was lost."""
    return LOST_REASON % attempts


def failure_event(attempts: int, failure: Failure, *, waits: bool) -> tuple[str, str]:
    """The event in the history of a request for a failed attempt: what happened, and its detail."""
    return FAILED_EVENT % attempts, failure.reason + (WAITS_DETAIL % failure.retry_in if waits else "")


def retry_reason(detail: str) -> str:
    """Why an attempt failed, from the detail of its event."""
    return detail.rpartition(WAITS_DETAIL.partition("%")[0])[0] or detail


def read_event(at: float, stored: str, detail: str, worker: str = "") -> Event:
    """An event as it is stored: its kind, and the number of an attempt."""
    kind, _, attempt = stored.partition(" ")
    number = int(attempt) if attempt.isdecimal() and len(attempt) < 10 else 0
    return Event(moment(at), cast("EventKind", kind), detail, worker, number)


def moment(at: float) -> float:
    """A stored time; 0 if no calendar has it."""
    return at if 0 <= at <= _LATEST else 0.0


# -- fingerprints of requests


def push_fingerprint(request: Request, seed: Claim | None, cursor: bytes, index: int) -> bytes:
    """The fingerprint of a pushed request.

    A request that is not filtered has a unique one. A seeder derives it from its cursor, so that a seeder that takes
    over and pushes the batch again adds nothing twice.
    """
    fingerprint = request.fingerprint()
    if not request.dont_filter:
        return fingerprint
    if seed is None:
        return derived_fingerprint(fingerprint, chance.token_bytes(16))
    return derived_fingerprint(fingerprint, b"seed", cursor, b"%d" % index)


def child_fingerprint(request: Request, parent: bytes, index: int) -> bytes:
    """The fingerprint of a child. If the child is not filtered, it is derived from its position on its parent, so that
    a parent that is handled again after a crash does not add it twice."""
    fingerprint = request.fingerprint()
    return derived_fingerprint(fingerprint, parent, b"%d" % index) if request.dont_filter else fingerprint


def sought_fingerprint(request: Request, parent: bytes) -> bytes:
    """The fingerprint that ``find`` looks for: that of the request. With a ``parent``, that of its first child, if the
    child is this request and was not filtered."""
    return derived_fingerprint(request.fingerprint(), parent, b"0") if parent else request.fingerprint()


def sought_urls(request: Request) -> list[str]:
    """The URLs that ``find`` searches for, if no request has the fingerprint: as written, and in normal form."""
    return list(dict.fromkeys((request.url, normalize_url(request.url))))


# -- encoding

ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError)
MAX_LINKS = 2000
"""Links that one call may add. The links of larger pages are staged."""
CHUNK = 1000
"""Links of a staged page that one step uploads, or moves into the queue."""


def encode_request(request: Request, encode: Callable[[Request], bytes]) -> bytes:
    """The request as msgpack. RequestError if it cannot be stored."""
    try:
        return encode(request)
    except ENCODING_ERRORS as exc:
        raise cannot_store(request, exc) from exc


def cannot_store(request: Request, exc: Exception) -> RequestError:
    """The error for a request that cannot be encoded."""
    return RequestError(f"cannot store {request.url}: {exc}")


# -- roles and fencing

SEED_ROLE = "seed"
"""The role of the process that pushes the start requests."""


def is_claimable(*, finished: bool, until: float, now: float, held_token: int, token: int) -> bool:
    """Whether a claim with this token gets a role: it is not finished, and it is free or already held by the token."""
    return not finished and (until <= now or held_token == token)


def claim_epoch(*, now: float, last: int, above: int) -> int:
    """The epoch of a new claim of a role; ``last`` is the epoch of its last claim, or 0. See `Roles.claim`."""
    return max(int(now * 1_000_000), last + 1, above + 1)


def check_cursor(claim: Claim, stored: bytes, cursor: bytes) -> None:
    """StoreRewoundError unless the claim may move the stored cursor to ``cursor``. A repeated move passes."""
    if stored not in (claim.cursor, cursor):
        raise StoreRewoundError(
            f"the stored cursor of {claim.role} is not the one that its holder saved: the store went back in time"
        )


MAX_WORKERS = 65_535
"""Records in memory and in Redis name at most this many workers of a run. The claims of later ones name none."""
MAX_HELD = 5000
"""Leases of a store that are looked at to find out who uses a host."""
HEARD_GAP = 0.5
"""If no heartbeat arrived for this part of a session, the store may have been away: silence begins anew. A worker that
is silent for so long is late."""


def check_fence(slot: str, epoch: int, latest: int | None) -> None:
    """FencedError if the slot was fenced under a later epoch; ``latest`` is the epoch of its last fence."""
    if latest is not None and latest > epoch:
        raise FencedError(f"slot {slot} is now held under epoch {latest}; epoch {epoch} gets nothing more")


def is_fenced(holder: Holder | None, slot: str, epoch: int) -> bool:
    """Whether a fence of the slot under this epoch revokes the leases and roles of this holder."""
    return holder is not None and holder.slot == slot and holder.epoch < epoch


# -- tokens

MAX_LEASES = 65_535
"""One call leases at most this many requests: the tokens of a call differ in their last 16 bits."""


def token_base(nonce: bytes) -> int:
    """The tokens of a call are ``token_base(nonce) + 1``, ``+ 2`` ...

    They fit a signed 64-bit integer and are never 0. They do not repeat as long as nonces do not, even in a store that
    was rewound.
    """
    check_nonce(nonce)
    number = int.from_bytes(blake2b(nonce, digest_size=6).digest(), "big") & (2**47 - 1)
    return (number or 1) << 16


def reissued_token(nonce: bytes, token: int) -> int:
    """The new token of a lease that is reissued. The same nonce and old token always give the same new token."""
    check_nonce(nonce)
    return token_base(blake2b(nonce + token.to_bytes(8, "big"), digest_size=16).digest()) + 1


def claim_token(nonce: bytes) -> int:
    """The token of a role that is claimed with this nonce."""
    return token_base(nonce) + 1


def new_nonce() -> bytes:
    """A nonce for a call whose caller passed none."""
    return chance.token_bytes(16)


def check_nonce(nonce: bytes) -> None:
    """ValueError unless the nonce is long enough to be unique, and short enough to be stored."""
    if not 8 <= len(nonce) <= 32:
        raise ValueError(f"a nonce must have 8 to 32 bytes, not {len(nonce)}")


# Large pages on frontiers that live in one process.
#
# To store thousands of links in one step would block all other calls for a second. So the links of a large page are
# *staged*: encoded in portions before the step that ends the page, kept aside by that step, and moved into the
# queue one portion at a time after it. Until then they are incoming: see `shoal.ports.Stats`.


E = TypeVar("E", Completion, Failure)

Portion: TypeAlias = list[tuple[bytes, bytes]]
"""The fingerprints of some links, and their msgpack."""


class MovedLinks(NamedTuple):
    """How many staged links of a page were queued, and how many were refused. The run had the others already."""

    added: int
    refused: int

    def plus(self, other: MovedLinks) -> MovedLinks:
        return MovedLinks(self.added + other.added, self.refused + other.refused)


POLL = 0.01
"""Seconds after which a caller that gets no leases polls again while links are incoming."""


async def split_large(
    pages: Sequence[E], encode: Callable[[Request], bytes]
) -> tuple[Sequence[E], dict[int, list[Portion]]]:
    """The pages, large ones without their links; and these links, by the position of their page.

    Other tasks take their turn between two portions. RequestError for a link that cannot be stored.
    """
    large = {place: page for place, page in enumerate(pages) if len(page.children) > MAX_LINKS}
    if not large:
        return pages, {}
    staged = {place: await _encode_links(page, encode) for place, page in large.items()}
    rest = [msgspec.structs.replace(page, children=()) if place in large else page for place, page in enumerate(pages)]
    return rest, staged


async def _encode_links(page: Completion | Failure, encode: Callable[[Request], bytes]) -> list[Portion]:
    parent = page.lease.fingerprint
    links = (
        (child_fingerprint(child, parent, index), encode_request(child, encode))
        for index, child in enumerate(page.children)
    )
    portions = []
    while portion := list(islice(links, CHUNK)):
        portions.append(portion)
        await asyncio.sleep(0)
    return portions


def first_of_each(portion: Portion) -> dict[bytes, bytes]:
    """The msgpack of each link by its fingerprint. If a page has a link twice, the first one counts."""
    links: dict[bytes, bytes] = {}
    for fingerprint, payload in portion:
        links.setdefault(fingerprint, payload)
    return links


def count_moved(page: Completion, links: MovedLinks) -> Pushed:
    """The result of a large page whose links were moved."""
    return Pushed(links.added, len(page.children) - sum(links) + page.duplicates, links.refused)


def incoming_history(link: Request, parent: str | None) -> History:
    """The history of a link that is not in the queue yet. ``parent``: the URL of its page."""
    return History(
        url=link.url,
        state="ready",
        depth=link.depth,
        priority=link.priority,
        attempts=0,
        status=0,
        items=0,
        parent=parent,
        reason="",
        events=(),
    )
