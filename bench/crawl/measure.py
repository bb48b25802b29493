"""One timed run of a crawler, from the start of its process to its end, and a check that it did all the work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crawl.contenders import Contender, Job, command_of, variables_of
from crawl.server import Serving, serve
from crawl.site import path_of


@dataclass(frozen=True)
class Setup:
    """Values that all runs of a benchmark share."""

    nginx: str
    work: Path
    server_pin: list[str]
    crawler_pin: list[str]
    crawler_core: int | None
    concurrency: int
    pages: int
    timeout: float
    log: bool

    @property
    def venvs(self) -> Path:
        return self.work / "venvs"


@dataclass
class Run:
    contender: str
    site: str
    round: int
    pages: int
    """Distinct pages in the output."""
    expected: int
    limited: bool
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    other_seconds: float
    """CPU time of other programs, or of the host of this machine, on the crawler's core during the run."""
    peak_bytes: int
    exit_code: int
    robots_requests: int | None
    problems: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.pages / self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(contender: Contender, site: str, root: Path, round_: int, setup: Setup) -> Run:
    scratch = setup.work / "runs" / f"{site}-{contender.key}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    limit = contender.limits.get(site, 0)
    limit = limit if limit < setup.pages else 0
    output = scratch / "pages.jsonl"
    with serve(setup.nginx, root, setup.work / "nginx", setup.server_pin, log=setup.log) as serving:
        job = Job(serving.url, output, scratch, setup.concurrency, limit)
        command = [*setup.crawler_pin, *command_of(contender, job, setup.venvs)]
        busy = busy_seconds(setup.crawler_core)
        started = time.monotonic()
        with (scratch / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=scratch,
                env=variables_of(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            exit_code, usage, late = wait(process, setup.timeout)
        seconds = time.monotonic() - started
        busy = busy_seconds(setup.crawler_core) - busy
    found = read_output(output)
    result = Run(
        contender=contender.key,
        site=site,
        round=round_,
        pages=len(found),
        expected=limit or setup.pages,
        limited=bool(limit),
        seconds=seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        other_seconds=max(0.0, busy - usage.ru_utime - usage.ru_stime),
        server_cpu_seconds=serving.cpu_seconds,
        peak_bytes=usage.ru_maxrss * 1024,
        exit_code=exit_code,
        robots_requests=serving.robots if setup.log else None,
    )
    if late:
        result.problems.append(f"stopped after {setup.timeout:.0f} s")
    elif exit_code:
        result.problems.append(f"exit code {exit_code}: {last_line(scratch / 'log.txt')}")
    result.problems += check_pages(found, result.expected, setup, serving)
    if result.other_seconds > max(0.2, 0.1 * result.seconds):
        result.problems.append("too slow: other programs used the crawler's core")
    if serving.cpu_seconds > 0.85 * result.seconds:
        result.problems.append("the server's core was full")
    return result


def busy_seconds(core: int | None) -> float:
    """Seconds that the core was busy so far, without interrupts: those of the network belong to the crawler."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name == f"cpu{core}":
            user, nice, system, _, _, _, _, steal = map(int, values[:8])
            return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")
    return 0.0


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
    return lines[-1].strip().replace("|", "/")[:120]  # it goes into a table


def wait(process: subprocess.Popen[bytes], timeout: float) -> tuple[int, Any, bool]:
    """Wait for the process and return its resource usage. After the time limit its whole group is killed."""
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        raise
    finally:
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage, late.is_set()


def read_output(output: Path) -> dict[str, int]:
    """The number of times that each page is in the output, by path."""
    found: dict[str, int] = {}
    if not output.exists():
        return found
    with output.open("rb") as lines:
        for line in lines:
            try:
                item = json.loads(line)
            except ValueError:
                break  # the last line of a crawler that was stopped
            path = urlsplit(item["url"]).path
            found[path] = found.get(path, 0) + (1 if item["title"] and item["h1"] and item["links"] else 0)
    return found


def check_pages(found: dict[str, int], expected: int, setup: Setup, serving: Serving) -> list[str]:
    """Problems that make a run incomparable: work that was not done, or was done twice."""
    problems = []
    everything = {path_of(number) for number in range(setup.pages)}
    if strange := found.keys() - everything:
        problems.append(f"{len(strange)} pages that the site does not have")
    if len(found) < expected:
        problems.append(f"{expected - len(found)} of {expected} pages not in the output")
    if empty := sum(1 for count in found.values() if count == 0):
        problems.append(f"{empty} items without their title, h1 or links")
    if repeated := sum(1 for count in found.values() if count > 1):
        problems.append(f"{repeated} pages more than once in the output")
    if setup.log:
        fetched = sum(1 for path in serving.pages if path in everything)
        if fetched < expected:
            problems.append(f"{expected - fetched} of {expected} pages never requested")
        if (again := serving.pages.total() - len(serving.pages)) > 0:
            problems.append(f"{again} pages fetched again")
        if failed := sum(count for status, count in serving.statuses.items() if status >= 400):
            problems.append(f"{failed} requests answered with an error")
    return problems
