"""Bodies of the charts."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from shoal.server.schemas.common import with_examples


class SeriesModel(BaseModel):
    """One line of a chart."""

    label: str
    colour: Annotated[str, Field(description="A colour of the dashboard: `done`, `dead`, `leased`, `waiting`...")]
    values: list[float]


class ChartModel(BaseModel):
    """Lines over time. Empty if nothing is known yet."""

    model_config = with_examples(
        {
            "times": [1771156800.0, 1771156810.0],
            "series": [{"label": "pages/s", "colour": "accent", "values": [12.5, 13.0]}],
        }
    )

    times: Annotated[list[float], Field(description="Unix times, in seconds.")]
    series: list[SeriesModel]
