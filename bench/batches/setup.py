"""Values and processes that all parts share. Runs in the environment that has Shoal."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from crawl.machine import pin
from crawl.site import path_of

BENCH = Path(__file__).parents[1]
FOLDER = BENCH / ".work/batch"
"""The folder for the logs of the processes."""
TOKENS = {"small": "token-of-the-small", "large": "token-of-the-large"}
"""Two callers. The server gives them equal shares."""


@dataclass(frozen=True)
class Setup:
    nginx: str
    root: str
    """The files of the site."""
    pages: int
    rounds: int
    batches: int
    """The number of small batches for each distribution of times."""
    concurrency: int
    site_core: int
    """The core of the site and the callers."""
    server_core: int

    @property
    def environ(self) -> dict[str, str]:
        """Settings for the server, the plain crawl and the workers: no delay, and no lower limit for a single host."""
        return {
            "SHOAL_DOWNLOAD_DELAY": "0",
            "SHOAL_CONCURRENCY": str(self.concurrency),
            "SHOAL_CONCURRENCY_PER_HOST": str(self.concurrency),
            "SHOAL_LOG_LEVEL": "WARNING",
            "SHOAL_SERVE__MAX_IN_FLIGHT": str(self.concurrency),
            "SHOAL_SERVE__ALLOW": "127.0.0.0/8",
            "SHOAL_SERVE__TOKENS": json.dumps(TOKENS),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def urls(self, site: str) -> list[str]:
        """All pages of the site at this URL."""
        return [site.rstrip("/") + path_of(number) for number in range(self.pages)]


@contextmanager
def running(
    setup: Setup,
    name: str,
    *words: str,
    core: int | None,
    environ: Mapping[str, str] | None = None,
    talks: bool = False,
) -> Iterator[Popen[str]]:
    """A Python process, killed with all its children when the block ends. Its output goes to a log. With ``talks``, its
    stdin and stdout are pipes."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.log").open("wb") as log:
        process = Popen(
            [*([] if core is None else pin(core)), sys.executable, *words], cwd=BENCH, text=True,
            stdin=PIPE if talks else DEVNULL, stdout=PIPE if talks else log, stderr=log,
            env={**os.environ, **setup.environ, **(environ or {})}, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_line(process: Popen[str]) -> str:
    """The next line of a process that has pipes."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process has ended: {process.args}; why is in {FOLDER}")
    return line
