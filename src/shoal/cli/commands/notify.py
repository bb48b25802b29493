"""`shoal notify` and `shoal actions`: reported problems, channels, and what users did."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import asdict

from shoal.cli.help import Commands, argument, local_time, option
from shoal.cli.options import AsJson, FrontierUrl, resolve
from shoal.cli.run_store import current_project, opened_store

if TYPE_CHECKING:
    from shoal.operations.notifications.messages import Report
    from shoal.operations.notifications.watcher import ChannelInfo

app = Commands()
notify_app = Commands(
    help="List reported problems and channels, or test a channel.\n\n"
    "Channels and rules are in shoal.toml: [notifications.channels.NAME] and [notifications.rules.NAME]. `shoal serve` "
    "watches the frontier and sends the messages.",
    epilog="shoal notify list --frontier redis://host\nshoal notify test\nshoal notify test ops",
    no_args_is_help=True,
)
app.add_typer(notify_app, name="notify")


@notify_app.add(
    "list",
    examples="""
    shoal notify list --frontier redis://host
    shoal notify list --all --json
    """,
)
async def list_notifications(
    frontier: FrontierUrl = None,
    every: Annotated[bool, option("--all", "Also list problems that are over.")] = False,
    as_json: AsJson = False,
) -> None:
    """List reported problems, and the state of each channel."""

    from shoal.operations.notifications.watcher import Notifications

    notifications = Notifications(resolve().config, active=False)
    async with opened_store(frontier, readonly=True) as store:
        reports = [report for report in await notifications.problems(store) if every or report.is_open]
        channels = await notifications.channels(store)
    if as_json:
        _print_json(reports, channels)
        return
    for report in reports:
        print(_problem_line(report))
    if not reports:
        print("no problem was reported" if every else "no problem: see --all for those that are over")
    for channel in channels:
        print(_channel_line(channel))
    if not channels:
        print("no channel is configured: add [notifications.channels.NAME] to shoal.toml")


def _print_json(reports: list[Report], channels: list[ChannelInfo]) -> None:
    for report in reports:
        times = {"reported_at": report.reported_at, "closed_at": report.closed_at}
        print(json.dumps({"problem": asdict(report.problem), **times}))
    for channel in channels:
        print(json.dumps({"channel": channel.name, "type": channel.type, **asdict(channel.state)}))


def _problem_line(report: Report) -> str:
    problem = report.problem
    over = "" if report.closed_at is None else f"  (over at {local_time(report.closed_at)})"
    run = f"  run {problem.run_id}" if problem.run_id else ""
    return f"{local_time(problem.since)}  {problem.severity:<8}  {problem.title}{run}{over}\n    {problem.text}"


def _channel_line(channel: ChannelInfo) -> str:
    state = channel.state
    if state.failures:
        doing = f"fails ({state.failures} in a row), next attempt {local_time(state.next_at)}: {state.error}"
    elif state.delivered:
        doing = f"{state.delivered} delivered, the last one {local_time(state.delivered_at)}"
    else:
        doing = "not used yet"
    return f"channel {channel.name} ({channel.type}): {doing}"


@notify_app.add(
    "test",
    examples="""
    shoal notify test
    shoal notify test ops
    """,
)
async def send_test(
    channel: Annotated[str | None, argument("CHANNEL", "The name of the channel (default: all).")] = None,
) -> None:
    """Send a test message through a channel, or through all of them.

    The exit code is 1 if one of them was not delivered.
    """

    from shoal.operations.notifications.watcher import Notifications

    config = resolve().config
    config.refuse_tor("`shoal notify`")
    service = Notifications(config)
    try:
        errors = await service.test(channel)
    finally:
        await service.close()
    for name, error in errors.items():
        print(f"{name}: {f'not delivered: {error}' if error else 'delivered'}")
    if any(errors.values()):
        sys.exit(1)


@app.add(
    examples="""
    shoal actions --frontier redis://host
    shoal actions --limit 5 --json
    """
)
async def actions(
    frontier: FrontierUrl = None,
    limit: Annotated[int, option("--limit N", "List at most N actions (default 30).")] = 30,
    as_json: AsJson = False,
) -> None:
    """List what users did: who paused, changed or deleted what.

    This includes commands and calls of the HTTP API, newest first.
    """

    from shoal.operations.actions import ActionLog

    async with opened_store(frontier, readonly=True) as store:
        log = await ActionLog(store, current_project()).recent(limit)
    for action in log:
        detail = f"  ({action.detail})" if action.detail else ""
        line = f"{local_time(action.at)}  {action.who}  {action.what} {action.target}{detail}"
        print(json.dumps(asdict(action)) if as_json else line)
