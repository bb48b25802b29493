"""Bodies of `/api/workers`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shoal.server.schemas.common import RUN_ID, with_examples

_PROCESS = {
    "run_id": RUN_ID, "name": "host-1234-9fe2", "machine": "host", "pid": 1234, "role": "worker", "condition": "active",
    "cluster": "", "slot": "", "epoch": 1, "silent_for": 1.2, "leases": 16, "started_at": 1771156800.0, "pages": 5210,
    "items": 5100, "failed": 4, "pages_per_second": 41.5, "memory": 83886080, "browser": "", "tor": "",
}  # fmt: skip


class ProcessModel(BaseModel):
    """A process that works on a run, or did so."""

    model_config = with_examples(_PROCESS)

    run_id: str
    name: str
    machine: str
    pid: int
    role: Annotated[str, Field(description="crawl, worker, runner or server; empty if it reports nothing.")]
    condition: Annotated[
        Literal["active", "lost", "ended"], Field(description="`lost`: it fell silent without having ended.")
    ]
    cluster: Annotated[str, Field(description="The cluster of a Runner.")]
    slot: Annotated[str, Field(description="The number of its slot in the cluster.")]
    epoch: int
    silent_for: Annotated[float, Field(description="Seconds since its last heartbeat or report.")]
    leases: int
    started_at: float | None
    pages: int
    items: int
    failed: int
    pages_per_second: Annotated[float, Field(description="Over the last minute.")]
    memory: Annotated[int, Field(description="Bytes; 0 if unknown.")]
    browser: str
    tor: str


class ProcessList(BaseModel):
    """The processes of all unfinished runs."""

    model_config = with_examples({"processes": [_PROCESS]})

    processes: list[ProcessModel]
