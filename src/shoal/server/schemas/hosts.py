"""Bodies of `/api/hosts`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from shoal.batch.limits import StrictModel
from shoal.server.schemas.common import RUN_ID, Word, with_examples

_HOST = {
    "host": "127.0.0.1:8080", "delay": 2.0, "why": "set for this host", "concurrency": 1, "in_flight": 1, "ready": 58,
    "blocked_for": 0.0, "block_reason": "",
}  # fmt: skip


class HostModel(BaseModel):
    """The politeness settings in force for a host, across all runs and workers of the frontier."""

    model_config = with_examples(_HOST)

    host: str
    delay: Annotated[float, Field(description="Seconds from the end of one fetch to the start of the next.")]
    why: Annotated[str, Field(description="Where the delay comes from.")]
    concurrency: int
    in_flight: int
    ready: int
    blocked_for: Annotated[float, Field(description="Seconds; 0 if the host is not blocked.")]
    block_reason: str


class HostList(BaseModel):
    """Hosts, busiest first."""

    model_config = with_examples({"hosts": [_HOST]})

    hosts: list[HostModel]


class RobotsModel(BaseModel):
    """A robots.txt, as workers read it."""

    origin: str
    text: Annotated[str, Field(description="Empty if the host has none.")]
    is_cut: Annotated[bool, Field(description="Whether the file is longer than `text`.")]
    crawl_delay: Annotated[float | None, Field(description="Seconds that it asks for.")]


class IdentityModel(BaseModel):
    """An identity (a proxy) on this host."""

    identity: str
    state: Literal["active", "resting", "given up", "removed"]
    host: Annotated[str, Field(description="Empty if it was removed from all hosts.")]
    reason: str
    returns_in: Annotated[float | None, Field(description="Seconds until it returns.")]


class HostDetails(BaseModel):
    """All that the frontier knows of a host."""

    model_config = with_examples(
        {
            "state": _HOST, "ready_by_run": {RUN_ID: 58},
            "robots": [
                {
                    "origin": "http://127.0.0.1:8080", "text": "User-agent: *\nDisallow: /private\n", "is_cut": False,
                    "crawl_delay": None,
                }
            ],
            "identities": [],
            "needs": {"/product/*": "browser"},
        }
    )  # fmt: skip

    state: Annotated[HostModel, Field(description="`ready` counts the requests of all unfinished runs.")]
    ready_by_run: Annotated[dict[str, int], Field(description="Ready requests by run.")]
    robots: list[RobotsModel]
    identities: list[IdentityModel]
    needs: Annotated[
        dict[str, Literal["http", "browser"]], Field(description="Which pages need a browser, by kind of page.")
    ]


class SetHost(StrictModel):
    """Changes to a host's settings. Omitted settings stay as they are; `null` restores the default."""

    model_config = with_examples({"delay": 2.0}, {"delay": 0, "concurrency": 4}, {"reset": True}, strict=True)

    delay: Annotated[float | None, Field(ge=0, le=1e9, description="Seconds from one fetch to the next.")] = None
    concurrency: Annotated[
        int | None, Field(ge=1, le=10_000, description="Parallel requests; applies only while the delay is 0.")
    ] = None
    reset: Annotated[bool, Field(description="Restore all defaults and drop the learned delay.")] = False

    @model_validator(mode="after")
    def _check_not_empty(self) -> SetHost:
        if not (self.reset or {"delay", "concurrency"} & self.model_fields_set):
            raise ValueError("nothing to change: send delay, concurrency or reset")
        return self


class BlockHost(StrictModel):
    """How long to block a host, and why."""

    model_config = with_examples({"seconds": 3600, "reason": "the site asked us to"}, {}, strict=True)

    seconds: Annotated[float, Field(ge=1, le=1e9)] = 86400.0
    reason: Word = "by hand"
