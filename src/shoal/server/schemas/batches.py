"""What comes in and goes out, as the API's description shows it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from shoal.batch.limits import StrictModel
from shoal.batch.options import BatchOptions

SessionStateName: TypeAlias = Literal["running", "paused", "finished", "cancelled"]

_URL = "http://127.0.0.1:8080/"
_SESSION = "1c5f0e7f3f3c4d0a9a1b2c3d4e5f6071"
_RESULT = {
    "status": "success", "url": _URL, "final_url": _URL, "http_status": 200, "title": "Bookshop",
    "content_type": "text/html", "content": "# Books", "worker_id": "crawl-1-4711-3fa9", "depth": 0,
    "fetched_at": 1767225600.5, "error": None,
}  # fmt: skip
_MISSING = {
    **_RESULT, "status": "failed", "url": _URL + "nowhere", "final_url": _URL + "nowhere", "http_status": 404,
    "title": None, "content_type": None, "content": None,
    "error": {"kind": "http 404", "message": "the server answered 404"},
}  # fmt: skip


def _example(*examples: Any, strict: bool = False) -> ConfigDict:
    return ConfigDict(extra="forbid" if strict else None, json_schema_extra={"examples": list(examples)})


class WebhookRequest(StrictModel):
    """Where to send a message when the batch is done."""

    url: Annotated[str, Field(max_length=2083, examples=["https://example.com/done"])]
    secret: Annotated[
        str | None, Field(min_length=8, max_length=200, description="Signs the message; else the server's key does.")
    ] = None


class BatchRequest(StrictModel):
    """URLs to crawl, and how."""

    model_config = _example(
        {"urls": [_URL, _URL + "nowhere"], "options": {"format": "markdown"}, "timeout": 60},
        {
            "urls": [_URL],
            "options": {"format": "fields", "fields": {"heading": "h1", "prices": {"css": "p.price", "all": True}}},
        },
        {"urls": [_URL], "wait": False, "webhook": {"url": "https://example.com/done", "secret": "a long secret"}},
        strict=True,
    )

    urls: Annotated[
        list[Annotated[str, Field(max_length=8192)]], Field(min_length=1, fail_fast=True, description="What to crawl.")
    ]
    distributed: Annotated[bool, Field(description="On Celery workers instead of this machine.")] = False
    options: BatchOptions = BatchOptions()
    timeout: Annotated[
        float, Field(gt=0, le=3600, description="Seconds to wait. Then the rest is `pending`, and goes on.")
    ] = 300.0
    wait: Annotated[bool, Field(description="False answers at once with 202 and the session.")] = True
    webhook: WebhookRequest | None = None


class ResultError(BaseModel):
    """Why a page could not be had. `kind` is a short word such as `timeout`, `dns`, `http 404`, `robots`, `address`."""

    kind: str
    message: str


class Result(BaseModel):
    """What became of one URL."""

    model_config = _example(_RESULT, _MISSING)

    status: Literal["success", "failed", "pending", "cancelled"]
    url: Annotated[str, Field(description="As it was given.")]
    final_url: Annotated[str | None, Field(description="After redirects.")]
    http_status: int | None
    title: str | None
    content_type: str | None
    content: Annotated[Any, Field(description="Text, or a list of links, or the fields; none for what is no text.")]
    worker_id: str | None
    depth: int
    fetched_at: Annotated[float | None, Field(description="Seconds since 1970.")]
    error: ResultError | None
    truncated: Annotated[bool, Field(description="The content was left out: the answer would be too large.")] = False


class BatchStats(BaseModel):
    """The figures of a batch."""

    total: int
    success: int
    failed: int
    pending: int
    cancelled: int
    workers_used: int


class BatchAnswer(BaseModel):
    """A batch, with everything that is there."""

    model_config = _example(
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
    """A batch that goes on by itself."""

    model_config = _example(
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
    """How far a batch is."""

    total: int
    ready: int
    waiting: int
    in_work: int
    done: int
    failed: int
    results: int


class SessionPage(BaseModel):
    """Some of a batch's results, in the order in which they came in."""

    model_config = _example(
        {
            "session_id": _SESSION, "state": "running", "distributed": False,
            "progress": {"total": 3, "ready": 1, "waiting": 0, "in_work": 1, "done": 1, "failed": 0, "results": 1},
            "results": [_RESULT], "next": 1,
        }
    )  # fmt: skip

    session_id: str
    state: SessionStateName
    distributed: bool
    progress: Progress
    results: list[Result]
    next: Annotated[int, Field(description="Give it as `after` to get what comes behind.")]


class SessionState(BaseModel):
    """A batch that was told to end."""

    model_config = _example({"session_id": _SESSION, "state": "cancelled"})

    session_id: str
    state: Annotated[SessionStateName, Field(description="`finished` if it was that already.")]


class DistributedStatus(BaseModel):
    """Whether `distributed: true` would work now."""

    model_config = _example({"distributed_available": True, "message": "Redis connected", "workers": 2})

    distributed_available: bool
    message: str
    workers: Annotated[int | None, Field(description="How many answered; none if nobody was asked.")] = None
