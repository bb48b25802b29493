"""`shoal node` and `shoal cluster`: Runners and Backup Runners, how they stand, and how many there are to be."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.fleet import SpiderName, find_spider, grace_of, prepare, work_to_the_end
from shoal.cli.running import (
    Argument,
    Concurrency,
    FrontierUrl,
    MetricsPort,
    Output,
    Quiet,
    Setting,
    given,
    pairs,
    resolve,
)
from shoal.errors import ConfigError, CoordinatorAwayError

if TYPE_CHECKING:
    from shoal.ports import ClusterEvent, ClusterView, Coordinator

CoordinatorUrl = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="URL",
        help="zookeeper://host:2181, redis://host or postgresql://host/database (default: the frontier's server).",
    ),
]
ClusterName = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="Its name: that of the run, unless it was given one.")
]
Runners = Annotated[int | None, typer.Option("--runner", metavar="N", help="How many nodes work.", min=1)]
Backups = Annotated[int | None, typer.Option("--backup", metavar="N", help="How many stand by.", min=0)]

cluster_app = typer.Typer(help="See how a cluster stands, and change how many of its nodes work.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.command()(node)
    app.add_typer(cluster_app, name="cluster")


def node(
    spider: SpiderName,
    run_id: Annotated[
        str | None,
        typer.Option(
            "--run-id",
            metavar="ID",
            help="The run, as `shoal start` printed it (default: one that the first node makes).",
        ),
    ] = None,
    runner: Runners = None,
    backup: Backups = None,
    coordinator: CoordinatorUrl = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Unique in the cluster, such as crawler_1 (default: made up)."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="The cluster (default: named like the run).")
    ] = None,
    session: Annotated[
        float | None,
        typer.Option("--session", metavar="SECONDS", help="Silent for so long, a node is dead (default 10)."),
    ] = None,
    frontier: FrontierUrl = None,
    output: Output = [],
    argument: Argument = [],
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", metavar="N", help="Requests leased at a time (default 50).")
    ] = None,
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="Stay when the run is finished.")] = False,
    concurrency: Concurrency = None,
    setting: Setting = [],
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Also when the spider's file is not the one the run began with.")
    ] = False,
    metrics_port: MetricsPort = None,
    quiet: Quiet = False,
) -> None:
    """Be a node of a cluster: work while there is a slot for it, stand by while there is none.

    Start it on as many machines as there are to be Runners and Backup Runners. Who dies is replaced by who stands by.
    """
    from shoal.cluster.node import Node

    options = given(
        {
            "frontier": frontier, "concurrency": concurrency, "lease.batch": batch_size, "cluster.runner": runner,
            "cluster.backup": backup, "cluster.coordinator": coordinator, "cluster.session": session,
        }
    )  # fmt: skip
    reference, entry = find_spider(spider)
    if argument and run_id is not None:
        raise ConfigError("-a is for a run that the node makes; that of --run-id has its arguments already")
    made, resolved = prepare(reference, entry, options, setting, run_id, pairs(argument, "-a"))
    work_to_the_end(
        Node(
            made, resolved.config, name=name, run_id=run_id, cluster=cluster, outputs=output, keep_alive=keep_alive,
            allow_changed=allow_changed, grace=grace_of(resolved),
        ),
        resolved, quiet=quiet, metrics_port=metrics_port,
    )  # fmt: skip


@asynccontextmanager
async def _opened(cluster: str, coordinator: str | None, frontier: str | None) -> AsyncIterator[Coordinator]:
    from shoal.cluster import open_coordinator

    config = resolve(None, given({"frontier": frontier, "cluster.coordinator": coordinator}), []).config
    url = config.cluster.coordinator or config.frontier
    if url.partition(":")[0] in ("memory", "sqlite"):
        raise ConfigError("where is the cluster kept? Say it with --coordinator zookeeper://host:2181, redis:// ...")
    opened = await open_coordinator(url, cluster, ttl=config.cluster.session)
    try:
        yield opened
    finally:
        await opened.close()


@cluster_app.command()
def status(
    cluster: ClusterName,
    coordinator: CoordinatorUrl = None,
    frontier: FrontierUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again each second.")] = False,
    events: Annotated[int, typer.Option("--events", metavar="N", help="How many of the last events.", min=0)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Who is a member, what each does, which slots they have, and what happened last."""

    async def work() -> None:
        async with _opened(cluster, coordinator, frontier) as opened:
            while True:
                try:
                    view, last = await opened.look(), await opened.events(events) if events else []
                    print(_as_json(cluster, view, last) if as_json else _as_text(cluster, view, last), flush=True)
                except CoordinatorAwayError as exc:
                    if not watch:
                        raise
                    print(f"shoal: {exc}", file=sys.stderr, flush=True)
                if not watch:
                    return
                await asyncio.sleep(1.0)
                if not as_json:
                    print()

    asyncio.run(work())


@cluster_app.command()
def scale(
    cluster: ClusterName,
    runner: Runners = None,
    backup: Backups = None,
    coordinator: CoordinatorUrl = None,
    frontier: FrontierUrl = None,
) -> None:
    """Change how many nodes work and how many stand by. Nodes see to it: some are promoted, or retire in good order."""
    if runner is None and backup is None:
        raise ConfigError("say how many: --runner N, --backup N or both")

    async def work() -> None:
        from shoal.ports import Counts

        async with _opened(cluster, coordinator, frontier) as opened:
            before = (await opened.look()).counts
            after = Counts(before.runner if runner is None else runner, before.backup if backup is None else backup)
            await opened.scale(after)
            print(f"{cluster}: {_words(before)} until now, {_words(after)} from now on")

    asyncio.run(work())


def _words(counts: Any) -> str:
    return f"{counts.runner} Runner{'s' * (counts.runner != 1)} and {counts.backup} Backup{'s' * (counts.backup != 1)}"


def _as_text(cluster: str, view: ClusterView, events: list[ClusterEvent]) -> str:
    from shoal.cluster.election import rank, roles, shortage

    slots = {slot.holder: slot for slot in view.slots if slot.holder}
    what = roles(view)
    order = {"runner": 0, "backup": 1, "spare": 2}
    members = sorted(view.members, key=lambda member: (order[what[member.name]], rank(member.name)))
    wide = max([len(member.name) for member in members] + [4])
    lack = shortage(view)
    count = f"{len(members)} member{'s' * (len(members) != 1)}"
    lines = [f"{cluster}: {_words(view.counts)}, {count}" + (f"; only {lack}" if lack else "")]
    lines.append(f"{'name':<{wide}}  {'role':<7} {'slot':>4} {'epoch':>16} {'heard of':>10}  {'where':<24} doing")
    for member in members:
        slot = slots.get(member.name)
        place = f"{slot.index if slot else '-':>4} {slot.epoch if slot else '-':>16}"
        age = f"{member.age:.1f} s ago"
        lines.append(
            f"{member.name:<{wide}}  {what[member.name]:<7} {place} {age:>10}  {member.where:<24} {member.doing}"
        )
    lines += [_event(event) for event in events]
    return "\n".join(lines)


def _event(event: ClusterEvent) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    slot = "" if event.slot is None else f" slot {event.slot}"
    epoch = f" (epoch {event.epoch})" if event.epoch else ""
    source = {"took over": " from "}.get(event.what, ": ")
    detail = source + event.detail if event.detail else ""
    return f"  {at}  {event.member + ' ' if event.member else ''}{event.what}{slot}{detail}{epoch}"


def _as_json(cluster: str, view: ClusterView, events: list[ClusterEvent]) -> str:
    import msgspec

    from shoal.cluster.election import roles

    return json.dumps(
        {"cluster": cluster, "roles": roles(view), **msgspec.to_builtins(view), "events": msgspec.to_builtins(events)}
    )
