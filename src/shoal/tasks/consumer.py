"""A worker's consumer that sends its events together."""

from __future__ import annotations

import time
from typing import Any

from celery.worker.consumer import Consumer

_TOGETHER = 0.2
"""Seconds for which events of tasks wait for others, so that Flower is as much late. A message for each event took a
third of the time of a worker's main process."""


class EventBatchingConsumer(Consumer):  # type: ignore[misc]
    """Celery's own sends them whenever its loop comes round."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._due = 0.0

    def on_send_event_buffered(self) -> None:
        now = time.monotonic()
        if self.hub and now >= self._due:
            self._due = now + _TOGETHER
            self.hub.call_later(_TOGETHER, self._flush_events)
