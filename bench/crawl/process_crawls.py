"""One crawl of a site by several processes of this machine, timed as a whole."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crawl.checks import check_pages, read_output
from crawl.contenders import SHOAL, SPIDERS, Job, variables_of
from crawl.content import Content
from crawl.measure import Setup, last_line
from crawl.server import serve

_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Run:
    """The figures of one crawl."""

    pages: int
    seconds: float
    cpu_seconds: float
    """Of all its processes."""
    site_cpu_seconds: float
    load_before: float
    rate: float = 0.0
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self, processes: int) -> str:
        flags = f"  !! {'; '.join(self.problems)}" if self.problems else ""
        per_page = 1e6 * self.cpu_seconds / max(1, self.pages)
        site = 1e6 * self.site_cpu_seconds / max(1, self.pages)
        return (
            f"{processes} processes  {self.rate:8,.0f} pages/s  {self.seconds:6.2f} s  CPU for a page: crawl "
            f"{per_page:,.0f} µs, site {site:,.0f} µs  load {self.load_before:.1f}{flags}"
        )


def adopt_orphans() -> None:
    """The process that owns the frontier detaches itself. Become its parent, to learn what CPU time it took."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(shoal: str, processes: int, frontier: str, content: Content, setup: Setup) -> Run:
    scratch = setup.work / "runs" / f"processes-{processes}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    output = scratch / "pages.jsonl"
    where = "memory:" if frontier == "memory" else f"sqlite:///{scratch}/run.db"
    load = os.getloadavg()[0]
    with serve(setup.nginx, content.root, setup.work / "nginx", [], log=setup.log) as serving:
        job = Job(serving.url, output, scratch, setup.concurrency, 0)
        words = [word.format(output=output, concurrency=setup.concurrency, delay=0) for word in SHOAL]
        command = [shoal, "run", f"{SPIDERS}/shoal_follow_all.py", "--frontier", where, *words]
        if processes > 1:
            command += ["--processes", str(processes)]
        before = _cpu()
        began = time.monotonic()
        with (scratch / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=scratch, env=variables_of(job), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            code = process.wait(setup.timeout)
        seconds = time.monotonic() - began
        _reap_orphans(serving.pid)
        worked = _cpu() - before
    found = read_output(output, content)
    result = Run(len(found.pages), seconds, worked, serving.cpu_seconds, load, len(found.pages) / seconds)
    if code:
        result.problems.append(f"exit code {code}: {last_line(scratch / 'log.txt')}")
    result.problems += check_pages(found, setup.pages, content, serving, log=setup.log)
    return result


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _reap_orphans(server: int) -> None:
    """Wait for the adopted processes. The site's server stays."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    for pid in map(int, path.read_text().split()):
        if pid != server:
            os.waitpid(pid, 0)
