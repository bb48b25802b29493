"""`/api/hosts`: politeness settings of hosts, across all runs and workers of the frontier."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from msgspec import UNSET, Struct
from pydantic import Field, model_validator

from shoal.api.batch.options import StrictModel
from shoal.api.resources.common import PRINTABLE, Word, find_run, record_action, with_examples
from shoal.api.server.answers import answer
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.errors import ProblemError, problems
from shoal.api.server.responses import json_response
from shoal.api.server.state import Server, server_of
from shoal.operations.hosts import HostReport, change_host, host_name, hosts_of, report_host
from shoal.operations.snapshot import ACTIVE, MAX_RUNS
from shoal.ports import HostState, HostUpdate, Run


class HostList(Struct, frozen=True, kw_only=True):
    """Hosts, busiest first."""

    hosts: list[HostState]


class SetHost(StrictModel):
    """Changes to a host's settings. Omitted settings stay as they are; `null` restores the default."""

    model_config = with_examples({"delay": 2.0}, {"delay": 0, "concurrency": 4}, {"reset": True})

    delay: Annotated[float | None, Field(ge=0, le=1e9, description="Seconds from one fetch to the next.")] = None
    concurrency: Annotated[
        int | None, Field(ge=1, le=10_000, description="Parallel requests; applies only while the delay is 0.")
    ] = None
    reset: Annotated[bool, Field(description="Restore all defaults and drop the learned delay.")] = False

    @model_validator(mode="after")
    def _check_not_empty(self) -> SetHost:
        if not (self.reset or {"delay", "concurrency"} & self.model_fields_set):
            raise ValueError("nothing to change: send delay, concurrency or reset")
        return self


class BlockHost(StrictModel):
    """How long to block a host, and why."""

    model_config = with_examples({"seconds": 3600, "reason": "the site asked us to"}, {})

    seconds: Annotated[float, Field(ge=1, le=1e9)] = 86400.0
    reason: Word = "by hand"


router = APIRouter(prefix="/api/hosts", tags=["hosts"], route_class=BoundedRoute)

_MAX_HOSTS = 1000

Host = Annotated[
    str,
    Path(
        max_length=260,
        pattern=PRINTABLE,
        description="`example.com` or `example.com:8080`; `*` is the default of all hosts.",
    ),
]


@router.get("", response_model=answer(HostList), responses=problems(401, 404, 422, 503))
async def list_hosts(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=_MAX_HOSTS, description="Number of hosts, busiest first.")] = 30,
    run: Annotated[str, Query(max_length=200, pattern=PRINTABLE, description="Only hosts of this `run_id`.")] = "",
    search: Annotated[
        str, Query(max_length=200, pattern=PRINTABLE, description="Only hosts with this in their name.")
    ] = "",
) -> Response:
    """The hosts of all unfinished runs, or of one run: delay and its source, requests in flight, blocks."""
    return await _list_hosts(server_of(request), limit, run, search.lower())


@router.get("/{host}", response_model=answer(HostReport), responses=problems(401, 409, 422, 503))
async def read_host(host: Host, request: Request) -> Response:
    """One host: its settings in force, its robots.txt as read, its identities, which of its pages need a browser."""
    server = server_of(request)
    return json_response(await report_host(server.store, await _runs(server), server.config, host_name(host)))


@router.put("/{host}", response_model=answer(HostList), responses=problems(401, 409, 422, 503))
async def set_host(host: Host, change: SetHost, request: Request) -> Response:
    """Change a host's delay or concurrency. It takes effect immediately, for all workers."""
    default = None if change.reset else UNSET
    update = HostUpdate(
        delay=change.delay if "delay" in change.model_fields_set else default,
        concurrency=change.concurrency if "concurrency" in change.model_fields_set else default,
        learned_delay=default,
    )
    detail = ", ".join(f"{name} {value}" for name, value in change.model_dump(exclude_unset=True).items())
    return await _update(request, host, update, "set host", detail)


@router.post("/{host}/block", response_model=answer(HostList), responses=problems(401, 409, 422, 503))
async def block(host: Host, request: Request, options: BlockHost | None = None) -> Response:
    """Stop fetching from a host for a while. Its requests stay queued. It does not shorten a longer block."""
    options = options or BlockHost()
    update = HostUpdate(block_for=options.seconds, block_reason=options.reason)
    return await _update(request, host, update, "block host", f"for {options.seconds:g} s: {options.reason}")


@router.post("/{host}/unblock", response_model=answer(HostList), responses=problems(401, 409, 422, 503))
async def unblock(host: Host, request: Request) -> Response:
    """End the block of a host, including one from a Retry-After header."""
    return await _update(request, host, HostUpdate(block_for=None), "unblock host")


async def _update(request: Request, text: str, update: HostUpdate, what: str, detail: str = "") -> Response:
    server = server_of(request)
    runs = await _runs(server)
    host = await change_host(await server.store.frontier(runs[0].run_id), text, update)
    await record_action(request, what, host, detail)
    if host == "*":
        return await _list_hosts(server, _MAX_HOSTS)
    report = await report_host(server.store, runs, server.config, host)
    return json_response(HostList(hosts=[report.state]))


async def _runs(server: Server) -> list[Run]:
    """The newest unfinished runs, or else the newest run."""
    runs = await server.store.list_runs(states=ACTIVE, limit=MAX_RUNS) or await server.store.list_runs(limit=1)
    if not runs:
        raise ProblemError(409, "no run", "the frontier has no run yet, so it knows no hosts")
    return runs


async def _list_hosts(server: Server, limit: int, run_id: str = "", search: str = "") -> Response:
    if run_id:
        runs = [await find_run(server, run_id)]
    else:
        runs = list(await server.store.list_runs(states=ACTIVE, limit=MAX_RUNS))
    return json_response(HostList(hosts=await hosts_of(server.store, runs, limit, search)))
