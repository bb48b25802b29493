"""`shoal identities`: the proxies of a fleet, and on which hosts they rest."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.help import Commands
from shoal.cli.options import AsJson, FrontierUrl, NewestRun
from shoal.cli.run_store import opened_run
from shoal.printable import printable

if TYPE_CHECKING:
    from shoal.identities.listing import IdentityState

_MAX_HOSTS = 30
_MAX_NAME = 40

app = Commands()


@app.add(
    examples="""
    shoal identities --frontier redis://host
    shoal identities books_1 --frontier redis://host --json
    """
)
def identities(
    run_id: NewestRun = None,
    frontier: FrontierUrl = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", help="List up to N identities (default 100).")] = 100,
    as_json: AsJson = False,
) -> None:
    """List the proxies of a run's workers, and where they rest.

    An identity is active on the host that it is assigned to. It rests on a host that blocked it. It is removed if its
    proxy fails everywhere. The busiest hosts of the run are listed.
    """
    from shoal.identities.facts import IdentityFacts
    from shoal.identities.listing import list_identities

    async def work() -> list[IdentityState]:
        async with opened_run(frontier, run_id, readonly=True) as (_, found):
            hosts = [state.host for state in await found.host_states(_MAX_HOSTS)]
            return await list_identities(IdentityFacts(found), hosts, limit)

    states = asyncio.run(work())
    if as_json:
        import msgspec

        for state in states:
            print(msgspec.json.encode(state).decode())
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
