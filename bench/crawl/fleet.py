"""One timed crawl whose frontier is on a server, with one worker process or more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crawl.checks import check_pages, read_output
from crawl.contenders import SCRAPY, SHOAL, Job, variables_of
from crawl.content import Content
from crawl.machine import pin
from crawl.measure import Setup, busy_seconds, last_line, prepare
from crawl.server import serve
from stores import servers

SPIDERS = Path(__file__).parent / "spiders"
SPIDER = "{spiders}/shoal_follow_all.py"
SETTINGS = SHOAL[2:]  # without the output


@dataclass(frozen=True)
class Fleet:
    """A crawl. Commands may contain `{bin}`, `{spiders}`, `{store}`, `{run}` and the fields of Job."""

    key: str
    label: str
    store: str | None
    """The kind of server that the frontier is on."""
    workers: tuple[tuple[str, ...], ...]
    """One command per process."""
    start: tuple[str, ...] = ()
    """A command to run first, which is not timed. It prints the `run_id`."""
    environment: str = "shoal-fleet"
    sites: tuple[str, ...] = ("a", "b")


START = ("{bin}/shoal", "start", SPIDER, "--frontier", "{store}", *SETTINGS)
WORKER = ("{bin}/shoal", "worker", SPIDER, "--frontier", "{store}", "--run-id", "{run}", *SETTINGS)
WRITER = (*WORKER, "-o", "{output}")


def alone(url: str) -> tuple[tuple[str, ...], ...]:
    return (("{bin}/shoal", "run", SPIDER, "--frontier", url, *SHOAL),)


FLEETS = (
    Fleet("memory", "Shoal, memory", None, alone("memory:")),
    Fleet("redis", "Shoal, Redis", "redis", alone("{store}")),
    Fleet("postgresql", "Shoal, PostgreSQL", "postgresql", alone("{store}")),
    Fleet(
        "scrapy-redis",
        "scrapy-redis",
        "redis",
        (
            (
                *SCRAPY,
                *("-s", "SCHEDULER=scrapy_redis.scheduler.Scheduler", "-s", "REDIS_URL={store}"),
                *("-s", "DUPEFILTER_CLASS=scrapy_redis.dupefilter.RFPDupeFilter"),
            ),
        ),
        environment="scrapy-redis",
        sites=("b",),
    ),
    Fleet("redis-1", "Shoal, Redis, 1 worker", "redis", (WRITER,), START),
    Fleet("redis-2", "Shoal, Redis, 2 workers", "redis", (WRITER, WORKER), START),
    Fleet("postgresql-1", "Shoal, PostgreSQL, 1 worker", "postgresql", (WRITER,), START),
    Fleet("postgresql-2", "Shoal, PostgreSQL, 2 workers", "postgresql", (WRITER, WORKER), START),
)


@dataclass
class Run:
    contender: str
    site: str
    round: int
    pages: int
    """Distinct pages in the output."""
    expected: int
    seconds: float
    """From the start of the first worker to the end of the last."""
    cpu_seconds: float
    """CPU time of all workers."""
    site_cpu_seconds: float
    store_cpu_seconds: float
    other_seconds: float
    """CPU time of other programs on the cores of this run."""
    peak_bytes: int
    """Peak memory of the largest worker."""
    cores: dict[str, Any]
    ledger: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.pages / self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def layout(workers: int, available: list[int]) -> tuple[list[int], list[int]]:
    """One core per worker, from the last. Site and store share the others; without others, all cores."""
    own = [available[-1 - number % len(available)] for number in range(workers)]
    return own, [core for core in available[:1] if core not in own] or available


def run(fleet: Fleet, site: str, content: Content, round_: int, setup: Setup, available: list[int]) -> Run:
    scratch = setup.work / "runs" / f"{site}-fleet-{fleet.key}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    worker_cores, server_cores = layout(len(fleet.workers), available)
    output = scratch / "pages.jsonl"
    with ExitStack() as stack:
        store = stack.enter_context(servers.server(fleet.store, set(server_cores))) if fleet.store else None
        server_pin = ["taskset", "-c", ",".join(map(str, server_cores))]
        serving = stack.enter_context(serve(setup.nginx, content.root, setup.work / "nginx", server_pin, log=setup.log))
        job = Job(serving.url, output, scratch, setup.concurrency, 0)
        words = {
            "bin": str(setup.venvs / fleet.environment / "bin"),
            "spiders": str(SPIDERS),
            "store": store.url if store else "",
            "output": str(output),
            "concurrency": str(setup.concurrency),
            "leases_per_host": str(job.leases_per_host),
            "delay": "0",
            "limit": "0",
        }
        if store is not None and fleet.environment == "shoal-fleet":
            prepare(store.url, setup.venvs / fleet.environment / "bin/shoal")
        if fleet.start:
            words["run"] = started([word.format(**words) for word in fleet.start], job)
        commands = [
            [*pin(core), *(word.format(**words) for word in command)]
            for core, command in zip(worker_cores, fleet.workers, strict=True)
        ]
        store_pid = servers.process_of(store) if store else 0
        stored = servers.cpu_seconds(store_pid) if store else 0.0
        busy = sum(map(busy_seconds, available))
        seconds, usages, codes = timed(commands, job, setup.timeout)
        busy = sum(map(busy_seconds, available)) - busy
        stored = servers.cpu_seconds(store_pid) - stored if store else 0.0
        ledger = ledger_of(words, job) if store and fleet.environment == "shoal-fleet" else {}
    found = read_output(output, content)
    worked = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    result = Run(
        contender=fleet.key,
        site=site,
        round=round_,
        pages=len(found.pages),
        expected=setup.pages,
        seconds=seconds,
        cpu_seconds=worked,
        site_cpu_seconds=serving.cpu_seconds,
        store_cpu_seconds=stored,
        other_seconds=max(0.0, busy - worked - stored - serving.cpu_seconds),
        peak_bytes=max(usage.ru_maxrss for usage in usages) * 1024,
        cores={"workers": worker_cores, "site and store": server_cores},
        ledger=ledger,
    )
    for number, code in enumerate(codes):
        if code:
            result.problems.append(f"exit code {code}: {last_line(scratch / f'log-{number}.txt')}")
    result.problems += check_pages(found, setup.pages, content, serving, log=setup.log)
    if ledger and (wrong := check_ledger(ledger, setup.pages)):
        result.problems.append(wrong)
    if result.other_seconds > max(0.3, 0.15 * seconds):
        result.problems.append("too slow: other programs used its cores")
    return result


def started(command: list[str], job: Job) -> str:
    done = subprocess.run(
        command, cwd=job.scratch, env=variables_of(job), capture_output=True, text=True, check=True, timeout=60
    )
    return str(json.loads(done.stdout)["run_id"])


def timed(commands: list[list[str]], job: Job, timeout: float) -> tuple[float, list[Any], list[int]]:
    """Run all commands at the same time, until the last one ends. After the time limit all are killed."""
    processes: list[subprocess.Popen[bytes]] = []
    began = time.monotonic()
    for number, command in enumerate(commands):
        with (job.scratch / f"log-{number}.txt").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, cwd=job.scratch, env=variables_of(job), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )
            )  # fmt: skip
    ended: set[int] = set()

    def kill() -> None:
        for process in processes:
            if process.pid not in ended:
                os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    usages, codes = [], []
    try:
        for process in processes:
            _, status, usage = os.wait4(process.pid, 0)
            ended.add(process.pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            usages.append(usage)
            codes.append(process.returncode)
    except BaseException:
        kill()
        raise
    finally:
        timer.cancel()
    return time.monotonic() - began, usages, codes


def ledger_of(words: dict[str, str], job: Job) -> dict[str, Any]:
    """The counters of the run, and whether they balance in an audit."""
    shoal, where = f"{words['bin']}/shoal", ["--frontier", words["store"]]
    environment = variables_of(job)
    stats = subprocess.run([shoal, "stats", "--json", *where], env=environment, capture_output=True, text=True)
    audit = subprocess.run([shoal, "audit", *where], env=environment, capture_output=True, text=True)
    if stats.returncode:
        return {"balanced": False, "error": (stats.stderr.strip() or "no message").splitlines()[-1]}
    return {**json.loads(stats.stdout), "balanced": audit.returncode == 0}


def check_ledger(ledger: dict[str, Any], pages: int) -> str | None:
    if "error" in ledger or not ledger["balanced"]:
        return f"the ledger does not balance: {ledger}"
    if any(ledger[name] != pages for name in ("pushed", "done", "items")):
        return f"the ledger has {ledger['done']} of {ledger['pushed']} pages done, {ledger['items']} items"
    return None
