"""The results of `bench/fuzz` as a section of a page."""

from __future__ import annotations

from typing import Any

from crawl import table

NAMES = {
    "parsing": "pages of up to 2 MB, in every mode",
    "selectors": "untrusted CSS and XPath, on hostile pages",
    "links": "2 MB of links and URLs",
    "cookies": "2 MB of Set-Cookie lines",
    "robots": "robots.txt",
    "sitemaps": "sitemaps of up to 16 MB",
    "headers": "headers of responses",
}


def rows(results: dict[str, Any]) -> list[list[str]]:
    lines = [["input", "inputs tried", "worst CPU time", "limit", "worst memory", "limit", "failed"]]
    for name, part in results["parts"].items():
        worst, limits = part["worst"], part["limits"]
        lines.append(
            [
                NAMES.get(name, name),
                f"{part['inputs']:,}",
                f"{worst['seconds']['value']:.2f} s",
                f"{limits['seconds']:g} s",
                f"{worst['megabytes']['value']:.0f} MB",
                f"{limits['megabytes']:g} MB",
                str(len(part["failures"])),
            ]
        )
    return lines


def section(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return (
        "## Hostile input\n\n"
        "`bench/fuzz` generates hostile inputs from a grammar, measures each one in its own process, and varies the\n"
        f"most expensive ones: {results['seconds']:g} s for each kind, seed {results['seed']}. An input fails if it\n"
        "exceeds its limit or ends in an unexpected error.\n\n"
        f"{table.markdown(rows(results), left=(0,))}\n\n"
        f"Measured {results['measured'][:10]}: {machine['cpu']}, {machine['cores']} cores, {machine['system']}, load "
        f"{machine['load_before']:g} before. Other programs on the machine make CPU times longer, never shorter.\n"
    )
