"""`/api/notifications`: reported problems, channels and their state, test messages."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from shoal.api.batch.options import StrictModel
from shoal.api.batch.urls import redacted
from shoal.api.resources.common import RUN_ID, Word, action_log, record_action, with_examples
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import server_of
from shoal.operations.notifications.messages import Report
from shoal.operations.notifications.watcher import ChannelInfo
from shoal.operations.problem import Problem, ProblemKind, Severity

# Bodies of `/api/notifications` and `/api/actions`.


class CurrentProblem(BaseModel):
    """A problem that lasts."""

    key: Annotated[str, Field(description="Identifies the problem while it lasts.")]
    kind: ProblemKind
    severity: Severity
    run_id: str
    spider: str
    title: str
    text: str
    since: Annotated[float, Field(description="Unix time, in seconds.")]


class ProblemModel(CurrentProblem):
    """A problem that was reported."""

    reported_at: Annotated[float, Field(description="When its last message was created.")]
    closed_at: Annotated[float | None, Field(description="When it ended; `null` while it lasts.")] = None
    undelivered: Annotated[list[str], Field(description="Channels that have not delivered all of its messages yet.")]


class ChannelModel(BaseModel):
    """A notification channel. Its URL and its secrets are not shown."""

    name: str
    type: Literal["webhook", "smtp", "slack", "telegram", "apprise"]
    failing: Annotated[bool, Field(description="It failed so often that other channels report it.")]
    delivered: Annotated[int, Field(description="Messages that it delivered.")]
    delivered_at: Annotated[float, Field(description="Unix time of the last delivery; 0 if never.")]
    failures: Annotated[int, Field(description="Attempts in a row that failed.")]
    next_at: Annotated[float, Field(description="Unix time of the next attempt; 0 if it works.")]
    error: Annotated[str, Field(description="Error of the last attempt; empty if it succeeded.")]


class NotificationPage(BaseModel):
    """What needs attention now, reported problems, lasting ones first, and the channels."""

    model_config = with_examples(
        {
            "problems": [
                {
                    "key": f"stalled/{RUN_ID}", "kind": "stalled", "severity": "critical", "run_id": RUN_ID,
                    "spider": "books", "title": "books: stalled",
                    "text": "No page was done or failed for 10 min. 80 requests are left: 60 ready, 0 waiting, 20 in "
                    "flight. 2 processes work on it.",
                    "since": 1771156800.0, "reported_at": 1771157400.0, "closed_at": None, "undelivered": [],
                }
            ],
            "current": [
                {
                    "key": f"callback_errors/{RUN_ID}", "kind": "callback_errors", "severity": "warning",
                    "run_id": RUN_ID, "spider": "books", "title": "books: errors in callbacks: 3",
                    "text": "Callbacks raised on 3 pages, on 1 in the last 10 min. The latest: KeyError: 'price' "
                    "(books.py, line 9), at https://books.example/7.",
                    "since": 1771156800.0,
                }
            ],
            "watched_since": 1771150000.0,
            "channels": [
                {
                    "name": "ops", "type": "webhook", "failing": False, "delivered": 12, "delivered_at": 1771157400.0,
                    "failures": 0, "next_at": 0.0, "error": "",
                }
            ],
        }
    )  # fmt: skip

    current: Annotated[
        list[CurrentProblem],
        Field(description="What needs attention now, critical problems first. It needs no channel."),
    ]
    problems: list[ProblemModel]
    channels: list[ChannelModel]
    watched_since: Annotated[
        float | None,
        Field(description="When a server began to check for problems; earlier events are not reported. `null`: never."),
    ]


class SendTest(StrictModel):
    """Which channel to test."""

    model_config = with_examples({"channel": "ops"}, {}, strict=True)

    channel: Annotated[Word | None, Field(description="Name of the channel. Default: all.")] = None


class TestResult(BaseModel):
    """The result of a test message."""

    channel: str
    delivered: bool
    error: str


class TestPage(BaseModel):
    """The results of the test messages."""

    model_config = with_examples({"results": [{"channel": "ops", "delivered": True, "error": ""}]})

    results: list[TestResult]


class ActionModel(BaseModel):
    """Something that a user did."""

    at: Annotated[float, Field(description="Unix time, in seconds.")]
    who: Annotated[str, Field(description="Name and address of the caller, or user and machine of a command.")]
    what: str
    target: Annotated[str, Field(description="The run, host, cluster or schedule.")]
    detail: str


class ActionPage(BaseModel):
    """User actions, newest first."""

    model_config = with_examples(
        {"actions": [{"at": 1771156800.0, "who": "admin (127.0.0.1)", "what": "pause", "target": RUN_ID, "detail": ""}]}
    )

    actions: list[ActionModel]


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


# `/api/actions`: the log of user actions.


actions_router = APIRouter(prefix="/api/actions", tags=["actions"])


@actions_router.get("", response_model=ActionPage, responses=problems(401, 422, 503))
async def list_actions(
    request: Request, limit: Annotated[int, Query(ge=1, le=400, description="Number of latest actions.")] = 100
) -> Response:
    """What users did through the API and with commands, newest first: who paused a run, who changed a host."""
    return json_response({"actions": await action_log(request).recent(limit)})
