"""`shoal runs`, `stats`, `pause`, `resume`, `cancel`, `rm` and `hosts`: what a person does to a fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.inspecting import RunName, choose_run, opened, quietly
from shoal.cli.running import FrontierUrl, given, resolve
from shoal.errors import ConfigError, RunError

if TYPE_CHECKING:
    from shoal.ports import HostState, HostUpdate, RunState, Stats, Store

OneRun = Annotated[str, typer.Argument(metavar="RUN", help="The run_id, as `shoal runs` shows it.")]
RunOption = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Which run (default: the newest).")]
Host = Annotated[
    str, typer.Argument(metavar="HOST", help="Such as example.com or example.com:8080; '*' for all others.")
]

hosts_app = typer.Typer(help="See and change how hosts are treated, by all runs and workers of a frontier.")


def register(app: typer.Typer) -> None:
    app.command()(runs)
    app.command()(stats)
    app.command()(pause)
    app.command()(resume)
    app.command()(cancel)
    app.command("rm")(remove)
    app.add_typer(hosts_app, name="hosts", invoke_without_command=True)


@asynccontextmanager
async def _store(url: str | None, *, readonly: bool = False) -> AsyncIterator[Store]:
    from shoal.frontier import open_store

    config = resolve(None, given({"frontier": url}), []).config
    with quietly():
        store = await open_store(config.frontier, readonly=readonly)
    try:
        yield store
    finally:
        await store.close()


def runs(
    frontier: FrontierUrl = None,
    spider: Annotated[str | None, typer.Option("--spider", metavar="NAME", help="Only its runs.")] = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="Only the newest.")] = 20,
) -> None:
    """List the runs of a frontier, the newest first."""

    async def work() -> None:
        from shoal.config import Config
        from shoal.runs.start import frontier_options

        async with _store(frontier, readonly=True) as store:
            found = await store.list_runs(spider)
            print(
                f"{'run':<26} {'spider':<16} {'state':<10} {'begun':<19}",
                *map(_wide, ("done", "left", "dead", "items")),
            )
            for run in found[:limit]:
                ledger = await (await store.frontier(run.run_id, frontier_options(Config()))).stats()
                begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created_at))
                numbers = (ledger.done, ledger.remaining, ledger.dead, ledger.items)
                print(f"{run.run_id:<26} {run.spider:<16} {run.state:<10} {begun}", *map(_wide, numbers))
            if len(found) > limit:
                print(f"... and {len(found) - limit} more; --limit shows them")

    asyncio.run(work())


def _wide(value: object) -> str:
    return f"{value:>9}"


def stats(
    run: RunName = None,
    frontier: FrontierUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="Again each second, until the run is finished.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """The ledger of a run at this moment, and its speed."""

    async def work() -> None:
        async with opened(frontier, run, readonly=True) as (chosen, found):
            before, at = await found.stats(), time.monotonic()
            _print_stats(chosen.run_id, before, None, as_json=as_json)
            while watch and not before.finished:
                await asyncio.sleep(1.0)
                now = await found.stats()
                speed = (now.done - before.done) / (time.monotonic() - at)
                before, at = now, time.monotonic()
                _print_stats(chosen.run_id, now, speed, as_json=as_json)

    asyncio.run(work())


def _print_stats(run_id: str, ledger: Stats, speed: float | None, *, as_json: bool) -> None:
    import json

    from msgspec.structs import asdict

    from shoal.crawling.stats import counts

    if as_json:
        print(json.dumps({"run_id": run_id, **asdict(ledger), **counts(ledger)}), flush=True)
        return
    pace = "" if speed is None else f"  {speed:.0f} pages/s"
    seeding = "  (still being seeded)" if ledger.seeding else ""
    words = " ".join(f" {name} {count}" for name, count in counts(ledger).items())
    print(f"{time.strftime('%H:%M:%S')} {words}  items {ledger.items}{pace}{seeding}", flush=True)


def pause(run: OneRun, frontier: FrontierUrl = None) -> None:
    """Give out no more work; workers stay and wait. What is in flight is ended."""
    _transition(run, "paused", frontier, "its workers wait for `shoal resume`")


def resume(run: OneRun, frontier: FrontierUrl = None) -> None:
    """Let a run go on that was paused or cancelled."""
    _transition(run, "running", frontier, "its workers go on; start some if there are none")


def cancel(run: OneRun, frontier: FrontierUrl = None) -> None:
    """End a run before it is finished: its workers leave. Nothing is removed, and it can be resumed."""
    _transition(run, "cancelled", frontier, "its workers leave; `shoal resume` would let it go on")


def _transition(run_id: str, state: RunState, frontier: str | None, what_then: str) -> None:
    async def work() -> None:
        async with _store(frontier) as store:
            await choose_run(store, run_id)
            await store.transition(run_id, state)
        print(f"run {run_id} is {state}: {what_then}")

    asyncio.run(work())


def remove(
    run: OneRun,
    frontier: FrontierUrl = None,
    force: Annotated[bool, typer.Option("--force", help="Also a run that is not finished or cancelled.")] = False,
) -> None:
    """Forget a run: its URLs, its ledger and its item log. Outputs stay as they are."""

    async def work() -> None:
        async with _store(frontier) as store:
            found = await choose_run(store, run)
            if found.state not in ("finished", "cancelled") and not force:
                raise RunError(f"run {run} is {found.state}; cancel it first, or say --force")
            await store.delete_run(run)
        print(f"run {run} is forgotten")

    asyncio.run(work())


# -- hosts


@hosts_app.callback()
def hosts(
    context: typer.Context,
    frontier: FrontierUrl = None,
    run_id: RunOption = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="The busiest.")] = 30,
) -> None:
    """Each host's delay and why, how many requests are in flight, and until when it is blocked."""
    context.obj = (frontier, run_id)
    if context.invoked_subcommand is not None:
        return

    async def work() -> None:
        async with _store(frontier, readonly=True) as store:
            _print_hosts(await _hosts_of(store, run_id, limit))

    asyncio.run(work())


async def _hosts_of(store: Store, run_id: str | None, limit: int) -> list[HostState]:
    """The hosts of a run, or of all that are not over: politeness is theirs together."""
    from shoal.config import Config
    from shoal.runs.queries import hosts_of

    unfinished = [run for run in await store.list_runs() if run.state in ("queued", "running", "paused")]
    chosen = unfinished if run_id is None and unfinished else [await choose_run(store, run_id)]
    return await hosts_of(store, chosen, Config(), limit)


def _print_hosts(states: list[HostState]) -> None:
    print(f"{'host':<32} {'ready':>8} {'in flight':>10} {'delay':>8}  {'why':<26} blocked")
    for state in states:
        blocked = f"for {state.blocked_for:.0f} s: {state.block_reason}" if state.blocked_for else ""
        flight = f"{state.in_flight} of {state.concurrency}"
        print(f"{state.host:<32} {state.ready:>8} {flight:>10} {state.delay:>6.2f} s  {state.why:<26} {blocked}")


@hosts_app.command("set")
def set_host(
    context: typer.Context,
    host: Host,
    delay: Annotated[
        float | None, typer.Option("--delay", metavar="SECONDS", help="From one fetch to the next.", min=0.0)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", metavar="N", help="At once, without a delay.", min=1)
    ] = None,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the defaults, also of what was learned.")] = False,
    frontier: FrontierUrl = None,
) -> None:
    """Change a host's delay or concurrency, at once and for all workers."""
    from shoal.ports import HostUpdate

    changes: dict[str, Any] = given({"delay": delay, "concurrency": concurrency})
    if reset:
        changes = {"delay": None, "concurrency": None, "learned_delay": None, **changes}
    if not changes:
        raise ConfigError("say what to change: --delay, --concurrency or --reset")
    _update_host(context, host, HostUpdate(**changes), frontier)


@hosts_app.command()
def block(
    context: typer.Context,
    host: Host,
    seconds: Annotated[
        float, typer.Option("--for", metavar="SECONDS", help="How long (default: a day).", min=1.0)
    ] = 86400.0,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Shown by `shoal hosts`.")] = "by hand",
    frontier: FrontierUrl = None,
) -> None:
    """Fetch nothing from a host for a while. Its requests wait."""
    from shoal.ports import HostUpdate

    _update_host(context, host, HostUpdate(block_for=seconds, block_reason=reason), frontier)


@hosts_app.command()
def unblock(context: typer.Context, host: Host, frontier: FrontierUrl = None) -> None:
    """End the block of a host, also one that its Retry-After asked for."""
    from shoal.ports import HostUpdate

    _update_host(context, host, HostUpdate(block_for=None), frontier)


def _update_host(context: typer.Context, host: str, update: HostUpdate, frontier: str | None) -> None:
    from msgspec import UNSET

    from shoal.runs.queries import host_name

    outer, run_id = context.obj
    host = host_name(host)
    if host == "*" and update.block_for is not UNSET:
        raise ConfigError("'*' is the default of delays and concurrency; `shoal pause RUN` stops all of a run")

    async def work() -> None:
        async with opened(frontier or outer, run_id, readonly=False) as (_, found):
            await found.update_host(host, update)
            _print_hosts([state for state in await found.host_states(1000) if host in (state.host, "*")])

    asyncio.run(work())
