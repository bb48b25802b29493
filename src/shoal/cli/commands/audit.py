"""`shoal audit`, `why` and `retry-failed`: what happened to the requests of a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from shoal.cli.commands.outputs import CountedOutput, is_wrong, print_outputs, reports_of
from shoal.cli.help import Commands, argument, local_time, option
from shoal.cli.options import FrontierUrl, NewestRun, RunOption, resolve
from shoal.cli.run_store import note_of, opened_run, record_action
from shoal.config import mask
from shoal.crawling.outcome import EXIT_FAILED
from shoal.crawling.stats import STATE_NAMES
from shoal.errors import RunError
from shoal.messages import printable

if TYPE_CHECKING:
    from shoal.operations.url_report import UrlReport
    from shoal.ports import Rewind, Run, Stats

app = Commands()


@app.add(
    examples="""
    shoal audit --frontier sqlite:///books.db
    shoal audit books_1 --frontier redis://host
    shoal audit books_1 --repair --frontier redis://host
    """
)
async def audit(
    run_id: NewestRun = None,
    frontier: FrontierUrl = None,
    output: CountedOutput = [],
    repair: Annotated[
        bool, option("--repair", "First restore what is missing in the store, as far as possible.")
    ] = False,
) -> None:
    """Check that no request and no item of a run is lost.

    It counts all requests again. Each pushed request must be ready, waiting, in flight, done or failed, and the store
    must be able to hand out each one that is left. It also counts the items in each output, where they are: see
    `shoal outputs`. The exit code is 1 if the numbers do not add up, if something is missing in the store, or if an
    output lacks items, and 5 if the outcome of the run is "failed".
    """

    from shoal.runs.run_end import limit_of, read_outcome

    async with opened_run(frontier, run_id, readonly=not repair) as (store, run, queue):
        if repair:
            lost = await queue.repair()
            await record_action(store, "repair", run.run_id, "; ".join(lost), run.project)
            if lost:
                print("lost: it could not be restored, and the store goes on without it")
                print(*(f"  {printable(loss)}" for loss in lost), "", sep="\n")
        counted, note = await queue.audit(), await note_of(store, run, queue)
        if note:
            print(note)
        _print_ledger(run, counted, await queue.dead_kinds())
        _print_faults(run, counted, frontier)
        reports = await reports_of(run, queue, output)
        if reports:
            print("\noutputs")
            print_outputs(run.run_id, reports, frontier)
        outcome = await read_outcome(store, run, queue, resolve().config.outcome)
        limit, rewinds = await limit_of(store, run), await queue.rewinds()
    complete = not any(is_wrong(report) for report in reports)
    print()
    for line in _verdict(counted, rewinds, complete):
        print(line)
    if limit is not None:
        print(f"the run {limit}: it has not fetched everything that it found")
    if uncounted := sum(report.count is None for report in reports):
        print(f"{uncounted} of {len(reports)} outputs could not be counted: see above")
    if outcome is not None and outcome.verdict != "good":
        print(f"outcome {outcome.verdict}: {outcome.accounted}")
        for reason in outcome.reasons:
            print(f"  {printable(reason)}")
    if not counted.balanced or not complete:
        sys.exit(1)
    if outcome is not None and outcome.verdict == "failed":
        sys.exit(EXIT_FAILED)


def _verdict(stats: Stats, rewinds: Sequence[Rewind], complete: bool) -> list[str]:
    """What the ledger means. "Nothing lost" is certain only for a finished run on a store that never went back, and
    only if its outputs have all items."""
    if not stats.balanced:
        return ["NOT BALANCED: this is a bug in Shoal, or another program wrote to the store"]
    lines = []
    if stats.seeding:
        lines.append("balanced, but seeding is not finished: start requests may be missing")
    elif stats.remaining:
        lines.append(f"balanced: {'1 request' if stats.remaining == 1 else f'{stats.remaining} requests'} left")
    elif not complete:
        lines.append("balanced, but an output does not have the items of the run: see above")
    elif not rewinds:
        lines.append("balanced: nothing lost")
    else:
        lines.append("balanced: all requests in the store are done")
    if rewinds:
        times = "once" if len(rewinds) == 1 else f"{len(rewinds)} times"
        lines.append(f"THE STORE WENT BACK IN TIME {times}:")
        for rewind in rewinds:
            lost = "by an unknown time" if rewind.lost_seconds is None else f"by up to {rewind.lost_seconds:.1f} s"
            lines.append(f"  noticed {local_time(rewind.at)}, {lost}")
        lines.append(
            "Pages of the lost time were crawled again, and outputs were set back. Changes that\n"
            "other programs made in that time (work queues, retry-failed, host settings) are lost: repeat them."
        )
    return lines


def _print_ledger(run: Run, stats: Stats, dead: dict[str, int]) -> None:
    print(f"run {run.run_id} of {run.spider}: {run.state}{', seeding' if stats.seeding else ''}\n")
    print(f"  pushed     {stats.pushed:>10}")
    for name in ("ready", "waiting", "leased", "done", "dead"):
        print(f"  {'=' if name == 'ready' else '+'} {STATE_NAMES.get(name, name):<9} {getattr(stats, name):>9}")
    for kind, count in sorted(dead.items(), key=lambda pair: -pair[1]):
        print(f"      {kind:<22} {count:>10}")
    if stats.incoming:
        print(f"\n  incoming   {stats.incoming:>10}  links of completed pages that are not queued yet")
    print(f"\n  items      {stats.items:>10}\n  duplicates {stats.duplicates:>10}")


def _print_faults(run: Run, stats: Stats, frontier: str | None) -> None:
    if not stats.faults:
        return
    print("\nfaults of the store")
    for fault in stats.faults:
        print(f"  {fault.what}{f', for example {printable(fault.example)}' if fault.example else ''}")
    if any(fault.repairable for fault in stats.faults):
        where = f" --frontier {shlex.quote(mask(frontier))}" if frontier else ""
        print(f"`shoal audit {run.run_id} --repair{where}` restores what can be restored, and names what is lost")
    if not all(fault.repairable for fault in stats.faults):
        print("some of it cannot be restored: a new run fetches what is lost")


@app.add(
    examples="""
    shoal why https://example.com/missing --frontier sqlite:///books.db
    shoal why https://example.com/missing --run-id books_1 --frontier redis://host
    """
)
async def why(
    url: Annotated[str, argument("URL", "The URL, as a page links to it or as the summary shows it.")],
    run: NewestRun = None,
    frontier: FrontierUrl = None,
    run_id: RunOption = None,
) -> None:
    """Show what happened to a URL.

    This shows the page that links to it, its attempts and waits, its chain of redirects and how that ended, what
    robots.txt said, and its first items. The exit code is 1 if the run has not seen the URL.
    """

    from shoal.config import Config
    from shoal.http import Request
    from shoal.operations.url_report import read_agent, read_url_items, report_url

    async with opened_run(frontier, run or run_id, readonly=True) as (store, chosen, queue):
        report = await report_url(queue, url, Config(), await read_agent(store, chosen.run_id, Config()))
        items = [] if report is None else await read_url_items(store, queue, chosen.run_id, report.history)
    if report is None:
        reason = "no page links to it, or it is out of scope"
        print(f"run {chosen.run_id} has not seen {Request(url).url}: {reason}")
        sys.exit(1)
    _print_report(report, items)


def _print_report(report: UrlReport, items: Sequence[str]) -> None:
    history = report.history
    status = f", HTTP {history.status}" if history.status else ""
    print(f"{history.url}\n  state     {STATE_NAMES.get(history.state, history.state)}{status}")
    if report.outcome:
        print(f"  outcome   {printable(report.outcome)}")
        for number, hop in enumerate(report.redirects):
            arrow = "→ " if number else ""
            print(f"  {'' if number else 'redirects':<9} {arrow}{printable(f'{hop.url}: {hop.text}')}")
    if history.worker:
        print(f"  worker    {printable(history.worker)}")
    if history.reason:
        print(f"  reason    {printable(history.reason)}")
    for number, parent in enumerate(report.parents or ("none: it is a start request",)):
        print(f"  {'found on' if not number else '':<9} {parent}")
    print(f"  robots    {report.robots}")
    print(f"  depth     {history.depth}\n  priority  {history.priority:g}")
    print(f"  attempts  {history.attempts}\n  items     {history.items}")
    for item in items:
        print(f"    {printable(item)}")
    print("  history")
    for event in history.events:
        worker = f"  (worker {printable(event.worker)})" if event.worker else ""
        detail = f": {printable(event.detail)}" if event.detail else ""
        print(f"    {local_time(event.at)}  {event.what}{detail}{worker}")


@app.add(
    "retry-failed",
    examples="""
    shoal retry-failed --frontier sqlite:///books.db
    shoal retry-failed --kind "http 500" --frontier sqlite:///books.db
    shoal retry-failed --host shop.example --url "*/products/*"
    """,
)
async def retry_failed(
    run_id: NewestRun = None,
    frontier: FrontierUrl = None,
    kind: Annotated[
        list[str], option("--kind KIND", 'Retry only this kind of failure, such as "http 500". Repeatable.')
    ] = [],
    host: Annotated[str | None, option("--host HOST", "Retry only requests of this host.")] = None,
    url: Annotated[
        str | None, option("--url PATTERN", 'Retry only URLs that match, such as "*/products/*": * is any text.')
    ] = None,
) -> None:
    """Queue the failed requests of a run again.

    They get all their attempts again. A finished run is reopened, and the command says what continues it. Requests that
    robots.txt disallowed stay failed. Links that were refused because the queue was full return only while it has room:
    run this command again later. `shoal audit` lists the kinds of failures.
    """

    from shoal.api.batch.spider import BatchSpider
    from shoal.frontier.rules import FULL_KIND, is_retried
    from shoal.operations.dead_requests import DeadFilter, retry_failed

    which = DeadFilter.of(kind, host, url)
    async with opened_run(frontier, run_id) as (store, run, queue):
        if run.spider == BatchSpider.name:
            raise RunError(f"run {run.run_id} is a batch of the HTTP API: send its failed URLs as a new batch")
        result = await retry_failed(store, run, queue, which)
        every = not which.is_by_url and is_retried(FULL_KIND, which.kinds)
        refused = (await queue.dead_kinds()).get(FULL_KIND, 0) if every else 0
        detail = f"{result.count} requests, {which}{'; the run is reopened' * result.reopened}"
        await record_action(store, "retry", run.run_id, detail, run.project)
    print(result)
    if refused:
        print(f"{refused} links did not fit into the queue (queue.max_size): run this command again later")
