"""The search: new inputs, and variants of the most expensive ones so far."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from fuzzing.measure import Cost, measure
from fuzzing.part import Part

_KEPT = 12
_FAILURES = 20


def search(part: Part, seconds: float, seed: int) -> dict[str, Any]:
    """The results of one part: the number of inputs, the worst ones, and those that exceeded a limit."""
    rng = random.Random(seed)
    pool: list[tuple[float, Any]] = []
    outcomes: Counter[str] = Counter()
    worst: dict[str, tuple[float, Any]] = {"seconds": (0.0, None), "megabytes": (0.0, None)}
    failures: list[dict[str, Any]] = []
    end, inputs = time.monotonic() + seconds, 0
    while time.monotonic() < end and len(failures) < _FAILURES:
        fresh = not pool or rng.random() < 0.4
        case = part.make(rng) if fresh else part.mutate(rng, rng.choice(pool)[1])
        cost = _confirmed(part, case)
        inputs += 1
        outcomes[cost.outcome] += not cost.failed
        for name, (most, _) in worst.items():
            if getattr(cost, name) > most:
                worst[name] = (getattr(cost, name), case)
        if reason := _broken(part, cost):
            failures.append({"reason": reason, "case": case})
            continue  # its variants would only find it again
        score = max(cost.seconds / part.SECONDS, cost.megabytes / part.MEGABYTES)
        pool = sorted([*pool, (score, case)], key=lambda each: -each[0])[:_KEPT]
    return {
        "inputs": inputs,
        "limits": {"seconds": part.SECONDS, "megabytes": part.MEGABYTES},
        "worst": {name: {"value": round(value, 3), "case": case} for name, (value, case) in worst.items()},
        "outcomes": {name: count for name, count in outcomes.most_common(20) if count},
        "failures": failures,
    }


def _confirmed(part: Part, case: Any) -> Cost:
    """Measure an input, and again if it seems too slow: other programs may have delayed the first attempt."""
    cost = measure(part.run, case, part.SECONDS)
    if cost.failed or cost.seconds <= part.SECONDS:
        return cost
    again = measure(part.run, case, part.SECONDS)
    return min(cost, again, key=lambda each: each.seconds)


def _broken(part: Part, cost: Cost) -> str | None:
    if cost.failed:
        return cost.outcome
    if cost.seconds > part.SECONDS:
        return f"{cost.seconds:.2f} s of CPU time"
    if cost.megabytes > part.MEGABYTES:
        return f"{cost.megabytes:.0f} MB of memory"
    return None
