"""`shoal runs`, `stats`, `pause`, `resume`, `cancel` and `rm`: list runs and control them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Annotated, cast, get_args

from msgspec.structs import asdict

from shoal.cli.help import Commands, local_time, option
from shoal.cli.options import AsJson, FrontierUrl, NewestRun, OneRun, resolve
from shoal.cli.run_store import choose_run, current_project, note_of, opened_run, opened_store, record_action
from shoal.errors import ConfigError, RunError
from shoal.system import clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shoal.crawling.stats import LimitReached
    from shoal.ports import Run, RunState, Stats, WorkerState

app = Commands()


@app.add(
    examples="""
    shoal runs --frontier sqlite:///books.db
    shoal runs --frontier redis://host --spider books --limit 5
    """
)
async def runs(
    frontier: FrontierUrl = None,
    spider: Annotated[str | None, option("--spider NAME", "List only the runs of this spider.")] = None,
    state: Annotated[str | None, option("--state STATE", "List only runs in this state, such as running.")] = None,
    search: Annotated[str, option("--search TEXT", "List only runs whose spider or ID contains TEXT.")] = "",
    limit: Annotated[int, option("--limit N", "List at most N runs (default 20).")] = 20,
    all_projects: Annotated[
        bool, option("--all-projects", "List the runs of all projects, not only of project_name.")
    ] = False,
) -> None:
    """List the runs of a frontier, newest first.

    They are those of the project in the setting project_name.
    """
    from shoal.operations.hosts import matching_runs
    from shoal.runs.run_end import limit_of, read_outcome

    states = None if state is None else [_checked_state(state)]
    async with opened_store(frontier, readonly=True) as store:
        project = None if all_projects else current_project()
        matching = matching_runs(await store.list_runs(spider, project, states=states), search)
        settings = resolve().config.outcome
        heading = f"{'run':<26} {'spider':<16} {'state':<10} {'outcome':<9} {'started':<19}"
        print(heading, *map(_column, ("done", "left", "failed", "items")), *["project"] * all_projects)
        for run in matching[:limit]:
            queue = await store.frontier(run.run_id)
            counts, outcome = await queue.stats(), await read_outcome(store, run, queue, settings)
            verdict = "" if outcome is None else outcome.verdict
            numbers = (counts.done, counts.remaining, counts.dead, counts.items)
            line = f"{run.run_id:<26} {run.spider:<16} {run.state:<10} {verdict:<9} {local_time(run.created_at)}"
            limit_reached = await limit_of(store, run)
            notes = [] if limit_reached is None else [f" {limit_reached}"]
            print(line, *map(_column, numbers), *[run.project] * all_projects, *notes)
        if len(matching) > limit:
            print(f"... and {len(matching) - limit} more: pass --limit {len(matching)} to list all")


def _checked_state(text: str) -> RunState:
    from shoal.ports import RunState

    for state in get_args(RunState):
        if state == text:
            return cast("RunState", state)
    raise ConfigError(f"--state must be one of {', '.join(get_args(RunState))}, not {text!r:.80}")


def _column(value: object) -> str:
    return f"{value:>9}"


@app.add(
    examples="""
    shoal stats --frontier sqlite:///books.db
    shoal stats books_1 --frontier redis://host --watch
    """
)
async def stats(
    run: NewestRun = None,
    frontier: FrontierUrl = None,
    watch: Annotated[bool, option("--watch", "Refresh every second until the run is finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the ready, done and failed requests of a run."""
    from shoal.runs.run_end import limit_of

    async with opened_run(frontier, run, readonly=True) as (store, chosen, queue):
        limit = await limit_of(store, chosen)
        before, at = await queue.stats(), clock.monotonic()
        # A run may have many failed requests, so they are not counted every second.
        kinds = await queue.dead_kinds() if before.dead else {}
        _print_stats(chosen, before, None, await queue.workers(), kinds, limit, as_json=as_json)
        if not as_json and (note := await note_of(store, chosen, queue)):
            print(note)
        while watch and not before.finished and limit is None:
            await asyncio.sleep(1.0)
            now = await queue.stats()
            speed = (now.done - before.done) / (clock.monotonic() - at)
            before, at = now, clock.monotonic()
            kinds = await queue.dead_kinds() if now.dead and now.finished else {}
            earlier, chosen = chosen, await store.get_run(chosen.run_id) or chosen
            limit = await limit_of(store, chosen)
            if not as_json and chosen.state != earlier.state:
                print(f"run {chosen.run_id} is {chosen.state}")
            _print_stats(chosen, now, speed, await queue.workers(), kinds, limit, as_json=as_json)


_SHOWN = ("ready", "waiting", "in_flight", "done", "failed", "left")


def _print_stats(
    run: Run, stats: Stats, speed: float | None, workers: Sequence[WorkerState], kinds: Mapping[str, int],
    limit: LimitReached | None, *, as_json: bool,
) -> None:  # fmt: skip
    """``kinds``: of the failed requests; empty if they were not counted."""
    from shoal.crawling.stats import ledger

    counts = ledger(stats)
    if as_json:
        page: dict[str, object] = {"run_id": run.run_id, "state": run.state, **counts}
        if kinds:
            page["failed_kinds"] = kinds
        if limit is not None:
            page["limit"] = asdict(limit)
        print(json.dumps({**page, "workers": [asdict(worker) for worker in workers]}), flush=True)
        return
    pace = "" if speed is None else f"  {speed:.0f} pages/s"
    seeding = "  (seeding)" if stats.seeding else ""
    words = " ".join(f" {name.replace('_', ' ')} {counts[name]}" for name in _SHOWN)
    print(f"{time.strftime('%H:%M:%S')} {words}  items {stats.items}{pace}{seeding}", flush=True)
    if kinds:
        print("failed:", ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items(), key=lambda pair: -pair[1])))
    if limit is not None:
        print(f"run {run.run_id} {limit}")
    for worker in workers:
        if worker.leases:
            pages = "1 page" if worker.leases == 1 else f"{worker.leases} pages"
            silent = worker.silent_for > worker.session / 2
            print(f"{pages} held by worker {worker.worker}" + (f", silent for {worker.silent_for:.0f} s" * silent))


@app.add(examples="shoal pause books_1 --frontier redis://host")
async def pause(run: OneRun, frontier: FrontierUrl = None) -> None:
    """Pause a run; its workers wait.

    Requests in flight are completed. No new requests are leased until you resume the run.
    """
    await _change_state(run, "paused", "pause", frontier, "its workers wait for `shoal resume`")


@app.add(examples="shoal resume books_1 --frontier redis://host")
async def resume(run: OneRun, frontier: FrontierUrl = None) -> None:
    """Resume a paused or cancelled run.

    Also one that its spider or a limit ended, and that has requests left.
    """
    await _change_state(run, "running", "resume", frontier, "workers that wait continue; if there are none, start some")


@app.add(examples="shoal cancel books_1 --frontier redis://host")
async def cancel(run: OneRun, frontier: FrontierUrl = None) -> None:
    """Stop a run before it is finished.

    Its workers exit. Nothing is deleted: `shoal resume` continues the run, `shoal rm` deletes it.
    """
    await _change_state(run, "cancelled", "cancel", frontier, "its workers exit; `shoal resume` continues it")


async def _change_state(run_id: str, state: RunState, verb: str, frontier: str | None, consequence: str) -> None:
    from shoal.runs.run_end import announce_end

    async with opened_store(frontier) as store:
        run = await choose_run(store, run_id)
        if state == "running":
            await announce_end(store, run_id, None)
        await store.transition(run_id, state)
        await record_action(store, verb, run_id, project=run.project)
    print(f"run {run_id} is {state}: {consequence}")


@app.add("rm", examples="shoal rm books_1 --frontier redis://host")
async def remove(
    run: OneRun,
    frontier: FrontierUrl = None,
    force: Annotated[bool, option("--force", "Delete the run even if it is not finished or cancelled.")] = False,
) -> None:
    """Delete a run, its URLs and its item log.

    Files and databases that its items were written to stay as they are.
    """
    from shoal.operations.snapshot import OVER

    async with opened_store(frontier) as store:
        chosen = await choose_run(store, run)
        if chosen.state not in OVER and not force:
            raise RunError(f"run {run} is {chosen.state}: cancel it first, or pass --force")
        await store.delete_run(run)
        await record_action(store, "delete", run, f"of {chosen.spider}, {chosen.state}", chosen.project)
    print(f"run {run} is deleted")
