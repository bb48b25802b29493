"""Bodies of `/api/crawl`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field

from shoal.batch.limits import StrictModel
from shoal.batch.options import BatchOptions
from shoal.server.schemas.common import URL, with_examples

SessionStateName: TypeAlias = Literal["running", "paused", "finished", "cancelled"]

_SESSION = "1c5f0e7f3f3c4d0a9a1b2c3d4e5f6071"
_RESULT = {
    "status": "success", "url": URL, "final_url": URL, "http_status": 200, "title": "Bookshop",
    "content_type": "text/html", "content": "# Books", "worker_id": "crawl-1-4711-3fa9", "depth": 0,
    "fetched_at": 1767225600.5, "error": None,
}  # fmt: skip
_MISSING = {
    **_RESULT, "status": "failed", "url": URL + "nowhere", "final_url": URL + "nowhere", "http_status": 404,
    "title": None, "content_type": None, "content": None,
    "error": {"kind": "http 404", "message": "the server answered 404"},
}  # fmt: skip


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
        strict=True,
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


class ResultError(BaseModel):
    """Why a page could not be fetched. `kind` is a code for programs: `timeout`, `dns`, `http 404`, `robots`..."""

    kind: str
    message: str


class CapturedResponse(BaseModel):
    """A response that the page itself loaded."""

    url: str
    status: int
    content_type: str
    body: Annotated[str | None, Field(description="`null` if it is not text.")]


class Result(BaseModel):
    """The result for one URL."""

    model_config = with_examples(_RESULT, _MISSING)

    status: Literal["success", "failed", "pending", "cancelled"]
    url: Annotated[str, Field(description="The URL as you sent it.")]
    final_url: Annotated[str | None, Field(description="The URL after redirects.")]
    http_status: int | None
    title: str | None
    content_type: str | None
    content: Annotated[
        object, Field(description="A string, a list of links, or an object of fields. `null` if the page is not text.")
    ]
    also: Annotated[
        dict[str, object],
        Field(description="The page in further forms, by name. Only with the options `also` or `fields`."),
    ] = {}
    worker_id: str | None
    depth: int
    fetched_at: Annotated[float | None, Field(description="Unix time, in seconds.")]
    error: ResultError | None
    rendered: Annotated[bool, Field(description="A browser rendered the page. Only with `render`.")] = False
    screenshot: Annotated[str | None, Field(description="A PNG in Base64. Only with `render.screenshot`.")] = None
    pdf: Annotated[str | None, Field(description="In Base64. Only with `render.pdf`.")] = None
    captured: Annotated[
        list[CapturedResponse], Field(description="Responses that the page loaded. Only with `render.capture`.")
    ] = []
    truncated: Annotated[
        bool,
        Field(
            description="`content`, `also`, `screenshot`, `pdf` and `captured` were left out because the response "
            "would be too large."
        ),
    ] = False
    same_as: Annotated[
        int | None,
        Field(
            description="Index in `results` of the same URL, which you sent more than once. That result has the "
            "content, the title, the type, the final URL and the error's message; here they are left out."
        ),
    ] = None


class BatchStats(BaseModel):
    """Number of results by status."""

    total: int
    success: int
    failed: int
    pending: int
    cancelled: int
    workers_used: int


class BatchAnswer(BaseModel):
    """A batch with all of its results."""

    model_config = with_examples(
        {
            "session_id": _SESSION, "state": "finished", "results": [_RESULT, _MISSING],
            "stats": {"total": 2, "success": 1, "failed": 1, "pending": 0, "cancelled": 0, "workers_used": 1},
            "distributed": False,
        }
    )  # fmt: skip

    session_id: str
    state: SessionStateName
    results: list[Result]
    stats: BatchStats
    distributed: bool


class SessionStarted(BaseModel):
    """A batch that runs in the background."""

    model_config = with_examples(
        {
            "session_id": _SESSION, "state": "running", "distributed": False, "status_url": f"/api/crawl/{_SESSION}",
            "stream_url": f"/api/crawl/{_SESSION}/stream",
        }
    )  # fmt: skip

    session_id: str
    state: Literal["running"]
    distributed: bool
    status_url: str
    stream_url: str


class Progress(BaseModel):
    """How many pages of a batch are in each state."""

    total: int
    ready: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    results: int


class SessionPage(BaseModel):
    """One page of a batch's results, in the order in which they were fetched."""

    model_config = with_examples(
        {
            "session_id": _SESSION, "state": "running", "distributed": False,
            "progress": {"total": 3, "ready": 1, "waiting": 0, "in_flight": 1, "done": 1, "failed": 0, "results": 1},
            "results": [_RESULT], "next": 1,
        }
    )  # fmt: skip

    session_id: str
    state: SessionStateName
    distributed: bool
    progress: Progress
    results: list[Result]
    next: Annotated[int, Field(description="Pass it as `after` to get the next page.")]


class SessionState(BaseModel):
    """A batch that was cancelled."""

    model_config = with_examples({"session_id": _SESSION, "state": "cancelled"})

    session_id: str
    state: Annotated[SessionStateName, Field(description="`finished` if the batch had ended before.")]


class SessionEntry(BaseModel):
    """A batch in a list."""

    session_id: str
    state: SessionStateName
    distributed: bool
    caller: Annotated[str, Field(description="Name of the token that it belongs to; empty for the main token.")]
    created_at: Annotated[float, Field(description="Unix time, in seconds.")]
    ended_at: float | None
    urls: Annotated[int, Field(description="Number of URLs that were sent.")]
    first_url: str
    progress: Progress


class SessionList(BaseModel):
    """Batches, newest first."""

    model_config = with_examples(
        {
            "sessions": [
                {
                    "session_id": _SESSION, "state": "running", "distributed": False, "caller": "",
                    "created_at": 1767225600.5, "ended_at": None, "urls": 3, "first_url": URL,
                    "progress": {
                        "total": 3, "ready": 1, "waiting": 0, "in_flight": 1, "done": 1, "failed": 0, "results": 1,
                    },
                }
            ]
        }
    )  # fmt: skip

    sessions: list[SessionEntry]


class CeleryMember(BaseModel):
    """A Celery worker."""

    name: str
    pid: int
    answers: Annotated[bool, Field(description="It replied to the last poll.")]


class DistributedStatus(BaseModel):
    """Whether `distributed: true` works at the moment."""

    model_config = with_examples(
        {
            "distributed_available": True, "message": "Redis connected", "workers": 1,
            "members": [{"name": "celery@crawl-1", "pid": 4711, "answers": True}],
        }
    )  # fmt: skip

    distributed_available: bool
    message: str
    workers: Annotated[
        int | None, Field(description="Number of workers that respond; `null` if the broker cannot be reached.")
    ] = None
    members: Annotated[list[CeleryMember], Field(description="Workers that responded within the last seconds.")] = []
