"""Whether a crawl that ended without an error achieved anything."""

from __future__ import annotations

from enum import Enum

from shoal.crawling.stats import Summary


class Outcome(Enum):
    """How a crawl ended. The value is the exit code of `shoal run` and `shoal crawl`."""

    GOOD = 0
    FAILED = 1
    """An output, the store or the spider's start failed."""
    NO_PAGES = 3
    """No page was fetched and handled."""
    NO_ITEMS = 4
    """Pages were handled, but the run has no item."""


def judge(summary: Summary) -> tuple[Outcome, str]:
    """The outcome, and one line that explains it unless it is good. A crawl that was stopped is not judged."""
    if summary.state == "failed":
        return Outcome.FAILED, summary.error
    if summary.state == "stopped":
        return Outcome.GOOD, ""
    if summary.stats.done <= summary.counters.redirected:
        return Outcome.NO_PAGES, _why_no_pages(summary)
    if summary.expects_items and not summary.stats.items:
        return Outcome.NO_ITEMS, _why_no_items(summary)
    return Outcome.GOOD, ""


def _why_no_pages(summary: Summary) -> str:
    failed = {kind: count for kind, count in summary.dead_kinds.items() if count}
    total = sum(failed.values())
    if not summary.stats.pushed:
        return "nothing was crawled: the spider has no start requests in its scope"
    if not total:
        return "nothing was crawled"
    if set(failed) == {"robots"}:
        return f"no page was fetched: robots.txt forbids all {total}"
    if set(failed) - {"robots"} == {"callback"}:
        return f"every callback failed, on {_count(failed['callback'], 'page')}{_first_error(summary)}"
    if total == 1:
        return f"no page was fetched: the only request failed ({next(iter(failed))})"
    return f"no page was fetched: all {total} requests failed ({', '.join(f'{k}: {n}' for k, n in failed.items())})"


def _why_no_items(summary: Summary) -> str:
    counters = summary.counters
    if counters.dropped:
        reasons = ", ".join(reason for reason, _ in counters.drop_reasons.most_common(3))
        return f"no items: the pipelines dropped all {counters.dropped} ({reasons})"
    if counters.item_errors:
        return f"no items: none of the {counters.item_errors} could be stored, see the log"
    on_pages = f"on {_count(summary.stats.done, 'page')}"
    if failed := summary.dead_kinds.get("callback", 0):
        failed_on = f"failed on {_count(failed, 'page')}"
        return f"no items: the callbacks {failed_on}, and yielded none {on_pages}{_first_error(summary)}"
    return f"no items: nothing was yielded {on_pages}"


def _first_error(summary: Summary) -> str:
    return f"; the first error: {summary.counters.callback_error}" if summary.counters.callback_error else ""


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"
