"""What may enter the frontier, and in which form: between the engine's pages and the frontier's requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from shoal.config import Config
from shoal.errors import LeaseLostError, RequestError
from shoal.http import LinkBatch, Request
from shoal.ports import Completion, Failure, Frontier, Lease, Leased
from shoal.spider import Spider
from shoal.urls.known_links import KnownLinks
from shoal.urls.normalize import resolve
from shoal.urls.scope import Scope

_encode = msgspec.msgpack.Encoder().encode


class Admitted(Struct):
    """What a page found, sorted: the children to push, and counts of the rest."""

    children: list[Request]
    duplicates: int = 0
    out_of_scope: int = 0
    left_out: int = 0
    """Links beyond ``scope.max_links``: they are not taken."""
    hrefs: list[tuple[str, list[str]]] = []
    """(page, raw hrefs) that the frontier will know once the children are pushed."""


class Scheduler:
    """A run's queue and filter.

    The engine uses the batch forms and settles leases with the frontier itself. The forms for one request are for
    people with a loop of their own: each request that ``next_request`` gave must be completed, failed or released, and
    LeaseLostError says when that came too late.
    """

    def __init__(
        self,
        frontier: Frontier,
        scope: Scope,
        *,
        ttl: float = 300.0,
        max_pages: int | None = None,
        shared: bool = False,
    ) -> None:
        """``max_pages`` is for the whole run: what it has done before counts, what fails does not. ``shared``: other
        processes work on it too, so it is counted anew each time."""
        self._shared = shared
        self.frontier = frontier
        self.scope = scope
        self._ttl = ttl
        self._max_pages = max_pages
        self._left: int | None = None
        """How many pages may still be leased; None: not counted yet, or without a limit."""
        self._pending = False
        """Whether pages were missing when they were last counted."""
        self._nonce, self._asked = b"", 0
        """Of the last lease under a page limit: its nonce, and how many it asked for."""
        self._known = KnownLinks()
        self._out: dict[int, Lease] = {}

    # -- in batches

    def admit(self, found: Iterable[Request | LinkBatch], parent: Request) -> Admitted:
        """Resolve, filter and deduplicate what a page found. Nothing is recorded before ``learn``.

        RequestError when one of them could not be stored: better here, where it costs one page, than in a batch.
        """
        admitted = Admitted([])
        depth = parent.depth + 1
        if self.scope.too_deep(depth):
            admitted.out_of_scope = sum(len(each) if isinstance(each, LinkBatch) else 1 for each in found)
            return admitted
        for each in found:
            if isinstance(each, LinkBatch):
                self._admit_batch(each, depth, admitted)
            elif self.scope.refuses(each.url):
                admitted.out_of_scope += 1
            elif len(admitted.children) >= self.scope.max_links:
                admitted.left_out += 1
            else:
                _check_storable(each)
                each.depth = depth
                admitted.children.append(each)
        return admitted

    def _admit_batch(self, batch: LinkBatch, depth: int, admitted: Admitted) -> None:
        if batch.dont_filter:
            hrefs = batch.hrefs
        else:
            hrefs = self._known.unknown(batch.base, batch.hrefs)
            admitted.duplicates += len(batch.hrefs) - len(hrefs)
        room = self.scope.max_links - len(admitted.children)
        if len(hrefs) > room:
            admitted.left_out += len(hrefs) - room
            hrefs = hrefs[:room]
        if not batch.dont_filter:
            admitted.hrefs.append((batch.base, hrefs))
        _check_storable(batch)
        for url in resolve(batch.base, hrefs):
            if self.scope.refuses(url):
                admitted.out_of_scope += 1
                continue
            child = batch.request(url)
            child.depth = depth
            admitted.children.append(child)

    def learn(self, admitted: Admitted) -> None:
        """The frontier has taken these children: their hrefs need not be looked at again."""
        for base, hrefs in admitted.hrefs:
            self._known.learn(base, hrefs)

    def forget(self) -> None:
        """Drop all that was learned from the frontier: it went back in time."""
        self._known = KnownLinks()
        self._left = None
        self._pending = False
        self._out.clear()

    async def enqueue_requests(self, requests: Sequence[Request]) -> int:
        """Push what is in scope; how many of them were new. QueueFullError: none of them was recorded."""
        inside = [request for request in requests if not self._outside(request)]
        return (await self.frontier.push(inside)).added if inside else 0

    async def next_requests(self, limit: int, *, begun: bool = True, nonce: bytes = b"") -> Leased:
        """Leases for up to ``limit`` requests that may be fetched now; none when the page limit is reached.

        ``begun=False``: they are sent to others, who have them reissued. ``nonce``: see ``Frontier.lease``."""
        if self._max_pages is None:
            return await self.frontier.lease(limit, self._ttl, begun=begun, nonce=nonce)
        if nonce and nonce == self._nonce:  # a repeat: what it leased before is not to be counted as others' work
            return await self.frontier.lease(self._asked, self._ttl, begun=begun, nonce=nonce)
        if self._left is None or self._shared:
            stats = await self.frontier.stats()
            self._left = max(0, self._max_pages - stats.done - stats.leased)
            self._pending = stats.done < self._max_pages
        if not self._left:
            if self._pending and self._shared:
                await self.frontier.lease(0, self._ttl)  # what ran out comes back, and may be had here
            return Leased([], None)
        self._nonce, self._asked = nonce, min(limit, self._left)
        leased = await self.frontier.lease(self._asked, self._ttl, begun=begun, nonce=nonce)
        self._left -= len(leased.leases)
        return leased

    @property
    def limit_reached(self) -> bool:
        """Whether the page limit allows no further page: not while others have some that may come back."""
        return self._left == 0 and not (self._shared and self._pending)

    def not_a_page(self, count: int) -> None:
        """So many leases came to nothing: they don't count for the page limit."""
        if self._left is not None:
            self._left += count

    # -- one at a time

    async def enqueue_request(self, request: Request) -> bool:
        """True if it was new and in scope; False for a duplicate."""
        return await self.enqueue_requests([request]) == 1

    async def next_request(self) -> Request | None:
        """The best request whose host is due, leased to the caller; None if there is none right now."""
        leased = await self.next_requests(1)
        if not leased.leases:
            return None
        lease = leased.leases[0]
        self._out[id(lease.request)] = lease
        return lease.request

    async def complete(self, request: Request, *, items: Sequence[bytes] = (), children: Sequence[Request] = ()) -> int:
        """Done, with its encoded items and its children in the same step; how many children were new."""
        completion = Completion(lease=self._lease_of(request), items=items, children=children)
        (pushed,) = await self.frontier.complete([completion])
        self._out.pop(id(request), None)
        if pushed is None:
            raise LeaseLostError(f"the lease of {request.url} was lost; nothing was changed")
        return pushed.added

    async def fail(self, request: Request, reason: str, *, retry_in: float | None = None) -> str:
        """The attempt failed: wait ``retry_in`` seconds for another, or die. The state it is in now."""
        failure = Failure(lease=self._lease_of(request), kind="failed", reason=reason, retry_in=retry_in)
        (state,) = await self.frontier.fail([failure])
        self._out.pop(id(request), None)
        self.not_a_page(1)
        if state is None:
            raise LeaseLostError(f"the lease of {request.url} was lost; nothing was changed")
        return state

    async def release(self, request: Request) -> None:
        """Give it back unused."""
        (released,) = await self.frontier.release([self._lease_of(request)])
        self._out.pop(id(request), None)
        self.not_a_page(1)
        if not released:
            raise LeaseLostError(f"the lease of {request.url} was lost; nothing was changed")

    async def has_pending_requests(self) -> bool:
        """Whether anything is ready, waiting or being worked on."""
        return (await self.frontier.stats()).remaining > 0

    async def idle(self) -> bool:
        """Whether there is nothing to do: nothing ready, waiting or being worked on."""
        return not await self.has_pending_requests()

    async def close(self) -> None:
        """Give back what ``next_request`` handed out and nobody settled."""
        if self._out:
            await self.frontier.release(list(self._out.values()))
            self._out.clear()

    def _lease_of(self, request: Request) -> Lease:
        lease = self._out.get(id(request))
        if lease is None:
            raise RequestError(f"{request.url} did not come from next_request, or is settled already")
        return lease

    def _outside(self, request: Request) -> bool:
        return self.scope.too_deep(request.depth) or self.scope.refuses(request.url) is not None


def make_scheduler(spider: Spider, config: Config, frontier: Frontier, *, shared: bool) -> Scheduler:
    """The scheduler of a run, as the configuration and the spider want it."""
    scope = Scope(config.scope, spider.allowed_domains)
    return Scheduler(frontier, scope, ttl=config.lease.ttl, max_pages=config.scope.max_pages, shared=shared)


def _check_storable(found: Request | LinkBatch) -> None:
    """``meta`` and ``cb_kwargs`` can have any values; the rest was checked when the request was made."""
    for name in ("meta", "cb_kwargs"):
        if values := getattr(found, name):
            try:
                _encode(values)
            except (TypeError, ValueError, OverflowError, RecursionError) as exc:
                raise RequestError(f"{name} {values!r:.80} cannot be stored: {exc}") from exc
