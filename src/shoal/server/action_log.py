"""Writes what callers of the API do to the log of user actions."""

from __future__ import annotations

import logging

from fastapi import Request

from shoal.errors import FrontierError
from shoal.monitoring.actions import ActionLog
from shoal.server.state import server_of

log = logging.getLogger("shoal.server")


def action_log(request: Request) -> ActionLog:
    server = server_of(request)
    return ActionLog(server.store, server.config.project_name)


async def record_action(request: Request, what: str, target: str, detail: str = "") -> None:
    """Log an action of this request's caller. The action is already done, so a failure to log it is only a warning."""
    who = f"{request.state.caller or request.state.role} ({request.state.address or 'unknown address'})"
    try:
        await action_log(request).add(who, what, target, detail)
    except FrontierError as exc:
        log.warning("could not write to the action log: %s %s by %s: %s", what, target, who, exc)
