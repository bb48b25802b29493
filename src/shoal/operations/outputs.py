"""What the outputs of a run have, counted in the outputs themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from shoal.config import Config, mask
from shoal.errors import RunError, ShoalError
from shoal.ports import ItemSource, OutputCount, RoleState, Run
from shoal.runs.start import RunSettings
from shoal.runs.trust import check_outputs
from shoal.sinks import file_of, open_sink, sink_id
from shoal.sinks.drainer import (
    COLLECTORS,
    PREFIX,
    find_gaps,
    first_after,
    host_of,
    not_trimmed,
    output_name,
    read_cursor,
    split_role,
)
from shoal.sinks.identity import identity_of, this_host
from shoal.sinks.storage import owner_of

_BATCH = 1000
_PASS_IT = "pass its URL with -o to count it"


class OutputReport(Struct, frozen=True, kw_only=True):
    """One output of a run: how far its writer is, and what it has."""

    name: str
    """Without secrets."""
    role: str
    writer: str = ""
    """The worker or slot that is writing it. Empty: nobody is."""
    position: int
    """The number of the last item that its writer saved."""
    logged: int
    """How many items the run has."""
    is_complete: bool
    """Whether it should have all items: the run is finished, and no process is writing."""
    is_open: bool = False
    """Whether the run is finished, but its last writer died before it completed the output."""
    first_logged: int = 1
    """The number of the first item that the log still has."""
    lost: tuple[tuple[int, int], ...] = ()
    """The items that the log lacks after that one: the first and the last number of each gap. Known if items are
    missing."""
    spec: str = ""
    """What to pass with ``-o``. Empty: unknown."""
    count: OutputCount | None = None
    unknown: str = ""
    """Why it could not be counted."""
    replaced_by: str = ""
    """The run whose output the file has now. Empty: this one, or it is not known."""
    machine: str = ""
    """The other machine whose file it is. Empty: this one, or a server."""

    @property
    def expected(self) -> int:
        """How many items it should have."""
        return self.logged if self.is_complete else min(self.position, self.logged)

    @property
    def missing(self) -> int:
        """How many items it should have and has not. 0 if it could not be counted."""
        if self.count is None:
            return 0
        if self.count.key or self.count.items is None:
            return 0 if self.count.position is None else max(0, self.expected - self.count.position)
        return max(0, self.expected - self.count.rejected - self.count.items)

    @property
    def export(self) -> str:
        """The output for `shoal export`, with the key of its rows. Empty: unknown."""
        if self.count is None or not self.count.key or "key=" in self.spec:
            return self.spec
        return f"{self.spec}{'&' if '?' in self.spec else '?'}key={','.join(self.count.key)}"

    @property
    def surplus(self) -> int:
        """How many items it has that the run does not have. 0 if it could not be counted."""
        if self.count is None or self.count.items is None:
            return 0
        return max(0, self.count.items - self.logged)

    @property
    def is_abandoned(self) -> bool:
        """Whether it is a file of another machine that nobody writes, although items are left to write."""
        return bool(self.machine) and not self.writer and self.position < self.logged


async def report_outputs(run: Run, frontier: ItemSource, specs: Sequence[str], config: Config) -> list[OutputReport]:
    """Count the items in each output that a process of this run has opened.

    ``specs``: outputs of the command line. Files of this machine are found by their path, and the outputs that are
    stored with the run by their URL, as far as a worker with this ``config`` would write to them."""
    specs_by_name, refused = _known_specs(run, specs, config)
    roles = [role for role in await frontier.roles() if role.role.startswith(PREFIX)]
    for spec in specs:  # a file that was moved together with its identity
        if (path := file_of(spec)) is not None and (identity := await identity_of(path)) is not None:
            specs_by_name |= {split_role(role.role)[0]: spec for role in roles if split_role(role.role)[1] == identity}
    first = await first_after(frontier, 0)
    reports = [
        await _report(run, frontier, role, specs_by_name, refused)
        for role in roles
        if not role.role.startswith(COLLECTORS)
    ]
    here = {split_role(report.role)[0] for report in reports if split_role(report.role)[1] and not report.machine}
    lost = await _gaps_in_log(frontier) if any(report.missing for report in reports) else ()
    return [  # without roles of an earlier version that a role with an identity continues
        structs.replace(report, first_logged=first, lost=lost)
        for report in reports
        if report.position or split_role(report.role)[1] or split_role(report.role)[0] not in here
    ]


async def _gaps_in_log(frontier: ItemSource) -> tuple[tuple[int, int], ...]:
    """The items that the log lacks, without those that were deleted on purpose. Nothing can write them again."""
    stats = await frontier.stats()
    gaps, last = list[tuple[int, int]](), stats.trimmed
    while items := await frontier.read_items(last, _BATCH):
        gaps += find_gaps(last, items)
        last = items[-1].seq
    if last < stats.items:
        gaps.append((last + 1, stats.items))
    return tuple(not_trimmed(gaps, stats.trimmed))


def _known_specs(run: Run, specs: Sequence[str], config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """By name: the outputs that may be opened; and why others may not."""
    specs_by_name, refused = {sink_id(spec): spec for spec in specs}, dict[str, str]()
    try:
        stored = RunSettings.of(run).outputs
    except RunError:  # a run of `shoal run` stores no outputs
        stored = ()
    for spec in stored:
        try:
            check_outputs(run.run_id, [spec], specs, config)
            specs_by_name.setdefault(sink_id(spec), spec)
        except RunError as exc:
            refused[mask(spec)] = str(exc)
    return specs_by_name, refused


async def _report(
    run: Run, frontier: ItemSource, role: RoleState, specs_by_name: Mapping[str, str], refused: Mapping[str, str]
) -> OutputReport:
    place, identity = split_role(role.role)
    cursor = read_cursor(role.cursor)
    spec, unknown, machine = specs_by_name.get(place, ""), "", ""
    if identity:
        at = file_of(spec or place) or place
        here = await identity_of(at)
        if here == identity or (here is None and host_of(role.role) == this_host()):
            spec = spec or place
        elif host_of(role.role) == this_host():
            spec, unknown = "", "another file has its name now; `forget` it if that one has all items"
        else:
            spec, machine = "", host_of(role.role)
            unknown = f"it is a file on {machine}; count it there"
    elif not spec and os.path.isabs(place):  # a file that is identified by its path
        spec = place if os.path.exists(place.partition("?")[0]) else ""
        unknown = "" if spec else "this machine has no such file"
    elif not spec:
        unknown = refused.get(place, _PASS_IT)
    count = None
    if spec:
        try:
            count = await open_sink(spec, run_id=run.run_id).count(cursor.state)
        except ShoalError as exc:
            unknown = str(exc)
    owner = owner_of(path) if spec and (path := file_of(spec)) else None
    return OutputReport(
        name=output_name(role.role),
        role=role.role.removeprefix(PREFIX),
        writer=(role.holder or "a process") if role.held else "",
        position=cursor.position,
        logged=(await frontier.stats()).items,
        is_complete=run.state == "finished" and not role.held,
        is_open=run.state == "finished" and not role.held and cursor.is_closed is False,
        spec=spec,
        count=count,
        unknown=unknown,
        replaced_by=owner if owner and owner != run.run_id else "",
        machine=machine,
    )
