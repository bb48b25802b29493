"""Many small batches at the same time, and the memory of the server before and at its peak."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batches.server import Caller, api, problems
from batches.setup import Setup
from batches.sites import SITES
from nodes.load import Load

SESSIONS, PAGES = 100, 20
SETTLING = 1.0


def measure(setup: Setup) -> list[dict[str, Any]]:
    """Return one result per site, each with a new server."""
    figures = []
    for name, open_site in SITES.items():
        # The pool closes last: its threads wait for responses, and stopping the server always ends that.
        with (
            ThreadPoolExecutor(SESSIONS) as pool,
            open_site(setup) as site,
            api(setup, core=setup.server_core) as server,
        ):
            urls = setup.urls(site.url)
            Caller(server.port).batch(urls[:3])
            time.sleep(SETTLING)
            idle = server.memory()["now"]
            some = [[urls[(PAGES * number + each) % len(urls)] for each in range(PAGES)] for number in range(SESSIONS)]
            with Load(worker=server.pid, site=site.pid) as load:
                ended = list(pool.map(session, [server.port] * SESSIONS, some))
            begins, ends = [began for began, _, _ in ended], [end for _, end, _ in ended]
            figure = {
                "part": "sessions", "site": name, "sessions": SESSIONS, "pages": PAGES, **load.figure(),
                "seconds": max(ends) - min(begins), "at_once": at_once(begins, ends), "idle_bytes": idle,
                "peak_bytes": server.memory()["peak"], "finished": sum(not wrong for _, _, wrong in ended),
                "problems": [each for _, _, wrong in ended for each in wrong],
            }  # fmt: skip
            print(
                f"sessions  {name}  {figure['finished']} of {SESSIONS} in {figure['seconds']:.2f} s, "
                f"{figure['at_once']} at once  {idle / 1e6:.0f} MB idle, {figure['peak_bytes'] / 1e6:.0f} MB at most",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            figures.append(figure)
    return figures


def session(port: int, urls: list[str]) -> tuple[float, float, list[str]]:
    """Return the start, the end, and the problems."""
    began = time.perf_counter()
    _, answer = Caller(port).timed(urls)
    return began, time.perf_counter(), problems(answer, urls)


def at_once(begins: list[float], ends: list[float]) -> int:
    """The largest number of sessions that ran at the same time."""
    most = open_ = 0
    for _, step in sorted([*((moment, 1) for moment in begins), *((moment, -1) for moment in ends)]):
        open_ += step
        most = max(most, open_)
    return most
