"""One timed run of a crawler, from the start of its process to its end, and a check that it did all the work."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crawl.checks import check_pages, read_output
from crawl.contenders import Contender, Job, command_of, variables_of
from crawl.content import Content
from crawl.server import Serving, serve
from crawl.web_server import authority_of, serve_web
from stores import servers


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
    delay: float = 0.0
    """Seconds between two requests to a host of site d."""
    server_cores: frozenset[int] | None = None
    """For the store of a frontier."""

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
    requests: int | None = None
    """That the server answered, without robots.txt."""
    connections: int = 0
    """TLS handshakes; 0 if they were not counted."""
    polite_seconds: float = 0.0
    """The least time that the delay between requests allows."""
    problems: list[str] = field(default_factory=list)
    failed: bool = False
    """It found less than half of the pages, so its figures mean nothing."""

    @property
    def rate(self) -> float:
        return self.pages / self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(contender: Contender, site: str, content: Content, round_: int, setup: Setup) -> Run:
    scratch = empty_folder(setup.work / "runs" / f"{site}-{contender.key}")
    limit = contender.limits.get(site, 0)
    limit = limit if limit < len(content.pages) else 0
    output = scratch / "pages.jsonl"
    delay = setup.delay if site == "d" else 0.0
    concurrency = max(setup.concurrency, len(content.hosts)) if delay else setup.concurrency
    with ExitStack() as stack:
        cores = set(setup.server_cores or ())
        store = stack.enter_context(servers.server(contender.store, cores)) if contender.store else None
        if store is not None:
            prepare(store.url, setup.venvs / contender.environment / "bin/shoal")
        serving = stack.enter_context(served(site, content, delay, setup))
        job = Job(
            serving.url, output, scratch, concurrency, limit, delay, store.url if store else "", content.hosts,
            authority_of(content, setup.work) if content.hosts else None,
        )  # fmt: skip
        timing = timed(command_of(contender, job, setup.venvs), job.scratch, variables_of(job), setup)
    found = read_output(output, content)
    worked = timing.cpu_seconds
    result = Run(
        contender=contender.key,
        site=site,
        round=round_,
        pages=sum(1 for key in found.pages if key in content.pages),
        expected=limit or len(content.pages),
        limited=bool(limit),
        seconds=timing.seconds,
        cpu_seconds=worked,
        other_seconds=max(0.0, timing.busy - worked),
        server_cpu_seconds=serving.cpu_seconds,
        peak_bytes=timing.peak_bytes,
        exit_code=timing.exit_code,
        robots_requests=serving.robots if setup.log else None,
        requests=(serving.pages + serving.refused).total() if setup.log else None,
        connections=serving.connections,
        polite_seconds=delay * content.requests_of_busiest_host(),
    )
    if timing.late:
        result.problems.append(f"stopped after {setup.timeout:.0f} s")
    elif timing.exit_code:
        result.problems.append(f"exit code {timing.exit_code}: {last_line(scratch / 'log.txt')}")
    result.failed = 2 * result.pages < result.expected
    expected = int(0.85 * limit) if limit and content.errors else result.expected  # the limit counts errors too
    result.problems += check_pages(found, expected, content, serving, log=setup.log)
    if result.other_seconds > max(0.2, 0.1 * result.seconds):
        result.problems.append("too slow: other programs used the crawler's core")
    if serving.cpu_seconds > 0.85 * result.seconds:
        result.problems.append("the server's core was full")
    return result


def prepare(store: str, shoal: Path) -> None:
    """Let Shoal create its schema, which it does once for each database."""
    subprocess.run([shoal, "runs", "--frontier", store], check=True, stdout=subprocess.DEVNULL)


def empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def served(site: str, content: Content, delay: float, setup: Setup) -> AbstractContextManager[Serving]:
    if not content.hosts:
        return serve(setup.nginx, content.root, setup.work / "nginx", setup.server_pin, log=setup.log)
    folder, slow = setup.work / "nginx-tls", site == "d"
    return serve_web(setup.nginx, content, folder, setup.server_pin, log=setup.log, slow=slow, delay=delay)


@dataclass
class Timing:
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    exit_code: int
    late: bool
    """It was killed at the time limit."""
    busy: float
    """Seconds that the crawler's core was busy."""


def timed(command: list[str], folder: Path, variables: dict[str, str], setup: Setup) -> Timing:
    """Run the crawler in this folder, on its core, until its process ends."""
    report = folder / "usage.json"
    launch = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")), str(report), str(setup.timeout)]
    busy = busy_seconds(setup.crawler_core)
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*launch, *setup.crawler_pin, *command],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:  # nothing that the crawler started outlives it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise SystemExit(f"cannot run {command[0]}: {last_line(folder / 'log.txt')}")
    return Timing(**json.loads(report.read_text()), busy=busy_seconds(setup.crawler_core) - busy)


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
