"""What is asked of Celery's broker, each in a thread: its library waits where it stands."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from celery.result import denied_join_result
from kombu.exceptions import ChannelError, OperationalError

from shoal.ports import Lease
from shoal.tasks.messages import pack
from shoal.tasks.settings import QUEUE, TASK

log = logging.getLogger("shoal.tasks")

_threads = ThreadPoolExecutor(4, thread_name_prefix="shoal-broker")

# Nobody in this process waits for the result of a task; else Celery listens for each one that is sent. It is so for as
# long as this is kept.
_denial = denied_join_result()
_denial.__enter__()


async def publish(session_id: str, store: str, leases: Sequence[Lease]) -> int:
    """Send a task for each lease; how many the broker took. ``store`` names the one that the session is in."""
    return await asyncio.get_running_loop().run_in_executor(_threads, _publish, session_id, store, leases)


async def queue_is_empty() -> bool:
    """Whether workers have taken all tasks by now. False if nobody knows."""
    return await asyncio.get_running_loop().run_in_executor(_threads, _queue_is_empty)


def _publish(session_id: str, store: str, leases: Sequence[Lease]) -> int:
    from shoal.tasks.app import app

    count = 0
    try:
        with app.producer_or_acquire() as producer:
            for lease in leases:
                url = lease.request.url
                app.send_task(
                    TASK, (session_id, url, pack(lease), store), producer=producer,
                    argsrepr=repr((session_id, url)),  # the lease may have somebody's cookies in it
                )  # fmt: skip
                count += 1
    except (OperationalError, OSError) as exc:
        log.debug("broker: %s", exc)
    return count


def _queue_is_empty() -> bool:
    from shoal.tasks.app import app

    try:
        with app.connection_or_acquire() as connection, connection.channel() as channel:
            return bool(channel.queue_declare(QUEUE, passive=True).message_count == 0)
    except ChannelError as exc:  # 404: on Redis a queue is not there while nothing is in it
        return str(exc.reply_code) == "404"
    except Exception as exc:  # whatever transports raise
        log.debug("broker: %s", exc)
        return False
