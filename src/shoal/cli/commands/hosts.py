"""`shoal hosts`: show and change how hosts are treated."""

from __future__ import annotations

import asyncio
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import UNSET
from msgspec.structs import asdict

from shoal.cli.help import Commands, argument, option, print_json
from shoal.cli.options import AsJson, FrontierUrl, NewestRun, RunOption, given
from shoal.cli.run_store import choose_run, opened_run, opened_store, record_action
from shoal.errors import ConfigError
from shoal.messages import did_you_mean, printable

if TYPE_CHECKING:
    from shoal.fetch.layers.identity_facts import IdentityState
    from shoal.fetch.routing import Need
    from shoal.operations.hosts import HostReport
    from shoal.ports import HostState, HostUpdate, Run, Store

Host = Annotated[str, argument("HOST", "The host, such as example.com or example.com:8080.")]

_MAX_LISTED = 1000

app = Commands()
hosts_app = Commands(
    help="Show or change delays, concurrency and blocks of hosts.\n\n"
    "Without a command it lists the busiest hosts: ready requests, requests in flight, the delay and the reason for "
    "it. Changes apply at once, to all runs and workers of the frontier.",
    epilog=(
        "shoal hosts --frontier redis://host\n"
        "shoal hosts set example.com --delay 2 --frontier redis://host\n"
        "shoal hosts block example.com --for 3600 --frontier redis://host"
    ),
)
app.add_typer(hosts_app, name="hosts", invoke_without_command=True)


@hosts_app.callback()
def hosts(
    context: typer.Context,
    frontier: FrontierUrl = None,
    run_id: RunOption = None,
    limit: Annotated[int, option("--limit N", "List the N busiest hosts (default 30).")] = 30,
    search: Annotated[str, option("--search TEXT", "List only hosts whose name contains TEXT.")] = "",
) -> None:
    context.obj = (frontier, run_id)
    if context.invoked_subcommand is not None:
        return

    asyncio.run(_list_hosts(frontier, run_id, limit, search))


async def _list_hosts(frontier: str | None, run_id: str | None, limit: int, search: str) -> None:
    """Print the hosts of one run or of all unfinished runs, and what their pages need."""
    from shoal.operations.hosts import hosts_of, page_needs_of

    async with opened_store(frontier, readonly=True) as store:
        runs = await _chosen_runs(store, run_id)
        states = await hosts_of(store, runs, limit, search)
        _print_hosts(states, await page_needs_of(store, runs[0], [state.host for state in states]))


async def _chosen_runs(store: Store, run_id: str | None) -> list[Run]:
    """One run, or all unfinished runs: these share the limits of a host."""
    from shoal.operations.snapshot import ACTIVE

    unfinished = [] if run_id is not None else await store.list_runs(states=ACTIVE)
    return unfinished or [await choose_run(store, run_id)]


def _print_hosts(states: list[HostState], needs: dict[str, dict[str, Need]]) -> None:
    print(f"{'host':<32} {'ready':>8} {'in flight':>10} {'delay':>8}  {'why':<26} blocked")
    for state in states:
        blocked = f"for {state.blocked_for:.0f} s: {state.block_reason}" if state.blocked_for else ""
        flight = f"{state.in_flight} of {state.concurrency}"
        print(f"{state.host:<32} {state.ready:>8} {flight:>10} {state.delay:>6.2f} s  {state.why:<26} {blocked}")
        for need, text in (("browser", "need a browser"), ("http", "need no browser")):
            if kinds := [kind for kind, needed in needs.get(state.host, {}).items() if needed == need]:
                print(f"  pages that {text}: {', '.join(kinds)}")


@hosts_app.add(examples="shoal hosts show example.com --frontier redis://host")
async def show(context: typer.Context, host: Host, frontier: FrontierUrl = None) -> None:
    """Show everything known about a host.

    Its delay and block, its robots.txt as it was read, its identities, and which of its pages need a browser.
    """
    from shoal.config import Config
    from shoal.operations.hosts import host_name, report_host

    outer, run_id = context.obj
    async with opened_store(frontier or outer, readonly=True) as store:
        _print_report(await report_host(store, await _chosen_runs(store, run_id), Config(), host_name(host)))


def _print_report(report: HostReport) -> None:
    _print_hosts([report.state], {report.state.host: report.needs})
    for file in report.robots:
        print(f"\n{file.origin}/robots.txt{'' if file.text.strip() else ': there is none'}")
        for line in file.text.splitlines():
            print(f"  {printable(line)}")
    if report.identities:
        print("\nidentities")
    for identity in report.identities:
        print(f"  {identity.identity:<40} {identity.state:<10} {printable(identity.reason)}")


@hosts_app.add(
    "set",
    examples="""
    shoal hosts set example.com --delay 2 --frontier redis://host
    shoal hosts set example.com --reset --frontier redis://host
    """,
)
async def set_host(
    context: typer.Context,
    host: Annotated[str, argument("HOST", "example.com, example.com:8080, or '*' for the default of all hosts.")],
    delay: Annotated[
        float | None, option("--delay SECONDS", "Wait between two fetches from the host.", min=0.0)
    ] = None,
    concurrency: Annotated[
        int | None, option("--concurrency N", "Fetch up to N pages at once if there is no delay.", min=1)
    ] = None,
    reset: Annotated[bool, option("--reset", "Restore the defaults and forget the measured delay.")] = False,
    frontier: FrontierUrl = None,
) -> None:
    """Change the delay or concurrency of a host."""
    if delay is None and concurrency is None and not reset:
        raise ConfigError("nothing to change: pass --delay, --concurrency or --reset")
    defaults = dict.fromkeys(("delay", "concurrency", "learned_delay")) if reset else {}
    changes = defaults | given(delay=delay, concurrency=concurrency)
    await _update_host(context, host, "set host", frontier, **changes)


@hosts_app.add(examples="shoal hosts block example.com --for 3600 --frontier redis://host")
async def block(
    context: typer.Context,
    host: Host,
    seconds: Annotated[float, option("--for SECONDS", "Block for this long (default: one day).", min=1.0)] = 86400.0,
    reason: Annotated[
        str, option("--reason TEXT", "The reason that `shoal hosts` shows (default: by hand).")
    ] = "by hand",
    frontier: FrontierUrl = None,
) -> None:
    """Fetch nothing from a host for a while.

    Its requests stay in the queue.
    """
    await _update_host(context, host, "block host", frontier, block_for=seconds, block_reason=reason)


@hosts_app.add(examples="shoal hosts unblock example.com --frontier redis://host")
async def unblock(context: typer.Context, host: Host, frontier: FrontierUrl = None) -> None:
    """End the block of a host, including one from Retry-After."""
    await _update_host(context, host, "unblock host", frontier, block_for=None)


async def _update_host(context: typer.Context, host: str, what: str, frontier: str | None, **changes: Any) -> None:
    """Change a host. ``changes``: fields of `HostUpdate`."""
    from shoal.operations.hosts import change_host, host_name
    from shoal.ports import HostUpdate

    update = HostUpdate(**changes)
    outer, run_id = context.obj
    host = host_name(host)

    async with opened_run(frontier or outer, run_id) as (store, _, queue):
        hosts = [state.host for state in await queue.host_states(_MAX_LISTED)]
        await change_host(queue, host, update)
        await record_action(store, what, host, _describe(update))
        _print_hosts([state for state in await queue.host_states(_MAX_LISTED) if host in (state.host, "*")], {})
    if host != "*" and host not in hosts:
        with_ports = [name for name in hosts if name.partition(":")[0] == host]
        hint = f"; did you mean {with_ports[0]}?" if with_ports else did_you_mean(host, hosts)
        print(f"the run has no pages of {host} yet: this applies when it has{hint}", file=sys.stderr)
    if update.delay not in (UNSET, None) or update.concurrency not in (UNSET, None):
        print(f"later runs use it too, until: shoal hosts set {shlex.quote(host)} --reset", file=sys.stderr)


def _describe(update: HostUpdate) -> str:
    """Describe the changes, such as ``delay 2.0``."""
    return ", ".join(f"{name} {value}" for name, value in asdict(update).items() if value not in (UNSET, ""))


# `shoal identities`: the proxies of a fleet, and on which hosts they rest.


_MAX_HOSTS = 30
_MAX_NAME = 40


@app.add(
    examples="""
    shoal identities --frontier redis://host
    shoal identities books_1 --frontier redis://host --json
    """
)
async def identities(
    run_id: NewestRun = None,
    frontier: FrontierUrl = None,
    limit: Annotated[int, option("--limit N", "List up to N identities (default 100).")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the proxies of a run's workers, and where they rest.

    An identity is active on the host that it is assigned to. It rests on a host that blocked it. It is removed if its
    proxy fails everywhere. The busiest hosts of the run are listed.
    """
    from shoal.fetch.layers.identity_facts import IdentityFacts, list_identities

    async with opened_run(frontier, run_id, readonly=True) as (_, _, queue):
        hosts = [state.host for state in await queue.host_states(_MAX_HOSTS)]
        states = await list_identities(IdentityFacts(queue), hosts, limit)
    if as_json:
        print_json(states)
    elif not states:
        print('no identities: no worker of this frontier used "proxies" during the last day')
    else:
        _print_states(states)


def _print_states(states: list[IdentityState]) -> None:
    width = min(_MAX_NAME, max(len(printable(state.identity)) for state in states))
    print(f"{'identity':<{width}}  {'state':<9} {'host':<28} {'returns in':>10}  reason")
    for state in states:
        returns = "" if state.returns_in is None else f"{state.returns_in:.0f} s"
        name, host, reason = printable(state.identity), printable(state.host), printable(state.reason)
        print(f"{name:<{width}}  {state.state:<9} {host:<28} {returns:>10}  {reason}".rstrip())
