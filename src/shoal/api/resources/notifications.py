"""`/api/notifications`: reported problems, channels and their state, test messages. `/api/actions`: what users did."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from msgspec import Struct, convert
from msgspec.structs import asdict, replace
from pydantic import Field

from shoal.api.batch.options import StrictModel
from shoal.api.batch.urls import redacted
from shoal.api.resources.common import Word, action_log, record_action, with_examples
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import server_of
from shoal.operations.actions import Action
from shoal.operations.notifications.messages import Report
from shoal.operations.notifications.watcher import ChannelInfo
from shoal.operations.problem import Problem, ProblemKind, Severity


class CurrentProblem(Struct, frozen=True, kw_only=True):
    """A problem that lasts."""

    key: str
    """Identifies the problem while it lasts."""
    kind: ProblemKind
    severity: Severity
    run_id: str
    spider: str
    title: str
    text: str
    since: float
    """Unix time, in seconds."""


class ReportedProblem(CurrentProblem, frozen=True, kw_only=True):
    """A problem that was reported."""

    reported_at: float
    """When its last message was created."""
    closed_at: float | None
    """When it ended; `null` while it lasts."""
    undelivered: list[str]
    """Channels that have not delivered all of its messages yet."""


class Channel(Struct, frozen=True, kw_only=True):
    """A notification channel. Its URL and its secrets are not shown."""

    name: str
    type: Literal["webhook", "smtp", "slack", "telegram", "apprise"]
    failing: bool
    """It failed so often that other channels report it."""
    delivered: int
    """Messages that it delivered."""
    delivered_at: float
    """Unix time of the last delivery; 0 if never."""
    failures: int
    """Attempts in a row that failed."""
    next_at: float
    """Unix time of the next attempt; 0 if it works."""
    error: str
    """Error of the last attempt; empty if it succeeded."""


class NotificationPage(Struct, frozen=True, kw_only=True):
    """What needs attention now, reported problems, lasting ones first, and the channels."""

    current: list[CurrentProblem]
    """What needs attention now, critical problems first. It needs no channel."""
    problems: list[ReportedProblem]
    channels: list[Channel]
    watched_since: float | None
    """When a server began to check for problems; earlier events are not reported. `null`: never."""


class SendTest(StrictModel):
    """Which channel to test."""

    model_config = with_examples({"channel": "ops"}, {})

    channel: Annotated[Word | None, Field(description="Name of the channel. Default: all.")] = None


class TestResult(Struct, frozen=True, kw_only=True):
    """The result of a test message."""

    channel: str
    delivered: bool
    error: str


class TestPage(Struct, frozen=True, kw_only=True):
    """The results of the test messages."""

    results: list[TestResult]


class ActionPage(Struct, frozen=True, kw_only=True):
    """User actions, newest first."""

    actions: list[Action]


router = APIRouter(prefix="/api/notifications", tags=["notifications"], route_class=BoundedRoute)


@router.get("", response_model=answer(NotificationPage), responses=problems(401, 422, 503))
async def list_notifications(
    request: Request,
    lasting: Annotated[bool, Query(description="Only problems that are not over.")] = False,
    limit: Annotated[int, Query(ge=1, le=1000, description="Number of problems.")] = 100,
) -> Response:
    """What needs attention now; problems that were reported in the last days, lasting ones first; the channels with
    their state. Problems are reported only if a channel is configured."""
    server = server_of(request)
    reports = await server.notifications.problems(server.store)
    problems = [_reported(report) for report in reports if report.is_open or not lasting]
    page = NotificationPage(
        current=[_current(problem) for problem in (await server.current_problems())[:limit]],
        problems=problems[:limit],
        channels=[_channel(channel) for channel in await server.notifications.channels(server.store)],
        watched_since=await server.notifications.watched_since(server.store),
    )
    return json_response(page)


@router.post("/test", response_model=answer(TestPage), responses=problems(401, 422, 503))
async def send_test(request: Request, which: SendTest | None = None) -> Response:
    """Send a test message through one channel or all of them, and wait for the result."""
    server = server_of(request)
    name = None if which is None else which.channel
    errors = await server.notifications.test(name)
    await record_action(request, "test notifications", ", ".join(errors))
    results = [TestResult(channel=name, delivered=not error, error=redacted(error)) for name, error in errors.items()]
    return json_response(TestPage(results=results))


def _current(problem: Problem) -> CurrentProblem:
    return replace(convert(problem, CurrentProblem, from_attributes=True), text=redacted(problem.text))


def _reported(report: Report) -> ReportedProblem:
    return ReportedProblem(
        **asdict(_current(report.problem)),
        reported_at=report.reported_at,
        closed_at=report.closed_at,
        undelivered=sorted({outgoing.channel for outgoing in report.outbox}),
    )


def _channel(channel: ChannelInfo) -> Channel:
    values = asdict(channel.state) | {
        "name": channel.name,
        "type": channel.type,
        "failing": channel.is_failing,
        "error": redacted(channel.state.error),
    }
    return convert(values, Channel)


# -- the log of user actions


actions_router = APIRouter(prefix="/api/actions", tags=["actions"])


@actions_router.get("", response_model=answer(ActionPage), responses=problems(401, 422, 503))
async def list_actions(
    request: Request, limit: Annotated[int, Query(ge=1, le=400, description="Number of latest actions.")] = 100
) -> Response:
    """What users did through the API and with commands, newest first: who paused a run, who changed a host."""
    return json_response(ActionPage(actions=await action_log(request).recent(limit)))
