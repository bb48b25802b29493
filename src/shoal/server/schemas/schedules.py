"""Bodies of `/api/schedules`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shoal.batch.limits import StrictModel, at_most
from shoal.server.schemas.common import RUN_ID, Scalar, Word, with_examples

_SETTINGS = {"download_delay": 2.0}
_SCHEDULE = {
    "name": "nightly", "spider": "Books", "arguments": {"category": "travel"}, "settings": _SETTINGS,
    "cron": "30 2 * * *", "every": "", "time_zone": "Europe/Berlin", "jitter": 60.0, "overlap": "skip",
    "missed": "one", "keep": 30, "origin": "store", "source": "", "orphaned_at": None, "paused": False,
    "next": 1771205400.0, "waiting": None,
    "run_id": "nightly_20260215T013000", "run_state": "finished", "fired_at": 1771119000.0, "fired": 12, "skipped": 0,
    "missed_times": 0, "missed_at": None, "error": "",
}  # fmt: skip

Overlap = Annotated[
    Literal["skip", "wait", "cancel"],
    Field(description="If the previous run is still active: skip the time, wait until the run ends, or cancel it."),
]
Missed = Annotated[
    Literal["one", "all", "none"],
    Field(description="Times at which no server ran: start a run for the latest, for all of them, or for none."),
]


class ChangeSchedule(StrictModel):
    """What runs, and when. Set either `cron` or `every`."""

    model_config = with_examples({"spider": "Books", "every": "30m", "overlap": "wait"}, strict=True)

    spider: Word
    arguments: Annotated[
        dict[Word, Scalar], Field(max_length=100, description="Constructor arguments of the spider."), at_most(100)
    ] = {}
    settings: Annotated[
        dict[Word, Scalar | Annotated[list[Scalar], Field(max_length=1000), at_most(1000)]],
        Field(max_length=100, description="Settings by dotted key, such as `scope.max_pages`."),
        at_most(100),
    ] = {}
    cron: Annotated[Word | None, Field(description="Minute, hour, day of month, month, day of week.")] = None
    every: Annotated[Word | None, Field(description="An interval such as `90s`, `15m`, `1h30m`, `1d`.")] = None
    time_zone: Annotated[Word | None, Field(description="IANA name, for `cron`. Default: UTC.")] = None
    jitter: Annotated[float, Field(ge=0, le=86400, description="Start up to this many seconds later.")] = 0.0
    overlap: Overlap = "skip"
    missed: Missed = "one"
    keep: Annotated[
        int | None, Field(ge=0, le=1_000_000, description="Number of ended runs to keep. Default: all.")
    ] = None


class AddSchedule(ChangeSchedule):
    """Runs a spider of the registry at set times. Set either `cron` or `every`."""

    model_config = with_examples(
        {"name": "nightly", "spider": "Books", "cron": "30 2 * * *", "time_zone": "Europe/Berlin", "keep": 30},
        {"name": "often", "spider": "Books", "every": "15m", "arguments": {"category": "travel"}, "overlap": "wait"},
        strict=True,
    )

    name: Word


class ScheduleModel(BaseModel):
    """A schedule and its state. Times are Unix times, in seconds."""

    model_config = with_examples(_SCHEDULE)

    name: str
    spider: str
    arguments: dict[str, object]
    settings: dict[str, object]
    cron: str
    every: str
    time_zone: str
    jitter: float
    overlap: Overlap
    missed: Missed
    keep: int | None = None
    origin: Annotated[Literal["file", "store"], Field(description="`file`: it is defined in shoal.toml.")]
    source: Annotated[str, Field(description="The machine and the shoal.toml that define it, or an empty string.")]
    orphaned_at: Annotated[
        float | None,
        Field(description="Since when no server that runs has it in its shoal.toml. It starts no runs until then."),
    ] = None
    paused: bool
    next: Annotated[
        float | None, Field(description="The next time, without jitter; `null` while it is paused or orphaned.")
    ] = None
    waiting: Annotated[float | None, Field(description="A time whose run starts when the previous run ends.")] = None
    run_id: Annotated[str, Field(description="The newest run, or an empty string.")]
    run_state: Annotated[str | None, Field(description="State of that run; `null` if it does not exist.")] = None
    fired_at: Annotated[float | None, Field(description="The time of the newest run.")] = None
    fired: Annotated[int, Field(description="Number of runs.")]
    skipped: Annotated[int, Field(description="Number of times that were skipped because of `overlap`.")]
    missed_times: Annotated[int, Field(description="Number of missed times without a run.")]
    missed_at: Annotated[float | None, Field(description="The last missed time.")] = None
    error: Annotated[str, Field(description="Why the last run could not start or failed, or an empty string.")]


class ScheduleList(BaseModel):
    """All schedules of the project, in the order of their names."""

    model_config = with_examples({"schedules": [_SCHEDULE]})

    schedules: list[ScheduleModel]


class ScheduleRun(BaseModel):
    """A run that was started now. `run_id` is empty if it waits for the previous run."""

    model_config = with_examples({"name": "nightly", "run_id": RUN_ID, "waits": False})

    name: str
    run_id: str
    waits: bool


class ScheduleRemoved(BaseModel):
    """A schedule that was deleted. Its runs stay."""

    model_config = with_examples({"name": "nightly", "removed": True})

    name: str
    removed: bool
