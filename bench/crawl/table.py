"""The medians, spreads and ratios of the runs, as text and as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

Results = dict[str, Any]


@dataclass(frozen=True)
class Row:
    key: str
    label: str
    rate: float
    """0 if no run fetched a page."""
    lowest: float
    highest: float
    cpu_ms: float | None
    """CPU time per page."""
    peak_mb: float
    to_scrapy: float | None
    to_bare: float | None
    """To the fastest bare loop."""
    to_memory: float | None
    """Only for Shoal's other frontiers."""
    to_polite: float | None
    """To the pages/s that the delay between requests allows."""
    limit: int | None
    """Its page limit, if it had one."""
    robots: bool
    requests: float
    """Per page; 0 if they were not counted."""
    note: str
    problems: tuple[str, ...]

    @property
    def notes(self) -> str:
        limit = [f"first {self.limit:,} pages"] if self.limit else []
        robots = [] if self.robots else ["does not read robots.txt"]
        requests = [f"{self.requests:.1f} requests per page"] if self.requests > 1.3 else []
        note = [self.note] if self.note else []
        return "; ".join([*limit, *robots, *requests, *note, *self.problems])

    def cells(self) -> list[str]:
        spread = "" if self.lowest == self.highest else f" ({self.lowest:,.0f}-{self.highest:,.0f})"
        return [
            self.label,
            f"{self.rate:,.0f}{spread}",
            "-" if self.cpu_ms is None else f"{self.cpu_ms:.2f}",
            f"{self.peak_mb:,.0f}",
            "-" if self.to_scrapy is None else f"{self.to_scrapy:.1f}",
            share(self.to_bare),
            share(self.to_memory),
            share(self.to_polite),
            self.notes,
        ]


def share(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.0f} %"


HEADER = [
    *("crawler", "pages/s (spread)", "CPU ms per page", "peak MB", "x Scrapy"),
    *("of the fastest bare loop", "of Shoal in memory", "of the polite limit", "notes"),
]
Rates = dict[str, dict[int, float]]
"""Pages per second by crawler and round."""


def rows(results: Results, site: str) -> list[Row]:
    """One row per crawler that has runs on this site."""
    by_contender: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        if run["site"] == site:
            by_contender.setdefault(run["contender"], []).append(run)
    rates = {key: {run["round"]: rate(run) for run in runs} for key, runs in by_contender.items()}
    loops = {key: median(found.values()) for key, found in rates.items() if key.startswith("bare")}
    fastest = max(loops, key=loops.__getitem__, default="")
    return [
        row(key, contender, by_contender[key], rates, fastest)
        for key, contender in results["contenders"].items()
        if key in by_contender
    ]


def row(key: str, contender: dict[str, Any], runs: list[dict[str, Any]], rates: Rates, fastest: str) -> Row:
    costs = [1000 * run["cpu_seconds"] / run["pages"] for run in runs if run["pages"]]
    problems = [problem for run in runs for problem in run["problems"]]
    polite = [run.get("polite_seconds", 0.0) for run in runs]
    return Row(
        key=key,
        label=contender["label"],
        rate=median(map(rate, runs)),
        lowest=min(map(rate, runs)),
        highest=max(map(rate, runs)),
        cpu_ms=median(costs) if costs else None,
        peak_mb=median(run["peak_bytes"] for run in runs) / 1e6,
        to_scrapy=ratio(rates, key, "scrapy"),
        to_bare=ratio(rates, key, fastest),
        to_memory=ratio(rates, key, "shoal") if key.startswith("shoal-") and key != "shoal-each" else None,
        to_polite=median(map(rate, runs)) / polite_limit(runs) if polite[0] and not runs[0]["limited"] else None,
        limit=runs[0]["expected"] if runs[0]["limited"] else None,
        robots=any(run["robots_requests"] != 0 or not run["pages"] for run in runs),
        requests=median((run.get("requests") or 0) / (run["pages"] or 1) for run in runs),
        note=contender.get("note", ""),
        problems=tuple(dict.fromkeys(problems)),
    )


def polite_limit(runs: list[dict[str, Any]]) -> float:
    """Pages per second of a crawler that waits for nothing but the delay."""
    return float(runs[0]["expected"] / runs[0]["polite_seconds"])


def ratio(rates: Rates, key: str, other: str) -> float | None:
    """The median of the ratios of the rounds: both ran within minutes, so a slower machine slows both."""
    found = [mine / rates[other][number] for number, mine in rates[key].items() if rates.get(other, {}).get(number)]
    return median(found) if found else None


def rate(run: dict[str, Any]) -> float:
    return float(run["pages"] / run["seconds"])


def crawl(results: Results, site: str) -> list[list[str]]:
    """The rows, without columns that are empty on this site."""
    lines = [HEADER, *(row.cells() for row in rows(results, site))]
    last = len(HEADER) - 1
    used = [column for column in range(last + 1) if column == last or any(line[column] for line in lines[1:])]
    return [[line[column] for column in used] for line in lines]


def left_out(results: Results, site: str) -> list[str]:
    """The crawlers that are not in the table, and why."""
    return [
        *(f"{name} cannot be installed: {reason}" for name, reason in results["not_installed"].items()),
        *(
            f"{each['label']} was left out after round {each['round']}: {each['reason']}"
            for each in results.get("left_out", ())
            if each["site"] == site
        ),
    ]


GROWTH_HEADER = [
    *("frontier", "URLs", "us per push", "us per push from the start", "us per lease and complete"),
    *("RSS bytes per URL", "RSS MB", "disk bytes per URL"),
]


def growth(figures: list[dict[str, Any]], labels: dict[str, str]) -> list[list[str]]:
    """One row per result, and the ratio of the largest size to the smallest for each backend."""
    lines = [GROWTH_HEADER]
    for backend in dict.fromkeys(figure["backend"] for figure in figures):
        own = sorted((figure for figure in figures if figure["backend"] == backend), key=lambda figure: figure["size"])
        lines += [growth_cells(figure, labels[backend]) for figure in own]
        small, large = own[0], own[-1]
        if small is not large:
            keys = ("push_us", "push_us_mean", "work_us", "rss_per_url", "rss_bytes")
            ratios = [f"x {large[key] / small[key]:.2f}" for key in keys]
            lines.append(["", f"{large['size']:,} : {small['size']:,}", *ratios, ""])
    return lines


def growth_cells(figure: dict[str, Any], label: str) -> list[str]:
    return [
        label,
        f"{figure['size']:,}",
        f"{figure['push_us']:.1f}",
        f"{figure['push_us_mean']:.1f}",
        f"{figure['work_us']:.1f}",
        f"{figure['rss_per_url']:.0f}",
        f"{figure['rss_bytes'] / 1e6:.0f}",
        "" if figure["disk_per_url"] is None else f"{figure['disk_per_url']:.0f}",
    ]


def aligned(table: list[list[str]], left: tuple[int, ...]) -> str:
    """The table for a terminal. `left` are the columns that are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line in table:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(table: list[list[str]], left: tuple[int, ...]) -> str:
    head, *body = table
    rule = ["---" if column in left else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *body])
