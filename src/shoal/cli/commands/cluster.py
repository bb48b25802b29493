"""`shoal node`, `shoal cluster status` and `shoal cluster scale`: Runners and Backup Runners."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec

from shoal.cli.commands.crawl import show_and_exit
from shoal.cli.commands.worker import ignored_settings, prepare, shutdown_grace
from shoal.cli.help import Commands, argument, option
from shoal.cli.options import (
    AllowChanged,
    Argument,
    AsJson,
    BatchSize,
    Concurrency,
    Display,
    FrontierUrl,
    KeepAlive,
    Outputs,
    RunOrInProject,
    Scrapy,
    Setting,
    SpiderName,
    Tor,
    Warc,
    pairs,
    resolve,
    settings_of,
)
from shoal.cli.run_store import find_spider
from shoal.errors import ConfigError, CoordinatorAwayError

if TYPE_CHECKING:
    from shoal.ports import ClusterEvent, ClusterView, Coordinator, Counts

CoordinatorUrl = Annotated[
    str | None,
    option(
        "--coordinator URL",
        "zookeeper://host:2181, redis://host or postgresql://host/db (default: the frontier's server).",
    ),
]
ClusterName = Annotated[str, argument("CLUSTER", "The cluster's name. By default it is the ID of its run.")]
Runners = Annotated[int | None, option("--runner N", "Let N nodes crawl.", min=1)]
Backups = Annotated[int | None, option("--backup N", "Keep N nodes on standby.", min=0)]

app = Commands()
cluster_app = Commands(
    help="Show a cluster, or change how many nodes it has.",
    epilog=(
        "shoal cluster status books_1 --coordinator zookeeper://host:2181\n"
        "shoal cluster scale books_1 --runner 8 --coordinator zookeeper://host:2181"
    ),
    no_args_is_help=True,
)
app.add_typer(cluster_app, name="cluster")


@app.add(
    examples="""
    shoal node books.py --runner 2 --backup 1 --frontier redis://host
    shoal node books.py --run-id books_1 --frontier redis://host --name crawler_1
    """
)
def node(
    spider: SpiderName,
    in_project: RunOrInProject = None,
    scrapy: Scrapy = Scrapy(),
    run_id: Annotated[
        str | None,
        option("--run-id ID", "The ID of the run, from `shoal start` (default: the first node creates a run)."),
    ] = None,
    runner: Runners = None,
    backup: Backups = None,
    coordinator: CoordinatorUrl = None,
    name: Annotated[
        str | None,
        option("--name NAME", 'A unique name; "<index>" in it becomes the first free number (default: generated).'),
    ] = None,
    cluster: Annotated[str | None, option("--cluster NAME", "The cluster's name (default: the ID of the run).")] = None,
    session_timeout: Annotated[
        float | None, option("--session-timeout SECONDS", "A node without heartbeats this long is dead (default 10).")
    ] = None,
    frontier: FrontierUrl = None,
    outputs: Outputs = Outputs(),
    argument: Argument = [],
    batch_size: BatchSize = None,
    keep_alive: KeepAlive = False,
    concurrency: Concurrency = None,
    tor: Tor = False,
    warc: Warc = None,
    setting: Setting = [],
    allow_changed: AllowChanged = False,
    display: Display = Display(),
) -> None:
    """Join a cluster as a Runner or Backup Runner.

    Runners crawl. Backup Runners wait and take over when a Runner dies. Start this command once for each node that you
    want, on one or more machines.
    """
    from shoal.cli.summary import resume_command
    from shoal.runs.cluster.node import Node

    options = settings_of(
        frontier=frontier,
        concurrency=concurrency,
        batch_size=batch_size,
        runner=runner,
        backup=backup,
        coordinator=coordinator,
        session_timeout=session_timeout,
        tor=tor,
        warc=warc,
    )
    if not scrapy and run_id is None:
        run_id, in_project = in_project, None
    if argument and run_id is not None:
        raise ConfigError("-a cannot be used with --run-id: the run already has its arguments")
    if scrapy or scrapy.scrapy_settings or in_project is not None:
        spider, _ = find_spider(spider, in_project, scrapy)
    instance, resolved = prepare(spider, options, setting, run_id, pairs(argument, "-a"))
    show_and_exit(
        Node(
            instance,
            resolved,
            name=name,
            run_id=run_id,
            cluster=cluster,
            outputs=outputs.specs(),
            keep_alive=keep_alive,
            allow_changed=allow_changed,
            grace=shutdown_grace(resolved),
            command=resume_command(sys.argv[1:]),
        ),
        resolved,
        display,
        notices=ignored_settings(resolved),
    )


@asynccontextmanager
async def _opened(cluster: str, coordinator: str | None, frontier: str | None) -> AsyncIterator[Coordinator]:
    """The coordinator of a cluster."""
    from shoal.runs.cluster import open_coordinator

    config = resolve(None, settings_of(frontier=frontier, coordinator=coordinator)).config
    url = config.cluster.coordinator or config.frontier
    if url.partition(":")[0] in ("memory", "sqlite"):
        raise ConfigError("no coordinator configured: pass --coordinator URL, such as zookeeper://host:2181")
    opened = await open_coordinator(url, cluster, ttl=config.cluster.session)
    try:
        yield opened
    finally:
        await opened.close()


@cluster_app.add(
    examples="""
    shoal cluster status books_1 --coordinator zookeeper://host:2181
    shoal cluster status books_1 --frontier redis://host --watch
    """
)
async def status(
    cluster: ClusterName,
    coordinator: CoordinatorUrl = None,
    frontier: FrontierUrl = None,
    watch: Annotated[bool, option("--watch", "Refresh every second.")] = False,
    events: Annotated[int, option("--events N", "Show the last N events (default 8).", min=0)] = 8,
    as_json: AsJson = False,
) -> None:
    """Show the nodes of a cluster, their roles, and the last events."""

    async with _opened(cluster, coordinator, frontier) as opened:
        while True:
            try:
                view, last = await opened.observe(), await opened.events(events) if events else []
                print(_status_json(cluster, view, last) if as_json else _status_text(cluster, view, last), flush=True)
            except CoordinatorAwayError as exc:
                if not watch:
                    raise
                print(f"shoal: {exc}", file=sys.stderr, flush=True)
            if not watch:
                return
            await asyncio.sleep(1.0)
            if not as_json:
                print()


@cluster_app.add(
    examples="""
    shoal cluster scale books_1 --runner 8 --coordinator zookeeper://host:2181
    shoal cluster scale books_1 --runner 2 --backup 1 --frontier redis://host
    """
)
async def scale(
    cluster: ClusterName,
    runner: Runners = None,
    backup: Backups = None,
    coordinator: CoordinatorUrl = None,
    frontier: FrontierUrl = None,
) -> None:
    """Change how many nodes crawl and how many are on standby.

    The nodes do this themselves: Backup Runners start to crawl, or Runners release their leases and stop crawling. No
    process is started or ended.
    """
    if runner is None and backup is None:
        raise ConfigError("nothing to change: pass --runner N, --backup N or both")

    from shoal.ports import Counts

    async with _opened(cluster, coordinator, frontier) as opened:
        before = (await opened.observe()).counts
        after = Counts(before.runner if runner is None else runner, before.backup if backup is None else backup)
        await opened.scale(after)
        print(f"{cluster}: {_counts(after)} (before: {_counts(before)})")


def _counts(counts: Counts) -> str:
    runners, backups = f"Runner{'s' * (counts.runner != 1)}", f"Backup Runner{'s' * (counts.backup != 1)}"
    return f"{counts.runner} {runners} and {counts.backup} {backups}"


def _status_text(cluster: str, view: ClusterView, events: list[ClusterEvent]) -> str:
    """The counts, one line for each member, and the last events."""
    from shoal.runs.cluster.election import Role, rank, roles, shortage

    slots = {slot.holder: slot for slot in view.slots if slot.holder}
    role = roles(view)
    order = get_args(Role)
    members = sorted(view.members, key=lambda member: (order.index(role[member.name]), rank(member.name)))
    width = max([len(member.name) for member in members] + [4])
    lack = shortage(view)
    count = f"{len(members)} member{'s' * (len(members) != 1)}"
    lines = [f"{cluster}: {_counts(view.counts)}, {count}" + (f"; only {lack}" if lack else "")]
    lines.append(f"{'name':<{width}}  {'role':<13} {'slot':>4} {'since':>8} {'heartbeat':>10}  {'where':<24} doing")
    for member in members:
        slot = slots.get(member.name)
        place = f"{slot.index if slot else '-':>4} {_clock(slot.taken_at) if slot else '-':>8}"
        age = f"{member.age:.1f} s ago"
        lines.append(
            f"{member.name:<{width}}  {role[member.name]:<13} {place} {age:>10}  {member.where:<24} {member.doing}"
        )
    lines += [_event_line(event) for event in events]
    return "\n".join(lines)


def _event_line(event: ClusterEvent) -> str:
    slot = "" if event.slot is None else f" slot {event.slot}"
    source = {"took over": " from "}.get(event.what, ": ")
    detail = source + event.detail if event.detail else ""
    return f"  {_clock(event.at)}  {event.member + ' ' if event.member else ''}{event.what}{slot}{detail}"


def _clock(moment: float) -> str:
    """The time of day, or the date if it was on another day."""
    then = time.localtime(moment)
    is_today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%d %b", then)


def _status_json(cluster: str, view: ClusterView, events: list[ClusterEvent]) -> str:
    from shoal.runs.cluster.election import roles

    return json.dumps(
        {"cluster": cluster, "roles": roles(view), **msgspec.to_builtins(view), "events": msgspec.to_builtins(events)}
    )
