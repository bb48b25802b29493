"""What each process of a run reports: who it is, what it did, and which fields its items have."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from shoal.crawling.stats import CodeError, FailingHost
from shoal.errors import DECODING_ERRORS
from shoal.item import PLAIN, Record
from shoal.ports import Document, Documents
from shoal.ports.documents import StoredValue, all_documents

ProcessRole: TypeAlias = Literal["crawl", "worker", "runner", "server", "earlier"]
"""``crawl``: `shoal run` and programs. ``worker``: of a fleet, or of ``--processes``. ``runner``: a node of a cluster.
``server``: a run of the API. ``earlier``: the sum of processes that ended long ago."""

REPORTED_EVERY = 5.0
"""Seconds between two reports of a process that works."""
IDLE_EVERY = 20.0
"""Seconds between two reports of an idle process, so that many idle workers cost the store little."""
LATE = 2 * IDLE_EVERY
"""Seconds without a report after which a process may be gone."""
SHORT = 120.0
"""Seconds. A fast run fails within minutes, and its good pages before that should not hide it."""
RECENT = 600.0
"""Seconds that count as the last minutes."""
MAX_HOSTS = 10
"""Failing hosts in a report: those with the most attempts."""
EARLIER = "(earlier)"
MAX_FIELDS = 200
OTHER_FIELDS = "..."
MAX_NAME = 100
_MAX_REPORTS = 300
"""How many reports of a run are kept. When there are more, those of the processes that ended first are added up."""


class ProcessFigures(Struct, frozen=True, kw_only=True):
    """Who a process of a run is, and what it did."""

    name: str
    """Unique. A worker uses its worker id."""
    role: ProcessRole
    machine: str = ""
    pid: int = 0
    slot: str = ""
    """The name under which it leases requests, with its epoch. Empty if it needs none."""
    epoch: int = 0
    pages: int = 0
    items: int = 0
    failed: int = 0
    """Requests that it gave up."""
    pages_per_second: float = 0.0
    """Over the last minute."""
    memory: int = 0
    """Bytes of resident memory; 0 if unknown."""
    browser: str = ""
    tor: str = ""


class CodeErrors(Struct, frozen=True, kw_only=True):
    """Errors of the user's code in a process: callbacks that raised, and items that could not be stored."""

    total: int = 0
    recent: int = 0
    """In the last minutes."""
    last: CodeError | None = None


class ProcessReport(ProcessFigures, frozen=True, kw_only=True):
    """What a process writes about itself, every 5 seconds. A field that an older version does not write has a
    default."""

    started_at: float
    at: float
    """When it wrote this, by its own clock."""
    ended: bool = False
    """Whether it has stopped, normally or with an error."""
    error: str = ""
    """The error that ended its part in the run."""
    items_counted: Mapping[str, int] = {}
    """Items whose fields were counted, by type: at most 50 per second."""
    fields: Mapping[str, Mapping[str, int]] = {}
    """How many of them have a value in a field, by type and field; 0 for a field that never has one. Fields after the
    first 200 count as ``...``."""
    user_agent: str = ""
    """The user agent with which it fetches; empty if unknown."""
    obeys_robots: bool = True
    command: str = ""
    """The command that starts a process like it. Empty if a program started it, or the command has a password."""
    hosts: dict[str, FailingHost] = {}
    """Hosts without a good answer since their last failure."""
    callback_errors: CodeErrors = CodeErrors()
    item_errors: CodeErrors = CodeErrors()
    forbidden: int = 0
    """Failed pages of the last ten minutes that do not count, such as those that robots.txt forbids."""
    forbidden_lately: int = 0
    """The same in the last two minutes."""
    loop_age: float = 0.0
    """Seconds for which its event loop has been blocked. 0 if it runs."""
    blocked_by: str = ""
    """What blocks it, such as a callback and its page."""
    replaced: tuple[str, ...] = ()
    """Of the report ``(earlier)``: the processes that were added last. Their reports may still be there."""


class FieldCoverage(Struct, frozen=True, kw_only=True):
    """How often a field of an item type has a value."""

    type: str
    """Class name of the items; ``item`` for a dict."""
    field: str
    filled: int
    items: int
    """Items of this type whose fields were counted."""

    @property
    def name(self) -> str:
        """The field; after the type, if the items have a class of their own."""
        return self.field if self.type == PLAIN else f"{self.type}.{self.field}"

    @property
    def share(self) -> float:
        return self.filled / self.items if self.items else 0.0


class FieldCounts:
    """Counts which fields of items have a value: neither null nor empty."""

    def __init__(self) -> None:
        self.items: Counter[str] = Counter()
        self.fields: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._names = 0

    def count(self, kind: str, record: Record) -> None:
        if kind not in self.items and len(self.items) >= MAX_FIELDS:
            kind = OTHER_FIELDS
        self.items[kind] += 1
        counts = self.fields[kind]
        for name, value in record.items():
            if name not in counts:
                name = self._new_name(name, counts)
                counts.setdefault(name, 0)
            if value is not None and (value or not isinstance(value, (str, bytes, list, dict))):
                counts[name] += 1

    def _new_name(self, name: str, counts: Mapping[str, int]) -> str:
        name = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
        if name in counts:
            return name
        if self._names >= MAX_FIELDS:
            return OTHER_FIELDS
        self._names += 1
        return name


def sum_errors(errors: Iterable[CodeErrors]) -> CodeErrors:
    """The errors of several processes."""
    every = list(errors)
    last = max((own.last for own in every if own.last is not None), key=lambda error: error.at, default=None)
    return CodeErrors(total=sum(own.total for own in every), recent=sum(own.recent for own in every), last=last)


def field_coverage(reports: Iterable[ProcessReport]) -> list[FieldCoverage]:
    """The coverage of all fields in the items of these processes, by type and field."""
    items, fields = _sum_fields(reports)
    return [
        FieldCoverage(type=kind, field=field, filled=filled, items=items[kind])
        for kind, counts in sorted(fields.items())
        for field, filled in sorted(counts.items())
        if field != OTHER_FIELDS
    ]


def _sum_fields(reports: Iterable[ProcessReport]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """``items_counted`` and ``fields`` of several processes."""
    items: Counter[str] = Counter()
    fields: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for report in reports:
        items.update(report.items_counted)
        for kind, counts in report.fields.items():
            fields[kind].update(counts)
    return items, fields


# -- documents


def process_key(run_id: str, name: str) -> str:
    return f"run/{run_id}/process/{name}"


def recent_items_key(run_id: str, name: str) -> str:
    return f"run/{run_id}/recent-items/{name}"


class RecentItems(Struct, frozen=True):
    """The last items of one process, oldest first, as JSON. Long ones are cut."""

    at: float
    items: list[str]


_decode_report = msgspec.msgpack.Decoder(ProcessReport).decode
_decode_items = msgspec.msgpack.Decoder(RecentItems).decode


async def read_processes(documents: Documents, run_id: str) -> list[ProcessReport]:
    """The reports of all processes of a run, those that wrote last first."""
    reports = [
        report
        for document in await all_documents(documents, process_key(run_id, ""))
        if (report := _report(document)) is not None
    ]
    replaced = {name for report in reports for name in report.replaced}
    return sorted(
        (report for report in reports if report.name not in replaced), key=lambda report: (-report.at, report.name)
    )


async def read_recent_items(documents: Documents, run_id: str, limit: int = 20) -> list[str]:
    """The last items of a run as JSON, newest first. The order of items of different processes is not exact."""
    found: list[tuple[float, int, str]] = []
    for document in await all_documents(documents, recent_items_key(run_id, "")):
        try:
            recent = _decode_items(document.value)
        except DECODING_ERRORS:  # of another version
            continue
        found += [(recent.at, number, item) for number, item in enumerate(recent.items)]
    return [item for _, _, item in sorted(found, reverse=True)[:limit]]


def _report(document: Document) -> ProcessReport | None:
    try:
        return _decode_report(document.value)
    except DECODING_ERRORS:  # of another version
        return None


# -- old reports


async def fold_reports(documents: Documents, run_id: str, silent_before: float) -> int:
    """If a run has very many reports, add up the oldest ones of processes that have written nothing since
    ``silent_before``, and delete them. Returns how many. It can be interrupted at any moment, and repeated."""
    reports = await read_processes(documents, run_id)
    old = [report for report in reversed(reports) if report.at < silent_before and report.name != EARLIER]
    chosen = old[: max(0, len(reports) - _MAX_REPORTS // 2)] if len(reports) > _MAX_REPORTS else []
    stored = StoredValue(documents, process_key(run_id, EARLIER), ProcessReport)
    before = await stored.read()
    for name in before.replaced if before is not None else ():  # an earlier call was interrupted
        await _delete(documents, run_id, name)
    if not chosen:
        return 0
    changed = await stored.change(lambda earlier: _sum(earlier, chosen) if earlier == before else earlier)
    if changed is None or changed.replaced != tuple(report.name for report in chosen):
        return 0  # another process was faster
    for report in chosen:
        await _delete(documents, run_id, report.name)
    return len(chosen)


def _sum(earlier: ProcessReport | None, more: Sequence[ProcessReport]) -> ProcessReport:
    every = [*more] if earlier is None else [earlier, *more]
    items, fields = _sum_fields(every)
    return ProcessReport(
        name=EARLIER, role="earlier", ended=True,
        started_at=min(report.started_at for report in every), at=max(report.at for report in every),
        pages=sum(report.pages for report in every), items=sum(report.items for report in every),
        failed=sum(report.failed for report in every), items_counted=items, fields=fields,
        callback_errors=sum_errors(report.callback_errors for report in every),
        item_errors=sum_errors(report.item_errors for report in every),
        replaced=tuple(report.name for report in more),
    )  # fmt: skip


async def _delete(documents: Documents, run_id: str, name: str) -> None:
    for key in (recent_items_key(run_id, name), process_key(run_id, name)):
        await StoredValue(documents, key, msgspec.Raw).change(lambda _: None)
