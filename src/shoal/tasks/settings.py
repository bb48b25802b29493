"""Celery's settings, under the names that those who run Celery know."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from msgspec import Struct

from shoal.config import Config
from shoal.errors import ConfigError

TASK = "shoal.crawl"
QUEUE = "shoal"


class CelerySettings(Struct, frozen=True, kw_only=True):
    """From the environment, of workers and API alike."""

    broker_url: str = "redis://localhost:6379/0"
    result_backend: str = "redis://localhost:6379/1"
    rate_limit: str | None = "10/m"
    """Pages of one worker; None: as many as it can."""
    max_retries: int = 3
    concurrency: int = 2
    """Processes of one worker."""


def celery_settings(environ: Mapping[str, str] = os.environ) -> CelerySettings:
    """ConfigError names the variable that can't be read."""
    known = CelerySettings()
    rate = environ.get("CELERY_TASK_RATE_LIMIT", known.rate_limit or "").strip().lower()
    if rate and rate not in ("0", "none", "off") and not re.fullmatch(r"\d+(\.\d+)?(/[smh])?", rate):
        raise ConfigError(f'CELERY_TASK_RATE_LIMIT must be such as "10/m", or "none", not {rate!r}')
    return CelerySettings(
        broker_url=environ.get("CELERY_BROKER_URL") or known.broker_url,
        result_backend=environ.get("CELERY_RESULT_BACKEND") or known.result_backend,
        rate_limit=None if rate in ("", "0", "none", "off") else rate,
        max_retries=_count(environ, "CELERY_TASK_MAX_RETRIES", known.max_retries, least=0),
        concurrency=_count(environ, "CELERY_WORKER_CONCURRENCY", known.concurrency, least=1),
    )


def _count(environ: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more, not {text!r}")
    return int(text)


def store_name(url: str) -> str:
    """What the API and its workers call a store when they talk about it: its address, but for user and password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}".replace("localhost", "127.0.0.1")


def distributed_frontier(config: Config, settings: CelerySettings | None = None) -> str:
    """Where the sessions of Celery's workers are kept: the frontier, if it is a server's; else beside the results."""
    settings = settings or celery_settings()
    for url in (config.frontier, settings.result_backend, settings.broker_url):
        if url.startswith(("redis://", "rediss://", "redis+", "rediss+", "postgresql://")):
            return url
    raise ConfigError(
        "Celery's workers need a store that they share: set SHOAL_FRONTIER to redis://host or postgresql://host/database"
    )
