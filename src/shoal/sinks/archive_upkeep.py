"""Checks, repairs and prunes an archive.

Each step of `prune` leaves an archive whose pages can all be read: payloads that later runs refer to are copied first,
then the files go, each before its index. A process that continues after a crash does the same steps again.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

from msgspec import Struct

from shoal import __version__
from shoal.messages import did_you_mean
from shoal.sinks.archive import (
    LOCK,
    OPEN,
    ArchiveFolder,
    FolderLock,
    Found,
    PayloadFilter,
    RunFiles,
    body_of,
    check_payload,
    finished_files,
    open_files,
    read_errors,
    read_record,
    size_of,
)
from shoal.sinks.archive_index import (
    ARCHIVE_MODE,
    ENDING,
    INDEX,
    KEYS,
    REVISIT,
    ArchiveError,
    FileIndex,
    IndexBuilder,
    IndexLine,
    digest_key,
    index_records,
    read_line,
    rebuild_index,
    write_index,
)
from shoal.sinks.storage import TEMPORARY, storage_errors, sync_folder
from shoal.sinks.warc_records import Damage, Member, first_record, members, parse_record, scan
from shoal.system import chance

_KEPT = "kept-"
"""What the names of files begin with that have payloads of pruned runs."""
_WORTH = 0.7
"""A file with payloads of pruned runs is written again when fewer of its pages are needed."""


# -- check


class Fault(NamedTuple):
    """What is wrong with an archive, in a sentence."""

    text: str
    repaired: bool = False


def check(folder: str, *, repair: bool = False) -> Iterator[Fault]:
    """Compare each WARC file with its index, and read each page. ``repair``: make wrong indexes again, and remove what
    belongs to no file. ArchiveError if the folder cannot be read."""
    folder = os.path.realpath(folder)
    paths = finished_files(folder)
    for path in paths:
        yield from _check_file(path, repair=repair)
    yield from _check_leftovers(folder, repair=repair)
    with ArchiveFolder(folder) as archive:
        for index in archive.indexes():
            for line in _readable_lines(index):
                try:
                    archive.read(Found(index, line))
                except ArchiveError as error:
                    yield Fault(str(error))


def _readable_lines(index: FileIndex) -> Iterator[IndexLine]:
    with suppress(ArchiveError):  # reported already
        yield from index


def _check_file(path: str, *, repair: bool) -> Iterator[Fault]:
    name = os.path.basename(path)
    builder = IndexBuilder(os.path.dirname(path))
    try:
        with read_errors(path + ENDING), open(path + ENDING, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found: list[Damage] = []
            run = index_records(_undamaged(scan(file, size), found), name + ENDING, builder)
        for damage in found:
            yield Fault(
                f"{name}{ENDING} is damaged from byte {damage.begin} to {damage.end}: the records there are lost, "
                "unless you restore the file from a backup"
            )
        faults = list(_index_faults(path, builder, run, size))
        if faults and repair:
            with storage_errors(path + INDEX):
                write_index(path, builder.lines(), run, size)
        for fault in faults:
            yield Fault(fault, repaired=repair)
    except ArchiveError as error:
        yield Fault(str(error))
    finally:
        builder.close()


def _undamaged(found: Iterable[Member | Damage], damaged: list[Damage]) -> Iterator[Member]:
    for part in found:
        if isinstance(part, Member):
            yield part
        else:
            damaged.append(part)


def _index_faults(path: str, builder: IndexBuilder, run: tuple[str, float], size: int) -> Iterator[str]:
    """How the index of a file differs from the one that is made from its records."""
    name = os.path.basename(path)
    try:
        index = FileIndex(path)
    except ArchiveError as error:
        yield str(error)
        return
    try:
        is_equal = True
        for line, is_expected in _differences(builder.lines(), _lines_of(index)):
            is_equal = False
            yield _difference(name, line, is_expected=is_expected)
        if is_equal and not index.is_whole(run, size):
            yield f"{name}{KEYS} does not belong to {name}{INDEX}: pages are not found by their request"
    except ArchiveError as error:
        yield str(error)
    finally:
        index.close()


def _lines_of(index: FileIndex) -> Iterator[bytes]:
    lines, at = index.lines, 0
    while at < len(lines):
        end = lines.find(b"\n", at) + 1 or len(lines)
        yield lines[at:end]
        at = end


def _differences(expected: Iterator[bytes], actual: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines that only one of them has, and whether that is the expected one. Both are sorted, or one is damaged."""
    left, right = next(expected, None), next(actual, None)
    while left is not None or right is not None:
        if left == right:
            left, right = next(expected, None), next(actual, None)
        elif right is None or (left is not None and left < right):
            assert left is not None
            yield left, True
            left = next(expected, None)
        else:
            yield right, False
            right = next(actual, None)


def _difference(name: str, data: bytes, *, is_expected: bool) -> str:
    try:
        entry = read_line(data).entry
    except ArchiveError as error:
        return f"{name}{INDEX}: {error}"
    where = f"{entry.url[:200]} at {entry.offset}"
    if is_expected:
        return f"{name}{INDEX} has no line for the record of {where}, or a wrong one"
    return f"{name}{INDEX} has a line for {where}, but the file has no such record"


def _check_leftovers(folder: str, *, repair: bool) -> Iterator[Fault]:
    """What a process left that died."""
    for path in _leftovers(folder):
        yield Fault(f"{os.path.basename(path)} belongs to no WARC file", repaired=repair)
        if repair:
            with read_errors(path):
                os.unlink(path)


def _leftovers(folder: str) -> list[str]:
    """Indexes without a WARC file, and temporary files that no process has open."""
    with read_errors(folder):
        names = sorted(os.listdir(folder))
    # Open files first: one that is finished meanwhile is among the finished ones.
    known = {os.path.basename(path) for path in (*open_files(folder), *finished_files(folder))}
    found = [name for name in names if name.endswith((INDEX, KEYS)) and os.path.splitext(name)[0] not in known]
    found += [name for name in names if name.endswith(TEMPORARY) and _is_abandoned(os.path.join(folder, name))]
    return [os.path.join(folder, name) for name in found]


def _is_abandoned(path: str) -> bool:
    """Whether no process writes this temporary file."""
    with suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# -- prune


class Pruned(Struct, kw_only=True):
    """What `prune` removed, or would remove."""

    runs: list[RunFiles]
    bytes: int = 0
    """Of the files that are removed, less what is written."""
    kept: int = 0
    """Pages of them whose payload later runs need: they were copied."""
    into: str = ""
    """The file with these."""


def prune(folder: str, *, keep: int | None = None, runs: Collection[str] = (), dry_run: bool = False) -> Pruned:
    """Remove the files of some runs: of ``runs``, or of all but the newest ``keep``.

    ArchiveError if a run is unknown, if a crawl writes to the archive, or if the archive is damaged. SinkError if it
    cannot be written. Then nothing is removed that is needed."""
    folder = os.path.realpath(folder)
    with _alone(folder, dry_run=dry_run):
        if not dry_run:
            for path in _leftovers(folder):
                with read_errors(path):
                    os.unlink(path)
        with ArchiveFolder(folder) as archive:
            if archive.faults:
                raise ArchiveError(f"the archive was not pruned: {archive.faults[0]}")
            chosen = _chosen(archive.runs(), folder, keep, runs)
            return _prune(archive, chosen, dry_run=dry_run)


@contextmanager
def _alone(folder: str, *, dry_run: bool) -> Iterator[None]:
    if dry_run:
        yield
        return
    with read_errors(folder):
        lock = FolderLock(folder)
    try:
        with read_errors(os.path.join(folder, LOCK)):
            if not lock.take(shared=False):
                raise ArchiveError(f"a crawl writes to {folder}, or another process prunes it; prune it afterwards")
        yield
    finally:
        lock.close()


def _chosen(found: list[RunFiles], folder: str, keep: int | None, names: Collection[str]) -> list[RunFiles]:
    """The runs that go."""
    found = [run for run in found if run.run]
    known = {run.run for run in found}
    for name in names:
        if name not in known:
            raise ArchiveError(
                f"{folder} has no run {name}{did_you_mean(name, known)}; `shoal archive list` lists them"
            )
    if keep is not None:
        return found[keep:]
    return [run for run in found if run.run in names]


def _prune(archive: ArchiveFolder, chosen: list[RunFiles], *, dry_run: bool) -> Pruned:
    gone = {path for run in chosen for path in run.files}
    opened = [path for run in chosen for path in run.open_files]
    needs = _Needs(archive, gone, set(opened))
    gone.update(needs.rewritten() if chosen else ())
    needs.leave(gone)
    sources = sorted(gone)
    needed = (found for index in archive.indexes(sources) for found in needs.of(index))
    result = Pruned(runs=chosen, bytes=sum(map(size_of, (*gone, *opened))))
    if dry_run:
        result.kept = sum(1 for _ in needed)
    elif gone or opened:
        path, result.kept = _copy(archive.folder, needed)
        result.into = os.path.basename(path) + ENDING if result.kept else ""
        result.bytes -= size_of(path)
        archive.close()
        for path in (*sorted(gone), *opened):
            _remove(path)
        sync_folder(os.path.join(archive.folder, LOCK))
    return result


class _Needs:
    """Knows which payloads of pruned files the pages of other files need."""

    def __init__(self, archive: ArchiveFolder, gone: Collection[str], opened: Collection[str]) -> None:
        self._archive = archive
        self._open = _open_revisits(archive.folder, opened)
        self._stay: list[str] = []
        self.leave(gone)

    def leave(self, gone: Collection[str]) -> None:
        """These files go, and all others stay."""
        self._stay = [index.path for index in self._archive.indexes() if index.path not in gone]
        entries = sum(index.summary.tables for index in self._archive.indexes(self._stay))
        self._filter = PayloadFilter(self._archive.indexes(self._stay), entries)

    def of(self, index: FileIndex) -> Iterator[Found]:
        """The pages of a file whose payloads are needed."""
        for line in index:
            if line.entry.mime != REVISIT and self._needs(line.entry.digest, line.entry.record):
                yield Found(index, line)

    def _needs(self, digest: str, record: str) -> bool:
        key = digest_key(digest)
        refers = set(self._open.get(digest, ()))
        has_other = False
        for index in self._archive.indexes(self._stay) if self._filter.may_have(key) else ():
            for line in index.by_digest(digest):
                if line.entry.mime == REVISIT:
                    refers.add(line.entry.refers)
                elif line.entry.record == record:
                    return False  # a copy was made before
                else:
                    has_other = True
        return record in refers or (bool(refers) and not has_other)

    def rewritten(self) -> list[str]:
        """Files with payloads of pruned runs of which few are needed any more."""
        found = []
        for index in self._archive.indexes([path for path in self._stay if _is_kept(path)]):
            if not index.summary.run:
                self._stay.remove(index.path)
                if sum(1 for _ in self.of(index)) < _WORTH * index.summary.pages:
                    found.append(index.path)
                self._stay.append(index.path)
        return found


def _is_kept(path: str) -> bool:
    return os.path.basename(path).startswith(_KEPT)


def _open_revisits(folder: str, gone: Collection[str]) -> dict[str, set[str]]:
    """What the revisits in open files refer to, by the digest of their payload."""
    found: dict[str, set[str]] = {}
    for path in open_files(folder):
        if path in gone:
            continue
        with suppress(FileNotFoundError), open(path + ENDING + OPEN, "rb") as file:
            for member in members(file):
                record = parse_record(member.content)
                if record is not None and record.kind == "revisit":
                    refers = record.headers.get("warc-refers-to", "").strip("<>").removeprefix("urn:uuid:")
                    found.setdefault(record.headers.get("warc-payload-digest", ""), set()).add(refers)
    return found


def _copy(folder: str, needed: Iterable[Found]) -> tuple[str, int]:
    """Write a file with the records of these pages that have their payloads. Return its path and their number.

    It has an index before it has its name, as every finished file."""
    path = os.path.join(folder, f"{_KEPT}{time.strftime('%Y%m%d%H%M%S', time.gmtime())}-{chance.token_hex(4)}")
    temporary = path + ENDING + TEMPORARY
    with storage_errors(path + ENDING):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, ARCHIVE_MODE)
            with open(descriptor, "wb") as target:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                target.write(first_record(os.path.basename(path) + ENDING, _INFO))
                count = sum(_copy_page(found, target) for found in needed)
                target.flush()
                os.fsync(descriptor)
                if count:
                    rebuild_index(path, temporary, size=target.tell())
                    os.rename(temporary, path + ENDING)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    sync_folder(path)
    return path, count


_INFO = {
    "software": f"Shoal/{__version__}",
    "format": "WARC File Format 1.1",
    "description": "Pages of pruned runs whose payloads later runs refer to.",
}


def _copy_page(found: Found, target: BinaryIO) -> int:
    """Copy the response of a page, and what names its request."""
    check_payload(found, body_of(read_record(found)))
    with read_errors(found.file.path + ENDING), open(found.file.path + ENDING, "rb") as source:
        for number, member in enumerate(members(source, int(found.entry.offset))):
            record = parse_record(member.content)
            if number and (record is None or record.kind in ("response", "revisit", "warcinfo")):
                break
            if not number or (record is not None and record.kind == "metadata"):
                target.write(os.pread(source.fileno(), member.length, member.offset))
    return 1


def _remove(path: str) -> None:
    """Remove a file before its index: an index without a file is ignored."""
    for ending in (ENDING, ENDING + OPEN, KEYS, INDEX):
        with storage_errors(path + ending), suppress(FileNotFoundError):
            os.unlink(path + ending)
