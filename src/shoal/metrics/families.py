"""What the values of a crawl are in the words of Prometheus. Every metric that Shoal exports is named in this file.

``labels`` are those that all samples of a source have: ``run`` and ``spider``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

from shoal.crawling.stats import Counters, Latency, Standing, Vitals
from shoal.metrics.exposition import Family, Labels, Sample, number
from shoal.ports import HostState, Stats

_ROLES = ("runner", "backup", "spare")
_CLUSTER_EVENTS = ("elected", "took over", "retired", "lost", "fenced")
_STATES = ("ready", "waiting", "leased", "done", "dead")

_COUNTED = (
    ("shoal_pages_total", "fetched", "Pages that this process has fetched."),
    ("shoal_pages_from_cache_total", "from_cache", "Those of them that came from the response cache."),
    ("shoal_page_bytes_total", "bytes", "Bytes of their bodies, unpacked."),
    ("shoal_items_total", "items", "Items that this process has committed."),
    ("shoal_items_dropped_total", "dropped", "Items that a pipeline has dropped."),
    ("shoal_item_errors_total", "item_errors", "Items that could not be stored."),
    ("shoal_retries_total", "retried", "Attempts that failed and are made again."),
    ("shoal_redirects_total", "redirected", "Pages that led to another one."),
    ("shoal_links_out_of_scope_total", "out_of_scope", "Links that were not followed, as they are out of scope."),
    ("shoal_leases_lost_total", "leases_lost", "Pages that were handled, but had become another's meanwhile."),
)

_OF_HOSTS = (
    ("shoal_host_delay_seconds", "delay", "From the end of one fetch to the next of the host."),
    ("shoal_host_blocked_seconds", "blocked_for", "How long from now nothing of the host is fetched."),
    ("shoal_host_requests_ready", "ready", "Requests that wait for their host's turn."),
    ("shoal_host_requests_in_flight", "in_flight", "Requests of the host that are leased."),
)


def of_vitals(vitals: Vitals) -> list[Family]:
    """What a process knows of itself."""
    labels = {"run": vitals.run_id, "spider": vitals.spider}
    families = [
        _gauge("shoal_worker_info", "Who this process is.", {"worker": vitals.worker, **labels}, 1),
        _gauge("shoal_pages_in_flight", "Pages that are being fetched or parsed.", labels, vitals.in_flight),
        *of_counters(vitals.counters, labels),
    ]
    if vitals.looped_at is not None:
        moment = time.time() - (time.monotonic() - vitals.looped_at)
        families.append(
            _gauge(
                "shoal_worker_heartbeat_timestamp_seconds",
                "When the loop of the process last went round: each 15 seconds at least, also when it is idle.",
                labels,
                round(moment, 3),
            )
        )
    if vitals.standing is not None:
        families += of_standing(vitals.standing, labels)
    return families


def of_counters(counters: Counters, labels: Labels) -> list[Family]:
    """What a process did since it began."""
    families = [_counter(name, text, labels, getattr(counters, field)) for name, field, text in _COUNTED]
    errors = [Sample({**labels, "kind": kind}, count) for kind, count in sorted(counters.errors.items())]
    families.append(Family("shoal_errors_total", "counter", "Attempts that failed, by kind.", errors))
    families.append(_histogram(counters.latency, labels))
    return families


def of_frontier(labels: Labels, *, up: bool) -> list[Family]:
    """Whether the frontier answers."""
    return [_gauge("shoal_frontier_up", "Whether the frontier answered this scrape within its time.", labels, up)]


def of_ledger(stats: Stats, labels: Labels) -> list[Family]:
    """A run as its frontier has it: the same from whichever process is asked."""
    return [
        *of_depth(stats, labels),
        _counter("shoal_requests_pushed_total", "Requests that have ever entered the run.", labels, stats.pushed),
        _counter("shoal_duplicates_total", "Links to what the run had already.", labels, stats.duplicates),
        _counter("shoal_run_items_total", "Items in the run's log, of all processes.", labels, stats.items),
        _gauge("shoal_run_seeding", "Whether start requests are still to come.", labels, stats.seeding),
    ]


def of_depth(stats: Stats, labels: Labels) -> list[Family]:
    """Only how much there is of each, for what comes and goes."""
    depth = {state: getattr(stats, state) for state in _STATES}
    return [
        Family(
            "shoal_requests",
            "gauge",
            "Requests of the run, by state.",
            [Sample({**labels, "state": state}, count) for state, count in depth.items()],
        ),
        _gauge(
            "shoal_ledger_imbalance",
            "Requests that entered the run and are in no state: 0, or something was lost.",
            labels,
            stats.pushed - sum(depth.values()),
        ),
    ]


def of_hosts(hosts: Sequence[HostState], labels: Labels) -> list[Family]:
    """Politeness. Hand in few hosts, the busiest: each is a label."""
    return [
        Family(name, "gauge", text, [Sample({**labels, "host": host.host}, getattr(host, field)) for host in hosts])
        for name, field, text in _OF_HOSTS
    ]


def of_sessions(running: Mapping[str, int], workers: int | None) -> list[Family]:
    """The batches of an API server, by where they are worked on, and Celery's workers, if anyone knows of them."""
    families = [
        Family(
            "shoal_sessions",
            "gauge",
            "Batches that are being worked on.",
            [Sample({"kind": kind}, count) for kind, count in running.items()],
        )
    ]
    if workers is not None:
        families.append(_gauge("shoal_celery_workers", "Celery workers that answered the last look.", {}, workers))
    return families


def of_standing(standing: Standing, labels: Labels) -> list[Family]:
    """A node in its cluster. Events that never happened are there too, so that the first one is seen as a step."""
    labels = {**labels, "cluster": standing.cluster}
    happened = standing.happened
    return [
        Family(
            "shoal_node_role",
            "gauge",
            "1 for the role that the node has now.",
            [Sample({**labels, "role": role}, int(role == standing.role)) for role in _ROLES],
        ),
        Family(
            "shoal_cluster_events_total",
            "counter",
            "What happened to the node.",
            [Sample({**labels, "what": what}, happened.get(what, 0)) for what in _CLUSTER_EVENTS],
        ),
        _counter(
            "shoal_takeovers_total", "Slots that the node took over from a lost one.", labels,
            happened.get("took over", 0),
        ),
    ]  # fmt: skip


def _counter(name: str, text: str, labels: Labels, value: float) -> Family:
    return Family(name, "counter", text, [Sample(labels, value)])


def _gauge(name: str, text: str, labels: Labels, value: float) -> Family:
    return Family(name, "gauge", text, [Sample(labels, int(value) if isinstance(value, bool) else value)])


def _histogram(latency: Latency, labels: Labels) -> Family:
    bounds = (*latency.BOUNDS, math.inf)
    samples = [
        Sample({**labels, "le": number(bound)}, count, "_bucket")
        for bound, count in zip(bounds, accumulate(latency.counts), strict=True)
    ]
    samples.append(Sample(labels, latency.seconds, "_sum"))
    samples.append(Sample(labels, sum(latency.counts), "_count"))
    return Family("shoal_fetch_duration_seconds", "histogram", "How long pages took to be fetched.", samples)
