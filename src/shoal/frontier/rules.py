"""What all frontiers decide in the same way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b

from shoal.errors import FencedError, RequestError, RunError, StoreRewoundError
from shoal.http import Request
from shoal.ports import Claim, Completion, Failure, Holder, RequestState, Run, RunState
from shoal.urls.normalize import derived_fingerprint

READY, WAITING, LEASED, DONE, DEAD = range(5)
STATE_NAMES: tuple[RequestState, ...] = ("ready", "waiting", "leased", "done", "dead")

LOST_KIND = "worker lost"
LOST_EVENT = "lease lost"
"""What the history of a request says when its worker was lost."""
SPARED_KINDS = frozenset({"robots", "scope"})
"""Kinds of death that a retry does not change unless it is asked for by name."""

HALTED: frozenset[RunState] = frozenset({"paused", "cancelled"})
"""In these states a run gives out no leases."""

_STEPS: dict[RunState, frozenset[RunState]] = {
    "queued": frozenset({"running", "paused", "cancelled"}),
    "running": frozenset({"queued", "paused", "finished", "cancelled"}),
    "paused": frozenset({"running", "finished", "cancelled"}),
    "finished": frozenset({"running"}),
    "cancelled": frozenset({"running"}),
}


def check_transition(run_id: str, run: Run | None, state: RunState) -> None:
    """RunError unless the run exists and may go to this state. Staying in a state is allowed."""
    if run is None:
        raise RunError(f"there is no run {run_id}")
    if state != run.state and state not in _STEPS[run.state]:
        raise RunError(f"run {run_id} is {run.state}; it can't become {state}")


def push_fingerprint(request: Request, seed: Claim | None, cursor: bytes, index: int) -> bytes:
    """The name of a pushed request. One that is not filtered gets a name of its own, which is the same again when a
    seeder that was taken over pushes it again."""
    fingerprint = request.fingerprint()
    if not request.dont_filter:
        return fingerprint
    if seed is None:
        return derived_fingerprint(fingerprint, os.urandom(16))
    return derived_fingerprint(fingerprint, b"seed", cursor, b"%d" % index)


def child_fingerprint(request: Request, parent: bytes, index: int) -> bytes:
    """The name of a child. One that is not filtered is named by its place on its parent, so a parent that is handled
    again after a crash does not make a second one."""
    fingerprint = request.fingerprint()
    return derived_fingerprint(fingerprint, parent, b"%d" % index) if request.dont_filter else fingerprint


LARGE_PAGE = 2000
"""Children of one page that are stored in one go, without giving way to other callers."""


async def encode_children(
    ended: Sequence[Completion | Failure], encode: Callable[[Request], bytes]
) -> dict[int, bytes]:
    """The msgpack of the children of large pages, by ``id``, made ahead of the step that stores them: so that no other
    caller waits for it. RequestError for one that can't be stored."""
    encoded: dict[int, bytes] = {}
    for each in ended:
        if len(each.children) > LARGE_PAGE:
            for place, child in enumerate(each.children):
                if place % LARGE_PAGE == 0:
                    await asyncio.sleep(0)
                encoded[id(child)] = encode_request(child, encode)
    return encoded


def encode_request(request: Request, encode: Callable[[Request], bytes]) -> bytes:
    """Its msgpack. RequestError if it can't be stored."""
    try:
        return encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise RequestError(f"{request.url} can't be stored: {exc}") from exc


def check_cursor(claim: Claim, stored: bytes, cursor: bytes) -> None:
    """StoreRewoundError unless the claim may move the stored cursor to this one. A repeat passes."""
    if stored not in (claim.cursor, cursor):
        raise StoreRewoundError(
            f"the cursor of {claim.role} is not where its holder left it: the store went back in time"
        )


def check_fence(slot: str, epoch: int, latest: int | None) -> None:
    """FencedError when the slot was fenced under a later epoch; ``latest`` is the one that is remembered."""
    if latest is not None and latest > epoch:
        raise FencedError(f"slot {slot} is held under epoch {latest} by now; nothing is given to epoch {epoch}")


def is_fenced(holder: Holder | None, slot: str, epoch: int) -> bool:
    """Whether a fence takes away what was given to this holder."""
    return holder is not None and holder.slot == slot and holder.epoch < epoch


MOST_LEASES = 65_535
"""Requests that one call may lease: tokens of one call differ in their last 16 bits."""


def token_base(nonce: bytes) -> int:
    """The tokens of a call are ``token_base(nonce) + 1``, ``+ 2`` ... They fit a signed 64-bit integer and are never 0.
    They don't repeat as long as nonces don't, also not in a store that was rewound."""
    check_nonce(nonce)
    number = int.from_bytes(blake2b(nonce, digest_size=6).digest(), "big") & (2**47 - 1)
    return (number or 1) << 16


def reissued_token(nonce: bytes, token: int) -> int:
    """The token that a lease gets when it is reissued: the same again for the same nonce and old token."""
    check_nonce(nonce)
    return token_base(blake2b(nonce + token.to_bytes(8, "big"), digest_size=16).digest()) + 1


def claim_token(nonce: bytes) -> int:
    """The token of a role that was claimed with this nonce."""
    return token_base(nonce) + 1


def new_nonce() -> bytes:
    """For a call whose caller gave none."""
    return os.urandom(16)


def check_nonce(nonce: bytes) -> None:
    """ValueError for one that others might make up too, or that is more than one."""
    if not 8 <= len(nonce) <= 32:
        raise ValueError(f"a nonce has 8 to 32 bytes, not {len(nonce)}")


def lost_reason(attempts: int) -> str:
    """Why a request whose worker was lost failed."""
    times = "once" if attempts == 1 else f"{attempts} times"
    return f"its worker was lost while working on it, {times}"
