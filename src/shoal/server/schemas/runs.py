"""Bodies of `/api/runs`."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field, field_validator

from shoal.batch.limits import StrictModel, at_most
from shoal.server.schemas.common import RUN_ID, URL, Scalar, Word, with_examples
from shoal.spider import Spider

RunStateName: TypeAlias = Literal["queued", "running", "paused", "finished", "cancelled"]

_STATS = {
    "pushed": 120, "ready": 60, "waiting": 0, "in_flight": 20, "done": 39, "failed": 1, "left": 80, "duplicates": 310,
    "items": 39, "seeding": False,
}  # fmt: skip
_PAGE = {"run_id": RUN_ID, "spider": "books", "state": "running", "created_at": 1771156800.0, "stats": _STATS}


class StartRun(StrictModel):
    """Starts a spider from the registry (`[spiders]` in the server's shoal.toml)."""

    model_config = with_examples(
        {"spider": "Books", "arguments": {"category": "travel"}},
        {"spider": "Books", "urls": [URL], "mode": "distributed", "new_run": True},
        strict=True,
    )

    spider: Annotated[str, Field(min_length=1, max_length=200, description="Name of the spider in the registry.")]
    urls: Annotated[
        Annotated[list[Annotated[str, Field(max_length=8192)]], Field(fail_fast=True)] | None,
        Field(min_length=1, description="URLs to start with, instead of the spider's start requests."),
    ] = None
    arguments: Annotated[
        dict[Word, Scalar],
        Field(max_length=100, description="Constructor arguments of the spider. They override those in the registry."),
        at_most(100),
    ] = {}
    mode: Annotated[
        Literal["single", "distributed"] | None,
        Field(description="`single` runs in this server, `distributed` on workers. Default: the registry's."),
    ] = None
    new_run: Annotated[
        bool, Field(description="Start a new run even if an unfinished run of the same request exists.")
    ] = False

    @field_validator("arguments")
    @classmethod
    def _check_names(cls, arguments: dict[str, object]) -> dict[str, object]:
        for name in arguments:
            if name.startswith("_") or hasattr(Spider, name):
                raise ValueError(f"{name!r:.80} is an attribute of Spider; it cannot be an argument")
        return arguments


class RunStarted(BaseModel):
    """A run that was started or resumed."""

    model_config = with_examples(
        {
            "run_id": RUN_ID, "status": "queued", "spider": "books", "mode": "distributed", "enqueued": 1,
            "duplicates": 0, "out_of_scope": 0, "unreadable": 0,
            "worker_command": f"shoal worker Books --run-id {RUN_ID} --batch-size 50",
        }
    )  # fmt: skip

    run_id: str
    status: RunStateName
    spider: Annotated[str, Field(description="`name` of the spider class.")]
    mode: Literal["single", "distributed"]
    enqueued: Annotated[
        int | None, Field(description="Start requests pushed. `null` if they are pushed while the run works.")
    ]
    duplicates: int | None
    out_of_scope: int | None
    unreadable: Annotated[int | None, Field(description="Start URLs that are not valid URLs.")]
    worker_command: Annotated[str | None, Field(description="Command that starts a worker.")]


class RequestCounts(BaseModel):
    """Requests of a run by state, and its items."""

    pushed: int
    ready: int
    waiting: int
    in_flight: int
    done: int
    failed: int
    left: Annotated[int, Field(description="Ready, waiting and in flight, and links that are not queued yet.")]
    duplicates: int
    items: int


class RunStats(RequestCounts):
    """Request counts of a run: pushed = ready + waiting + in_flight + done + failed."""

    model_config = with_examples(_STATS)

    seeding: Annotated[bool, Field(description="Not all start requests are pushed yet.")]


class RunOutcome(BaseModel):
    """How a run ended."""

    verdict: Annotated[Literal["good", "degraded", "failed"], Field(description="See the page about outcomes.")]
    accounted: Annotated[str, Field(description="What became of its pages.")]
    reasons: Annotated[list[str], Field(description="Why the verdict is not better.")]
    headline: str


class LimitModel(BaseModel):
    """The limit at which a run stopped before it had fetched everything."""

    setting: Annotated[str, Field(description="Such as `scope.max_pages`. Empty if the spider called `stop`.")]
    value: int | float
    left: Annotated[int, Field(description="Requests in the queue when it stopped.")]
    at: Annotated[float, Field(description="Unix time, in seconds.")]
    reason: Annotated[str, Field(description="What the spider passed to `stop`.")]
    message: str


class RunPage(BaseModel):
    """A run and its current counts."""

    model_config = with_examples({**_PAGE, "outcome": None, "error": "", "limit": None})

    run_id: str
    spider: str
    state: RunStateName
    created_at: Annotated[float, Field(description="Unix time, in seconds.")]
    stats: RunStats
    outcome: Annotated[RunOutcome | None, Field(description="`null` until the run is finished.")] = None
    error: Annotated[str, Field(description="Why the run failed in this server, or an empty string.")] = ""
    limit: Annotated[
        LimitModel | None, Field(description="At which limit it stopped. `null` if it is not finished, or complete.")
    ] = None


class RunList(BaseModel):
    """Runs, newest first."""

    model_config = with_examples({"runs": [{**_PAGE, "outcome": None, "error": ""}], "total": 1})

    runs: list[RunPage]
    total: Annotated[int, Field(description="Number of all runs, also those beyond `limit`.")]


class RetryFailed(StrictModel):
    """Which failed requests to retry."""

    model_config = with_examples({"kinds": ["http 500", "timeout"]}, {"url": "*/products/*"}, {}, strict=True)

    kinds: Annotated[
        list[Word] | None,
        Field(min_length=1, max_length=100, description="Error kinds to retry (default: all but `robots`, `scope`)."),
        at_most(100),
    ] = None
    host: Annotated[str | None, Field(min_length=1, max_length=260, description="Only requests of this host.")] = None
    url: Annotated[
        str | None,
        Field(min_length=1, max_length=1000, description="Only URLs that match: `*` is any text, `?` any character."),
    ] = None


class RetryUrl(StrictModel):
    """The failed URL to retry."""

    model_config = with_examples({"url": URL}, strict=True)

    url: Annotated[str, Field(min_length=1, max_length=8192, description="The URL as it was found, or normalized.")]


class Retried(BaseModel):
    """How many failed requests are ready again, and what their run needs."""

    model_config = with_examples(
        {
            "run_id": RUN_ID, "retried": 3, "reopened": True, "state": "running", "workers": 2,
            "message": f"3 requests are queued again. Run {RUN_ID} is running again: 2 processes work on it",
        }
    )  # fmt: skip

    run_id: str
    retried: int
    reopened: Annotated[bool, Field(description="The run was finished, and is running again.")]
    state: RunStateName
    workers: Annotated[int, Field(description="Processes that work on the run now.")]
    message: Annotated[str, Field(description="What happened, and what continues the run.")]


class Removed(BaseModel):
    """A run that was deleted."""

    model_config = with_examples({"run_id": RUN_ID, "removed": True})

    run_id: str
    removed: bool


class LoggedItemModel(BaseModel):
    """An item of the item log. Retries of its page do not change `key`."""

    seq: int
    key: str
    type: Annotated[str, Field(description="Class name of the item; `item` for a dict.")]
    item: dict[str, object]


class ItemPage(BaseModel):
    """One page of a run's items, in log order."""

    model_config = with_examples(
        {
            "run_id": RUN_ID, "next": 1,
            "items": [
                {
                    "seq": 1, "key": "0f343b0931126a20f133d67c2b018a3b-0", "type": "item",
                    "item": {"title": "A book", "price": "9.99"},
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    items: list[LoggedItemModel]
    next: Annotated[int, Field(description="Pass it as `after` to get the next page.")]


class FaultModel(BaseModel):
    """Something that is missing in the store, or contradicts the rest. See `shoal audit`."""

    kind: str
    count: int
    what: str
    example: Annotated[str, Field(description="One of the URLs, hosts or roles that it is about, or empty.")]
    repairable: Annotated[bool, Field(description="Whether `shoal audit --repair` restores it.")]


class Ledger(RunStats):
    """Request counts, recounted from the requests themselves."""

    model_config = with_examples(
        {
            **_STATS, "run_id": RUN_ID, "balanced": True, "failed_kinds": {"http 500": 1}, "faults": [],
        }
    )  # fmt: skip

    run_id: str
    failed_kinds: dict[str, int]
    balanced: Annotated[
        bool, Field(description="Whether pushed = ready + waiting + in_flight + done + failed, without faults.")
    ]
    faults: Annotated[list[FaultModel], Field(description="What is missing in the store, or contradicts the rest.")]


class EventModel(BaseModel):
    """An event in the life of a request."""

    at: Annotated[float, Field(description="Unix time, in seconds.")]
    what: Annotated[str, Field(description="What happened, or the state it has now.")]
    detail: str
    worker: Annotated[str, Field(description="The worker that held the lease; empty if none did.")]


_HISTORY = {
    "url": f"{URL}a", "state": "done", "depth": 1, "priority": 0.0, "attempts": 1, "status": 200, "items": 1,
    "parent": URL, "reason": "", "kind": "", "worker": "crawler-1",
    "events": [
        {"at": 1771156800.0, "what": "attempt 1 failed", "detail": "HTTP 503; waits 2 s", "worker": "crawler-2"},
        {"at": 1771156802.0, "what": "done", "detail": "", "worker": "crawler-1"},
    ],
}  # fmt: skip


class HistoryModel(BaseModel):
    """The history of a URL."""

    model_config = with_examples(_HISTORY)

    url: str
    state: Literal["ready", "waiting", "in flight", "done", "failed"]
    depth: int
    priority: float
    attempts: int
    status: Annotated[int, Field(description="HTTP status of the last response; 0 if there was none.")]
    items: int
    parent: Annotated[str | None, Field(description="The page that links to it; `null` for a start request.")]
    reason: str
    kind: Annotated[str, Field(description="Kind of the failure; empty if it did not fail.")]
    events: list[EventModel]
    worker: Annotated[str, Field(description="The worker that holds its lease, or held the last one.")]


class HopModel(BaseModel):
    """One page of a chain of redirects."""

    url: str
    state: Annotated[str | None, Field(description="Of its request. `null` if the run does not have it.")]
    status: int
    kind: Annotated[str, Field(description="Kind of failure, if it failed.")]
    reason: str
    found_on: Annotated[
        str | None,
        Field(description="If the run had this page already: the page it was found on; empty for a start request."),
    ]


class UrlModel(HistoryModel):
    """The history of a URL, and what led to it."""

    model_config = with_examples(
        {
            **_HISTORY, "parents": [URL], "robots": "allowed", "first_items": ['{"title":"Dune"}'], "redirects": [],
            "outcome": "",
        }
    )  # fmt: skip

    parents: Annotated[
        list[str], Field(description="`parent`, the page that links to that one, and so on; at most 20.")
    ]
    robots: Annotated[str, Field(description="What the robots.txt of its host says about it, as last read.")]
    first_items: Annotated[
        list[str],
        Field(
            description="Its first items as JSON, at most 5. Long ones are cut. Empty if the item log no longer has "
            "them, or a short search does not find them."
        ),
    ]
    redirects: Annotated[
        list[HopModel],
        Field(description="The chain of redirects that it belongs to, from the first URL to the last. At most 25."),
    ]
    outcome: Annotated[str, Field(description="How that chain ended. Empty if there is none.")]


class FailedPage(BaseModel):
    """Failed requests: counts by error kind, and some of the requests."""

    model_config = with_examples(
        {
            "run_id": RUN_ID, "kinds": {"http 500": 1},
            "failed": [
                {
                    "url": f"{URL}b", "state": "failed", "depth": 1, "priority": 0.0, "attempts": 3, "status": 500,
                    "items": 0, "parent": URL, "reason": "http 500: HTTP 500", "events": [],
                    "kind": "http 500", "worker": "crawler-1",
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    kinds: dict[str, int]
    failed: list[HistoryModel]
