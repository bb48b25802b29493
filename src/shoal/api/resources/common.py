"""What several resources share: types of parameters, finding a run, the log of user actions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Annotated, TypeAlias

from fastapi import Path, Request
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

from shoal.api.server.errors import ProblemError, public_message
from shoal.api.server.state import Server, server_of
from shoal.errors import FrontierError, SinkError, SpiderError
from shoal.operations.actions import ActionLog
from shoal.ports import Frontier, Run

PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
"""Text without control characters. No store has a key with one."""
URL = "http://127.0.0.1:8080/"

Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]


def _check_scalar(value: object) -> object:
    """Runs before pydantic tries each type of the union, so that there is one message instead of one per type."""
    if isinstance(value, dict | list):
        raise ValueError("must be a string, a number, true, false or null")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must fit into 64 bits; send larger integers as strings")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError("must be a finite number")
    return value


Scalar: TypeAlias = Annotated[
    Annotated[str, Field(max_length=10_000)] | bool | int | float | None, BeforeValidator(_check_scalar)
]


def with_examples(*examples: JsonDict) -> ConfigDict:
    """Settings of a body that show ``examples`` in OpenAPI."""
    return ConfigDict(json_schema_extra={"examples": list(examples)})


RunId = Annotated[str, Path(max_length=200, pattern=PRINTABLE, description="`run_id` of the run.")]


async def find_run(server: Server, run_id: str) -> Run:
    """Find a run. Batches are 404: each belongs to its caller. So are runs of other projects."""
    run = await server.get_run(run_id)
    if run is None:
        raise ProblemError(404, "no such run", f"run {run_id} does not exist")
    return run


async def open_frontier(server: Server, run_id: str) -> Frontier:
    run = await find_run(server, run_id)
    return await server.store.frontier(run.run_id)


@contextmanager
def spider_problems() -> Iterator[None]:
    """A spider or an output that cannot be started is the caller's error (422), not the server's."""
    try:
        yield
    except (SpiderError, SinkError) as exc:
        raise ProblemError(422, "bad request", public_message(exc)) from exc


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
