"""`/api/notifications`: reported problems, channels and their state, test messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from shoal.batch.redaction import redacted
from shoal.monitoring.problem import Problem
from shoal.notifications.reports import Report
from shoal.notifications.service import ChannelInfo
from shoal.server.action_log import record_action
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import problems
from shoal.server.responses import json_response
from shoal.server.schemas.notifications import NotificationPage, SendTest, TestPage
from shoal.server.state import server_of

router = APIRouter(prefix="/api/notifications", tags=["notifications"], route_class=BoundedRoute)


@router.get("", response_model=NotificationPage, responses=problems(401, 422, 503))
async def list_notifications(
    request: Request,
    lasting: Annotated[bool, Query(description="Only problems that are not over.")] = False,
    limit: Annotated[int, Query(ge=1, le=1000, description="Number of problems.")] = 100,
) -> Response:
    """What needs attention now; problems that were reported in the last days, lasting ones first; the channels with
    their state. Problems are reported only if a channel is configured."""
    server = server_of(request)
    reports = await server.notifications.problems(server.store)
    shown = [_problem(report) for report in reports if report.is_open or not lasting]
    channels = await server.notifications.channels(server.store)
    return json_response(
        {
            "current": [_current(each) for each in (await server.current_problems())[:limit]],
            "problems": shown[:limit],
            "channels": [_channel(channel) for channel in channels],
            "watched_since": await server.notifications.watched_since(server.store),
        }
    )


@router.post("/test", response_model=TestPage, responses=problems(401, 422, 503))
async def send_test(request: Request, which: SendTest | None = None) -> Response:
    """Send a test message through one channel or all of them, and wait for the result."""
    server = server_of(request)
    name = None if which is None else which.channel
    errors = await server.notifications.test(name)
    await record_action(request, "test notifications", ", ".join(errors))
    results = [
        {"channel": channel, "delivered": not error, "error": redacted(error)} for channel, error in errors.items()
    ]
    return json_response({"results": results})


def _current(problem: Problem) -> dict[str, object]:
    shown = msgspec.structs.asdict(problem)
    del shown["figure"], shown["about"]
    return {**shown, "text": redacted(problem.text)}


def _problem(report: Report) -> dict[str, object]:
    undelivered = sorted({outgoing.channel for outgoing in report.outbox})
    return {
        **_current(report.problem), "reported_at": report.reported_at,
        "closed_at": report.closed_at, "undelivered": undelivered,
    }  # fmt: skip


def _channel(channel: ChannelInfo) -> dict[str, object]:
    shown = msgspec.structs.asdict(channel.state)
    del shown["failing_since"]
    return {
        **shown, "name": channel.name, "type": channel.type, "failing": channel.is_failing,
        "error": redacted(channel.state.error),
    }  # fmt: skip
