"""Celery's settings, from the environment variables that Celery users know."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from msgspec import Struct

from shoal.config import Config
from shoal.errors import ConfigError

TASK = "shoal.crawl"
ROBOTS_TASK = "shoal.robots"
"""Fetches a robots.txt that a page needs. It has no rate limit: only the page itself counts."""
QUEUE = "shoal"


class CelerySettings(Struct, frozen=True, kw_only=True):
    """Settings that the API and the workers share."""

    broker_url: str = "redis://localhost:6379/0"
    result_backend: str = "redis://localhost:6379/1"
    rate_limit: str | None = "10/m"
    """Pages per worker; None: no limit."""
    max_retries: int = 3
    concurrency: int = 2
    """Processes per worker."""


def celery_settings(environ: Mapping[str, str] = os.environ) -> CelerySettings:
    """Read the settings. ConfigError names an invalid variable."""
    defaults = CelerySettings()
    rate = environ.get("CELERY_TASK_RATE_LIMIT", defaults.rate_limit or "").strip().lower()
    if rate and rate not in ("0", "none", "off") and not re.fullmatch(r"\d+(\.\d+)?(/[smh])?", rate):
        raise ConfigError(f'CELERY_TASK_RATE_LIMIT must be a rate such as "10/m", or "none", not {rate!r}')
    return CelerySettings(
        broker_url=environ.get("CELERY_BROKER_URL") or defaults.broker_url,
        result_backend=environ.get("CELERY_RESULT_BACKEND") or defaults.result_backend,
        rate_limit=None if rate in ("", "0", "none", "off") else rate,
        max_retries=_count(environ, "CELERY_TASK_MAX_RETRIES", defaults.max_retries, minimum=0),
        concurrency=_count(environ, "CELERY_WORKER_CONCURRENCY", defaults.concurrency, minimum=1),
    )


def _count(environ: Mapping[str, str], name: str, default: int, *, minimum: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name} must be a whole number of {minimum} or more, not {text!r}")
    return int(text)


def store_name(url: str) -> str:
    """The URL of a store without user and password. The API and the workers compare stores by it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}".replace("localhost", "127.0.0.1")


def distributed_frontier(config: Config, settings: CelerySettings | None = None) -> str:
    """The store of distributed sessions: the frontier if it is on a server, else the result backend or the broker.
    ConfigError if none of them is Redis or PostgreSQL."""
    settings = settings or celery_settings()
    for url in (config.frontier, settings.result_backend, settings.broker_url):
        if url.startswith(("redis://", "rediss://", "redis+", "rediss+", "postgresql://")):
            return url
    raise ConfigError(
        "Celery workers need a shared store: set SHOAL_FRONTIER to redis://host or postgresql://host/database"
    )
