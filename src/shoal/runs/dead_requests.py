"""The failed requests of a run: which to retry, and examples of each kind."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from fnmatch import translate
from typing import TypeVar, cast

from msgspec import Struct

from shoal.frontier.rules import is_retried
from shoal.ports import MAX_RETRIED, History, Inspection
from shoal.runs.queries import host_name
from shoal.urls.normalize import host_of

T = TypeVar("T")

_MAX_READ = 1000
"""Failed requests that are read to find examples."""


def closing(found: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close an iterator at the end of a block, also if not all of it was read. Those of frontiers are generators."""
    return aclosing(cast("AsyncGenerator[T, None]", found))


class DeadFilter(Struct, frozen=True, kw_only=True):
    """Selects failed requests of a run."""

    kinds: tuple[str, ...] | None = None
    """Kinds of failure. None: all but those that robots.txt or the scope forbids."""
    host: str | None = None
    url: str | None = None
    """A pattern of URLs: ``*`` stands for any text, ``?`` for any character."""

    @classmethod
    def of(cls, kinds: Sequence[str], host: str | None, url: str | None) -> DeadFilter:
        """A filter as users write it. ConfigError or RequestError if the host is invalid."""
        return cls(kinds=tuple(kinds) or None, host=None if host is None else host_name(host), url=url)

    @property
    def is_by_url(self) -> bool:
        return self.host is not None or self.url is not None

    def __str__(self) -> str:
        """For people: ``http 500, of a.example``."""
        words = [", ".join(self.kinds or ("all kinds",)), f"of {self.host}" * (self.host is not None)]
        return ", ".join(filter(None, [*words, self.url or ""]))

    def pattern(self) -> re.Pattern[str]:
        """The pattern of URLs as a regular expression without backtracking."""
        return re.compile(translate("*" if self.url is None else self.url.replace("[", "[[]")))


async def retry_matching(frontier: Inspection, which: DeadFilter) -> int:
    """Make the failed requests of a filter ready again. Returns how many. Requests of a host or a URL are retried in
    steps: if it is interrupted, call it again."""
    if not which.is_by_url:
        return await frontier.retry_dead(which.kinds)
    retried, matches = 0, which.pattern().match
    named: list[bytes] = []
    async with closing(frontier.dead()) as dead:
        async for each in dead:
            if is_retried(each.kind, which.kinds) and which.host in (None, _host(each.url)) and matches(each.url):
                named.append(each.fingerprint)
            if len(named) == MAX_RETRIED:
                retried += await frontier.retry_dead(which.kinds, only=named)
                named = []
    return retried + (await frontier.retry_dead(which.kinds, only=named) if named else 0)


def _host(url: str) -> str:
    return host_of(url) if "://" in url else ""  # another program overwrote the request


class DeadKind(Struct, frozen=True, kw_only=True):
    """The failed requests of one kind."""

    kind: str
    count: int
    examples: list[History]
    """Some of them. It may be empty if there are very many failed requests of other kinds."""


async def dead_examples(frontier: Inspection, limit: int = 3) -> list[DeadKind]:
    """The failed requests of a run by kind, the most frequent kind first, with examples of each. It reads a bounded
    number of requests, so a rare kind may have no example."""
    counts = await frontier.dead_kinds()
    found: dict[str, list[History]] = {kind: [] for kind in counts}
    missing, left = sum(min(limit, count) for count in counts.values()), _MAX_READ
    if not missing:
        return [DeadKind(kind=kind, count=count, examples=[]) for kind, count in _by_count(counts)]
    async with closing(frontier.dead()) as dead:
        async for each in dead:
            examples = found.setdefault(each.kind, [])
            if len(examples) < limit:
                examples.append(each)
                missing -= 1
            left -= 1
            if not left or missing <= 0:
                break
    return [DeadKind(kind=kind, count=count, examples=found[kind]) for kind, count in _by_count(counts)]


def _by_count(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
