"""What a page as a Celery task is compared with: a task that does nothing.

By a worker of Celery's own with all settings of Shoal's application; by Shoal's worker, which sends the events of many
tasks together; and by one that has late acknowledgement, no prefetching and results, as the comparison wants it, but
no events for those who look on.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from shoal.tasks.app import app as own

NAME = "bench.noop"
SESSION = "0123456789abcdef" * 2

# Broker and results of all of them are where the environment says, each has a queue of its own.
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
    """Answers as a page does."""
    return {"url": url, "session_id": SESSION, "attempt": 1, "state": "done"}


TASKS = {name: app.task(name=NAME)(noop) for name, app in (("same", same), ("own", own), ("bare", bare))}
