"""Calls of Celery's broker, in threads: its library blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from celery.result import denied_join_result
from kombu.exceptions import ChannelError, OperationalError

from shoal.api.celery.messages import pack
from shoal.api.celery.settings import QUEUE, TASK
from shoal.ports import Lease
from shoal.system import threads

log = logging.getLogger("shoal.tasks")

_threads = threads.Pool(4, "shoal-broker")

# This process never waits for task results. Without this, Celery subscribes to the result of each task that it sends.
# The global keeps the context open for the life of the process.
_denial = denied_join_result()
_denial.__enter__()


async def publish(session_id: str, store: str, leases: Sequence[Lease], task: str = TASK) -> int:
    """Send a task for each lease. Returns how many the broker accepted. ``store`` is the name of the session's
    store."""
    return await _threads.call(_publish, session_id, store, leases, task)


async def queue_is_empty() -> bool:
    """Whether workers have received all tasks. False if the broker does not respond."""
    return await _threads.call(_queue_is_empty)


def _publish(session_id: str, store: str, leases: Sequence[Lease], task: str = TASK) -> int:
    from shoal.api.celery.app import app

    count = 0
    try:
        with app.producer_or_acquire() as producer:
            for lease in leases:
                url = lease.request.url
                app.send_task(
                    task, (session_id, url, pack(lease), store), producer=producer,
                    argsrepr=repr((session_id, url)),  # the lease may contain cookies
                )  # fmt: skip
                count += 1
    except (OperationalError, ChannelError, OSError) as exc:  # every error of a broker is temporary: pages wait
        log.warning("the broker does not accept tasks, retrying: %s; its address is CELERY_BROKER_URL", exc)
    return count


def _queue_is_empty() -> bool:
    from shoal.api.celery.app import app

    try:
        with app.connection_or_acquire() as connection, connection.channel() as channel:
            return bool(channel.queue_declare(QUEUE, passive=True).message_count == 0)
    except ChannelError as exc:  # 404: on Redis, an empty queue does not exist
        return str(exc.reply_code) == "404"
    except Exception as exc:  # transports have no common base error
        log.debug("broker: %s", exc)
        return False
