"""One URL of a run: where it was found, what happened to it, and why it is in its state."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from fastapi import APIRouter, Request

from shoal.batch.redaction import redacted
from shoal.crawling.stats import STATE_NAMES
from shoal.errors import RequestError
from shoal.monitoring.url_items import read_url_items
from shoal.monitoring.url_report import Agent, UrlReport, read_agent, report_url
from shoal.ports import Run
from shoal.server.dashboard.pages import add_screen
from shoal.server.dashboard.screens.run import find_run
from shoal.server.errors import ProblemError
from shoal.server.state import Server

router = APIRouter()

_MAX_URL = 8192
_FRESH = 60.0  # seconds for which items that were found, and the user agent, are kept
_ADDRESS = re.compile(r"(https?://[^\s\"'<>]+)")


async def load(server: Server, request: Request) -> dict[str, object]:
    run = await find_run(server, request.path_params["run_id"])
    url = request.query_params.get("url", "").strip()[:_MAX_URL]
    report: UrlReport | None = None
    if url:
        frontier = await server.store.frontier(run.run_id)
        try:
            report = await report_url(frontier, url, server.config, await _agent(server, run.run_id), exact=True)
        except RequestError as exc:
            raise ProblemError(422, "bad request", str(exc)) from exc
    return {
        "run": run, "url": url, "report": report, "address": lambda each: address_of(run.run_id, each),
        "parts": _parts, "state": _state(report), "body": json.dumps({"url": url}),
        "items": await _items(server, run, report) if report is not None else [],
    }  # fmt: skip


async def _agent(server: Server, run_id: str) -> Agent:
    return await server.cache.get(("agent", run_id), _FRESH, lambda: read_agent(server.store, run_id, server.config))


async def _items(server: Server, run: Run, report: UrlReport) -> list[str]:
    history = report.history

    async def read() -> list[str]:
        frontier = await server.store.frontier(run.run_id)
        return await read_url_items(server.store, frontier, run.run_id, history)

    return await server.cache.get(("items", run.run_id, history.fingerprint, history.items), _FRESH, read)


def _state(report: UrlReport | None) -> str:
    return "" if report is None else STATE_NAMES.get(report.history.state, report.history.state)


def address_of(run_id: str, url: str) -> str:
    """The address of this screen for a URL."""
    return f"/ui/runs/{quote(run_id, safe='')}/url?url={quote(url, safe='')}"


def _parts(text: str) -> list[tuple[str, bool]]:
    """A text in parts, and whether each part is a web address, such as the target of a redirect."""
    return [(part, bool(number % 2)) for number, part in enumerate(_ADDRESS.split(redacted(text))) if part]


add_screen(router, "/ui/runs/{run_id}/url", "url", load)
