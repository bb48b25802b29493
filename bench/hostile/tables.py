"""The results of `bench/strangers` as a table."""

from __future__ import annotations

from typing import Any

from crawl import table


def rows(results: dict[str, Any]) -> list[list[str]]:
    limits = results["limits"]
    lines = [
        [
            "attack",
            f"memory (≤ {limits['megabytes']} MB)",
            f"`/health` (≤ {limits['seconds']:g} s more)",
            "idle server",
            "seen",
        ]
    ]
    for figure in results["attacks"].values():
        seen = f"exceeded: {'; '.join(figure['failures'])}" if figure["failures"] else figure["seen"]
        what = figure["what"].removesuffix(".")
        lines.append(
            [what, f"+{figure['growth'] / 1e6:.0f} MB", f"{figure['wait']:.2f} s", f"{figure['idle_wait']:.2f} s", seen]
        )
    return lines


def printed(results: dict[str, Any]) -> str:
    return table.markdown(rows(results), left=(0, 4))


def section(results: dict[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"{printed(results)}\n\n"
        f"Measured {results['measured'][:10]}: {machine['cores']} cores, {machine['system']}, load "
        f"{machine['load_before']:g} before. Other programs on the machine make both "
        "waits longer.\n"
    )
