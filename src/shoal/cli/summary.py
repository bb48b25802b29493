"""The summary at the end of a crawl, and the commands to run next."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.progress import duration
from shoal.config import Config, mask
from shoal.crawling.stats import Counters, Summary
from shoal.printable import printable

_MAX_REASONS = 5
_MAX_OWN = 50
"""Counters of the spider that are shown."""
_TITLES = {
    "finished": "finished: every page found is accounted for",
    "stopped": "stopped before it was finished",
    "limit": "page limit reached (scope.max_pages)",
    "failed": "failed",
}


def show(console: Console, summary: Summary, config: Config, command: str = "") -> None:
    """Print the summary and the commands to run next."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim")
    table.add_column()
    for row in _rows(summary):
        table.add_row(*(Text(printable(cell)) for cell in row))
    _print(console, f"{summary.spider}: {_TITLES[summary.state]}", "red" if summary.error else "bold", before="\n")
    if summary.error:
        _print(console, f"  {summary.error}", "red")
    console.print(table)
    for hint in next_steps(summary, config, command):
        _print(console, f"  {hint}", "dim", soft_wrap=True)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    """The name and value of each line."""
    stats, counters = summary.stats, summary.counters
    dead = {kind: count for kind, count in summary.dead_kinds.items() if kind != "robots"}
    reasons = ", ".join(f"{kind}: {count}" for kind, count in sorted(dead.items(), key=lambda pair: -pair[1]))
    fetched = f"{counters.fetched} pages, {counters.bytes / 1e6:.1f} MB"
    rows = [
        ("run", summary.run_id),
        ("fetched", fetched + _details((counters.redirected, "redirects"), (counters.from_cache, "from the cache"))),
        (
            "items",
            f"{stats.items}" + _details((counters.dropped, _drops(counters)), (counters.item_errors, "not stored")),
        ),
        ("duplicates", str(stats.duplicates)),
        ("out of scope", str(counters.out_of_scope)),
        ("links ignored", f"{counters.left_out} (scope.max_links)" if counters.left_out else ""),
        ("blocked by robots", str(summary.dead_kinds.get("robots", 0))),
        ("retried", str(counters.retried)),
        ("dead", f"{sum(dead.values())}" + (f" ({reasons})" if reasons else "")),
        ("left", str(stats.remaining)),
        ("lost", str(summary.lost)),
        ("leases lost", str(counters.leases_lost or "")),
        ("rewinds", f"{stats.rewinds}: the store went back in time, see `shoal audit`" if stats.rewinds else ""),
        ("time", duration(summary.elapsed)),
        ("speed", f"{summary.pages_per_second:.1f} pages/s"),
        *((name, str(count)) for name, count in list(summary.own_counters.items())[:_MAX_OWN]),
        *(("written to", _output(mask(output), summary)) for output in summary.outputs if output != "-"),
    ]
    return [(name, value) for name, value in rows if value]


def _drops(counters: Counters) -> str:
    """``dropped: sold out 3, no price 1``; one reason needs no number."""
    reasons = counters.drop_reasons.most_common(_MAX_REASONS)
    if len(reasons) == 1:
        return f"dropped: {reasons[0][0]}"
    more = len(counters.drop_reasons) - len(reasons)
    return "dropped: " + ", ".join(f"{reason} {n}" for reason, n in reasons) + (f", {more} more" if more else "")


def _details(*counts: tuple[int, str]) -> str:
    """`` (2 dropped, 1 not stored)``, without the ones that are zero."""
    parts = [f"{count} {name}" for count, name in counts if count]
    return f" ({', '.join(parts)})" if parts else ""


def _print(console: Console, text: str, style: str, *, before: str = "", soft_wrap: bool = False) -> None:
    """Print text as it is: texts of pages and servers are not markup and cannot control the terminal."""
    console.print(Text(before + printable(text)), style=style, soft_wrap=soft_wrap)


def _output(output: str, summary: Summary) -> str:
    if output.endswith(".parquet") and summary.state in ("stopped", "failed"):
        return f"{output} (in parts until the run is finished)"
    return output


def next_steps(summary: Summary, config: Config, command: str) -> list[str]:
    """Commands that the user may want to run next."""
    if config.frontier.startswith("memory:"):
        if summary.state == "finished":
            return []
        return ["the queue was in memory and is lost: use --frontier sqlite:///crawl.db to keep it"]
    if not config.frontier.startswith("sqlite:"):
        return _fleet_steps(summary)
    at = f"--frontier {config.frontier}"
    steps = []
    if summary.state == "limit":
        steps.append("resume: run the same command with a higher --max-pages")
    elif summary.stats.remaining or summary.state == "failed":
        steps.append("resume: run the same command again")
    if set(summary.dead_kinds) - {"robots", "scope"}:
        steps.append(f"shoal retry-failed {at}")
    steps.append(f"shoal audit {at}")
    steps.append(f"shoal why URL {at}")
    if summary.stats.items:
        steps.append(f"shoal export {at} -o items.csv")
    if summary.state in ("finished", "limit") and command:
        steps.append(f"shoal run {command} {at} --new-run")
    return ["next: " + steps[0], *("      " + step for step in steps[1:])]


def _fleet_steps(summary: Summary) -> list[str]:
    run = summary.run_id
    steps = [f"shoal stats {run}", f"shoal audit {run}"]
    if set(summary.dead_kinds) - {"robots", "scope"}:
        steps.insert(0, f"shoal retry-failed {run}")
    if summary.stats.items:
        steps.append(f"shoal export {run} -o items.csv")
    return [f"next: {steps[0]}", *("      " + step for step in steps[1:])]
