"""Which run a crawl works on: one to resume, one that other processes have just begun, or a new one."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from shoal.config import NewRunPolicy
from shoal.ports import Documents, Frontier, Run, Store
from shoal.ports.documents import StoredValue
from shoal.spider import Spider
from shoal.system import chance, clock

log = logging.getLogger("shoal.crawl")


def new_run_id() -> str:
    """A new name that sorts by time, such as ``20260215_120000_3fa9``."""
    return time.strftime("%Y%m%d_%H%M%S") + "_" + chance.token_hex(2)


class WantedRun(Struct, frozen=True, kw_only=True):
    """What a process wants to crawl."""

    spider: str
    project: str
    start: Mapping[str, object]
    """The start URLs and arguments. They are stored with a new run."""
    new: NewRunPolicy


def start_settings(spider: Spider, urls: Sequence[str] | None = None) -> dict[str, object]:
    """The start URLs and arguments of a crawl."""
    return {
        "start_urls": [str(url) for url in (spider.start_urls if urls is None else urls)][:100],
        "arguments": {name: repr(value) for name, value in spider.arguments.items()},
    }


async def finished_at(run: Run, frontier: Frontier) -> str | None:
    """When the run was finished, in words. None if it was not, or has requests again."""
    if run.state != "finished" or not (await frontier.stats()).finished:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.ended_at or run.created_at))


async def choose_run(store: Store, wanted: WantedRun, on_create: Callable[[Run], None] = lambda run: None) -> Run:
    """Find the run to resume, or create one. Processes that start at the same time on a shared store choose the same
    run, unless each of them wants a new one. ``on_create`` is called with a run that this call creates, even if it then
    chooses that of another process."""
    if wanted.new == "always":
        mine = await _create(store, wanted, "running")
        on_create(mine)
        return mine
    before = await store.list_runs(wanted.spider, wanted.project)
    run = await _to_resume(store, before, wanted)
    if run is not None:
        if run.settings.get("start_urls") != wanted.start.get("start_urls"):
            log.warning("run %s resumes with the start URLs that it began with", run.run_id)
        return run
    mine = await _create(store, wanted, "queued" if store.shared else "running")
    on_create(mine)
    return await _agree(store, wanted, before, mine) if store.shared else mine


async def _to_resume(store: Store, runs: list[Run], wanted: WantedRun) -> Run | None:
    """The newest run with the same arguments: pages of other arguments are another crawl, with other items. A finished
    run is followed by an older one if somebody reopened that one afterwards."""
    newest: Run | None = None
    for run in runs:
        if run.state in ("queued", "cancelled") or not run.settings.keys().isdisjoint(("seeds", "schedule")):
            continue  # runs of a fleet are for workers, those of a schedule for servers
        if _arguments(run.settings) != _arguments(wanted.start):
            if newest is None and run.state != "finished":
                log.warning("run %s is left as it is: it began with other arguments", run.run_id)
            continue
        newest = newest or run
        if newest.state != "finished":
            break
        if run.state == "running" and (await _reopening(store, run.run_id).read() or 0.0) > newest.created_at:
            return run
    return None if newest is not None and newest.state == "finished" and wanted.new == "after_finish" else newest


def _arguments(settings: Mapping[str, object]) -> object:
    """The arguments of a run, to compare them. An object without a text of its own shows its address in memory, which
    differs in each process."""
    arguments = settings.get("arguments")
    if not isinstance(arguments, Mapping):
        return {}
    return {name: re.sub(r" at 0x[0-9a-fA-F]+", "", str(value)) for name, value in arguments.items()}


async def mark_reopened(documents: Documents, run_id: str) -> None:
    """Record that a finished run is reopened now. Then the next crawl of its spider continues it, even if there is a
    newer run that is finished."""
    await _reopening(documents, run_id).change(lambda _: clock.time())


def _reopening(documents: Documents, run_id: str) -> StoredValue[float]:
    return StoredValue(documents, f"run/{run_id}/reopened", float)


async def _agree(store: Store, wanted: WantedRun, before: list[Run], mine: Run) -> Run:
    """List the runs again, after this process has created its own. If another process has created one with the same
    start URLs and arguments earlier, delete the run of this process and join that one.

    Two processes never keep different runs. Stores number runs in the order in which they become visible, so a process
    that lists the runs after it has created one sees every earlier one. Only the process with the first run sees none
    and keeps its own; all others see that one. Nobody joins a run that is then deleted: it is queued until its process
    has decided, a queued run is joined only here, and only if there is no earlier one. If a process dies in between,
    its queued run is the first one for those that come later.
    """
    known = {run.run_id for run in before if run.state != "queued"}
    for run in reversed(await store.list_runs(wanted.spider, wanted.project)):
        if run.run_id == mine.run_id:
            break
        if run.run_id not in known and run.state != "cancelled" and run.settings == mine.settings:
            await store.delete_run(mine.run_id)
            log.info("joining run %s, which another process has begun", run.run_id)
            return run
    return mine


async def _create(store: Store, wanted: WantedRun, state: Literal["queued", "running"]) -> Run:
    run = Run(
        run_id=new_run_id(), spider=wanted.spider, state=state, created_at=clock.time(), settings=wanted.start,
        project=wanted.project,
    )  # fmt: skip
    return await store.create_run(run)
