"""Runs, hosts and clusters, as the API's description shows them."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shoal.batch.limits import StrictModel, at_most
from shoal.spider import Spider

RunStateName: TypeAlias = Literal["queued", "running", "paused", "finished", "cancelled"]

PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
"""No store has anything under a name with control characters."""
Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=PRINTABLE)]


def _scalar(value: object) -> object:
    """Here, so that the message is about the value, and not about each type that it might have been."""
    if isinstance(value, dict | list):
        raise ValueError("must be text, a number, true, false or null")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("is a whole number past 64 bits: send it as text")
    if isinstance(value, float) and not isfinite(value):
        raise ValueError("must be a finite number")
    return value


Scalar: TypeAlias = Annotated[
    Annotated[str, Field(max_length=10_000)] | bool | int | float | None, BeforeValidator(_scalar)
]

_RUN = "20260215_120000_3fa9"
_URL = "http://127.0.0.1:8080/"
_STATS = {
    "pushed": 120, "ready": 60, "waiting": 0, "leased": 20, "done": 39, "dead": 1, "duplicates": 310, "items": 39,
    "seeding": False, "pending": 60, "claimed": 20, "completed": 39, "failed": 1, "remaining": 80,
}  # fmt: skip
_PAGE = {"run_id": _RUN, "spider": "books", "state": "running", "created_at": 1771156800.0, "stats": _STATS}
_HOST = {
    "host": "127.0.0.1:8080", "delay": 2.0, "why": "set for this host", "concurrency": 1, "in_flight": 1, "ready": 58,
    "blocked_for": 0.0, "block_reason": "",
}  # fmt: skip


def _example(*examples: Any, strict: bool = False) -> ConfigDict:
    return ConfigDict(extra="forbid" if strict else None, json_schema_extra={"examples": list(examples)})


# -- runs


class StartRun(StrictModel):
    """A spider of the registry (`[spiders]` in the server's shoal.toml), by its name."""

    model_config = _example(
        {"spider": "Books", "arguments": {"category": "travel"}},
        {"spider": "Books", "urls": [_URL], "mode": "distributed", "new_run": True},
        strict=True,
    )

    spider: Annotated[str, Field(min_length=1, max_length=200, description="Its name in the registry.")]
    urls: Annotated[
        Annotated[list[Annotated[str, Field(max_length=8192)]], Field(fail_fast=True)] | None,
        Field(min_length=1, description="Instead of the spider's own start requests."),
    ] = None
    arguments: Annotated[
        dict[Word, Scalar],
        Field(max_length=100, description="What the spider is made with, on top of what the registry says."),
        at_most(100),
    ] = {}
    mode: Annotated[
        Literal["single", "distributed"] | None,
        Field(description="In this server, or on a fleet; by default what the registry says."),
    ] = None
    new_run: Annotated[
        bool, Field(description="Also when an earlier start with the same words did not come to its end.")
    ] = False

    @field_validator("arguments")
    @classmethod
    def _are_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if name.startswith("_") or hasattr(Spider, name):
                raise ValueError(f"{name} is the spider's own, and no argument")
        return arguments


class RunStarted(BaseModel):
    """A run that was begun."""

    model_config = _example(
        {
            "run_id": _RUN, "status": "queued", "spider": "books", "mode": "distributed", "enqueued": 1,
            "duplicates": 0, "out_of_scope": 0, "unreadable": 0,
            "worker_command": f"shoal worker Books --run-id {_RUN} --batch-size 50",
        }
    )  # fmt: skip

    run_id: str
    status: RunStateName
    spider: Annotated[str, Field(description="The name that the spider gives itself.")]
    mode: Literal["single", "distributed"]
    enqueued: Annotated[int | None, Field(description="Start requests; none if they are pushed while it runs.")]
    duplicates: int | None
    out_of_scope: int | None
    unreadable: Annotated[int | None, Field(description="What was no URL.")]
    worker_command: Annotated[str | None, Field(description="What to type on each node of a fleet.")]


class RunStats(BaseModel):
    """The ledger of a run: pushed = ready + waiting + leased + done + dead. Also in the words of a work queue."""

    model_config = _example(_STATS)

    pushed: int
    ready: int
    waiting: int
    leased: int
    done: int
    dead: int
    duplicates: int
    items: int
    seeding: Annotated[bool, Field(description="Not all start requests are there yet.")]
    pending: int
    claimed: int
    completed: int
    failed: int
    remaining: int


class RunPage(BaseModel):
    """A run at this moment."""

    model_config = _example({**_PAGE, "error": ""})

    run_id: str
    spider: str
    state: RunStateName
    created_at: Annotated[float, Field(description="Seconds since 1970.")]
    stats: RunStats
    error: Annotated[str, Field(description="Why it could not go on in this server, if so.")] = ""


class RunList(BaseModel):
    """Runs, the newest first."""

    model_config = _example({"runs": [{**_PAGE, "error": ""}], "total": 1})

    runs: list[RunPage]
    total: Annotated[int, Field(description="How many there are.")]


class RetryFailed(StrictModel):
    """Which of the dead are tried again."""

    model_config = _example({"kinds": ["http 500", "timeout"]}, {}, strict=True)

    kinds: Annotated[
        list[Word] | None,
        Field(min_length=1, max_length=100, description="Without it all but what robots.txt forbade."),
        at_most(100),
    ] = None


class Retried(BaseModel):
    """How many of the dead are ready again."""

    model_config = _example({"run_id": _RUN, "retried": 3})

    run_id: str
    retried: int


class Removed(BaseModel):
    """A run that was forgotten."""

    model_config = _example({"run_id": _RUN, "removed": True})

    run_id: str
    removed: bool


class LoggedItemModel(BaseModel):
    """An item of the log. `key` is the same however often its page was tried."""

    seq: int
    key: str
    type: Annotated[str, Field(description="The name of its class, or `item`.")]
    item: dict[str, Any]


class ItemPage(BaseModel):
    """Some items of a run, in the order of its log."""

    model_config = _example(
        {
            "run_id": _RUN, "next": 1,
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
    next: Annotated[int, Field(description="Give it as `after` to get what comes behind.")]


class Ledger(BaseModel):
    """The ledger, counted anew from the requests themselves."""

    model_config = _example(
        {
            **{name: _STATS[name] for name in ("pushed", "ready", "waiting", "leased", "done", "dead")},
            "duplicates": 310, "items": 39, "seeding": False, "run_id": _RUN, "balanced": True,
            "dead_kinds": {"http 500": 1},
        }
    )  # fmt: skip

    run_id: str
    pushed: int
    ready: int
    waiting: int
    leased: int
    done: int
    dead: int
    duplicates: int
    items: int
    seeding: bool
    dead_kinds: dict[str, int]
    balanced: Annotated[bool, Field(description="pushed = ready + waiting + leased + done + dead.")]


class EventModel(BaseModel):
    """Something that happened to a request."""

    at: Annotated[float, Field(description="Seconds since 1970.")]
    what: str
    detail: str


class HistoryModel(BaseModel):
    """What became of a URL."""

    model_config = _example(
        {
            "url": f"{_URL}a", "state": "done", "depth": 1, "priority": 0.0, "attempts": 1, "status": 200, "items": 1,
            "parent": _URL, "reason": "",
            "events": [
                {"at": 1771156800.0, "what": "pushed", "detail": ""},
                {"at": 1771156801.0, "what": "done", "detail": "HTTP 200, 1 items, 0 new links"},
            ],
        }
    )  # fmt: skip

    url: str
    state: Literal["ready", "waiting", "leased", "done", "dead"]
    depth: int
    priority: float
    attempts: int
    status: Annotated[int, Field(description="Of the last answer; 0 if there was none.")]
    items: int
    parent: Annotated[str | None, Field(description="Where it was found; none for a start request.")]
    reason: str
    events: list[EventModel]


class DeadPage(BaseModel):
    """What was given up, counted by kind, and some of it."""

    model_config = _example(
        {
            "run_id": _RUN, "kinds": {"http 500": 1},
            "dead": [
                {
                    "url": f"{_URL}b", "state": "dead", "depth": 1, "priority": 0.0, "attempts": 3, "status": 500,
                    "items": 0, "parent": _URL, "reason": "http 500: HTTP 500", "events": [],
                }
            ],
        }
    )  # fmt: skip

    run_id: str
    kinds: dict[str, int]
    dead: list[HistoryModel]


# -- hosts


class HostModel(BaseModel):
    """A host's politeness as it is in force, for all runs and workers of the frontier."""

    model_config = _example(_HOST)

    host: str
    delay: Annotated[float, Field(description="Seconds from the end of one fetch to the next.")]
    why: Annotated[str, Field(description="Where the delay comes from.")]
    concurrency: int
    in_flight: int
    ready: int
    blocked_for: Annotated[float, Field(description="Seconds; 0 if it is not blocked.")]
    block_reason: str


class HostList(BaseModel):
    """Hosts, the busiest first."""

    model_config = _example({"hosts": [_HOST]})

    hosts: list[HostModel]


class SetHost(StrictModel):
    """What to change of a host. What is left out stays; `null` is the default again."""

    model_config = _example({"delay": 2.0}, {"delay": 0, "concurrency": 4}, {"reset": True}, strict=True)

    delay: Annotated[float | None, Field(ge=0, le=1e9, description="Seconds from one fetch to the next.")] = None
    concurrency: Annotated[int | None, Field(ge=1, le=10_000, description="At once, without a delay.")] = None
    reset: Annotated[bool, Field(description="Back to the defaults, also of what was learned.")] = False

    @model_validator(mode="after")
    def _says_something(self) -> SetHost:
        if not (self.reset or {"delay", "concurrency"} & self.model_fields_set):
            raise ValueError("say what to change: delay, concurrency or reset")
        return self


class BlockHost(StrictModel):
    """For how long nothing is fetched from a host, and why."""

    model_config = _example({"seconds": 3600, "reason": "the site asked us to"}, {}, strict=True)

    seconds: Annotated[float, Field(ge=1, le=1e9)] = 86400.0
    reason: Word = "by hand"


# -- clusters


class CountsModel(BaseModel):
    """How many members work, and how many stand by."""

    runner: int
    backup: int


class MemberModel(BaseModel):
    """A living member."""

    name: str
    age: Annotated[float, Field(description="Seconds since it was last heard of.")]
    fit: Annotated[bool, Field(description="It reaches the frontier.")]
    doing: str
    where: str


class SlotModel(BaseModel):
    """The right to work, and who has it."""

    index: int
    holder: Annotated[str, Field(description="A member's name, or nothing.")]
    epoch: int


class ClusterEventModel(BaseModel):
    """Something that happened in a cluster."""

    at: float
    what: Literal["joined", "left", "lost", "elected", "took over", "retired", "scaled"]
    member: str
    slot: int | None
    epoch: int
    detail: str


class ClusterPage(BaseModel):
    """A cluster at this moment, and what happened last."""

    model_config = _example(
        {
            "cluster": "books", "roles": {"crawler_1": "runner", "crawler_2": "backup"},
            "counts": {"runner": 1, "backup": 1},
            "members": [
                {"name": "crawler_1", "age": 0.4, "fit": True, "doing": "20 in flight", "where": "a-12-9f"},
                {"name": "crawler_2", "age": 0.2, "fit": True, "doing": "", "where": "b-7-03"},
            ],
            "slots": [{"index": 0, "holder": "crawler_1", "epoch": 1}],
            "events": [
                {"at": 1771156800.0, "what": "elected", "member": "crawler_1", "slot": 0, "epoch": 1, "detail": ""}
            ],
        }
    )  # fmt: skip

    cluster: str
    roles: dict[str, Literal["runner", "backup", "spare"]]
    counts: CountsModel
    members: list[MemberModel]
    slots: list[SlotModel]
    events: Annotated[list[ClusterEventModel], Field(description="The last ones, oldest first.")]


class ScaleCluster(StrictModel):
    """How many there are to be. What is left out stays."""

    model_config = _example({"runner": 3, "backup": 2}, {"runner": 5}, strict=True)

    runner: Annotated[int | None, Field(ge=1, le=10_000)] = None
    backup: Annotated[int | None, Field(ge=0, le=10_000)] = None

    @model_validator(mode="after")
    def _says_something(self) -> ScaleCluster:
        if self.runner is None and self.backup is None:
            raise ValueError("say how many: runner, backup or both")
        return self


class Scaled(BaseModel):
    """How many there were, and how many there are to be."""

    model_config = _example(
        {"cluster": "books", "before": {"runner": 1, "backup": 1}, "after": {"runner": 3, "backup": 1}}
    )

    cluster: str
    before: CountsModel
    after: CountsModel
