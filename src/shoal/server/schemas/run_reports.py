"""Bodies of the reports below `/api/runs`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shoal.crawling.outcome import Verdict
from shoal.monitoring.processes import ProcessState
from shoal.server.schemas.common import RUN_ID, URL, with_examples
from shoal.server.schemas.runs import RequestCounts, RunStateName

_AT = 1771156800.0
_FIGURES = {
    "run_id": RUN_ID, "spider": "books", "state": "finished", "ending": "finished", "outcome": "good",
    "created_at": _AT, "seconds": 60.0, "pages": 1000, "items": 980, "failed": 3, "failed_kinds": {"http 500": 3},
    "left": 0,
}  # fmt: skip


class SampleModel(RequestCounts):
    """The counts of a run at one moment."""

    at: Annotated[float, Field(description="Unix time, in seconds.")]
    incoming: Annotated[int, Field(description="Links of done pages that are not queued yet.")]
    pages_per_second: Annotated[float | None, Field(description="Since the previous sample; `null` for the first one.")]
    items_per_second: float | None


class HistoryPage(BaseModel):
    """The counts of a run over time, oldest first. Times in which no process worked on it have no samples."""

    model_config = with_examples(
        {
            "run_id": RUN_ID,
            "samples": [
                {
                    "at": _AT, "pushed": 120, "ready": 60, "waiting": 0, "in_flight": 20, "done": 39, "failed": 1,
                    "left": 80, "items": 39, "incoming": 0, "duplicates": 310, "pages_per_second": 8.0,
                    "items_per_second": 7.8,
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    samples: list[SampleModel]


PROCESS = {
    "name": "crawler-1-4711-9f2c", "state": "working", "role": "worker", "machine": "crawler-1", "pid": 4711,
    "slot": "crawler-1-4711-9f2c", "epoch": 1, "started_at": _AT, "last_seen": 1.2, "leases": 20, "pages": 39,
    "items": 39, "failed": 1, "pages_per_second": 8.0, "memory": 90000000, "browser": "", "tor": "",
}  # fmt: skip


class ProcessModel(BaseModel):
    """A process that works on a run, or did so."""

    name: str
    state: Annotated[
        ProcessState,
        Field(
            description="`stuck`: a callback blocks it. `silent`: its heartbeat is late. `lost`: killed or cut off. "
            "`ended`: stopped normally."
        ),
    ]
    role: Annotated[
        Literal["crawl", "worker", "runner", "server"],
        Field(description="`runner`: a node of a cluster. `server`: a run in a server."),
    ]
    machine: str
    pid: int
    slot: Annotated[str, Field(description="Its name in leases; empty if it needs none.")]
    epoch: int
    started_at: Annotated[float | None, Field(description="Unix time; `null` if it has not reported yet.")]
    last_seen: Annotated[float, Field(description="Seconds since its last heartbeat or report.")]
    leases: Annotated[int, Field(description="Requests that it has in flight.")]
    pages: int
    items: int
    failed: int
    pages_per_second: Annotated[float, Field(description="Over the last minute.")]
    memory: Annotated[int, Field(description="Bytes of resident memory; 0 if unknown.")]
    browser: str
    tor: str


class ProcessList(BaseModel):
    """The processes of a run, those that work first."""

    model_config = with_examples({"run_id": RUN_ID, "total": 1, "workers": [PROCESS]})

    run_id: str
    total: Annotated[int, Field(description="Number of all processes, also those beyond `limit`.")]
    workers: list[ProcessModel]


class FailureExample(BaseModel):
    """A failed request."""

    url: str
    status: Annotated[int, Field(description="HTTP status of the last response; 0 if there was none.")]
    attempts: int
    reason: str


class FailureKind(BaseModel):
    """The failed requests of one kind."""

    kind: str
    count: int
    examples: list[FailureExample]


class FailureKinds(BaseModel):
    """The failed requests of a run by kind, most frequent first."""

    model_config = with_examples(
        {
            "run_id": RUN_ID,
            "kinds": [
                {
                    "kind": "http 500", "count": 3,
                    "examples": [{"url": f"{URL}b", "status": 500, "attempts": 3, "reason": "HTTP 500"}],
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    kinds: list[FailureKind]


class FieldModel(BaseModel):
    """How often a field of the items has a value: neither null nor empty."""

    type: Annotated[str, Field(description="Class name of the items; `item` for a dict.")]
    field: str
    filled: int
    items: Annotated[int, Field(description="Items of this type whose fields were counted.")]
    share: float


class RecentItemsPage(BaseModel):
    """The last items of a run, newest first, and which fields its items have."""

    model_config = with_examples(
        {
            "run_id": RUN_ID, "items": ['{"title":"A Light in the Attic"}'],
            "fields": [{"type": "item", "field": "title", "filled": 39, "items": 39, "share": 1.0}],
        }
    )  # fmt: skip

    run_id: str
    items: Annotated[list[str], Field(description="JSON text. An item of more than 2,000 characters is cut.")]
    fields: Annotated[list[FieldModel], Field(description="Counted on up to 50 items per second and process.")]


class FiguresModel(BaseModel):
    """The results of a run, so far or at its end."""

    run_id: str
    spider: str
    state: RunStateName
    ending: Annotated[str, Field(description="How it ended, as text: `finished`, or at which limit it stopped.")]
    outcome: Annotated[Verdict | None, Field(description="`null` unless it is finished.")]
    created_at: float
    seconds: Annotated[float, Field(description="From its creation to its end, or to now.")]
    pages: int
    items: int
    failed: int
    failed_kinds: dict[str, int]
    left: int


class DifferenceModel(BaseModel):
    """A figure of two runs; `null` if a run does not have it."""

    name: str
    unit: Literal["count", "seconds", "per second", "share"]
    a: float | None
    b: float | None
    change: Annotated[float | None, Field(description="0.1 if `b` is 10 % larger; `null` if undefined.")]


class ComparisonPage(BaseModel):
    """Two runs, and their figures side by side."""

    model_config = with_examples(
        {
            "a": _FIGURES, "b": {**_FIGURES, "pages": 1100},
            "differences": [{"name": "pages", "unit": "count", "a": 1000.0, "b": 1100.0, "change": 0.1}],
        }
    )  # fmt: skip

    a: FiguresModel
    b: FiguresModel
    differences: list[DifferenceModel]
