"""Bodies of `/api/workers`."""

from __future__ import annotations

from pydantic import BaseModel

from shoal.server.schemas.common import RUN_ID, with_examples
from shoal.server.schemas.run_reports import PROCESS, ProcessModel


class FleetProcessModel(ProcessModel):
    """A process of one of the unfinished runs."""

    run_id: str


class FleetPage(BaseModel):
    """The processes of all unfinished runs, those that work first."""

    model_config = with_examples({"processes": [{"run_id": RUN_ID, **PROCESS}]})

    processes: list[FleetProcessModel]
