"""The overview: running crawls, and what needs attention."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Request

from shoal.batch.redaction import redacted
from shoal.crawling.outcome import Outcome
from shoal.errors import ShoalError
from shoal.monitoring.snapshot import StoreSnapshot
from shoal.ports import HostState, Run
from shoal.server.dashboard.ledger import ledger_bar
from shoal.server.dashboard.pages import add_screen
from shoal.server.dashboard.screens.runs import read_outcomes
from shoal.server.state import Server

router = APIRouter()

_PROBLEMS = 20
_HOSTS = 10
HOURS = (1, 3, 12, 24)


async def load(server: Server, request: Request) -> dict[str, object]:
    snapshot = await server.snapshots.get()
    problems = await server.current_problems()
    hours = request.query_params.get("hours", "")
    return {
        "snapshot": snapshot,
        "runs": [(each, ledger_bar(each.stats)) for each in snapshot.runs],
        "total": _total(snapshot),
        "recent": await _recent(server, snapshot),
        "waiting_hosts": _waiting_hosts(snapshot),
        "hosts_age": hosts_age(snapshot),
        "problems": [(each, redacted(each.text)) for each in problems[:_PROBLEMS]],
        "more_problems": max(0, len(problems) - _PROBLEMS),
        "hours": next((each for each in HOURS if str(each) == hours), HOURS[0]),
        "all_hours": HOURS,
    }


async def _recent(server: Server, snapshot: StoreSnapshot) -> list[tuple[Run, Outcome | None]]:
    """The runs that ended lately, with their outcomes as far as the store answers."""
    if not snapshot.away:
        with suppress(ShoalError):
            return await read_outcomes(server, snapshot.recent)
    return [(run, None) for run in snapshot.recent]


def _total(snapshot: StoreSnapshot) -> dict[str, float]:
    runs = snapshot.runs
    return {
        "running": sum(each.run.state == "running" for each in runs),
        "pages_per_second": sum(each.pages_per_second for each in runs),
        "items_per_second": sum(each.items_per_second for each in runs),
        "remaining": sum(each.stats.remaining for each in runs),
        "workers": sum(each.processes for each in runs),
    }


def hosts_age(snapshot: StoreSnapshot) -> float:
    """How much older the numbers of hosts are than those of runs, in seconds."""
    return max((each.at - (each.details_at or each.at) for each in snapshot.runs), default=0.0)


def _waiting_hosts(snapshot: StoreSnapshot) -> list[HostState]:
    """Hosts whose requests wait: those that are blocked, the longest block first, then those whose queue takes longest
    because of their delay."""
    found = {
        host.host: host
        for each in snapshot.runs
        for host in each.hosts
        if host.blocked_for > 0 or (host.ready > 1 and host.delay > 0)
    }
    return sorted(found.values(), key=lambda host: (-host.blocked_for, -host.ready * host.delay))[:_HOSTS]


add_screen(router, "/", "overview", load)
