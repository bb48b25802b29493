"""A batch on Celery compared with tasks that do nothing. They take turns on the same broker, with the same worker.

Workers, broker, site, server and sender share all cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from subprocess import Popen
from typing import Any

import msgspec
from celery import Task

from batches import sites
from batches.local import visits
from batches.server import Caller, api, problems, wait_until
from batches.setup import Setup, running
from nodes.load import Load
from stores import servers

PROCESSES = 2
_POLL_EVERY = 0.005
WORKER = ("worker", "--loglevel=WARNING", f"--concurrency={PROCESSES}")


def measure(setup: Setup) -> list[dict[str, Any]]:
    """Return one result per method and round. The first round is a warm-up and is not counted."""
    figures: list[dict[str, Any]] = []
    with servers.server("redis", None) as redis, sites.fast(setup) as site:
        base = redis.url.rpartition("/")[0]
        environ = {
            "CELERY_BROKER_URL": f"{base}/0",
            "CELERY_RESULT_BACKEND": f"{base}/1",
            "SHOAL_FRONTIER": f"{base}/2",
            "CELERY_TASK_RATE_LIMIT": "none",
        }
        os.environ.update(environ)  # this process sends the tasks that do nothing
        with (
            api(setup, core=None, environ=environ) as server,
            celery_worker(setup, "same", environ) as same,
            celery_worker(setup, "own", environ) as own,
            celery_worker(setup, "bare", environ) as bare,
        ):
            from batches.noop import TASKS  # it reads the environment

            for task in TASKS.values():
                wait_until(task.app.control.ping, "a Celery worker")
            urls = setup.urls(site.url)
            Caller(server.port).get("/api/crawl/distributed/status")  # Celery is imported now
            idle = server.memory()["now"]

            def batch() -> tuple[float, list[str]]:
                seconds, answer = Caller(server.port).timed(urls, distributed=True)
                return seconds, problems(answer, urls)

            ways = {
                "same": (lambda: do_nothing(TASKS["same"], urls), same.pid),
                "own": (lambda: do_nothing(TASKS["own"], urls), own.pid),
                "bare": (lambda: do_nothing(TASKS["bare"], urls), bare.pid),
                "batch": (batch, own.pid),
            }
            others = {"sender": server.pid, "Redis": servers.process_of(redis), "site": site.pid}
            for number in range(setup.rounds + 1):
                for way, (act, pid) in ways.items():
                    own = time.process_time()
                    with Load(worker=pid, **others) as load:
                        seconds, wrong = act()
                    own = time.process_time() - own
                    print(
                        f"celery  round {number}  {way:<6}{len(urls) / seconds:8,.0f} /s", file=sys.stderr, flush=True
                    )
                    # The server sends pages; this process sends tasks that do nothing.
                    spent = {**load.spent, "sender": load.spent["sender"] + own}
                    figure = {
                        "part": "celery", "way": way, "round": number, "pages": len(urls), **load.figure(),
                        "seconds": seconds, "problems": wrong,
                        "cpu_us": {name: 1e6 * each / len(urls) for name, each in spent.items()},
                    }  # fmt: skip
                    if number:
                        figures.append(figure)
            figures[-1] |= {"idle_bytes": idle, "peak_bytes": server.memory()["peak"]}
    figures[-1]["problems"] += visits(site, setup, setup.rounds + 1)
    return figures


def celery_worker(setup: Setup, app: str, environ: dict[str, str]) -> AbstractContextManager[Popen[str]]:
    words = ("-m", "celery", "-A", f"batches.noop:{app}", *WORKER)
    return running(setup, f"celery-worker-{app}", *words, core=None, environ=environ)


def do_nothing(task: Task, urls: Sequence[str]) -> tuple[float, list[str]]:
    """Send one task per URL as fast as possible, and wait for the last result. The results are counted, not fetched."""
    backend, results = task.app.backend, task.app.backend.client
    results.flushdb()
    began = time.perf_counter()
    with task.app.producer_or_acquire() as producer:
        sent = [task.apply_async((url,), producer=producer) for url in urls]
    keys = [backend.get_key_for_task(each.id) for each in sent]
    while results.dbsize() < len(urls) or not all(is_done(found) for found in results.mget(keys)):
        time.sleep(_POLL_EVERY)
    return time.perf_counter() - began, []


def is_done(result: bytes) -> bool:
    return bool(msgspec.json.decode(result)["status"] == "SUCCESS")
