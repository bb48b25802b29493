"""The samples of py-spy: which part of Shoal each one belongs to, and which functions take the most time."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

Frame = tuple[str, str]
"""A function and its file."""
Stacks = Counter[tuple[Frame, ...]]

_FRAME = re.compile(r"(.+) \((.+?)(?::\d+)?\)")

# Patterns for FILE#FUNCTION. The innermost frame that matches one decides; for one frame, the first part does.
PARTS = {
    "fetch": [
        *(r"aiohttp/", r"pyreqwest", r"aiohappyeyeballs/", r"shoal/fetch/(?!layers|sessions)", r"multidict/"),
        *(r"\bssl\.py", r"yarl/"),
    ],
    "links": [
        *(r"shoal/urls/", r"shoal/crawling/run_queue\.py", r"shoal/http/link"),
        *(r"#Response\.(_hrefs|follow)", r"#AttributeBudget\.(values|hrefs)"),
    ],
    "parse": [r"shoal/selector/parsing\.py", r"response\.py#Response\._parse"],
    "callback": [r"shoal/selector/", r"shoal/http/", r"shoal_follow_all\.py", r"#Callbacks\.", r"shoal/spider\.py"],
    "items: encoding and output": [r"shoal/item\.py", r"shoal/sinks/"],
    "queue": [r"shoal/frontier/"],
    "middleware": [r"shoal/fetch/(layers|sessions)/", r"shoal/crawling/onion\.py"],
    "engine": [r"shoal/crawling/", r"shoal/runs/", r"shoal/"],
    "event loop and system calls": [r"asyncio/", r"uvloop/"],
    "other": [r""],
}
_RULES = {part: re.compile("|".join(rules)) for part, rules in PARTS.items()}
_OUTSIDE = re.compile(r"importlib|RunLifecycle\._prepare|atexit|_shutdown")


def read(stacks: Path) -> Stacks:
    """Samples of the crawl itself, from the outermost frame to the innermost; without imports, start and end."""
    found: Stacks = Counter()
    for line in stacks.read_text().splitlines():
        text, _, count = line.rpartition(" ")
        if _OUTSIDE.search(text) or "Runner.run " not in text:
            continue
        frames = [match.groups() for frame in text.split(";") if (match := _FRAME.fullmatch(frame))]
        found[tuple((name, file) for name, file in frames)] += int(count)
    return found


def part_of(stack: tuple[Frame, ...]) -> str:
    for name, file in reversed(stack):
        for part, rule in _RULES.items():
            if part != "other" and rule.search(f"{file}#{name}"):
                return part
    return "other"


def by_part(stacks: Stacks) -> dict[str, float]:
    """The share of each part."""
    counts: Counter[str] = Counter()
    for stack, count in stacks.items():
        counts[part_of(stack)] += count
    return {part: counts[part] / stacks.total() for part in PARTS}


def top(stacks: Stacks, number: int, cost: float) -> list[list[str]]:
    """The functions with the most own time: that of the C functions they call counts, that of Python functions not."""
    own: Counter[tuple[Frame, str]] = Counter()
    for stack, count in stacks.items():
        own[stack[-1], part_of(stack)] += count
    lines = [["function", "part", "µs per page", "%"]]
    for ((name, file), part), count in own.most_common(number):
        share = count / stacks.total()
        lines.append([f"`{file}` {name}", part, f"{1e6 * cost * share:.1f}", f"{100 * share:.1f}"])
    return lines


def parts_table(shares: dict[str, dict[str, float]], costs: dict[str, float]) -> list[list[str]]:
    """One row per part, one column per site: CPU time per page, split by the shares of the samples."""
    lines = [["part", *(f"site {key}, µs per page" for key in shares)]]
    for part in PARTS:
        spent = [1e6 * costs[key] * shares[key][part] for key in shares]
        if any(each >= 0.5 for each in spent):
            lines.append([part, *(f"{each:.0f}" for each in spent)])
    return [*lines, ["all", *(f"{1e6 * costs[key]:.0f}" for key in shares)]]
