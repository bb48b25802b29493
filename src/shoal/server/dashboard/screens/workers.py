"""Every process of the active runs, and their clusters."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from fastapi import APIRouter, Request

from shoal.monitoring.fleet import FleetProcess, read_fleet
from shoal.monitoring.processes import ProcessState
from shoal.server.dashboard.pages import add_screen
from shoal.server.state import Server

router = APIRouter()

CONDITIONS = get_args(ProcessState)
_PAGE = 100


async def load(server: Server, request: Request) -> dict[str, object]:
    query = request.query_params
    text, condition = query.get("q", "").strip().lower()[:200], query.get("state", "")
    start = int(number) if (number := query.get("from", "")).isascii() and number.isdigit() and len(number) < 6 else 0
    snapshot = await server.snapshots.get()
    processes = await read_fleet(server.store, snapshot)
    wanted = [each for each in processes if _is_wanted(each, text, condition)]
    return {
        "snapshot": snapshot, "processes": wanted[start : start + _PAGE], "total": len(wanted), "start": start,
        "next": start + _PAGE if len(wanted) > start + _PAGE else 0, "text": text,
        "condition": condition if condition in CONDITIONS else "", "conditions": CONDITIONS,
        "counts": Counter(each.state for each in processes), "clusters": _clusters(processes),
        "spiders": {each.run.run_id: each.run.spider for each in snapshot.runs},
        "pages_per_second": sum(each.pages_per_second for each in processes),
        "memory": sum(each.memory for each in processes if each.state == "working"),
    }  # fmt: skip


def _is_wanted(process: FleetProcess, text: str, condition: str) -> bool:
    words = f"{process.name} {process.machine} {process.run_id} {process.role} {process.cluster}".lower()
    return text in words and condition in ("", process.state)


def _clusters(processes: list[FleetProcess]) -> list[tuple[str, str, int]]:
    """The clusters of these processes: name, run, and how many of them crawl."""
    runs = {each.cluster: each.run_id for each in processes if each.cluster}
    active = Counter(each.cluster for each in processes if each.state == "working")
    return [(name, run_id, active[name]) for name, run_id in sorted(runs.items())]


add_screen(router, "/ui/workers", "workers", load)
