"""The results of `bench/dashboard` as tables and as a section of a page."""

from __future__ import annotations

from typing import Any

from crawl import table
from stores import pages

SECONDS, SIZE = 0.1, 300_000
"""The most that a screen may take."""
SHARES = {1: 0.01, 50: 0.2}
"""The most that so many open overviews may cost the store, of a core."""


def screens(results: dict[str, Any]) -> list[list[str]]:
    names = {figure["server"]: pages.NAMES[figure["server"]] for figure in results["figures"]}
    head = ["screen", "kB"]
    for name in names.values():
        head += [f"{name}: ms", "CPU ms: store", "server"]
    found = [{each["name"]: each for each in figure["screens"]} for figure in results["figures"]]
    lines = [head]
    for screen in found[0]:
        line = [screen, f"{max(each[screen]['size'] for each in found) / 1000:.1f}"]
        for each in found:
            line += [f"{1000 * each[screen][what]:.1f}" for what in ("seconds", "store_cpu", "server_cpu")]
        lines.append(line)
    return lines


def open_pages(results: dict[str, Any]) -> list[list[str]]:
    lines = [["open overviews", *(f"{pages.NAMES[each['server']]}: store" for each in results["figures"])]]
    lines[0] += [f"{pages.NAMES[each['server']]}: server" for each in results["figures"]]
    for place, count in enumerate(SHARES):
        cells = [each["open"][place][part] for part in ("store", "server") for each in results["figures"]]
        lines.append([str(count), *(f"{100 * cell:.2f} %" for cell in cells)])
    return lines


def missed(results: dict[str, Any]) -> list[str]:
    """The goals that were not reached."""
    found = []
    for figure in results["figures"]:
        name = pages.NAMES[figure["server"]]
        for screen in figure["screens"]:
            if screen["seconds"] > SECONDS:
                found.append(f"{name}: {screen['name']} took {1000 * screen['seconds']:.0f} ms")
            if screen["size"] > SIZE:
                found.append(f"{name}: {screen['name']} had {screen['size'] / 1000:.0f} kB")
        found += [
            f"{name}: {each['pages']} open overviews cost the store {100 * each['store']:.1f} % of a core"
            for each in figure["open"]
            if each["store"] > SHARES[each["pages"]]
        ]
    return found


def _rounds(results: dict[str, Any]) -> str:
    """How the cost of open pages was measured; older figures have one round after a time without pages."""
    counts = {len(each.get("rounds", [0])) for figure in results["figures"] for each in figure["open"]}
    if counts == {1}:
        return ""
    return f", medians of {max(counts)} rounds, without what both use before and after each round, when no page is open"


def section(results: dict[str, Any]) -> str:
    size, beyond = results["size"], missed(results)
    load = results["machine"]["load_before"]
    return pages.section(
        "## The dashboard",
        f"""`bench/dashboard` fills a store with {size["runs"]:,} runs, {size["active"]:,} of them active,
        {size["urls"]:,} URLs on {size["hosts"]:,} hosts, and {size["workers"]:,} workers that send heartbeats. Then it
        requests each screen {results["times"]} times from a real `shoal serve`. The time is that of the whole answer,
        the median; the size is that of its body. CPU times are those of one answer, without what the store and the
        server need anyway.""",
        table.markdown(screens(results), left=(0,)),
        f"What open pages cost, in percent of a core{_rounds(results)}:",
        table.markdown(open_pages(results), left=(0,)),
        f"""The goals are {1000 * SECONDS:.0f} ms and {SIZE / 1000:.0f} kB for each screen, and
        {100 * SHARES[1]:g} % of a core of the store for one open overview, {100 * SHARES[50]:g} % for 50.
        {"All are reached." if not beyond else f"Not reached: {'; '.join(beyond)}."}""",
        f"The load of the machine was {load:g} before the run, so times are too long." if load > 0.5 else "",
        pages.conditions(results),
    )
