"""The last thing that a crawl says."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.progress import duration
from shoal.config import Config, mask
from shoal.crawling.stats import Summary
from shoal.printable import printable

_TITLES = {
    "finished": "finished: every page that was found is accounted for",
    "stopped": "stopped before the end",
    "limit": "page limit reached (scope.max_pages)",
    "failed": "failed",
}


def show(console: Console, summary: Summary, config: Config, command: str = "") -> None:
    """Print the summary and the commands that come next."""
    stats, counters = summary.stats, summary.counters
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="dim")
    table.add_column()
    robots = summary.dead_kinds.get("robots", 0)
    dead = {kind: count for kind, count in summary.dead_kinds.items() if kind != "robots"}
    reasons = ", ".join(f"{kind}: {count}" for kind, count in sorted(dead.items(), key=lambda pair: -pair[1]))
    rows = [
        ("run", summary.run_id),
        (
            "fetched",
            f"{counters.fetched} pages, {counters.bytes / 1e6:.1f} MB"
            + _of_which(counters.redirected, counters.from_cache),
        ),
        ("items", f"{stats.items}" + _items_beside(counters.dropped, counters.item_errors)),
        ("duplicates", str(stats.duplicates)),
        ("out of scope", str(counters.out_of_scope)),
        *([("links left out", f"{counters.left_out} (scope.max_links)")] if counters.left_out else []),
        ("blocked by robots", str(robots)),
        ("retried", str(counters.retried)),
        ("dead", f"{sum(dead.values())}" + (f" ({reasons})" if reasons else "")),
        ("left", str(stats.remaining)),
        ("lost", str(summary.lost)),
        *([("leases lost", str(counters.leases_lost))] if counters.leases_lost else []),
        *([("rewinds", f"the store went back in time, {stats.rewinds} times: see audit")] if stats.rewinds else []),
        ("time", duration(summary.elapsed)),
        ("speed", f"{summary.pages_per_second:.1f} pages/s"),
        *(("written to", _whole(mask(output), summary)) for output in summary.outputs if output != "-"),
    ]
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _say(console, f"{summary.spider}: {_TITLES[summary.state]}", "red" if summary.error else "bold", before="\n")
    if summary.error:
        _say(console, f"  {summary.error}", "red")
    console.print(table)
    for hint in next_steps(summary, config, command):
        _say(console, f"  {hint}", "dim", soft_wrap=True)


def _say(console: Console, text: str, style: str, *, before: str = "", soft_wrap: bool = False) -> None:
    """As it is: what a page or a server said is neither markup nor able to control the terminal."""
    console.print(Text(before + printable(text)), style=style, soft_wrap=soft_wrap)


def _whole(output: str, summary: Summary) -> str:
    if output.endswith(".parquet") and summary.state in ("stopped", "failed"):
        return f"{output} (parts of it, until the run is finished)"
    return output


def _of_which(redirected: int, cached: int) -> str:
    parts = [f"{count} {name}" for count, name in ((redirected, "redirects"), (cached, "from the cache")) if count]
    return f" ({', '.join(parts)})" if parts else ""


def _items_beside(dropped: int, errors: int) -> str:
    parts = [f"{count} {name}" for count, name in ((dropped, "dropped"), (errors, "could not be stored")) if count]
    return f" ({', '.join(parts)})" if parts else ""


def next_steps(summary: Summary, config: Config, command: str) -> list[str]:
    """What one may want to do now."""
    if config.frontier.startswith("memory:"):
        if summary.state == "finished":
            return []
        return ["the queue was in memory and is gone; --frontier sqlite:///crawl.db would keep it"]
    if not config.frontier.startswith("sqlite:"):
        return _next_steps_of_a_fleet(summary)
    at = f"--frontier {config.frontier}"
    steps = []
    if summary.state == "limit":
        steps.append("go on: the same command with a higher --max-pages")
    elif summary.stats.remaining or summary.state == "failed":
        steps.append("go on: the same command again")
    if set(summary.dead_kinds) - {"robots", "scope"}:
        steps.append(f"shoal retry-failed {at}")
    steps.append(f"shoal audit {at}")
    steps.append(f"shoal why URL {at}")
    if summary.stats.items:
        steps.append(f"shoal export {at} -o items.csv")
    if summary.state in ("finished", "limit") and command:
        steps.append(f"shoal run {command} {at} --new-run")
    return ["next: " + steps[0], *("      " + step for step in steps[1:])]


def _next_steps_of_a_fleet(summary: Summary) -> list[str]:
    run = summary.run_id
    steps = [f"shoal stats {run}", f"shoal audit {run}"]
    if set(summary.dead_kinds) - {"robots", "scope"}:
        steps.insert(0, f"shoal retry-failed {run}")
    if summary.stats.items:
        steps.append(f"shoal export {run} -o items.csv")
    return [f"next: {steps[0]}", *("      " + step for step in steps[1:])]
