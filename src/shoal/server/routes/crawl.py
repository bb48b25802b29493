"""`/api/crawl`: batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from shoal.batch.results import SessionResults
from shoal.batch.session import OVER, Session
from shoal.batch.settings import Webhook
from shoal.http import Request as Page
from shoal.server.auth import allows
from shoal.server.bodies import BoundedRoute
from shoal.server.budgets import caller_of
from shoal.server.errors import ProblemError, problems
from shoal.server.responses import EntryEncoder, LimitedStream, Piece, json_response
from shoal.server.schemas.batches import (
    BatchAnswer,
    BatchRequest,
    DistributedStatus,
    SessionList,
    SessionPage,
    SessionStarted,
    SessionState,
)
from shoal.server.schemas.common import PRINTABLE
from shoal.server.state import Server, server_of

router = APIRouter(prefix="/api/crawl", tags=["crawl"], route_class=BoundedRoute)

_KEEP_ALIVE_EVERY = 15.0  # seconds without a result after which a stream sends a comment

_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not buffer the stream

_EVENTS = {
    "schema": {  # of one event
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": "Send it as Last-Event-ID when you reconnect."},
            "event": {"enum": ["result", "done"]},
            "data": {"type": "string", "description": "JSON: a result, or the session's ID and state."},
        },
        "required": ["id", "event", "data"],
    },
    "example": 'id: 7\nevent: result\ndata: {"depth": 0}\n\nid: 7\nevent: done\ndata: {"state": "finished"}\n\n',
}

SessionId = Annotated[str, Path(max_length=100, pattern=PRINTABLE, description="`session_id` of a batch.")]


@router.post(
    "/batch",
    response_model=BatchAnswer,
    responses={202: {"model": SessionStarted}, **problems(401, 413, 422, 429, 503)},
    summary="Crawl a batch of URLs",
)
async def crawl_batch(batch: BatchRequest, request: Request) -> Response:
    """Fetch URLs and return their content. If the batch takes longer than `timeout`, the response has the results so
    far, and the other URLs are `pending`. The crawl continues: read the session to get the rest."""
    server = server_of(request)
    service, options = server.local, batch.options
    if batch.distributed:
        service, options = await server.remote.service(), server.remote.with_defaults(options)
    if options.render is not None:
        await server.check_rendering(distributed=batch.distributed)
    session = await service.create(
        batch.urls, options, caller=request.state.caller, address=request.state.address,
        webhook=_make_webhook(server, batch),
    )  # fmt: skip
    if not batch.wait:
        started = {
            "session_id": session.id,
            "state": "running",
            "distributed": batch.distributed,
            "status_url": f"/api/crawl/{session.id}",
            "stream_url": f"/api/crawl/{session.id}/stream",
        }
        return json_response(started, 202, {"Location": f"/api/crawl/{session.id}"})
    await session.wait(batch.timeout)
    encoder = EntryEncoder(server.answers, caller_of(request), server.config.serve.max_answer_bytes)
    found = await SessionResults(session).read_all()
    begin = {"session_id": session.id, "state": await session.state()}
    end = {"stats": found.stats, "distributed": session.settings.distributed}
    return await encoder.respond(encoder.elements(begin, "results", found.portions, lambda: end))


@router.get("", response_model=SessionList, responses=problems(401, 422, 503))
async def list_sessions(
    request: Request, limit: Annotated[int, Query(ge=1, le=100, description="Number of newest batches.")] = 20
) -> Response:
    """Your batches with their progress, newest first. The role `admin` sees those of all callers."""
    caller = None if allows(request, "admin") else request.state.caller
    return json_response({"sessions": await server_of(request).list_sessions(caller, limit)})


@router.get("/distributed/status", response_model=DistributedStatus, responses=problems(401))
async def distributed_status(request: Request) -> Response:
    """Whether batches can run on Celery workers, and if not, why."""
    return json_response(await server_of(request).remote.status())


@router.get("/{session_id}", response_model=SessionPage, responses=problems(401, 404, 422, 429, 503))
async def read_session(
    session_id: SessionId,
    request: Request,
    after: Annotated[int, Query(ge=0, le=10**13, description="`next` of the previous page.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The progress of a batch and one page of its results, in the order in which they were fetched. A page may have
    fewer than `limit` results, to bound its size."""
    session, server = await find_session(request, session_id), server_of(request)
    begin = {
        "session_id": session.id, "state": await session.state(), "distributed": session.settings.distributed,
        "progress": await session.progress(),
    }  # fmt: skip
    encoder = EntryEncoder(server.answers, caller_of(request), server.config.serve.max_answer_bytes)
    page = encoder.page(begin, "results", SessionResults(session).portions(after, limit), limit, after)
    return await encoder.respond(page)


@router.delete("/{session_id}", response_model=SessionState, responses=problems(401, 404, 422, 503))
async def cancel_session(session_id: SessionId, request: Request) -> Response:
    """Cancel a batch: fetch no more pages. You can still read its results."""
    session = await find_session(request, session_id)
    server = server_of(request)
    service = await server.remote.service() if session.settings.distributed else server.local
    await service.cancel(session)
    return json_response({"session_id": session.id, "state": await session.state()})


@router.get(
    "/{session_id}/stream",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": _EVENTS}},
        204: {"description": "The batch has ended and there are no results after Last-Event-ID."},
        **problems(401, 404, 422, 429, 503),
    },
)
async def stream_session(
    session_id: SessionId,
    request: Request,
    after: Annotated[int, Query(ge=0, le=10**13)] = 0,
    last_event_id: Annotated[str | None, Header(description="Browsers send it when they reconnect.")] = None,
) -> Response:
    """Stream results as server-sent events: `result` for each result, then `done`. Browsers reconnect after `done`;
    they get 204, which tells them to stop."""
    session = await find_session(request, session_id)
    if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < 16:
        after = int(last_event_id)
        if await session.state() in OVER and not await SessionResults(session).read(after, 1, 0):
            return Response(status_code=204)
    server, caller = server_of(request), caller_of(request)
    events = _stream_events(session, after, EntryEncoder(server.answers, caller))
    return LimitedStream(events, server.streams, caller, media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _stream_events(session: Session, after: int, encoder: EntryEncoder) -> AsyncGenerator[Piece]:
    loop = asyncio.get_running_loop()
    quiet_since = loop.time()
    async for portion in SessionResults(session).follow(after):
        for entry in portion:
            after = entry.number
            async for piece in encoder.alone(entry, b"id: %d\nevent: result\ndata: " % after, b"\n\n"):
                yield piece
        if portion:
            quiet_since = loop.time()
        elif loop.time() - quiet_since > _KEEP_ALIVE_EVERY:
            quiet_since = loop.time()
            yield b": alive\n\n"
    state = await session.state()
    if state in OVER:
        data = msgspec.json.encode({"session_id": session.id, "state": state})
        yield b"id: %d\nevent: done\ndata: %b\n\n" % (after, data)


async def find_session(request: Request, session_id: str) -> Session:
    """A session of the caller, or of anyone for an admin. Sessions of other callers are 404 too."""
    session = await server_of(request).find_session(session_id)
    if session is None or not (session.settings.caller == request.state.caller or allows(request, "admin")):
        hint = "; to send a batch, use POST" if session_id == "batch" else ""
        raise ProblemError(404, "no such session", f"session {session_id!r:.110} does not exist or has expired{hint}")
    return session


def _make_webhook(server: Server, batch: BatchRequest) -> Webhook | None:
    if batch.webhook is None:
        return None
    secret = batch.webhook.secret or server.config.serve.webhook_key
    if not secret:
        message = "webhook.secret: required, because the server has no key of its own (serve.webhook_key)"
        raise ProblemError(422, "bad request", message)
    return Webhook(Page(batch.webhook.url).url, secret)
