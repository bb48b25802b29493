"""The log of user actions."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.monitoring.actions import MAX_ACTIONS, ActionLog
from shoal.server.dashboard.pages import add_screen
from shoal.server.state import Server

router = APIRouter()

_PAGE = 100


async def load(server: Server, request: Request) -> dict[str, object]:
    text = request.query_params.get("q", "")[:200].strip().lower()
    found = [
        each
        for each in await ActionLog(server.store, server.config.project_name).recent(MAX_ACTIONS)
        if text in f"{each.who} {each.what} {each.target} {each.detail}".lower()
    ]
    return {"actions": found[:_PAGE], "total": len(found), "text": text, "max_actions": MAX_ACTIONS}


add_screen(router, "/ui/actions", "actions", load)
