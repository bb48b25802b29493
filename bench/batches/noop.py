"""What a page as a Celery task is compared with: a task that does nothing.

Once it is a task of Shoal's own application, so that all settings of the worker are the same; and once of one that has
late acknowledgement, no prefetching and results, as the comparison wants it, but nothing that Shoal has beside: no
events for those who look on, no word that a task was begun.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from shoal.tasks.app import app as app

NAME = "bench.noop"
SESSION = "0123456789abcdef" * 2

bare = Celery("bare", broker=os.environ["BENCH_BROKER_URL"], backend=os.environ["BENCH_RESULT_BACKEND"])
bare.conf.update(task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)


def noop(url: str) -> dict[str, Any]:
    """Answers as a page does."""
    return {"url": url, "session_id": SESSION, "attempt": 1, "state": "done"}


TASKS = {"noop": app.task(name=NAME)(noop), "bare": bare.task(name=NAME)(noop)}
