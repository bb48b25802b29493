"""The results of clusters as tables."""

from __future__ import annotations

from typing import Any

from stores.tables import OTHERS

Figure = dict[str, Any]

TAKEOVER_HEADER = [
    *("coordinator", "session, s", "rounds", "kill to lost, s", "to the new holder, ms", "to its first page, ms"),
    *("kill to first page, s", "beyond the session, s"),
]


def takeovers(results: Figure) -> list[list[str]]:
    """One row per coordinator and session: medians, and the worst round."""
    return [TAKEOVER_HEADER, *(takeover(each, results["labels"]) for each in of_act(results, "takeover"))]


def takeover(figure: Figure, labels: dict[str, str]) -> list[str]:
    return [
        labels[figure["coordinator"]],
        f"{figure['session']:g}",
        str(figure["rounds"]),
        both(figure["lost"]),
        both(figure["elected"], 1000, 0),
        both(figure["page"], 1000, 0),
        both(figure["whole"]),
        both(figure["whole"], minus=figure["session"]),
    ]


def both(spread: dict[str, float], factor: int = 1, digits: int = 2, minus: float = 0.0) -> str:
    middle, worst = (factor * (spread[name] - minus) for name in ("median", "worst"))
    return f"{middle:.{digits}f} ({worst:.{digits}f})"


IDLE_HEADER = [
    *(
        "coordinator",
        "nodes",
        "Runners",
        "complete after, s",
        "CPU, %: all nodes",
        "coordinator's server",
        "frontier's server",
    ),
    *("memory of a node, MB", "its share, MB"),
]


def idle(results: Figure) -> list[list[str]]:
    """One row per coordinator."""
    lines = [IDLE_HEADER]
    for figure in of_act(results, "idle"):
        cpu = figure["cpu"]
        shares = (100 * cpu["nodes"], 100 * cpu["coordinator"], 100 * cpu["frontier"] if "frontier" in cpu else None)
        lines.append(
            [
                results["labels"][figure["coordinator"]],
                str(figure["members"]),
                str(figure["runners"]),
                f"{figure['formed']:.1f}",
                *("the same" if share is None else f"{share:.1f}" for share in shares),
                f"{figure['rss'] / 1e6:.0f}",
                f"{figure['pss'] / 1e6:.1f}",
            ]
        )
    return lines


def seconds(results: Figure) -> int:
    """The duration of the measurement of idle clusters."""
    return round(float(of_act(results, "idle")[0]["seconds"]))


def of_act(results: Figure, act: str) -> list[Figure]:
    return [figure for figure in results["figures"] if figure["act"] == act]


def disturbed(figures: list[Figure]) -> str:
    """A warning if other programs used the cores, or an empty text."""
    marked = [figure["others"] for figure in figures if figure["others"] > OTHERS]
    if not marked:
        return ""
    most = 100 * max(marked)
    return f"Other programs used up to {most:.0f} % of a core during {len(marked)} of {len(figures)} measurements."
