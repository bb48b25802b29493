"""`/api/hosts`: how hosts are treated, by all runs and workers of the frontier."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from shoal.batch.session import OVER
from shoal.errors import ConfigError
from shoal.ports import HostUpdate
from shoal.runs.queries import host_name, hosts_of, run_options
from shoal.server.responses import answer
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import ProblemError, responses
from shoal.server.schemas.runs import PRINTABLE, BlockHost, HostList, SetHost
from shoal.server.state import Server, server_of

router = APIRouter(prefix="/api/hosts", tags=["hosts"], route_class=BoundedRoute)

_ALL = 1000

Host = Annotated[
    str,
    Path(max_length=260, pattern=PRINTABLE, description="Such as example.com or example.com:8080; * for all others."),
]


@router.get("", response_model=HostList, responses=responses(401, 422, 503))
async def list_hosts(
    request: Request, limit: Annotated[int, Query(ge=1, le=_ALL, description="The busiest.")] = 30
) -> Response:
    """Each host of the runs that are not over: its delay and why, what is in flight, until when it is blocked."""
    return await _hosts(server_of(request), limit)


@router.put("/{host}", response_model=HostList, responses=responses(401, 409, 422, 503))
async def set_host(host: Host, change: SetHost, request: Request) -> Response:
    """Change a host's delay or concurrency, at once and for all workers."""
    changes: dict[str, Any] = change.model_dump(include={"delay", "concurrency"}, exclude_unset=True)
    if change.reset:
        changes = {"delay": None, "concurrency": None, "learned_delay": None, **changes}
    return await _update(server_of(request), host, HostUpdate(**changes))


@router.post("/{host}/block", response_model=HostList, responses=responses(401, 409, 422, 503))
async def block(host: Host, request: Request, how: BlockHost | None = None) -> Response:
    """Fetch nothing from a host for a while. Its requests wait. A longer block stays."""
    how = how or BlockHost()
    return await _update(server_of(request), host, HostUpdate(block_for=how.seconds, block_reason=how.reason))


@router.post("/{host}/unblock", response_model=HostList, responses=responses(401, 409, 422, 503))
async def unblock(host: Host, request: Request) -> Response:
    """End the block of a host, also one that its Retry-After asked for."""
    return await _update(server_of(request), host, HostUpdate(block_for=None))


async def _update(server: Server, text: str, update: HostUpdate) -> Response:
    host = host_name(text)
    if host == "*" and update.block_for is not msgspec.UNSET:
        raise ConfigError("'*' is the default of delays and concurrency; pause a run to stop all of it")
    runs = await server.store.list_runs()
    if not runs:
        raise ProblemError(409, "no run", "there is no run yet whose hosts could be changed")
    frontier = await server.store.frontier(runs[0].run_id, run_options(runs[0], server.config))
    await frontier.update_host(host, update)
    return await _hosts(server, _ALL, host)


async def _hosts(server: Server, limit: int, only: str = "*") -> Response:
    runs = [run for run in await server.store.list_runs() if run.state not in OVER]
    found = await hosts_of(server.store, runs, server.config, limit)
    shown = [state for state in found if only in (state.host, "*")]
    return answer({"hosts": shown})
