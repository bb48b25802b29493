"""Bodies of `/api/clusters`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from shoal.batch.limits import StrictModel
from shoal.server.schemas.common import with_examples


class CountsModel(BaseModel):
    """Number of Runners and Backup Runners."""

    runner: int
    backup: int


class MemberModel(BaseModel):
    """A live member of the cluster."""

    name: str
    age: Annotated[float, Field(description="Seconds since its last heartbeat.")]
    fit: Annotated[bool, Field(description="Whether it can reach the frontier.")]
    doing: str
    where: str


class SlotModel(BaseModel):
    """A slot: the right of one member to crawl."""

    index: int
    holder: Annotated[str, Field(description="Name of the member that holds it, or an empty string.")]
    epoch: int


class ClusterEventModel(BaseModel):
    """An event in the cluster."""

    at: float
    what: Literal["joined", "left", "lost", "elected", "took over", "retired", "scaled"]
    member: str
    slot: int | None
    epoch: int
    detail: str


class ClusterPage(BaseModel):
    """The current state of a cluster and its latest events."""

    model_config = with_examples(
        {
            "cluster": "books", "roles": {"crawler_1": "Runner", "crawler_2": "Backup Runner"},
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
    roles: dict[str, Literal["Runner", "Backup Runner", "Spare"]]
    counts: CountsModel
    members: list[MemberModel]
    slots: list[SlotModel]
    events: Annotated[list[ClusterEventModel], Field(description="The latest events, oldest first.")]


class ScaleCluster(StrictModel):
    """The number of Runners and Backup Runners you want. Omitted numbers stay as they are."""

    model_config = with_examples({"runner": 3, "backup": 2}, {"runner": 5}, strict=True)

    runner: Annotated[int | None, Field(ge=1, le=10_000)] = None
    backup: Annotated[int | None, Field(ge=0, le=10_000)] = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> ScaleCluster:
        if self.runner is None and self.backup is None:
            raise ValueError("nothing to change: send runner, backup or both")
        return self


class Scaled(BaseModel):
    """The numbers before and after the change."""

    model_config = with_examples(
        {"cluster": "books", "before": {"runner": 1, "backup": 1}, "after": {"runner": 3, "backup": 1}}
    )

    cluster: str
    before: CountsModel
    after: CountsModel
