"""The defaults of Scrapy as a module: ``RETRY_HTTP_CODES`` and so on."""

from __future__ import annotations

import copy
from typing import Any

from shoal.scrapy.settings import DEFAULTS


def __getattr__(name: str) -> Any:
    if name not in DEFAULTS:
        raise AttributeError(f"Shoal does not have the default of {name}")
    return copy.deepcopy(DEFAULTS[name])
