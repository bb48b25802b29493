"""Metrics for Prometheus, computed from the counters of a crawl at the time of a scrape.

`serving` answers for one process. A server can combine the families of several runs::

    Response(render([*of_ledger(stats, {"run": run_id, "spider": spider}), ...]), media_type=CONTENT_TYPE)
"""

from shoal.metrics.exposition import CONTENT_TYPE, Family, Sample, render
from shoal.metrics.families import (
    of_counters,
    of_depth,
    of_frontier,
    of_hosts,
    of_ledger,
    of_problems,
    of_sessions,
    of_standing,
    of_vitals,
)

__all__ = [
    "CONTENT_TYPE",
    "Family",
    "Sample",
    "of_counters",
    "of_depth",
    "of_frontier",
    "of_hosts",
    "of_ledger",
    "of_problems",
    "of_sessions",
    "of_standing",
    "of_vitals",
    "render",
]
