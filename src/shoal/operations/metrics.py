"""Metrics for Prometheus, computed from the counters of a crawl at the time of a scrape.

`metrics_server` answers for one process. A server can combine the families of several runs::

    Response(render([*of_ledger(stats, {"run": run_id, "spider": spider}), ...]), media_type=CONTENT_TYPE)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

from shoal.crawling.stats import Counters, Latency, Standing, Vitals, ledger
from shoal.fetch.layers.identity_facts import IdentityCounts
from shoal.ports import HostState, Stats
from shoal.system import clock

# The text format of Prometheus: families of samples, one line each.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = Mapping[str, str]
_Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


class Sample(NamedTuple):
    """One number. A histogram has several with the same labels and different suffixes."""

    labels: Labels
    value: float
    suffix: str = ""


class Family(Struct, frozen=True):
    """All samples of one name."""

    name: str
    kind: _Kind
    help: str
    samples: Sequence[Sample]


def render(families: Iterable[Family]) -> str:
    """The answer to a scrape. Families with the same name are combined, as the format requires: several runs may each
    have one."""
    together: dict[str, list[Family]] = {}
    for family in families:
        together.setdefault(family.name, []).append(family)
    lines: list[str] = []
    for name, alike in together.items():
        lines.append(f"# HELP {name} {_escaped(alike[0].help)}")
        lines.append(f"# TYPE {name} {alike[0].kind}")
        lines += [_line(name, sample) for family in alike for sample in family.samples]
    return "\n".join(lines) + "\n" if lines else ""


def _line(name: str, sample: Sample) -> str:
    labels = ",".join(f'{key}="{_escaped(value, quotes=True)}"' for key, value in sample.labels.items())
    return f"{name}{sample.suffix}{{{labels}}} {number(sample.value)}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def number(value: float) -> str:
    """A number in the notation of the format."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


# All metrics that Shoal exports, computed from the values of a crawl.
#
# ``labels`` are the common labels of a source: ``run`` and ``spider``.


_ROLES = ("Runner", "Backup Runner", "Spare")
_CLUSTER_EVENTS = ("elected", "took over", "retired", "lost", "fenced")
_STATES = ("ready", "waiting", "in_flight", "done", "failed")

_COUNTED = (
    ("shoal_pages_total", "fetched", "Pages that this process has fetched."),
    ("shoal_pages_from_cache_total", "from_cache", "Pages that came from the response cache."),
    ("shoal_page_bytes_total", "bytes", "Bytes of page bodies after decompression."),
    ("shoal_items_total", "items", "Items that this process has committed."),
    ("shoal_items_dropped_total", "dropped", "Items that a pipeline has dropped."),
    ("shoal_item_errors_total", "item_errors", "Items that could not be stored."),
    ("shoal_retries_total", "retried", "Failed attempts that are retried."),
    ("shoal_redirects_total", "redirected", "Pages that redirected to another one."),
    ("shoal_links_out_of_scope_total", "out_of_scope", "Links that were not followed because they are out of scope."),
    ("shoal_links_refused_total", "links_refused", "Links that were refused because the queue was full."),
    ("shoal_leases_lost_total", "leases_lost", "Pages whose lease was lost before they were completed."),
)

_HOST_GAUGES = (
    ("shoal_host_delay_seconds", "delay", "Delay between two fetches from the host."),
    ("shoal_host_blocked_seconds", "blocked_for", "Seconds until the host may be fetched from again."),
    ("shoal_host_requests_ready", "ready", "Requests that wait for the delay of their host."),
    ("shoal_host_requests_in_flight", "in_flight", "Requests of the host that are leased."),
)


def of_vitals(vitals: Vitals) -> list[Family]:
    """Metrics of one process, without the frontier."""
    labels = {"run": vitals.run_id, "spider": vitals.spider}
    families = [
        _gauge("shoal_worker_info", "Always 1. The label names this worker.", {"worker": vitals.worker, **labels}, 1),
        _gauge("shoal_pages_in_flight", "Pages that are being fetched or parsed.", labels, vitals.in_flight),
        *of_counters(vitals.counters, labels),
    ]
    if vitals.looped_at is not None:
        moment = clock.time() - (clock.monotonic() - vitals.looped_at)
        text = "Last heartbeat of the process's loop: at least every 15 seconds, also while it is idle."
        families.append(_gauge("shoal_worker_heartbeat_timestamp_seconds", text, labels, round(moment, 3)))
    if vitals.loop_age is not None:
        text = "Seconds since the event loop of the process last ran: up to 1, unless a callback blocks it."
        families.append(_gauge("shoal_worker_loop_age_seconds", text, labels, round(vitals.loop_age, 3)))
    if vitals.identities is not None:
        families += of_identities(vitals.identities, labels)
    if vitals.standing is not None:
        families += of_standing(vitals.standing, labels)
    return families


def of_identities(counts: IdentityCounts, labels: Labels) -> list[Family]:
    """Metrics of the identities of this process."""
    states = {"active": counts.known - counts.removed, "removed": counts.removed}
    return [
        _by_label("shoal_identities", "gauge", "Identities of this process, by state.", labels, "state", states),
        _gauge("shoal_identity_rests", "Pairs of an identity and a host on which it rests.", labels, counts.resting),
        _counter("shoal_identity_requests_total", "Requests sent with an identity.", labels, counts.requests),
        _counter("shoal_identity_blocks_total", "Answers that say that an identity is blocked.", labels, counts.blocks),
        _counter(
            "shoal_identity_failures_total", "Requests that may have failed because of their proxy.", labels,
            counts.failures,
        ),
    ]  # fmt: skip


def of_counters(counters: Counters, labels: Labels) -> list[Family]:
    """Metrics of what a process did since it started."""
    families = [_counter(name, text, labels, getattr(counters, field)) for name, field, text in _COUNTED]
    errors = dict(sorted(counters.errors.items()))
    families.append(_by_label("shoal_errors_total", "counter", "Failed attempts, by kind.", labels, "kind", errors))
    families.append(_histogram(counters.latency, labels))
    return families


def of_frontier(labels: Labels, *, up: bool) -> list[Family]:
    """Whether the frontier answers."""
    return [_gauge("shoal_frontier_up", "Whether the frontier answered this scrape in time.", labels, up)]


def of_ledger(stats: Stats, labels: Labels) -> list[Family]:
    """Metrics of a run, from the counters in its frontier. Every process reports the same values."""
    return [
        *of_depth(stats, labels),
        _counter("shoal_requests_pushed_total", "Requests that were ever pushed to the run.", labels, stats.pushed),
        _counter("shoal_duplicates_total", "Links to pages that the run already knew.", labels, stats.duplicates),
        _counter("shoal_run_items_total", "Items in the run's log, from all processes.", labels, stats.items),
        _gauge("shoal_run_seeding", "Whether start requests are still being pushed.", labels, stats.seeding),
    ]


def of_depth(stats: Stats, labels: Labels) -> list[Family]:
    """Only the requests by state, for short-lived runs."""
    counted = ledger(stats)
    depth = {state: counted[state] for state in _STATES}
    imbalance = stats.pushed - sum(depth.values())
    text = "Pushed requests that are in no state: 0, unless something was lost."
    return [
        _by_label("shoal_requests", "gauge", "Requests of the run, by state.", labels, "state", depth),
        _gauge("shoal_ledger_imbalance", text, labels, imbalance),
    ]


def of_hosts(hosts: Sequence[HostState], labels: Labels) -> list[Family]:
    """Politeness by host. Pass only the busiest hosts: each is a label."""
    return [
        _by_label(name, "gauge", text, labels, "host", {host.host: getattr(host, field) for host in hosts})
        for name, field, text in _HOST_GAUGES
    ]


def of_sessions(running: Mapping[str, int], workers: int | None) -> list[Family]:
    """The batches of an API server by kind, and the number of Celery workers if it is known."""
    families = [_by_label("shoal_sessions", "gauge", "Batches in progress.", {}, "kind", running)]
    if workers is not None:
        families.append(_gauge("shoal_celery_workers", "Celery workers that answered the last poll.", {}, workers))
    return families


def of_problems(problems: Iterable[tuple[str, str]]) -> list[Family]:
    """What needs attention: the number of problems by kind and severity."""
    counts = Counter(problems)
    samples = [
        Sample({"kind": kind, "severity": severity}, count) for (kind, severity), count in sorted(counts.items())
    ]
    return [Family("shoal_problems", "gauge", "What needs attention now, by kind and severity.", samples)]


def of_standing(standing: Standing, labels: Labels) -> list[Family]:
    """Metrics of a node in its cluster. Events that did not occur are 0, so that the first one shows as an increase."""
    labels = {**labels, "cluster": standing.cluster}
    roles = {role: int(role == standing.role) for role in _ROLES}
    events = {what: standing.events.get(what, 0) for what in _CLUSTER_EVENTS}
    takeovers = events["took over"]
    return [
        _by_label("shoal_node_role", "gauge", "1 for the current role of the node.", labels, "role", roles),
        _by_label("shoal_cluster_events_total", "counter", "Cluster events of the node.", labels, "what", events),
        _counter("shoal_takeovers_total", "Slots that the node took over from lost nodes.", labels, takeovers),
    ]


def _counter(name: str, text: str, labels: Labels, value: float) -> Family:
    return Family(name, "counter", text, [Sample(labels, value)])


def _gauge(name: str, text: str, labels: Labels, value: float) -> Family:
    return Family(name, "gauge", text, [Sample(labels, int(value) if isinstance(value, bool) else value)])


def _by_label(name: str, kind: _Kind, text: str, labels: Labels, label: str, values: Mapping[str, float]) -> Family:
    """One sample for each value of a label."""
    return Family(name, kind, text, [Sample({**labels, label: key}, value) for key, value in values.items()])


def _histogram(latency: Latency, labels: Labels) -> Family:
    bounds = (*latency.BOUNDS, math.inf)
    samples = [
        Sample({**labels, "le": number(bound)}, count, "_bucket")
        for bound, count in zip(bounds, accumulate(latency.counts), strict=True)
    ]
    samples.append(Sample(labels, latency.seconds, "_sum"))
    samples.append(Sample(labels, sum(latency.counts), "_count"))
    return Family("shoal_fetch_duration_seconds", "histogram", "Duration of fetches.", samples)
