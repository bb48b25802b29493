"""Bodies of `/api/settings`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from shoal.server.schemas.common import with_examples


class SettingEntry(BaseModel):
    """A setting."""

    key: Annotated[str, Field(description="Dotted key, as in `shoal.toml` and `--set`.")]
    value: Annotated[object, Field(description="The value in force. Secrets are masked.")]
    source: Annotated[str, Field(description="`default`, a file, an environment variable, or `command line or code`.")]


class SettingList(BaseModel):
    """All settings of the server."""

    model_config = with_examples(
        {
            "settings": [
                {"key": "download_delay", "value": 0.5, "source": "default"},
                {"key": "serve.token", "value": "***", "source": "SHOAL_SERVE__TOKEN"},
            ]
        }
    )

    settings: list[SettingEntry]


class EndedLogins(BaseModel):
    """Whose sessions of the dashboard were ended."""

    model_config = with_examples({"ended": ["", "otto"]})

    ended: Annotated[list[str], Field(description="Names of tokens; empty: the main token.")]
