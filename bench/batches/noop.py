"""A Celery task that does nothing, to compare with tasks that fetch a page. Three kinds of worker run it:

- Celery's own worker with all settings of Shoal's application,
- Shoal's worker, which sends the events of many tasks together,
- a worker with late acknowledgement, no prefetching and stored results, but without monitoring events.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from shoal.api.celery.app import app as own

NAME = "bench.noop"
SESSION = "0123456789abcdef" * 2

# All use the broker and the result backend of the environment. Each has its own queue.
same = Celery("same")
same.conf.update({key: own.conf[key] for key in own.conf.changes if key != "worker_consumer"})
same.conf.task_default_queue = "same"
bare = Celery("bare")
bare.conf.update(
    task_default_queue="bare",
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)


def noop(url: str) -> dict[str, Any]:
    """Return a result of the same form as that of a page."""
    return {"url": url, "session_id": SESSION, "attempt": 1, "state": "done"}


TASKS = {name: app.task(name=NAME)(noop) for name, app in (("same", same), ("own", own), ("bare", bare))}
