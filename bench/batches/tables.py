"""The results of batches as tables, and whether they meet the goals."""

from __future__ import annotations

from statistics import median
from typing import Any

from stores.tables import OTHERS, pace

Figure = dict[str, Any]

PARTS = ("local", "small", "sessions", "celery")
SITES = {"slow": "a site with 50 ms latency", "fast": "nginx"}

RATE_HEADER = ["pages/s (spread)", "x the rows above", "CPU us per page", "notes"]
LABELS = {
    ("local", "crawl"): "a crawl in memory",
    ("local", "batch"): "a local batch",
    ("celery", "same"): "Celery tasks that do nothing, same settings",
    ("celery", "own"): "the same by Shoal's worker",
    ("celery", "bare"): "the same by a worker without events",
    ("celery", "batch"): "a batch on Celery",
}


def rates(results: Figure) -> list[list[str]]:
    """One row per method, medians of the rounds."""
    lines = [[f"{results['pages']:,} pages of 4 KB", *RATE_HEADER]]
    for part, way in LABELS:
        figures = of(results, part, way=way)
        if figures:
            paces = [pace(figure) for figure in figures]
            spread = f" ({min(paces):,.0f}-{max(paces):,.0f})" if len(paces) > 1 else ""
            above = [other for of_part, other in LABELS if of_part == part and other != "batch"]
            ratios = [ratio(results, part, other) for other in above] if way == "batch" else []
            lines.append(
                [
                    LABELS[part, way],
                    f"{median(paces):,.0f}{spread}",
                    ", ".join(f"{each:.2f}" for each in ratios if each is not None),
                    cost(figures),
                    notes(figures),
                ]
            )
    return lines


def cost(figures: list[Figure]) -> str:
    """The CPU time of the process that crawls; with Celery, of all processes involved."""
    costs = [figure["cpu_us"] for figure in figures]
    if isinstance(costs[0], dict):
        return ", ".join(f"{name} {median(each[name] for each in costs):,.0f}" for name in costs[0])
    return f"{median(costs):,.0f}"


def ratio(results: Figure, part: str, other: str) -> float | None:
    """The rate of batches divided by the rate of the other method; None if one was not measured."""
    batches, others = ([pace(figure) for figure in of(results, part, way=way)] for way in ("batch", other))
    return median(batches) / median(others) if batches and others else None


SMALL_HEADER = [
    "a batch of 3", "alone: p50, ms", "p99", "under load: p50, ms", "p99", "p99 : p50 alone", "large batches meanwhile",
    "notes",
]  # fmt: skip


def small(results: Figure) -> list[list[str]]:
    """One row per site."""
    lines = [SMALL_HEADER]
    for site in SITES:
        figures = of(results, "small", site=site)
        if len(figures) == 2:
            alone, loaded = figures
            times = [figure[name] for figure in figures for name in ("p50", "p99")]
            lines.append(
                [
                    SITES[site],
                    *(f"{1000 * seconds:.1f}" for seconds in times),
                    f"{loaded['p99'] / alone['p50']:.1f}",
                    str(loaded["large_batches"]),
                    notes(figures),
                ]
            )
    return lines


SESSIONS_HEADER = ["sessions", "finished", "concurrent", "seconds", "pages/s", "server idle, MB", "peak, MB", "notes"]


def sessions(results: Figure) -> list[list[str]]:
    """One row per site."""
    return [SESSIONS_HEADER, *map(sessions_cells, of(results, "sessions"))]


def sessions_cells(figure: Figure) -> list[str]:
    return [
        f"{figure['sessions']} of {figure['pages']} pages, {SITES[figure['site']]}",
        str(figure["finished"]),
        str(figure["at_once"]),
        f"{figure['seconds']:.2f}",
        f"{figure['sessions'] * figure['pages'] / figure['seconds']:,.0f}",
        f"{figure['idle_bytes'] / 1e6:.0f}",
        f"{figure['peak_bytes'] / 1e6:.0f}",
        notes([figure]),
    ]


def tables(results: Figure) -> list[list[list[str]]]:
    """The tables that have results."""
    return [lines for lines in (rates(results), small(results), sessions(results)) if len(lines) > 1]


GOALS_HEADER = ["goal", "wanted", "measured", ""]


def goals(results: Figure) -> list[list[str]]:
    """One line per goal that was measured."""
    lines = [GOALS_HEADER]

    def goal(name: str, wanted: str, measured: str, met: bool) -> None:
        lines.append([name, wanted, measured, "met" if met else "MISSED"])

    if (local := ratio(results, "local", "crawl")) is not None:
        goal("local batch : crawl in memory, pages/s", "at least 70 %", f"{100 * local:.0f} %", local >= 0.7)
    if len(figures := of(results, "small", site="slow")) == 2:
        times = figures[1]["p99"] / figures[0]["p50"]
        goal("p99 of a batch of 3 under load : p50 alone", "at most 3 times", f"{times:.1f}", times <= 3)
    if (celery := ratio(results, "celery", "same")) is not None:
        goal("batch on Celery : tasks that do nothing", "at least 60 %", f"{100 * celery:.0f} %", celery >= 0.6)
    if figures := of(results, "sessions"):
        idle = max(figure["idle_bytes"] for figure in figures) / 1e6
        least = min(min(figure["finished"], figure["at_once"]) for figure in figures if figure["site"] == "slow")
        goal("memory of the idle server", "under 150 MB", f"{idle:.0f} MB", idle < 150)
        goal("concurrent sessions that all finish", "100", str(least), least >= 100)
    return lines


def of(results: Figure, part: str, **wanted: Any) -> list[Figure]:
    return [
        figure
        for figure in results["figures"]
        if figure["part"] == part and all(figure[key] == value for key, value in wanted.items())
    ]


def notes(figures: list[Figure]) -> str:
    """The problems, and how many results other programs disturbed."""
    found = list(dict.fromkeys(problem for figure in figures for problem in figure["problems"]))
    if marked := sum(figure["others"] > OTHERS for figure in figures):
        found.append(f"other programs used the cores during {marked} of {len(figures)} figures")
    return "; ".join(found)
