"""Notifications: current problems, what was reported, channels and rules."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.batch.redaction import redacted
from shoal.notifications.settings import Rule
from shoal.server.dashboard.pages import add_screen
from shoal.server.state import Server

router = APIRouter()

_PROBLEMS = 100
_CLOSED = 50


async def load(server: Server, request: Request) -> dict[str, object]:
    problems = await server.current_problems()
    reports = await server.notifications.problems(server.store)
    closed = [each for each in reports if not each.is_open]
    return {
        "problems": [(each, redacted(each.text)) for each in problems[:_PROBLEMS]],
        "reports": {each.problem.key: each for each in reports if each.is_open},
        "closed": [(each, redacted(each.problem.text)) for each in closed[:_CLOSED]],
        "channels": [(each, redacted(each.state.error)) for each in await server.notifications.channels(server.store)],
        "rules": [(name, rule, _limits(rule)) for name, rule in server.notifications.rules.items()],
    }


def _limits(rule: Rule) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in rule.limits.items())


add_screen(router, "/ui/notifications", "notifications", load)
