"""`/api/crawl`: batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from shoal.batch.session import OVER, Session
from shoal.batch.settings import Webhook
from shoal.http import Request as Page
from shoal.server.responses import answer
from shoal.server.bodies import BoundedRoute
from shoal.server.errors import ProblemError, responses
from shoal.server.schemas.batches import (
    BatchAnswer,
    BatchRequest,
    DistributedStatus,
    SessionPage,
    SessionStarted,
    SessionState,
)
from shoal.server.schemas.runs import PRINTABLE
from shoal.server.state import Server, server_of

router = APIRouter(prefix="/api/crawl", tags=["crawl"], route_class=BoundedRoute)

_ALIVE_EVERY = 15.0  # seconds between signs of life in a stream

_EVENTS = {
    "schema": {  # of one event
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": "Sent back as Last-Event-ID by who connects again."},
            "event": {"enum": ["result", "done"]},
            "data": {"type": "string", "description": "JSON: a result, or the session and its state."},
        },
        "required": ["id", "event", "data"],
    },
    "example": 'id: 7\nevent: result\ndata: {"depth": 0}\n\nid: 7\nevent: done\ndata: {"state": "finished"}\n\n',
}

SessionId = Annotated[str, Path(max_length=100, pattern=PRINTABLE, description="The session_id of a batch.")]


@router.post(
    "/batch",
    response_model=BatchAnswer,
    responses={202: {"model": SessionStarted}, **responses(401, 413, 422, 429, 503)},
    summary="Crawl a batch of URLs",
)
async def crawl_batch(batch: BatchRequest, request: Request) -> Response:
    """Send URLs, get content. At the time-out the answer has what is there, the rest is `pending`, and the work goes
    on: the session has it later."""
    server = server_of(request)
    desk, options = server.local, batch.options
    if batch.distributed:
        desk, options = await server.remote.desk(), server.remote.with_defaults(options)
    session = await desk.take(
        batch.urls, options, caller=request.state.caller, address=request.state.address,
        webhook=_webhook(server, batch),
    )  # fmt: skip
    if not batch.wait:
        started = {
            "session_id": session.id,
            "state": "running",
            "distributed": batch.distributed,
            "status_url": f"/api/crawl/{session.id}",
            "stream_url": f"/api/crawl/{session.id}/stream",
        }
        return answer(started, 202, {"Location": f"/api/crawl/{session.id}"})
    await session.wait(batch.timeout)
    found = await session.results(server.config.serve.max_answer_bytes)
    return answer(
        {
            "session_id": session.id,
            "state": await session.state(),
            "results": found.results,
            "stats": found.stats,
            "distributed": batch.distributed,
        }
    )


@router.get("/distributed/status", response_model=DistributedStatus, responses=responses(401))
async def distributed_status(request: Request) -> Response:
    """Whether batches can be given to Celery workers, or why not."""
    return answer(await server_of(request).remote.status())


@router.get("/{session_id}", response_model=SessionPage, responses=responses(401, 404, 422, 503))
async def read_session(
    session_id: SessionId,
    request: Request,
    after: Annotated[int, Query(ge=0, le=10**13, description="`next` of the page before.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """How far a batch is, and its results a page at a time, in the order in which they came in. A page ends early where
    it would be too large."""
    session = await _find(request, session_id)
    state = await session.state()
    page = await session.read(after, limit, server_of(request).config.serve.max_answer_bytes)
    return answer(
        {
            "session_id": session.id,
            "state": state,
            "distributed": session.settings.distributed,
            "progress": await session.progress(),
            "results": [result for _, result in page],
            "next": page[-1][0] if page else after,
        }
    )


@router.delete("/{session_id}", response_model=SessionState, responses=responses(401, 404, 422, 503))
async def cancel_session(session_id: SessionId, request: Request) -> Response:
    """Fetch nothing more of a batch. What is there can still be read."""
    session = await _find(request, session_id)
    server = server_of(request)
    desk = await server.remote.desk() if session.settings.distributed else server.local
    await desk.cancel(session)
    return answer({"session_id": session.id, "state": await session.state()})


@router.get(
    "/{session_id}/stream",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": _EVENTS}},
        204: {"description": "There is nothing behind Last-Event-ID, and nothing more will come."},
        **responses(401, 404, 422, 503),
    },
)
async def stream_session(
    session_id: SessionId,
    request: Request,
    after: Annotated[int, Query(ge=0, le=10**13)] = 0,
    last_event_id: Annotated[str | None, Header(description="Sent by browsers that connect again.")] = None,
) -> Response:
    """Results as they come, as server-sent events: `result` for each, `done` at the end. Browsers connect again after
    that, and are told by 204 not to."""
    session = await _find(request, session_id)
    if last_event_id is not None and last_event_id.isdecimal() and len(last_event_id) < 16:
        after = int(last_event_id)
        if await session.state() in OVER and not await session.read(after, 1, 0):
            return Response(status_code=204)
    return StreamingResponse(_events(session, after), media_type="text/event-stream")


async def _events(session: Session, after: int) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    quiet_since = loop.time()
    async for found in session.follow(after):
        for number, result in found:
            after = number
            yield b"id: %d\nevent: result\ndata: %b\n\n" % (number, msgspec.json.encode(result))
        if found:
            quiet_since = loop.time()
        elif loop.time() - quiet_since > _ALIVE_EVERY:
            quiet_since = loop.time()
            yield b": alive\n\n"
    state = await session.state()
    if state in OVER:
        data = msgspec.json.encode({"session_id": session.id, "state": state})
        yield b"id: %d\nevent: done\ndata: %b\n\n" % (after, data)


async def _find(request: Request, session_id: str) -> Session:
    """Only the caller's own."""
    session = await server_of(request).find_session(session_id)
    if session is None or session.settings.caller != request.state.caller:
        raise ProblemError(404, "no such session", f"there is no session {session_id!r:.110}, or it has expired")
    return session


def _webhook(server: Server, batch: BatchRequest) -> Webhook | None:
    if batch.webhook is None:
        return None
    secret = batch.webhook.secret or server.config.serve.webhook_key
    if not secret:
        raise ProblemError(422, "bad request", "webhook.secret: give one; this server has no key of its own")
    return Webhook(Page(batch.webhook.url).url, secret)
