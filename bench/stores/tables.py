"""The results of shared frontiers as tables."""

from __future__ import annotations

from statistics import median
from typing import Any

from crawl.table import Row, row

Figure = dict[str, Any]

PUSHED, WORKED = 500, 100
"""URLs per call in the samples of `bench/fleet-growth`."""

QUEUE_HEADER = [
    *("queue", "pushes/s, 500 at a time", "leases with completion/s, 100", "200"),
    *("four callers: pushes/s", "leases with completion/s", "one at a time: pushes/s", "leases with completion/s"),
]
COLUMNS = (
    *(("push", 500, 1), ("work", 100, 1), ("work", 200, 1)),
    *(("push", 500, 4), ("work", 100, 4), ("push", 1, 1), ("work", 1, 1)),
)


def queue(content: Figure) -> list[list[str]]:
    """One row per frontier and number of hosts. The drain results of pgqueuer have their own table."""
    figures, labels = content["figures"], content["labels"]
    lines = [QUEUE_HEADER]
    for backend, hosts in dict.fromkeys((figure["backend"], figure["hosts"]) for figure in figures):
        if backend == "pgqueuer":
            continue
        found = {
            (figure["act"], figure["batch"], figure["callers"]): figure
            for figure in figures
            if (figure["backend"], figure["hosts"]) == (backend, hosts)
        }
        name = f"{labels[backend]}, {'one host' if hosts == 1 else f'{hosts} hosts'}"
        lines.append([name, *(rate(found.get(column)) for column in COLUMNS)])
    return lines


PEER_HEADER = [
    *("pgqueuer", "pushes/s, 500 at a time, half known", "by four callers"),
    *("all new", "jobs/s, drained", "with"),
]


def peers(content: Figure) -> list[list[str]]:
    """One row per durability: the best drain, with its consumers and batch size."""
    figures = [figure for figure in content["figures"] if figure["backend"] == "pgqueuer"]
    lines = [PEER_HEADER]
    for durability in dict.fromkeys(figure["durability"] for figure in figures):
        own = [figure for figure in figures if figure["durability"] == durability]
        found = {(figure["act"], figure["callers"]): figure for figure in own if figure["act"] != "work"}
        best = max((figure for figure in own if figure["act"] == "work"), key=lambda figure: float(figure["rate"]))
        pushes = (rate(found.get(key)) for key in (("push", 1), ("push", 4), ("push-new", 1)))
        lines.append([durability, *pushes, rate(best), f"{best['callers']} consumers, batches of {best['batch']}"])
    return lines


OTHERS = 0.15
"""A share of the time. A result is marked if other programs used more of the cores."""


def disturbed(figures: list[Figure]) -> str:
    """A warning if other programs used the cores, or an empty text."""
    marked = sum(figure.get("others", 0.0) > OTHERS for figure in figures)
    return (
        f"Other programs used the cores during {marked} of {len(figures)} measurements. Rates are low."
        if marked
        else ""
    )


def rate(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure['rate']:,.0f}"


def queue_line(figure: Figure, labels: dict[str, str]) -> str:
    what = figure.get("durability") or f"{figure['hosts']} hosts"
    cpu = ""
    if "client_us" in figure:
        doubt = "  !! others" if figure["others"] > OTHERS else ""
        cpu = f"  CPU: client {figure['client_us']:5.1f} us, server {figure['server_us']:5.1f} us{doubt}"
    return (
        f"{labels[figure['backend']]:<22}{what:<10}{figure['act']:<9}{figure['batch']:>4} x {figure['callers']:<3}"
        f"{figure['rate']:10,.0f}/s{cpu}"
    )


FLEET_HEADER = [
    *("crawl", "pages/s (spread)", "x memory", "x one worker", "x scrapy-redis"),
    *("CPU s per 1,000 pages: workers", "store", "site", "peak MB", "notes"),
]


def fleet_runs(results: Figure, site: str) -> tuple[dict[str, list[Figure]], dict[str, float]]:
    """The runs per kind of crawl on this site, and the median of their rates."""
    by_key: dict[str, list[Figure]] = {}
    for run in results["runs"]:
        if run["site"] == site:
            by_key.setdefault(run["contender"], []).append(run)
    return by_key, {key: median(pace(run) for run in runs) for key, runs in by_key.items()}


def fleet_rows(results: Figure, site: str) -> list[Row]:
    """The bars of a chart."""
    rows = []
    for key, runs in fleet_runs(results, site)[0].items():
        name = key if key == "scrapy-redis" else f"shoal-{key}"  # for its colour
        whole = [{**run, "limited": False, "robots_requests": 1} for run in runs]
        rows.append(row(name, {"label": results["labels"][key]}, whole, {name: {}}, ""))
    return rows


def fleet(results: Figure, site: str) -> list[list[str]]:
    """One row per kind of crawl on this site, medians of the rounds."""
    by_key, rates = fleet_runs(results, site)
    lines = [FLEET_HEADER]
    for key, runs in by_key.items():
        paces = [pace(run) for run in runs]
        spread = f" ({min(paces):,.0f}-{max(paces):,.0f})" if len(runs) > 1 else ""
        costs = [
            median(1000 * run[name] / max(run["pages"], 1) for run in runs)
            for name in ("cpu_seconds", "store_cpu_seconds", "site_cpu_seconds")
        ]
        single = f"{key.removesuffix('-2')}-1" if key.endswith("-2") else ""
        lines.append(
            [
                results["labels"][key],
                f"{rates[key]:,.0f}{spread}",
                ratio(rates, key, "memory"),
                ratio(rates, key, single),
                ratio(rates, key, "scrapy-redis", 1),
                *(f"{cost:.2f}" for cost in costs),
                f"{median(run['peak_bytes'] for run in runs) / 1e6:,.0f}",
                "; ".join(dict.fromkeys(problem for run in runs for problem in run["problems"])),
            ]
        )
    return lines


def pace(run: Figure) -> float:
    return float(run["pages"] / run["seconds"])


def ratio(rates: dict[str, float], key: str, other: str, digits: int = 2) -> str:
    return f"{rates[key] / rates[other]:.{digits}f}" if rates.get(other) else ""


GROWTH_HEADER = [
    *("frontier", "URLs", "us per push", "per lease", "per completion", "worst batch, ms"),
    *("store's bytes per URL", "client's memory, MB"),
]
COSTS = ("push", "lease", "complete")


def growth(figures: list[Figure], labels: dict[str, str]) -> list[list[str]]:
    """One row per size, and the ratio of the largest to the smallest for each store."""
    lines = [GROWTH_HEADER]
    for backend in dict.fromkeys(figure["backend"] for figure in figures):
        own = [figure for figure in figures if figure["backend"] == backend]
        for figure in own:
            worst = max(figure[cost]["worst_batch_ms"] for cost in COSTS)
            lines.append(
                [
                    labels[backend],
                    f"{figure['size']:,}",
                    *(f"{figure[cost]['us']:.1f}" for cost in COSTS),
                    f"{worst:.0f}",
                    f"{figure['store_per_url']:.0f}",
                    f"{figure['rss_bytes'] / 1e6:.0f}",
                ]
            )
        small, large = own[0], own[-1]
        if small is not large:
            ratios = [large[cost]["us"] / small[cost]["us"] for cost in COSTS]
            ratios_after = [large["store_per_url"] / small["store_per_url"], large["rss_bytes"] / small["rss_bytes"]]
            cells = [*(f"x {each:.2f}" for each in ratios), "", *(f"x {each:.2f}" for each in ratios_after)]
            lines.append(["", f"{large['size']:,} : {small['size']:,}", *cells])
    return lines


def growth_line(figure: Figure, labels: dict[str, str]) -> str:
    costs = "  ".join(f"{cost} {figure[cost]['us']:.1f} ({figure[cost]['median_us']:.1f})" for cost in COSTS)
    cpu = "  ".join(
        f"{name}: client {figure[name]['client_us']:.1f} server {figure[name]['server_us']:.1f}"
        for name in ("fill", "push", "work")
    )
    audit = f"  audit {figure['audit_seconds']:.1f} s" if "audit_seconds" in figure else ""
    return (
        f"{labels[figure['backend']]:<11}{figure['size']:>11,}  us, mean (median): {costs}  fill "
        f"{figure['fill']['rate']:,.0f}/s  {figure['store_per_url']:.0f} bytes  {figure['rss_bytes'] / 1e6:.0f} MB  "
        f"CPU us {cpu}{audit}"
    )
