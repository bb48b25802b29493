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
    cpu_per_1000: float | None
    peak_mb: float
    to_scrapy: float | None
    to_bare: float | None
    limit: int | None
    """Its page limit, if it had one."""
    robots: bool
    problems: tuple[str, ...]

    @property
    def notes(self) -> str:
        limit = [f"first {self.limit:,} pages"] if self.limit else []
        robots = [] if self.robots else ["does not read robots.txt"]
        return "; ".join([*limit, *robots, *self.problems])

    def cells(self) -> list[str]:
        spread = "" if self.lowest == self.highest else f" ({self.lowest:,.0f}-{self.highest:,.0f})"
        return [
            self.label,
            f"{self.rate:,.0f}{spread}",
            "-" if self.cpu_per_1000 is None else f"{self.cpu_per_1000:.2f}",
            f"{self.peak_mb:,.0f}",
            "-" if self.to_scrapy is None else f"{self.to_scrapy:.1f}",
            "-" if self.to_bare is None else f"{self.to_bare:.2f}",
            self.notes,
        ]


HEADER = ["crawler", "pages/s (spread)", "CPU s per 1,000 pages", "peak MB", "x Scrapy", "x bare loop", "notes"]


def rows(results: Results, site: str) -> list[Row]:
    """One row per crawler that has runs on this site."""
    by_contender: dict[str, list[dict[str, Any]]] = {}
    for run in results["runs"]:
        if run["site"] == site:
            by_contender.setdefault(run["contender"], []).append(run)
    rates = {key: median(map(rate, runs)) for key, runs in by_contender.items()}
    return [
        row(key, contender["label"], by_contender[key], rates)
        for key, contender in results["contenders"].items()
        if key in by_contender
    ]


def row(key: str, label: str, runs: list[dict[str, Any]], rates: dict[str, float]) -> Row:
    costs = [1000 * run["cpu_seconds"] / run["pages"] for run in runs if run["pages"]]
    problems = [problem for run in runs for problem in run["problems"]]
    return Row(
        key=key,
        label=label,
        rate=rates[key],
        lowest=min(map(rate, runs)),
        highest=max(map(rate, runs)),
        cpu_per_1000=median(costs) if costs else None,
        peak_mb=median(run["peak_bytes"] for run in runs) / 1e6,
        to_scrapy=rates[key] / rates["scrapy"] if rates.get("scrapy") else None,
        to_bare=rates[key] / rates["bare"] if rates.get("bare") else None,
        limit=runs[0]["expected"] if runs[0]["limited"] else None,
        robots=any(run["robots_requests"] != 0 or not run["pages"] for run in runs),
        problems=tuple(dict.fromkeys(problems)),
    )


def rate(run: dict[str, Any]) -> float:
    return float(run["pages"] / run["seconds"])


def crawl(results: Results, site: str) -> list[list[str]]:
    return [HEADER, *(row.cells() for row in rows(results, site))]


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
