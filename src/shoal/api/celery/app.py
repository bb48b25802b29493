"""The Celery application: ``celery -A shoal.celery worker``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from celery import Celery, Task
from celery.exceptions import Retry
from celery.signals import after_setup_logger, after_setup_task_logger, worker_process_init, worker_process_shutdown
from celery.utils.dispatch import Signal
from celery.worker.consumer import Consumer
from kombu.transport.redis import Channel

from shoal.api.celery.page_worker import PageFailedError, PageWorker
from shoal.api.celery.settings import QUEUE, ROBOTS_TASK, TASK, celery_settings
from shoal.messages import LogFilter
from shoal.runs.loop_thread import collect_rarely
from shoal.system import clock

_RESULT_TTL = 3600
_VISIBILITY_TIMEOUT = 900
"""Seconds after which the broker delivers an unacknowledged task to another worker. If the first worker is only slow,
the second is refused: the lease has another token by then."""

settings = celery_settings()
app = Celery("shoal", broker=settings.broker_url, backend=settings.result_backend)
app.conf.update(
    task_default_queue=QUEUE,
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    result_expires=_RESULT_TTL,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_time_limit=_VISIBILITY_TIMEOUT,
    task_send_sent_event=True,
    worker_send_task_events=True,
    worker_prefetch_multiplier=1,
    worker_consumer="shoal.api.celery.app:EventBatchingConsumer",
    worker_concurrency=settings.concurrency,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "visibility_timeout": _VISIBILITY_TIMEOUT,
        "socket_timeout": 10,
        "socket_connect_timeout": 5,
        "health_check_interval": 10,
        "socket_keepalive": True,
    },
    result_backend_transport_options={"retry_policy": {"timeout": 5.0}},
    redis_socket_timeout=10.0,
    redis_socket_connect_timeout=5.0,
    redis_backend_health_check_interval=10,
    task_publish_retry_policy={"max_retries": 1, "interval_start": 0.1},
)

_F = TypeVar("_F", bound=Callable[..., object])


def _on(signal: Signal) -> Callable[[_F], _F]:
    """Decorate the handler of a signal. Celery's decorators have no types."""
    return cast("Callable[[_F], _F]", signal.connect)


def _task(**options: object) -> Callable[[_F], _F]:
    """Decorate a task."""
    return cast("Callable[[_F], _F]", app.task(**options))


_worker: PageWorker | None = None
_worker_lock = threading.Lock()


@_on(after_setup_logger)
@_on(after_setup_task_logger)
def _keep_logs_printable(logger: logging.Logger, **_: object) -> None:
    """Escape control characters in the log: text of pages must not control the terminal or forge log lines."""
    for handler in logger.handlers:
        handler.addFilter(LogFilter())


@_task(name=TASK, bind=True, rate_limit=settings.rate_limit, throws=(PageFailedError,))
def crawl(self: Task, session_id: str, url: str, lease: str, store: str) -> dict[str, object]:
    """Fetch one page of a session under the lease in the task. ``url`` is only for display, as in Flower.

    Celery shows a failed page as a failed task, and a page that will be retried as a retry. The next attempt is a new
    task: until then the page waits in the frontier.
    """
    return _work(self, session_id, lease, store)


@_task(name=ROBOTS_TASK, bind=True, throws=(PageFailedError,))
def robots(self: Task, session_id: str, url: str, lease: str, store: str) -> dict[str, object]:
    """Fetch the robots.txt that a page needs. The page itself follows as a task of its own."""
    return _work(self, session_id, lease, store, robots_only=True)


def _work(task: Task, session_id: str, lease: str, store: str, *, robots_only: bool = False) -> dict[str, object]:
    worker_id = str(task.request.hostname or "celery")
    outcome = _page_worker().work(session_id, lease, store, worker_id=worker_id, robots_only=robots_only)
    error = PageFailedError(outcome.get("reason"))
    if outcome["state"] == "dead":
        raise error
    if outcome["state"] == "waiting":
        raise Retry(str(error), exc=error, when=outcome["retry_in"])
    return outcome


def _page_worker() -> PageWorker:
    global _worker
    with _worker_lock:
        if _worker is None:  # no process was forked: the pool has threads, or none
            _worker = PageWorker(in_background=True)
        return _worker


@_on(worker_process_init)
def _start_worker(**_: object) -> None:
    """Start the worker after the fork: a process cannot share event loops and connections with its parent."""
    global _worker
    collect_rarely()
    _worker = PageWorker(in_background=False)


@_on(worker_process_shutdown)
def _stop_worker(**_: object) -> None:
    if _worker is not None:
        _worker.close()


# A Celery consumer that sends task events in batches, and survives messages that others wrote to the broker.


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
                headers = message.headers
                if headers.get("timelimit") not in (None, [None, None]) or headers.get("eta") or headers.get("expires"):
                    # A wrong one would end the worker later, when its task begins.
                    raise ValueError("a task of Shoal has no time limit, no ETA and does not expire")
                handle(message)
            except (*self.connection_errors, *self.channel_errors):
                raise
            except Exception as exc:
                log.error("refused a message that is no task: %s", _shortened(exc))
                message.reject_log_error(log, self.connection_errors)

        return handle_or_reject

    def on_send_event_buffered(self) -> None:
        now = clock.monotonic()
        if self.hub and now >= self._due:
            self._due = now + _BATCH_EVERY
            self.hub.call_later(_BATCH_EVERY, self._flush_events)


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
