"""Judges leases at the server, from the calls that it answers: laws 3, 5 and 10."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from sys import maxsize
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shoal.frontier.local import wire
from shoal.frontier.rules import is_fenced
from shoal.ports import Holder, Lease, Leased

if TYPE_CHECKING:
    from shoal.testing.simulation.store import Call
    from shoal.testing.simulation.world import World

_ENDINGS = ("complete", "store_cookies", "fail", "release")
JUDGED = frozenset({"lease", "renew", "fence", "fence_silent", *_ENDINGS})
_SLACK = 0.05
"""Seconds that may pass between a step of the store and its note."""


class Grant(Struct):
    """A lease as the server granted it."""

    token: int
    process: str
    holder: Holder | None
    until: float
    """When it expires, in the time of the loop."""
    is_over: bool = False


class LeaseJudge:
    """Every token is new. Nobody gets a request that another process has. Only the last token ends a lease, once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._grants: dict[tuple[str, bytes], Grant] = {}
        """The last lease of each request."""
        self._owners: dict[tuple[str, bytes, int], str] = {}
        """The process that got a request under a token."""
        self._done: dict[tuple[str, bytes], int] = {}
        """The token that made a request done."""
        self._fences: dict[tuple[str, str], int] = {}
        """The epoch under which a slot of a run was fenced last."""
        self._holders: dict[tuple[str, Holder], str] = {}
        """The process that works on a run under a slot and an epoch."""

    def __deepcopy__(self, memo: dict[int, object]) -> LeaseJudge:
        twin = LeaseJudge(self._world)
        twin._grants, twin._done = copy.deepcopy(self._grants), dict(self._done)
        twin._fences = dict(self._fences)
        return twin

    def after_rewind(self, before: LeaseJudge) -> LeaseJudge:
        """This judge, for a store that went back to it. Tokens and epochs stay used."""
        self._owners, self._holders = before._owners, before._holders
        return self

    def note(self, call: Call, arguments: tuple[Any, ...], result: Any) -> None:
        """The server has executed a call."""
        run = wire.decode_run_key(call.run)
        if call.method == "lease":
            self._granted(run, call.caller.name, arguments[1], result)
        elif call.method == "renew":
            for lease in filter(None, result):
                self._check_current(run.run_id, lease, "renewed").until = self._now + arguments[1]
        elif call.method in _ENDINGS:
            pages = arguments[1] if call.method == "store_cookies" else arguments[0]
            results = result[1] if call.method == "store_cookies" else result
            self._ended(call.method, run.run_id, pages, results)
        elif call.method == "fence":
            self._fenced(run.run_id, *arguments)
        elif call.method == "fence_silent":
            for silent in result:
                self._end_grants(silent.worker, maxsize)

    @property
    def _now(self) -> float:
        return self._world.loop.time()

    def _granted(self, run: wire.RunKey, process: str, ttl: float, leased: Leased) -> None:
        if run.holder is not None and leased.leases:
            self._check_holder(run.run_id, run.holder, process)
        for lease in leased.leases:
            name, grant = (run.run_id, lease.fingerprint), Grant(lease.token, process, run.holder, self._now + ttl)
            last = self._grants.get(name)
            url = lease.request.url
            owner = self._owners.setdefault((*name, lease.token), process)
            self._world.require(owner == process, f"{process} got {url} under a token that {owner} had")
            if last is not None and last.token == lease.token:  # the call was repeated
                last.until, last.is_over = grant.until, False
                continue
            self._world.require(
                last is None or last.is_over or last.until <= self._now + _SLACK,
                f"{process} got {url}, which {last and last.process} has",
            )
            self._world.require(name not in self._done, f"{process} got {url}, which is done")
            self._grants[name] = grant

    def _check_current(self, run_id: str, lease: Lease, what: str) -> Grant:
        grant = self._grants.get((run_id, lease.fingerprint))
        is_current = grant is not None and grant.token == lease.token
        self._world.require(is_current, f"a lease was {what} under the token {lease.token}, which is not the last one")
        assert grant is not None
        return grant

    def _ended(self, method: str, run_id: str, pages: Sequence[Any], results: Sequence[Any]) -> None:
        for page, result in zip(pages, results, strict=False):
            lease = page if method == "release" else page.lease
            name = (run_id, lease.fingerprint)
            if result is None or result is False or self._done.get(name) == lease.token:
                continue
            self._world.require(name not in self._done, f"a request was done twice, under {lease.token} at last")
            self._check_current(run_id, lease, f"ended by {method}").is_over = True
            if method in ("complete", "store_cookies"):
                self._done[name] = lease.token

    def _check_holder(self, run_id: str, holder: Holder, process: str) -> None:
        owner = self._holders.setdefault((run_id, holder), process)
        self._world.require(owner == process, f"{process} works under {holder}, and so does {owner}")
        fence = self._fences.get((run_id, holder.slot), 0)
        self._world.require(holder.epoch >= fence, f"{process} got leases under {holder}, which {fence} has fenced")

    def _fenced(self, run_id: str, slot: str, epoch: int) -> None:
        self._fences[run_id, slot] = max(epoch, self._fences.get((run_id, slot), 0))
        self._end_grants(slot, epoch)

    def _end_grants(self, slot: str, epoch: int) -> None:
        """End the leases that a slot has under earlier epochs."""
        for grant in self._grants.values():
            if is_fenced(grant.holder, slot, epoch):
                grant.is_over = True

    def forget(self, run_id: str) -> None:
        """A run was deleted. Another one may get its name."""
        for named in (self._grants, self._done):
            for name in [name for name in named if name[0] == run_id]:
                del named[name]

    def lease_at(self, process: str, fingerprint: bytes) -> Grant | None:
        """The lease that a process has on a request now; None if it has none."""
        for (_, name), grant in self._grants.items():
            if name == fingerprint and grant.process == process and not grant.is_over and grant.until > self._now:
                return grant
        return None
