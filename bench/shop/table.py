"""The results of `bench/scrapy` as Markdown."""

from __future__ import annotations

from statistics import median
from typing import Any

from crawl.table import markdown

_LABELS = {
    "rules": "CrawlSpider with LinkExtractor and ItemLoader",
    "follow": "Spider with xpath and follow",
}


def section(results: dict[str, Any]) -> str:
    """A table of the crawls, and one of where Shoal's time goes."""
    crawls = [["spider", "Scrapy, s", "Shoal, s", "times as fast", "Scrapy, CPU s", "Shoal, CPU s", "ratio"]]
    for spider, ratio in results["ratios"].items():
        theirs, ours = (
            [run for run in results["runs"] if (run["spider"], run["crawler"]) == (spider, crawler)]
            for crawler in ("scrapy", "shoal")
        )
        crawls.append(
            [
                _LABELS[spider], _seconds(theirs, "seconds"), _seconds(ours, "seconds"),
                f"{ratio['median']:.1f} ({ratio['lowest']:.1f}-{ratio['highest']:.1f})",
                _seconds(theirs, "cpu_seconds"), _seconds(ours, "cpu_seconds"), f"{ratio['cpu']:.1f}",
            ]
        )  # fmt: skip
    names = list(results["shares"])
    parts = list(dict.fromkeys(part for spider in names for part, _ in results["shares"][spider]))
    found = {spider: dict(results["shares"][spider]) for spider in names}
    shares = [["part", *(_LABELS[spider] for spider in names)]]
    shares += [[part, *(f"{found[spider].get(part, 0):.0%}" for spider in names)] for part in parts]
    machine = results["machine"]
    versions = results["versions"]
    return (
        "## A Scrapy project\n\n"
        "`bench/scrapy` runs an ordinary Scrapy project under Scrapy and under Shoal (`shoal run --scrapy`), in turn,\n"
        f"on one core. The shop has {results['pages']:,} pages of about 14 KB with about 50 links each. Both must\n"
        f"write the same {results['products']:,} items, and fetch each page once. The times include the start of the\n"
        "program.\n\n"
        f"{markdown(crawls, left=(0,))}\n\n"
        "Where Shoal's time goes, by cProfile, which makes short functions look slower than they are:\n\n"
        f"{markdown(shares, left=(0,))}\n\n"
        f"Measured {results['measured'][:10]}: {results['rounds']} rounds, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['system']}, nginx {results['nginx']}, Scrapy {versions['scrapy'].get('Scrapy', '?')}, "
        f"Python {versions['shoal'].get('Python', '?')}. Load before: {machine['load_before']}.\n"
        f"{_disturbances(results['runs'])}"
    )


def _seconds(runs: list[dict[str, Any]], name: str) -> str:
    return f"{median(run[name] for run in runs):.1f}"


def _disturbances(runs: list[dict[str, Any]]) -> str:
    """What was not as it should be."""
    found = sorted({problem for run in runs for problem in run["problems"]})
    counts = [f"{sum(problem in run['problems'] for run in runs)} of {len(runs)} runs: {problem}" for problem in found]
    return f"\nNot as it should be: {'; '.join(counts)}. CPU times are less affected than times.\n" if counts else ""
