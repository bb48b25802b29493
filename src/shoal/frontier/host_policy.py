"""The rules of politeness: the delay and the concurrency in force for a host, when it is due, and whose turn it is.

The rules are written once. Frontiers in this process call the functions here. The scripts of Redis get the same rules
from `lua`, and the functions of PostgreSQL from `sql`.

A rule reads from three places: the ``host``, the host ``*`` (``all``), and the options of the ``run``.

Several runs may want the same host. A run shares a host if it has requests for the host and is *live*. All runs that
share a host keep the longest ``download_delay`` among theirs, because the host cannot tell them apart. They also take
turns: one turn is one lease. The *use* of a run is its number of turns, divided by its weight. Runs that have used less
go first. The *time* of a host is the smallest use of the runs that compete. A run that comes or returns starts there.
"""

from __future__ import annotations

from math import floor
from typing import NamedTuple

from shoal.ports import HostState

DEFAULT_HOST = "*"
"""Its delay and concurrency apply to every host without values of its own."""

_MOST_SPECIFIC = ("host", "all", "run")
"""Delay and concurrency come from the first of these places that sets them. A run always sets them."""
SET_FOR_HOST, SET_FOR_ALL = "set for this host", "set for all hosts"
_DELAY_REASONS = (SET_FOR_HOST, SET_FOR_ALL, "download_delay")
_AT_LEAST = {"crawl_delay": "robots.txt Crawl-delay", "learned_delay": "learned from its answers"}
"""A host is never contacted faster than these values allow."""

_LIVE_SECONDS, _LIVE_DELAYS = 10, 3
"""A run is live for this many seconds after its last call, or for this many of its delays if that is longer."""
_GRACE = 1
"""Seconds that a host waits for a run whose turn it is, counted from its last call or from when the host is due."""
SHORT_PAUSE, _LONG_PAUSE = 0.05, 0.25
"""Seconds after which a run asks again for a host that another run uses."""
RECHECK = 2
"""A run that keeps the delay of another run checks after this many seconds whether the other is still there."""
MAX_SHARING = 32
"""How many runs of one host are known. If there are more, chance decides turns, but the longest delays are kept."""
MEET_SECONDS = 30
"""Two runs that lease within this many seconds may share hosts. On Redis, they also may while they are live."""
NOTED_EVERY = 5
"""Seconds after which a run's use of a host is noted again."""
_TINY = 1e-9

Delays = tuple[float | None, float | None, float, float | None, float | None]
"""The arguments of `effective_delay`."""
Limits = tuple[int | None, int | None, int]
"""The arguments of `effective_concurrency` after the delay."""


class RivalDelay(NamedTuple):
    """The longest ``download_delay`` of the other runs that share a host."""

    delay: float
    run_id: str


def effective_delay(
    own: float | None,
    default: float | None,
    configured: float,
    crawl_delay: float | None,
    learned: float | None,
    rival: RivalDelay | None = None,
) -> tuple[float, str]:
    """The delay in force for a host, and where it comes from.

    It is the largest of three: the delay that is set, the Crawl-delay of the host's robots.txt, and the delay that
    workers learned from its answers. The delay that is set is ``own`` for this host, else ``default`` for all hosts,
    else the longest that a run is ``configured`` with.
    """
    delay, why = configured, _DELAY_REASONS[-1]
    if rival is not None and rival.delay > delay:
        delay, why = rival.delay, f"{why} of run {rival.run_id}"
    for value, reason in zip((own, default), _DELAY_REASONS, strict=False):
        if value is not None:
            delay, why = value, reason
            break
    for value, reason in zip((crawl_delay, learned), _AT_LEAST.values(), strict=True):
        if value is not None and value > delay:
            delay, why = value, reason
    return delay, why if delay else "no delay"


def effective_concurrency(delay: float, own: int | None, default: int | None, configured: int) -> int:
    """How many requests a host may have in flight. With a delay one, else the most specific limit that is set."""
    if delay > 0:
        return 1
    return own if own is not None else default if default is not None else configured


def due_at(delay: float, ended_at: float, blocked_until: float) -> float:
    """When a host may be contacted again: one delay after its last fetch has ended, and not while it is blocked."""
    return max(ended_at + delay, blocked_until) if delay else blocked_until


# -- runs that share a host


def is_live(since: float, delay: float, now: float) -> bool:
    """Whether a run with this delay is live. ``since``: its last call, or its last use of a host."""
    return now < since + max(_LIVE_SECONDS, _LIVE_DELAYS * delay)


def is_asking(asked_at: float, due: float, now: float) -> bool:
    """Whether a host waits for a run. ``asked_at``: when the run's last call got less than it wanted. 0: it got all."""
    return asked_at > 0 and now < max(asked_at, due) + _GRACE


def turns_left(concurrency: int, weight: float, used: float, least: float) -> int:
    """How many turns a run may take now. ``least``: the smallest use of the other runs that ask. With a delay, the
    concurrency is 1, and turns alternate. Otherwise a run may be ahead by as many requests as the concurrency, so that
    the host is not idle until another run asks again."""
    return concurrency + floor(weight * (least - used) + _TINY)


def pause_for(delay: float) -> float:
    """Seconds after which to ask again for a full host. It is due one delay after it has room."""
    return max(SHORT_PAUSE, min(_LONG_PAUSE, delay / 2))


def host_state(
    name: str,
    delays: Delays,
    limits: Limits,
    *,
    rival: RivalDelay | None = None,
    in_flight: int,
    ready: int,
    blocked_for: float,
    block_reason: str,
) -> HostState:
    """The politeness in force. ``blocked_for``: not blocked if this is not positive."""
    delay, why = effective_delay(*delays, rival)
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
    """The rules as SQL expressions over rows ``h`` (host), ``e`` (all hosts), ``r`` (run) and the delay ``d.delay``.

    Rules about another run that shares the host use its rows ``o`` (run), ``t`` (turn), ``p`` (presence) and ``l``
    (lane), and ``s.due``, ``s.used`` and ``s.least``."""
    rows = dict(zip(_MOST_SPECIFIC, "her", strict=True))

    def most_specific(column: str, last: str) -> str:
        return f"coalesce({', '.join(f'{rows[place]}.{column}' for place in _MOST_SPECIFIC[:-1])}, {last})"

    def live(since: str) -> str:
        return f"_now < {since} + greatest({_LIVE_SECONDS}, {_LIVE_DELAYS} * o.delay)"

    at_least = "".join(f", h.{column}" for column in _AT_LEAST)
    return {
        "DELAY": f"greatest({most_specific('delay', 'greatest(r.delay, h.longest)')}{at_least})",
        "CONCURRENCY": f"CASE WHEN d.delay > 0 THEN 1 ELSE {most_specific('concurrency', 'r.concurrency')} END",
        "DUE_AT": "greatest(CASE WHEN d.delay > 0 THEN greatest(h.ended_at, e.ended_at) + d.delay ELSE 0 END,"
        " h.blocked_until)",
        "IS_SEEN": live("t.seen"),
        "IS_LIVE": f"({live('greatest(p.called, t.seen)')} AND (l.ready > 0 OR {live('t.seen')}))",
        "IS_ASKING": f"(p.asked > 0 AND _now < greatest(p.asked, s.due) + {_GRACE})",
        "LEAD": f"floor(r.weight * (s.least - s.used) + {_TINY})::integer",
        "PAUSE": f"greatest({SHORT_PAUSE}, least({_LONG_PAUSE}, d.delay / 2))",
        "SHORT_PAUSE": str(SHORT_PAUSE),
        "RECHECK": str(RECHECK),
        "MAX_SHARING": str(MAX_SHARING),
        "MEET_SECONDS": str(MEET_SECONDS),
    }


def lua() -> dict[str, str]:
    """The rules as functions in Lua, by name. ``policy`` returns delay and concurrency, and ``due_at`` a time.
    ``sharing_rules`` returns the functions for runs that share a host: most scripts do not need them. Values that are
    not set are NaN or -1."""
    first, *others = (f"{place}.delay" for place in _MOST_SPECIFIC[:-1])
    *limits, last = (f"{place}.concurrency" for place in _MOST_SPECIFIC)
    policy = (
        "local function policy(host, all, run, longest)",
        f"local delay = {first}",
        *(f"if delay ~= delay then delay = {value} end" for value in others),
        "if delay ~= delay then delay = run.delay if longest and longest > delay then delay = longest end end",
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
    functions = {
        "live_for": f"(delay) return math.max({_LIVE_SECONDS}, {_LIVE_DELAYS} * delay) end",
        "is_live": "(since, delay, now) return now < since + live_for(delay) end",
        "is_asking": f"(asked, due, now) return asked > 0 and now < math.max(asked, due) + {_GRACE} end",
        "turns_left": "(concurrency, weight, used, least)"
        f" return concurrency + math.floor(weight * (least - used) + {_TINY}) end",
        "pause_for": f"(delay) return math.max({SHORT_PAUSE}, math.min({_LONG_PAUSE}, delay / 2)) end",
    }
    return {
        "policy": "\n".join(policy),
        "due_at": "\n".join(due_at),
        "sharing_rules": "\n".join(
            (
                "local function sharing_rules()",
                *(f"local function {name}{body}" for name, body in functions.items()),
                f"return {', '.join(functions)} end",
            )
        ),
    }
