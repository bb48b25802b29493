"""The rules of politeness: the delay and the concurrency in force for a host, and when it is due.

They are written once, as data. Frontiers in this process call the functions; the scripts of Redis and the functions of
PostgreSQL get the same rules as `lua` and `sql`.

A rule reads from three places: the ``host``, the host ``*`` (``all``), and the options of the ``run``.
"""

from __future__ import annotations

from shoal.ports import HostState

DEFAULT_HOST = "*"
"""Its delay and concurrency apply to every host that has none of its own."""

_MOST_SPECIFIC = ("host", "all", "run")
"""Delay and concurrency are taken from the first place that sets them. A run always does."""
_DELAY_REASONS = ("set for this host", "set for all hosts", "download_delay")
_AT_LEAST = {"crawl_delay": "robots.txt Crawl-delay", "learned_delay": "learned from its answers"}
"""A host is never contacted faster than these say."""

Delays = tuple[float | None, float | None, float, float | None, float | None]
"""The arguments of `effective_delay`."""
Limits = tuple[int | None, int | None, int]
"""The arguments of `effective_concurrency` after the delay."""


def effective_delay(
    own: float | None, default: float | None, configured: float, crawl_delay: float | None, learned: float | None
) -> tuple[float, str]:
    """The delay in force for a host, and where it comes from.

    The largest of three counts: the delay that is set (``own`` for this host, else ``default`` for all hosts, else the
    ``configured`` one), the Crawl-delay of its robots.txt, and the delay that workers learned from its answers.
    """
    delay, why = configured, _DELAY_REASONS[-1]
    for value, reason in zip((own, default), _DELAY_REASONS, strict=False):
        if value is not None:
            delay, why = value, reason
            break
    for value, reason in zip((crawl_delay, learned), _AT_LEAST.values(), strict=True):
        if value is not None and value > delay:
            delay, why = value, reason
    return delay, why if delay else "no delay"


def effective_concurrency(delay: float, own: int | None, default: int | None, configured: int) -> int:
    """How many requests a host may have in flight: one if it has a delay, else the most specific limit that is set."""
    if delay > 0:
        return 1
    return own if own is not None else default if default is not None else configured


def due_at(delay: float, ended_at: float, blocked_until: float) -> float:
    """When a host may be contacted again: one delay after its last fetch ended, and not while it is blocked."""
    return max(ended_at + delay, blocked_until) if delay else blocked_until


def host_state(
    name: str,
    delays: Delays,
    limits: Limits,
    *,
    in_flight: int,
    ready: int,
    blocked_for: float,
    block_reason: str,
) -> HostState:
    """The politeness in force. Not blocked if ``blocked_for`` is not positive."""
    delay, why = effective_delay(*delays)
    return HostState(
        host=name,
        delay=delay,
        why=why,
        concurrency=effective_concurrency(delay, *limits),
        in_flight=in_flight,
        ready=ready,
        blocked_for=max(0.0, blocked_for),
        block_reason=block_reason if blocked_for > 0 else "",
    )


def sql() -> dict[str, str]:
    """The rules as SQL expressions over rows ``h`` (host), ``e`` (all hosts), ``r`` (run) and the delay ``d.delay``."""
    rows = dict(zip(_MOST_SPECIFIC, "her", strict=True))

    def most_specific(column: str) -> str:
        return f"coalesce({', '.join(f'{rows[place]}.{column}' for place in _MOST_SPECIFIC)})"

    at_least = "".join(f", h.{column}" for column in _AT_LEAST)
    return {
        "DELAY": f"greatest({most_specific('delay')}{at_least})",
        "CONCURRENCY": f"CASE WHEN d.delay > 0 THEN 1 ELSE {most_specific('concurrency')} END",
        "DUE_AT": "greatest(CASE WHEN d.delay > 0 THEN greatest(h.ended_at, e.ended_at) + d.delay ELSE 0 END,"
        " h.blocked_until)",
    }


def lua() -> dict[str, str]:
    """The rules as functions in Lua, by name: ``policy`` returns delay and concurrency, ``due_at`` a time. Values that
    are not set are NaN or -1."""
    first, *others = (f"{place}.delay" for place in _MOST_SPECIFIC)
    *limits, last = (f"{place}.concurrency" for place in _MOST_SPECIFIC)
    policy = (
        "local function policy(host, all, run)",
        f"local delay = {first}",
        *(f"if delay ~= delay then delay = {value} end" for value in others),
        *(f"if host.{name} > delay then delay = host.{name} end" for name in _AT_LEAST),
        "if delay > 0 then return delay, 1 end",
        *(f"if {value} >= 0 then return 0, {value} end" for value in limits),
        f"return 0, {last} end",
    )
    due_at = (
        "local function due_at(host, all, delay)",
        "if delay <= 0 then return host.blocked_until end",
        "return math.max(host.blocked_until, math.max(host.ended_at, all.ended_at) + delay) end",
    )
    return {"policy": "\n".join(policy), "due_at": "\n".join(due_at)}
