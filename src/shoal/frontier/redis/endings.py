"""Ends leases: completions, failures and releases, with their items and links.

Redis runs one script at a time, so a script with very many links would block all other clients. Therefore the links of
large pages are uploaded in chunks to a stage first. The script that ends the lease only registers the stage. Later
scripts move its chunks into the queue, one at a time. See ``lua/stages.lua``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from shoal.clients.redis import Answer
from shoal.errors import StoreAwayError
from shoal.frontier.receipts import Receipts
from shoal.frontier.redis.layouts import FOREVER, SETTLED
from shoal.frontier.redis.records import Parcel, document_words, pack_leases, pack_token
from shoal.frontier.rules import (
    CHUNK,
    DEAD,
    DONE,
    MAX_LINKS,
    READY,
    STATE_NAMES,
    WAITING,
    child_fingerprint,
    is_redirect,
)
from shoal.http import Request
from shoal.ports import Completion, CookieWrite, Failure, Lease, Pushed, RequestState

_MAX_TRIES = 3

E = TypeVar("E", Completion, Failure)


class _EndingResult(NamedTuple):
    """The result of an ending. ``state`` is -1 if the lease was lost."""

    state: int
    added: int
    known: int
    refused: int
    order: int


class _Stage(NamedTuple):
    chunks: int
    links: int


class Endings:
    """Ends leases of a run. ``run`` runs a script that presents the newest receipt."""

    def __init__(self, run: Callable[..., Awaitable[Answer]], receipts: Receipts[bytes]) -> None:
        self._run = run
        self._receipts = receipts

    async def complete(self, completions: Sequence[Completion]) -> list[Pushed | None]:
        return (await self._complete(completions, ()))[1] if completions else []

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Pushed | None]]:
        return await self._complete(completions, document_words(*msgspec.structs.astuple(cookies)))

    async def _complete(
        self, completions: Sequence[Completion], cookies: Sequence[bytes]
    ) -> tuple[int, list[Pushed | None]]:
        def add(parcel: Parcel, page: Completion, stage: _Stage | None) -> None:
            parcel.add_ending(
                page.lease, DONE, contacted=page.contacted, redirected=page.redirected, status=page.status,
                duplicates=page.duplicates, item_errors=page.item_errors, text=page.note, items=page.items,
                children=0 if stage else len(page.children), staged=stage or (0, 0),
            )  # fmt: skip

        version, settled = await self._end(completions, add, cookies)
        return version, [
            None if result.state < 0 else Pushed(result.added, result.known, result.refused) for result in settled
        ]

    async def fail(self, failures: Sequence[Failure]) -> list[RequestState | None]:
        def add(parcel: Parcel, failure: Failure, stage: _Stage | None) -> None:
            parcel.add_ending(
                failure.lease, DEAD if failure.retry_in is None else WAITING, contacted=failure.contacted,
                status=failure.status, retry_in=min(failure.retry_in or 0.0, FOREVER), kind=failure.kind,
                text=failure.reason, items=failure.items, children=0 if stage else len(failure.children),
                staged=stage or (0, 0), item_errors=failure.item_errors,
            )  # fmt: skip

        _, settled = await self._end(failures, add) if failures else (0, [])
        return [None if result.state < 0 else STATE_NAMES[result.state] for result in settled]

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        if not leases:
            return []
        parcel = Parcel()
        for lease in leases:
            parcel.add_ending(lease, READY, contacted=contacted)
        _, settled = await self._settle(parcel, leases)
        return [result.state >= 0 for result in settled]

    async def _end(
        self, endings: Sequence[E], add: Callable[[Parcel, E, _Stage | None], None], cookies: Sequence[bytes] = ()
    ) -> tuple[int, list[_EndingResult]]:
        """End all in one script, after the links of the largest pages were staged. The same script writes ``cookies``.
        Returns the version of the cookies, and the result of each page, unless they were not written."""
        large = _large(endings)
        for _ in range(_MAX_TRIES):
            stages = {index: await self._upload(endings[index]) for index in large}
            parcel = Parcel()
            for index, ended in enumerate(endings):
                add(parcel, ended, stages.get(index))
                if index not in stages:
                    _add_children(parcel, ended.lease, ended.children)
            version, settled = await self._settle(parcel, [ended.lease for ended in endings], cookies)
            if settled or cookies:
                return version, [
                    await self._move_links(endings[index].lease, result)
                    if stages.get(index, _NO_STAGE).links
                    else result
                    for index, result in enumerate(settled)
                ]
        raise StoreAwayError("the store lost the links of a page while they were uploaded; try again in a moment")

    async def _settle(
        self, parcel: Parcel, leases: Sequence[Lease], cookies: Sequence[bytes] = ()
    ) -> tuple[int, list[_EndingResult]]:
        """The version of the cookies, and the result of each. Both are empty if a stage has expired, or if the cookies
        have another version: then nothing was changed."""
        call = self._receipts.begin()
        answer = await self._run("settle", *parcel.endings(cookies))
        version, answer = answer if isinstance(answer, list) else (0, answer)
        settled = [_EndingResult._make(fields) for fields in SETTLED.iter_unpack(answer)]
        order, index = max(((result.order, index) for index, result in enumerate(settled)), default=(0, 0))
        if order:
            self._receipts.completed(call, order, pack_leases([leases[index]]))
        return version, settled

    async def _upload(self, ended: Completion | Failure) -> _Stage:
        """Stage the links of a page. Nothing is staged if its lease was lost."""
        lease, children = ended.lease, ended.children
        words = lease.fingerprint, pack_token(lease.token)
        for first in range(0, len(children), CHUNK):
            parcel, some = Parcel(), children[first : first + CHUNK]
            _add_children(parcel, lease, some, first)
            if not await self._run("stage", "put", *words, first // CHUNK, parcel.chunk(len(some))):
                return _REFUSED
        return _Stage(-(-len(children) // CHUNK), len(children))

    async def _move_links(self, lease: Lease, settled: _EndingResult) -> _EndingResult:
        """Move the staged links into the queue and count them. If this client dies, others move them."""
        if settled.state not in (DONE, DEAD):
            return settled
        while True:
            remaining, added, known, refused = await self._run("stage", "move", pack_token(lease.token))
            if not remaining:
                return settled._replace(added=added, known=settled.known + known, refused=refused)
            await asyncio.sleep(0)


_NO_STAGE = _Stage(0, 0)
_REFUSED = _Stage(1, 0)
"""A stage that does not exist: if the lease is held after all, the page is not completed without its links."""


def _large(endings: Sequence[Completion | Failure]) -> list[int]:
    """Which pages to stage, largest first, so that the links of the others fit into one script. Never a redirect: its
    child enters a full queue too, and staged links do not."""
    links = sum(len(ended.children) for ended in endings)
    if links <= MAX_LINKS:
        return []
    large = []
    for index in sorted(range(len(endings)), key=lambda index: -len(endings[index].children)):
        if links <= MAX_LINKS:
            break
        if is_redirect(endings[index]):
            continue
        large.append(index)
        links -= len(endings[index].children)
    return large


def _add_children(parcel: Parcel, lease: Lease, children: Sequence[Request], first: int = 0) -> None:
    for index, child in enumerate(children, first):
        parcel.add_request(child, child_fingerprint(child, lease.fingerprint, index), lease.fingerprint)
