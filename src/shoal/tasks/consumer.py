"""A Celery consumer that sends task events in batches, and survives messages that others wrote to the broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from celery.worker.consumer import Consumer
from kombu.transport.redis import Channel

log = logging.getLogger("shoal.tasks")

_BATCH_EVERY = 0.2
"""Seconds for which events are collected, which is also the delay of Flower. One message per event took a third of the
time of a worker's main process."""


class EventBatchingConsumer(Consumer):  # type: ignore[misc]
    """Sends events every ``_BATCH_EVERY`` seconds. Celery's own consumer sends them with each turn of its loop."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._due = 0.0

    def create_task_handler(self, *args: object, **kwargs: object) -> Callable[[Any], None]:
        """Reject messages that Celery cannot read. By itself, a worker ends with the first one."""
        handle = super().create_task_handler(*args, **kwargs)

        def handle_or_reject(message: Any) -> None:
            try:
                _check_headers(message.headers)
                handle(message)
            except (*self.connection_errors, *self.channel_errors):
                raise
            except Exception as exc:
                log.error("refused a message that is no task: %s", _shortened(exc))
                message.reject_log_error(log, self.connection_errors)

        return handle_or_reject

    def on_send_event_buffered(self) -> None:
        now = time.monotonic()
        if self.hub and now >= self._due:
            self._due = now + _BATCH_EVERY
            self.hub.call_later(_BATCH_EVERY, self._flush_events)


def _check_headers(headers: dict[str, object]) -> None:
    """ValueError for times that Shoal does not set. A wrong one ends the worker later, when its task begins."""
    if headers.get("timelimit") not in (None, [None, None]) or headers.get("eta") or headers.get("expires"):
        raise ValueError("a task of Shoal has no time limit, no ETA and does not expire")


_BAD_ENVELOPE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_read = Channel._brpop_read


def _read_or_drop(channel: Any, **options: object) -> Any:
    """Read the next message of the broker. One without a valid envelope is dropped: it cannot even be rejected."""
    try:
        return _read(channel, **options)  # type: ignore[no-untyped-call]
    except _BAD_ENVELOPE as exc:
        log.error("dropped a message without a valid envelope: %s", _shortened(exc))
        return True


def _shortened(exc: Exception) -> str:
    return f"{type(exc).__name__} {exc!s:.200}"


Channel._brpop_read = _read_or_drop  # type: ignore[assignment, method-assign]
