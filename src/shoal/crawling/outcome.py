"""The outcome of a run: good, degraded or failed. One function decides it, from facts in the store.

- *good*: every page was fetched and handled, and every item is stored.
- *degraded*: pages failed, but no more than ``outcome.max_failed`` of them; or items could not be stored, or were lost
  in the store; or the store went back in time.
- *failed*: more pages failed, no page was fetched, no item was stored although the run has outputs, or the spider's
  own rule (`Spider.judge`) says so.

These do not count as failed: pages that robots.txt or the scope forbids, broken links (404 and 410 of links that were
followed), links that a full queue refused, and requests that a middleware of a Scrapy project ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from shoal.frontier.rules import FULL_KIND
from shoal.ports import Stats

Verdict: TypeAlias = Literal["good", "degraded", "failed"]

EXIT_FAILED = 5
"""The exit code of `shoal run`, `crawl` and `audit` for a run whose outcome is *failed*."""
BROKEN_LINK = "broken link"
"""The kind of a failure: a link that was followed led to 404 or 410."""
GONE = frozenset({404, 410})
NOT_COUNTED = {
    "robots": "blocked by robots.txt",
    "scope": "out of scope",
    BROKEN_LINK: "broken links",
    "ignored": "ignored by a middleware",
    FULL_KIND: "refused by a full queue",
}
"""Kinds of failures that say nothing about the crawl, and their names for people."""
_CALLBACK = "callback"
_MAX_KINDS = 5


class Outcome(Struct, frozen=True, kw_only=True):
    """How a run ended."""

    verdict: Verdict
    accounted: str
    """What became of its pages: ``41 pages accounted for: 5 done, 36 failed (ValueError in parse: 36)``."""
    reasons: tuple[str, ...] = ()
    """Why the verdict is not better. Empty if it is good."""
    failed_hooks: tuple[str, ...] = ()
    """Those reasons that came after the end: a hook of the spider or of a pipeline failed, in any process."""

    def with_failed_hooks(self, failures: tuple[str, ...]) -> Outcome:
        """The outcome if these hooks failed after the end."""
        new = tuple(reason for reason in failures if reason not in self.failed_hooks)
        if not new:
            return self
        return replace(self, verdict="failed", reasons=(*self.reasons, *new), failed_hooks=(*self.failed_hooks, *new))

    def headline(self, ending: str = "finished") -> str:
        """One line. Only a good run that is finished says that every page is accounted for."""
        if self.verdict != "good":
            return f"{ending}, {self.verdict}: {self.accounted}"
        return f"{ending}: every page found is accounted for" if ending == "finished" else ending


class RunFacts(Struct, frozen=True, kw_only=True):
    """What the outcome depends on."""

    stats: Stats
    dead_kinds: Mapping[str, int] = {}
    """The failed requests by kind."""
    causes: Mapping[str, int] = {}
    """The failed callbacks by exception and method: ``ValueError in parse``. Perhaps not all of them."""
    expects_items: bool = False
    """Whether the run has outputs or pipelines."""
    rejected: int = 0
    """Items that an output could not take."""
    lost: int = 0
    """Items that no output has, because the item log lacked them."""
    dropped: int = 0
    """Items that pipelines of this process dropped, and the most frequent reasons."""
    drop_reasons: tuple[str, ...] = ()
    why_nothing: str = ""
    """Why the run has no requests, if it has none. Empty: not known."""
    rule: str = ""
    """Why the run failed by the spider's own rule. Empty: it did not."""

    @property
    def pages(self) -> int:
        """Pages that were fetched and handled."""
        return self.stats.pages

    @property
    def items(self) -> int:
        return self.stats.items

    @property
    def failed(self) -> int:
        """Failed pages that count."""
        return sum(count for kind, count in self.dead_kinds.items() if kind not in NOT_COUNTED)

    @property
    def ended(self) -> int:
        """Pages that ended and count."""
        return self.stats.pages + self.failed


def decide(facts: RunFacts, max_failed: float) -> Outcome:
    """The outcome of a run that has ended. ``max_failed``: the share of pages that may fail."""
    failures = list(_failures(facts, max_failed))
    reasons = (*failures, *_flaws(facts, is_failed=facts.failed > max_failed * facts.ended))
    verdict: Verdict = "failed" if failures else "degraded" if reasons else "good"
    return Outcome(verdict=verdict, accounted=_accounted(facts), reasons=reasons)


def _failures(facts: RunFacts, max_failed: float) -> Iterable[str]:
    stats = facts.stats
    if stats.pages <= 0:
        yield _why_no_pages(facts)
    elif facts.failed > max_failed * facts.ended:
        limit = f"the limit is {100 * max_failed:g} % (outcome.max_failed)"
        yield f"{facts.failed:,} of {facts.ended:,} pages failed ({_causes(facts)}); {limit}"
    if stats.pages > 0 and facts.expects_items and not stats.items:
        yield _why_no_items(facts)
    if facts.rule:
        yield facts.rule


def _flaws(facts: RunFacts, *, is_failed: bool) -> Iterable[str]:
    """What keeps a run from being good."""
    stats = facts.stats
    if facts.failed and stats.pages > 0 and not is_failed:
        yield f"{facts.failed:,} of {facts.ended:,} pages failed ({_causes(facts)})"
    if refused := facts.dead_kinds.get(FULL_KIND, 0):
        yield f"the queue was full (queue.max_size) for {_count(refused, 'link')}: `shoal retry-failed` queues them"
    if stats.item_errors:
        yield f"{_count(stats.item_errors, 'item')} could not be stored: the log names the pages"
    if facts.rejected:
        yield f"an output could not take {_count(facts.rejected, 'item')}"
    if facts.lost:
        yield f"the item log lacked {_count(facts.lost, 'item')}: another program changed the store, see `shoal audit`"
    if stats.rewinds:
        times = "once" if stats.rewinds == 1 else f"{stats.rewinds} times"
        yield f"the store went back in time {times}: `shoal audit` says when"


def _accounted(facts: RunFacts) -> str:
    stats = facts.stats
    parts = [f"{stats.pages:,} done"]
    if facts.failed:
        parts.append(f"{facts.failed:,} failed ({_causes(facts)})")
    for kind, name in NOT_COUNTED.items():
        if count := facts.dead_kinds.get(kind, 0):
            parts.append(f"{count:,} {BROKEN_LINK if kind == BROKEN_LINK and count == 1 else name}")
    if stats.remaining:
        parts.append(f"{stats.remaining:,} left")
    total = stats.pages + sum(facts.dead_kinds.values()) + stats.remaining
    return f"{_count(total, 'page')} accounted for: {', '.join(parts)}"


def _causes(facts: RunFacts) -> str:
    """The failures that count, by kind, and those of callbacks by exception: ``timeout: 2, ValueError in parse: 1``."""
    kinds = {kind: count for kind, count in facts.dead_kinds.items() if kind not in NOT_COUNTED}
    if sum(facts.causes.values()) == kinds.get(_CALLBACK):
        del kinds[_CALLBACK]
        kinds |= facts.causes
    ordered = sorted(kinds.items(), key=lambda pair: (-pair[1], pair[0]))
    texts = [f"{kind}: {count:,}" for kind, count in ordered[:_MAX_KINDS]]
    if len(ordered) > _MAX_KINDS:
        texts.append(f"{len(ordered) - _MAX_KINDS} more kinds")
    if _CALLBACK in kinds and facts.causes:
        texts.append(f"mostly {max(facts.causes, key=lambda cause: facts.causes[cause])}")
    return ", ".join(texts)


def _why_no_pages(facts: RunFacts) -> str:
    failed = {kind: count for kind, count in facts.dead_kinds.items() if count}
    total = sum(failed.values())
    if not facts.stats.pushed:
        return f"nothing was crawled: {facts.why_nothing or 'the spider has no start requests in its scope'}"
    if not total:
        return "nothing was crawled"
    if set(failed) == {"robots"}:
        return f"no page was fetched: robots.txt forbids all {total:,}"
    if set(failed) - {"robots"} == {_CALLBACK}:
        return f"every callback failed, on {_count(failed[_CALLBACK], 'page')} ({_causes(facts)})"
    if total == 1:
        return f"no page was fetched: the only request failed ({next(iter(failed))})"
    kinds = ", ".join(f"{kind}: {count:,}" for kind, count in failed.items())
    return f"no page was fetched: all {total:,} requests failed ({kinds})"


def _why_no_items(facts: RunFacts) -> str:
    if facts.dropped:
        reasons = ", ".join(facts.drop_reasons)
        return f"no items: the pipelines dropped all {facts.dropped:,} ({reasons})"
    if facts.stats.item_errors:
        return f"no items: none of the {facts.stats.item_errors:,} could be stored, see the log"
    on_pages = f"on {_count(facts.stats.pages, 'page')}"
    if failed := facts.dead_kinds.get(_CALLBACK, 0):
        return f"no items: the callbacks failed on {_count(failed, 'page')}, and yielded none {on_pages}"
    return f"no items: nothing was yielded {on_pages}"


def _count(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"
