"""A worker that kills itself with SIGKILL between two steps, when it reaches that place for the n-th time.

It is the real worker. Only the method after which it dies is wrapped, in its own process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shoal.cli.main import main
from shoal.crawling.callbacks import CallbackOutput, Callbacks
from shoal.crawling.leases import SettledState, Settler
from shoal.crawling.page import ParsedPage
from shoal.crawling.run_queue import RunQueue
from shoal.fetch.http_fetcher import HttpFetcher
from shoal.http import Request, Response
from shoal.ports import Claim, Leased
from shoal.sinks.drainer import Drainer


@dataclass(frozen=True)
class Crash:
    """Where to die. For a step of an output, add the name of the output: ``written items.jsonl``."""

    step: str
    passing: int
    report: str
    """A file to which the URLs of the step are written."""


def crashing(crash: Crash) -> list[str]:
    """The start of a command that dies there: what `SHOAL` is for others."""
    return [sys.executable, "-m", "tests.acceptance.crashing_worker", crash.step, str(crash.passing), crash.report]


def arm(crash: Crash) -> None:
    """Make this process die at that place."""
    step, _, output = crash.step.partition(" ")
    fuse = _Fuse(crash)
    match step:
        case "leased":
            _after_leasing(fuse)
        case "fetched":
            _after_fetching(fuse)
        case "parsed":
            _after_parsing(fuse)
        case "completing":
            _while_completing(fuse)
        case "completed":
            _after_completing(fuse)
        case "written" | "flushed" | "saved":
            _after_draining(fuse, step, output)
        case _:
            raise ValueError(f"no step {step}")


class _Fuse:
    def __init__(self, crash: Crash) -> None:
        self._left = crash.passing
        self._report = Path(crash.report)

    @property
    def is_last(self) -> bool:
        return self._left == 1

    def burn(self, urls: Iterable[str]) -> None:
        self._left -= 1
        if not self._left:
            self._report.write_text("\n".join(urls))
            die()


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def _after_leasing(fuse: _Fuse) -> None:
    original = RunQueue.next_requests

    async def next_requests(self: RunQueue, limit: int, **options: Any) -> Leased:
        leased = await original(self, limit, **options)
        if leased.leases:
            fuse.burn(lease.request.url for lease in leased.leases)
        return leased

    RunQueue.next_requests = next_requests  # type: ignore[method-assign]


def _after_fetching(fuse: _Fuse) -> None:
    original = HttpFetcher.fetch

    async def fetch(self: HttpFetcher, request: Request, max_body_bytes: int | None = None) -> Response:
        response = await original(self, request, max_body_bytes)
        fuse.burn([request.url])
        return response

    HttpFetcher.fetch = fetch  # type: ignore[method-assign]


def _after_parsing(fuse: _Fuse) -> None:
    original = Callbacks.call

    async def call(self: Callbacks, name: str | None, request: Request, *arguments: Any) -> CallbackOutput:
        found = await original(self, name, request, *arguments)
        fuse.burn([request.url])
        return found

    Callbacks.call = call  # type: ignore[method-assign]


def _while_completing(fuse: _Fuse) -> None:
    """Send the call to the server, and die before its response: nobody knows whether it happened."""
    original = Settler._complete

    async def commit(self: Settler, parsed: list[ParsedPage]) -> dict[int, SettledState]:
        if fuse.is_last:
            telling = asyncio.ensure_future(self._frontier.complete([page.completion for page in parsed]))
            await asyncio.sleep(0.001)
            fuse.burn(each.completion.lease.request.url for each in parsed)
            await telling
        fuse.burn([])
        return await original(self, parsed)

    Settler._complete = commit  # type: ignore[method-assign]


def _after_completing(fuse: _Fuse) -> None:
    original = Settler._complete

    async def commit(self: Settler, parsed: list[ParsedPage]) -> dict[int, SettledState]:
        outcomes = await original(self, parsed)
        fuse.burn(each.completion.lease.request.url for each in parsed)
        return outcomes

    Settler._complete = commit  # type: ignore[method-assign]


def _after_draining(fuse: _Fuse, step: str, output: str) -> None:
    """Die after a step of one output: items written, items flushed, or cursor saved."""
    opening, moving = Drainer._open, Drainer._move

    async def opened(self: Drainer, claim: Claim) -> None:
        await opening(self, claim)
        if output in self._role and step != "saved":
            name = "write" if step == "written" else "flush"
            setattr(self._sink, name, _then_burn(getattr(self._sink, name), fuse))

    async def moved(self: Drainer, position: int, state: bytes) -> None:
        moves = position > self._position
        await moving(self, position, state)
        if moves and output in self._role and step == "saved":
            fuse.burn([])

    Drainer._open, Drainer._move = opened, moved  # type: ignore[method-assign]


def _then_burn(method: Callable[..., Any], fuse: _Fuse) -> Callable[..., Any]:
    async def wrapped(*args: Any) -> Any:
        result = await method(*args)
        fuse.burn([])
        return result

    return wrapped


if __name__ == "__main__":
    step, passing, report, *words = sys.argv[1:]
    arm(Crash(step, int(passing), report))
    sys.argv = ["shoal", *words]
    main()
