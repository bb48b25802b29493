"""Open the store of a frontier, and the run that a command is about."""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.options import Scrapy, pairs, resolve, settings_of
from shoal.errors import RunError, ShoalError, SpiderError, StoreError
from shoal.messages import did_you_mean

if TYPE_CHECKING:
    from shoal.ports import Frontier, Run, Store
    from shoal.runs.orchestrator import Entry
    from shoal.spider import Spider


@contextmanager
def hidden_warnings() -> Iterator[None]:
    """Hide warnings about a server's settings: they are for workers, not for every command that reads a run."""
    logger = logging.getLogger("shoal.frontier")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def current_project() -> str:
    """``project_name`` of the file and the environment."""
    return resolve().config.project_name


@asynccontextmanager
async def opened_store(url: str | None, *, readonly: bool = False, may_create: bool = False) -> AsyncIterator[Store]:
    """The store at a frontier's URL, or at the configured one. StoreError if its file does not exist, unless the
    command may create it."""
    from shoal.frontier import file_of, join_store

    config = resolve(None, settings_of(frontier=url)).config
    frontier = running_frontier(config.frontier)
    path = file_of(frontier)
    if path is not None and not may_create and not os.path.exists(path):
        raise StoreError(f"there is no file {os.path.abspath(path)}")
    with hidden_warnings():
        store = await join_store(frontier, readonly=readonly)
    try:
        yield store
    finally:
        await store.close()


def running_frontier(frontier: str) -> str:
    """The URL at which a frontier can be opened. One in memory is opened through the crawl that runs now."""
    from shoal.frontier.local.places import announced

    if not frontier.startswith("memory:"):
        return frontier
    crawls = announced()
    if not crawls:
        raise StoreError(
            "no crawl in memory runs on this machine now, and a frontier in memory ends with its process. Name a "
            "stored frontier, such as --frontier sqlite:///file.db"
        )
    if len(crawls) > 1:
        return "local:"  # opening it raises an error that lists them
    name = next(iter(crawls))
    print(f"using --frontier local:{name}, the only crawl that runs", file=sys.stderr)
    return f"local:{name}"


async def record_action(store: Store, what: str, target: str, detail: str = "", project: str | None = None) -> None:
    """Record what this user did in the store's log of actions. If that fails, print a warning: the action is done."""
    import getpass
    import socket

    from shoal.errors import FrontierError
    from shoal.operations.actions import ActionLog

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    try:
        log = ActionLog(store, current_project() if project is None else project)
        await log.add(f"{user}@{socket.gethostname()}", what, target, detail)
    except FrontierError as exc:
        print(f"shoal: warning: cannot write to the action log: {exc}", file=sys.stderr)


@asynccontextmanager
async def opened_run(
    url: str | None, run_id: str | None, *, readonly: bool = False
) -> AsyncIterator[tuple[Store, Run, Frontier]]:
    """The store at a frontier's URL, a run of it or its newest one, and the frontier of that run."""
    async with opened_store(url, readonly=readonly) as store:
        run = await choose_run(store, run_id)
        yield store, run, await store.frontier(run.run_id)


async def note_of(store: Store, run: Run, frontier: Frontier) -> str:
    """What the state of a run alone does not say, and what to do. Empty: nothing."""
    from socket import gethostname

    from shoal.frontier.local.store import SocketStore
    from shoal.operations.processes import PRESENT, read_run_processes

    if run.state == "paused":
        return f"run {run.run_id} is paused: `shoal resume {run.run_id}` continues it"
    if isinstance(store, SocketStore):  # a process owns the store now, and has perhaps not reported yet
        return ""
    if run.state != "running" or any(worker.silent_for < worker.session for worker in await frontier.workers()):
        return ""
    for process in await read_run_processes(store, frontier, run.run_id):  # as far as this machine can tell
        is_elsewhere = process.machine != gethostname() or not process.pid
        if process.state in PRESENT and (is_elsewhere or os.path.exists(f"/proc/{process.pid}")):
            return ""
    return f"no process works on run {run.run_id} now: repeat its command, or start a worker, to continue it"


async def choose_run(store: Store, run_id: str | None) -> Run:
    """This run, or the newest of the project. RunError lists the runs that exist."""
    run = await store.get_run(run_id) if run_id is not None else None
    if run is not None:
        return run
    project = current_project()
    runs = await store.list_runs(project=project)
    if run_id is None and runs:
        return runs[0]
    if not runs:
        others = await store.list_runs()
        where = (
            f"the project {project!r} has no runs; see `shoal runs --all-projects`"
            if others
            else "the frontier has no runs"
        )
        raise RunError(f"there is no run{f' {run_id}' if run_id else ''}: {where}")
    newest = ", ".join(run.run_id for run in runs[:5])
    near = did_you_mean(run_id or "", [run.run_id for run in runs])
    raise RunError(f"there is no run {run_id}; the newest ones are: {newest}{near}")


# Find the spider that the user names, and create it.


_MAX_FILES = 200
"""How many files of a folder are searched for a similar name."""


def find_spider(name: str, in_project: str | None = None, scrapy: Scrapy = Scrapy()) -> tuple[str, Entry | None]:
    """The reference of a spider (``file.py`` or ``file.py:Class``), and its entry in shoal.toml if it has one.

    ``in_project`` is the name of a Scrapy spider, if ``name`` is the folder of its project."""
    from shoal.runs.orchestrator import Registry
    from shoal.spider import SCRAPY

    if scrapy.scrapy_settings:
        from shoal.scrapy.adapter import command_line

        if not scrapy and not name.startswith(SCRAPY):
            raise SpiderError("-s sets a setting of Scrapy: add --scrapy, or use --set for a setting of Shoal")
        command_line.update(pairs(scrapy.scrapy_settings, "-s"))
    if scrapy:
        return SCRAPY + (name if in_project is None else f"{name}:{in_project}"), None
    if in_project is not None:
        raise SpiderError(f"unexpected argument {in_project!r}: to name a spider of a Scrapy project, add --scrapy")
    registry = Registry.load()
    if name in registry:
        return registry.reference(name), registry[name]
    if ".py" in name or name.startswith(SCRAPY):
        return name, None
    hint = _did_you_mean(name, list(registry)) or "; `shoal list` shows the spiders in this folder"
    raise SpiderError(f"there is no spider {name}: use FILE.py, FILE.py:Class or a name from shoal.toml{hint}")


def make_spider(reference: str, arguments: Mapping[str, object]) -> Spider:
    """Create the spider of a file with its arguments."""
    from shoal.spider import create_spider, load_spider

    try:
        kind = load_spider(reference)
    except SpiderError as error:
        hint = _did_you_mean(reference, [])
        if not hint:
            raise
        raise SpiderError(f"{error}{hint}") from error
    try:
        return create_spider(kind, arguments)
    except ShoalError:
        raise
    except Exception as exc:  # whatever the user's __init__ raises
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        place = "" if frame.name == create_spider.__name__ else f" (line {frame.lineno})"
        raise SpiderError(f"{reference}: cannot create {kind.__name__}: {type(exc).__name__}: {exc}{place}") from exc


def _did_you_mean(name: str, registered: list[str]) -> str:
    """``; did you mean ...?`` with the spider that has the nearest name, or nothing. No file is imported for it."""
    if name.startswith("scrapy:") and ".py" not in name:
        return ""  # a project: its error lists its spiders
    name = name.removeprefix("scrapy:")
    file, _, class_name = name.partition(".py:")
    path = Path(f"{file}.py") if class_name else Path(name)
    references: dict[str, str] = {spider.lower(): spider for spider in registered}
    if path.is_file():
        if class_name in _classes(path):
            return ""  # the class exists: the error has another cause
        if class_name:
            references |= {class_of_file.lower(): f"{path}:{class_of_file}" for class_of_file in _classes(path)}
        sought = class_name.lower()
    else:
        for file_path in sorted(path.parent.glob("*.py"))[:_MAX_FILES]:
            classes = _classes(file_path)
            references |= {file_path.name.lower(): str(file_path)} if classes else {}
            for kind in classes:
                references.setdefault(kind.lower(), f"{file_path}:{kind}")
        sought = path.name.lower()
    return did_you_mean(sought, references)


def _classes(path: Path) -> list[str]:
    """The classes of a file that look like spiders."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return re.findall(r"^class (\w+)\(", text, re.MULTILINE) if "Spider" in text else []
