"""The summary at the end of a crawl, and the commands to run next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.cli.options import is_replaceable, shown_output
from shoal.cli.progress import PlainConsole, duration, print_rows, size
from shoal.config import Config, mask
from shoal.crawling.outcome import BROKEN_LINK, NOT_COUNTED
from shoal.crawling.stats import Counters, Summary
from shoal.messages import printable

if TYPE_CHECKING:
    from shoal.cli.progress import AnyConsole

# The commands to run after a crawl, ready to be pasted.


_OUTPUT_FLAGS = {"-o": "-O", "--output": "--replace"}


def next_steps(summary: Summary, config: Config, command: Sequence[str] = ()) -> list[str]:
    """Lines to print: a heading, and commands that can be pasted. ``command``: the words after ``shoal``."""
    if config.frontier.startswith("memory:"):
        lines = _keep_items(summary, command)
        if summary.state != "finished":
            lines.append("the queue was in memory and is lost; to keep it, add: --frontier sqlite:///crawl.db")
        return lines
    has_password = mask(config.frontier) != config.frontier
    at = [] if has_password else ["--frontier", config.frontier]
    is_file = config.frontier.startswith("sqlite:")
    run = summary.run_id  # the newest run may be another one
    steps = _resume(summary, command)
    if summary.dead_kinds.keys() - NOT_COUNTED.keys():
        steps.append(["retry-failed", run, *at])
    if summary.failed_url:
        steps.append(["why", summary.failed_url, "--run-id", run, *at])
    steps += [] if is_file else [["stats", run, *at]]
    steps.append(["audit", run, *at])
    if summary.stats.items:
        steps.append(["export", run, *at, "-o", f"{run}.csv"])
    if summary.state in ("finished", "limit") and command and not _has_secrets(command) and is_file:
        steps.append(_again(command))
    heading = "next, with the same --frontier:" if has_password else "next:"
    return [heading, *(f"  shoal {shlex.join(step)}" for step in steps)]


def _keep_items(summary: Summary, command: Sequence[str]) -> list[str]:
    """What to write if the items of this run went nowhere."""
    if summary.keeps_items or not summary.stats.items:
        return []
    output = ["-o", f"{summary.spider}.jsonl"]
    count = "the only item was" if summary.stats.items == 1 else f"the {summary.stats.items:,} items were"
    lost = f"{count} not written anywhere and {'is' if summary.stats.items == 1 else 'are'} lost"
    them = "it" if summary.stats.items == 1 else "them"
    if not command or _has_secrets(command):
        return [f"{lost}; to keep {them}, add: {shlex.join(output)}"]
    return [f"{lost}; to keep {them}:", f"  shoal {shlex.join([*command, *output])}"]


def resume_command(words: Sequence[str]) -> str:
    """The command that continues a run, from the words after ``shoal``. Empty if it has a password."""
    return "" if _has_secrets(words) else shlex.join(["shoal", *(word for word in words if word != "--new-run")])


def _resume(summary: Summary, command: Sequence[str]) -> list[list[str]]:
    if not command or _has_secrets(command):
        return []
    command = [word for word in command if word != "--new-run"]
    if summary.limit is not None and summary.limit.setting == "scope.max_items":
        return [_with_option(command, "--max-items", str(2 * max(1, summary.stats.items)))]
    if summary.limit is not None:
        return [list(command)]
    if summary.state == "limit":
        return [_with_option(command, "--max-pages", str(2 * max(1, summary.stats.done)))]
    if summary.state == "failed" or (summary.stats.remaining and summary.state == "stopped"):
        return [command]
    return []


def _again(command: Sequence[str]) -> list[str]:
    """The command for a new run. It replaces the files of this one; databases keep the rows of all runs."""
    words = [
        _OUTPUT_FLAGS[word] if word in _OUTPUT_FLAGS and is_replaceable(following) else word
        for word, following in zip(command, [*command[1:], ""], strict=True)
        if word != "--new-run"
    ]
    return [*words, "--new-run"]


def _with_option(command: Sequence[str], option: str, value: str) -> list[str]:
    words = [word for word in command if not word.startswith(option + "=")]
    if option in words:
        place = words.index(option)
        del words[place : place + 2]
    return [*words, option, value]


def _has_secrets(command: Sequence[str]) -> bool:
    return any(mask(word) != word for word in command)


_MAX_REASONS = 5
_MAX_UNMATCHED = 10
_MAX_OWN = 50
"""Counters of the spider that are shown."""
_STOPPED = "stopped before it was finished"
_ENDINGS = {"finished": "finished", "limit": "page limit reached (scope.max_pages)"}
_LIMITS = {"scope.max_items": "item limit", "scope.max_seconds": "time limit", "scope.max_bytes": "byte limit"}
_STYLES = {"good": "bold", "degraded": "bold yellow", "failed": "bold red"}


def show(console: AnyConsole, summary: Summary, config: Config, command: Sequence[str] = ()) -> None:
    """Print the summary and the commands to run next. ``command``: the words after ``shoal``."""
    outcome = summary.outcome
    if summary.state == "failed":
        _print(console, f"{summary.spider}: failed: {summary.error}", "bold red", before="\n", soft_wrap=True)
    elif outcome is None:
        _print(console, f"{summary.spider}: {_ending(summary)}", "bold", before="\n")
    else:
        headline = outcome.headline(_ending(summary))
        _print(console, f"{summary.spider}: {headline}", _STYLES[outcome.verdict], before="\n", soft_wrap=True)
        for reason in outcome.reasons:
            _print(console, f"  {reason}", "yellow", soft_wrap=True)
    heading = "this process" if summary.processes == 1 else f"these {summary.processes} processes"
    _print_rows(console, heading, _own_rows(summary))
    _print_rows(console, f"run {summary.run_id}", _run_rows(summary))
    for query, pages in list(summary.unmatched.items())[:_MAX_UNMATCHED]:
        _print(console, f"  `{query}` matched nothing on {_count(pages, 'page')}", "yellow", soft_wrap=True)
    for hint in next_steps(summary, config, command):
        _print(console, f"  {hint}", "dim", soft_wrap=True)


def _ending(summary: Summary) -> str:
    limit = summary.limit
    if limit is None or summary.state != "limit":
        return _ENDINGS.get(summary.state, _STOPPED)
    if limit.setting:
        return f"{_LIMITS[limit.setting]} reached ({limit.setting})"
    return f"stopped by the spider: {limit.reason}"


def _print_rows(console: AnyConsole, heading: str, rows: list[tuple[str, str]]) -> None:
    _print(console, f"  {heading}", "dim")
    safe = [(printable(name), printable(value)) for name, value in rows]
    if isinstance(console, PlainConsole):
        console.print_rows(safe)
    else:
        print_rows(console, safe)


def _own_rows(summary: Summary) -> list[tuple[str, str]]:
    """Rows about the work of this process, or of all processes of this crawl."""
    counters = summary.counters
    fetched = f"{_count(counters.fetched, 'page')}, {size(counters.bytes)}"
    redirects = "redirect" if counters.redirected == 1 else "redirects"
    rows = [
        ("fetched", fetched + _details((counters.redirected, redirects), (counters.from_cache, "from the cache"))),
        ("retried", _shown(counters.retried)),
        ("out of scope", _shown(counters.out_of_scope) + _details((counters.too_deep, "beyond scope.max_depth"))),
        ("not followed", f"{counters.not_followed} links (robots.nofollow)" if counters.not_followed else ""),
        ("links ignored", f"{counters.left_out} (scope.max_links)" if counters.left_out else ""),
        ("links refused", f"{counters.links_refused} (queue.max_size)" if counters.links_refused else ""),
        ("items dropped", f"{counters.dropped} ({_drops(counters)})" if counters.dropped else ""),
        ("items not stored", _shown(counters.item_errors)),
        ("leases lost", _shown(counters.leases_lost)),
        *((name, str(count)) for name, count in list(summary.own_counters.items())[:_MAX_OWN]),
        ("time", f"{duration(summary.elapsed)}, {summary.pages_per_second:.1f} pages/s"),
    ]
    return [(name, value) for name, value in rows if value]


def _run_rows(summary: Summary) -> list[tuple[str, str]]:
    """Rows about the whole run, with all its processes."""
    stats = summary.stats
    failed = {kind: count for kind, count in summary.dead_kinds.items() if kind not in ("robots", BROKEN_LINK)}
    reasons = ", ".join(f"{kind}: {count}" for kind, count in sorted(failed.items(), key=lambda pair: -pair[1]))
    rows = [
        ("done", str(stats.done)),
        ("items", str(stats.items)),
        ("failed", f"{sum(failed.values())} ({reasons})" if reasons else ""),
        ("broken links", _shown(summary.dead_kinds.get(BROKEN_LINK, 0))),
        ("blocked by robots", _shown(summary.dead_kinds.get("robots", 0))),
        ("duplicates", _shown(stats.duplicates)),
        ("left", _shown(stats.remaining)),
        ("lost", _shown(summary.lost)),
        ("rewinds", f"{stats.rewinds}: the store went back in time, see `shoal audit`" if stats.rewinds else ""),
        *(("written to", _output(shown_output(output), summary)) for output in summary.outputs if output != "-"),
    ]
    return [(name, value) for name, value in rows if value]


def _shown(count: int) -> str:
    """The number; empty for zero, which hides the row."""
    return str(count) if count else ""


def _count(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _drops(counters: Counters) -> str:
    """``sold out: 3, no price: 1``; a single reason needs no number."""
    reasons = counters.drop_reasons.most_common(_MAX_REASONS)
    if len(reasons) == 1:
        return reasons[0][0]
    more = len(counters.drop_reasons) - len(reasons)
    return ", ".join(f"{reason}: {n}" for reason, n in reasons) + (f", {more} more reasons" if more else "")


def _details(*counts: tuple[int, str]) -> str:
    """`` (2 dropped, 1 not stored)``, without the ones that are zero."""
    parts = [f"{count} {name}" for count, name in counts if count]
    return f" ({', '.join(parts)})" if parts else ""


def _print(console: AnyConsole, text: str, style: str, *, before: str = "", soft_wrap: bool = False) -> None:
    """Print text as it is: texts of pages and servers are not markup and cannot control the terminal."""
    safe = before + printable(text)
    if isinstance(console, PlainConsole):
        console.print(safe, style=style, soft_wrap=soft_wrap)
    else:
        from rich.text import Text

        console.print(Text(safe), style=style, soft_wrap=soft_wrap)


def _output(output: str, summary: Summary) -> str:
    if output.endswith(".parquet") and summary.state in ("stopped", "failed"):
        return f"{output} (in parts until the run is finished)"
    return output
