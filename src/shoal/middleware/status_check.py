"""Which answers are errors, whether a retry can help, and when to retry."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from datetime import UTC, datetime, timedelta

from shoal.config import RetrySettings, ThrottleSettings
from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.ports import Fetch

MAX_RETRY_AFTER = ThrottleSettings().max_retry_after


class StatusCheck:
    """Turns an error status into a FetchError. Redirects with a Location pass: the engine follows them."""

    def __init__(
        self, retried: Collection[int], handled: Collection[int] = (), max_retry_after: float = MAX_RETRY_AFTER
    ) -> None:
        self._retried = frozenset(retried)
        self._handled = frozenset(handled)
        self._max_retry_after = max_retry_after

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        response = await fetch(request)
        status = response.status
        if 200 <= status < 300 or status in self._handled or (300 <= status < 400 and "Location" in response.headers):
            return response
        error = FetchError(
            f"the server answered {status}",
            kind=f"http {status}",
            retryable=status in self._retried,
            status=status,
            retry_after=parse_retry_after(
                response.headers.get("Retry-After"), datetime.now(UTC), self._max_retry_after
            ),
            contacted=not response.from_cache,
        )
        error.response = response
        raise error


class RetryPolicy:
    """How long a failed request waits: as long as the server asks, else with exponential backoff and jitter."""

    def __init__(self, config: RetrySettings, random_fraction: Callable[[], float] = random.random) -> None:
        self._config = config
        self._random = random_fraction

    def retry_in(self, error: FetchError, attempt: int) -> float | None:
        """Seconds until the next attempt. None: give up, the request is dead."""
        if not error.retryable or attempt >= self._config.max_attempts:
            return None
        if error.retry_after is not None:
            return error.retry_after.total_seconds()
        delay = self._config.base_delay * 2.0 ** min(attempt - 1, 60)
        return min(self._config.max_delay, delay * (0.75 + 0.5 * self._random()))


def parse_retry_after(value: str | None, now: datetime, limit: float = MAX_RETRY_AFTER) -> timedelta | None:
    """The wait that a Retry-After header asks for, between zero and ``limit`` seconds; None if it is missing or
    invalid. Every wait that a server asks for comes from here: without the limit, one answer could stop all runs on its
    host for a day."""
    if not value:
        return None
    value = value.strip()
    if value.isascii() and value.isdigit():
        wait = timedelta(seconds=min(int(value[:9]), 10**9))
    else:
        from email.utils import parsedate_to_datetime  # few crawls need it

        try:
            moment = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        wait = moment - now
    return min(max(wait, timedelta(0)), timedelta(seconds=limit))
