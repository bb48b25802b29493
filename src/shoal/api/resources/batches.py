"""`/api/crawl`: batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Literal, TypeAlias

import msgspec
from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from msgspec import Struct
from pydantic import Field

from shoal.api.batch.options import BatchOptions, StrictModel
from shoal.api.batch.results import SessionResults
from shoal.api.batch.service import SessionSummary
from shoal.api.batch.session import OVER, Progress, Session, Webhook
from shoal.api.celery.watch import CeleryWorker
from shoal.api.resources.common import PRINTABLE, URL, with_examples
from shoal.api.server.answers import answer
from shoal.api.server.auth import allows
from shoal.api.server.bodies import BoundedRoute
from shoal.api.server.budgets import caller_of
from shoal.api.server.errors import ProblemError, problems
from shoal.api.server.responses import EntryEncoder, LimitedStream, Piece, json_response
from shoal.api.server.state import Server, server_of
from shoal.http import Request as Page

SessionStateName: TypeAlias = Literal["running", "paused", "finished", "cancelled"]


class WebhookRequest(StrictModel):
    """Where to send a message when the batch ends."""

    url: Annotated[str, Field(max_length=2083, examples=["https://example.com/done"])]
    secret: Annotated[
        str | None,
        Field(min_length=8, max_length=200, description="Key that signs the message. Default: the server's key."),
    ] = None


class BatchRequest(StrictModel):
    """URLs to crawl, and how."""

    model_config = with_examples(
        {"urls": [URL, URL + "nowhere"], "options": {"format": "markdown"}, "timeout": 60},
        {
            "urls": [URL],
            "options": {"format": "fields", "fields": {"heading": "h1", "prices": {"css": "p.price", "all": True}}},
        },
        {
            "urls": [URL],
            "options": {"render": {"wait_for": "#price", "screenshot": "full"}},
            "wait": False,
            "webhook": {"url": "https://example.com/done", "secret": "a long secret"},
        },
    )

    urls: Annotated[
        list[Annotated[str, Field(max_length=8192)]], Field(min_length=1, fail_fast=True, description="URLs to crawl.")
    ]
    distributed: Annotated[bool, Field(description="Crawl on Celery workers instead of in this server.")] = False
    options: BatchOptions = BatchOptions()
    timeout: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="Seconds to wait. URLs without a result by then are `pending`; the crawl continues.",
        ),
    ] = 300.0
    wait: Annotated[bool, Field(description="`false` responds immediately with 202 and the session ID.")] = True
    webhook: WebhookRequest | None = None


class ResultError(Struct, frozen=True, kw_only=True):
    """Why a page could not be fetched. `kind` is a code for programs: `timeout`, `dns`, `http 404`, `robots`..."""

    kind: str
    message: str


class CapturedResponse(Struct, frozen=True, kw_only=True):
    """A response that the page itself loaded."""

    url: str
    status: int
    content_type: str
    body: str | None
    """`null` if it is not text."""


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result for one URL."""

    status: Literal["success", "failed", "pending", "cancelled"]
    url: str
    """The URL as you sent it."""
    final_url: str | None
    """The URL after redirects."""
    http_status: int | None
    title: str | None
    content_type: str | None
    content: object
    """A string, a list of links, or an object of fields. `null` if the page is not text."""
    also: dict[str, object] = {}
    """The page in further forms, by name. Only with the options `also` or `fields`."""
    worker_id: str | None
    depth: int
    fetched_at: float | None
    """Unix time, in seconds."""
    error: ResultError | None
    rendered: bool = False
    """A browser rendered the page. Only with `render`."""
    screenshot: str | None = None
    """A PNG in Base64. Only with `render.screenshot`."""
    pdf: str | None = None
    """In Base64. Only with `render.pdf`."""
    captured: list[CapturedResponse] = []
    """Responses that the page loaded. Only with `render.capture`."""
    truncated: bool = False
    """`content`, `also`, `screenshot`, `pdf` and `captured` were left out because the response would be too large."""
    same_as: int | None = None
    """Index in `results` of the same URL, which you sent more than once. That result has the content, the title, the
    type, the final URL and the error's message; here they are left out."""


class BatchStats(Struct, frozen=True, kw_only=True):
    """Number of results by status."""

    total: int
    success: int
    failed: int
    pending: int
    cancelled: int
    workers_used: int


class BatchAnswer(Struct, frozen=True, kw_only=True):
    """A batch with all of its results."""

    session_id: str
    state: SessionStateName
    results: list[Result]
    stats: BatchStats
    distributed: bool


class SessionStarted(Struct, frozen=True, kw_only=True):
    """A batch that runs in the background."""

    session_id: str
    state: Literal["running"]
    distributed: bool
    status_url: str
    stream_url: str


class SessionPage(Struct, frozen=True, kw_only=True):
    """One page of a batch's results, in the order in which they were fetched."""

    session_id: str
    state: SessionStateName
    distributed: bool
    progress: Progress
    results: list[Result]
    next: int
    """Pass it as `after` to get the next page."""


class SessionState(Struct, frozen=True, kw_only=True):
    """A batch that was cancelled."""

    session_id: str
    state: SessionStateName
    """`finished` if the batch had ended before."""


class SessionList(Struct, frozen=True, kw_only=True):
    """Batches, newest first."""

    sessions: list[SessionSummary]


class DistributedStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether `distributed: true` works at the moment."""

    distributed_available: bool
    message: str
    workers: int | None = None
    """Number of workers that respond; `null` if the broker cannot be reached."""
    members: list[CeleryWorker] = []
    """Workers that responded within the last seconds."""


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
    response_model=answer(BatchAnswer),
    responses={202: {"model": answer(SessionStarted)}, **problems(401, 413, 422, 429, 503)},
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
        batch.urls,
        options,
        caller=request.state.caller,
        address=request.state.address,
        webhook=_make_webhook(server, batch),
    )
    if not batch.wait:
        location = f"/api/crawl/{session.id}"
        started = SessionStarted(
            session_id=session.id,
            state="running",
            distributed=batch.distributed,
            status_url=location,
            stream_url=f"{location}/stream",
        )
        return json_response(started, 202, {"Location": location})
    await session.wait(batch.timeout)
    encoder = EntryEncoder(server.answers, caller_of(request), server.config.serve.max_answer_bytes)
    results = await SessionResults(session).read_all()
    begin = {"session_id": session.id, "state": await session.state()}
    end = {"stats": results.stats, "distributed": session.settings.distributed}
    return await encoder.respond(encoder.elements(begin, "results", results.portions, lambda: end))


@router.get("", response_model=answer(SessionList), responses=problems(401, 422, 503))
async def list_sessions(
    request: Request, limit: Annotated[int, Query(ge=1, le=100, description="Number of newest batches.")] = 20
) -> Response:
    """Your batches with their progress, newest first. The role `admin` sees those of all callers."""
    caller = None if allows(request, "admin") else request.state.caller
    return json_response(SessionList(sessions=await server_of(request).list_sessions(caller, limit)))


@router.get("/distributed/status", response_model=answer(DistributedStatus), responses=problems(401))
async def distributed_status(request: Request) -> Response:
    """Whether batches can run on Celery workers, and if not, why."""
    return json_response(await server_of(request).remote.status())


@router.get("/{session_id}", response_model=answer(SessionPage), responses=problems(401, 404, 422, 429, 503))
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
        "session_id": session.id,
        "state": await session.state(),
        "distributed": session.settings.distributed,
        "progress": await session.progress(),
    }
    encoder = EntryEncoder(server.answers, caller_of(request), server.config.serve.max_answer_bytes)
    page = encoder.page(begin, "results", SessionResults(session).portions(after, limit), limit, after)
    return await encoder.respond(page)


@router.delete("/{session_id}", response_model=answer(SessionState), responses=problems(401, 404, 422, 503))
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
