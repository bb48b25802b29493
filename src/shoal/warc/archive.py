"""Stores the pages of one process in WARC files, so that each page that is done has its records exactly once.

The records of a page are in the file, durably, before the frontier learns that the page is done. If the page does not
become done, its records are left out when the file gets its final name. If the process dies, another one asks the
frontier which of the pages in the file are done.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Sequence

from shoal import __version__
from shoal.config import WarcSettings
from shoal.errors import FrontierError, SinkError
from shoal.http.exchange import Exchange
from shoal.ports import Inspection, Lease, LeaseKey, LeaseOutcome, Run
from shoal.sinks.storage import in_thread
from shoal.warc.files import OPEN, PagePart, WarcFile, left_by_dead, publish, read_leftover
from shoal.warc.records import Original, PageRecords, RecordMaker, check_installed

log = logging.getLogger("shoal.warc")

_MAX_ORIGINALS = 100_000
"""Payloads that are remembered, so that the same payload is stored once."""
_QUESTIONS = 1000
"""How many leases one call asks the frontier about."""
ENDING = ".warc.gz"
_UNSAFE = re.compile(r"[^\w.-]")


async def open_archive(
    settings: WarcSettings, run: Run, frontier: Inspection, *, durable: bool, user_agent: str
) -> WarcArchive:
    """The archive of a process. ConfigError if a library is missing; SinkError if it cannot write to the folder.

    ``durable``: the frontier survives a crash of the machine, so the records must too.
    """
    check_installed()
    archive = WarcArchive(settings, run, frontier, durable=durable, user_agent=user_agent)
    await archive.open()
    return archive


class WarcArchive:
    """See `shoal.crawling.engine_options.Archive`. Call ``close`` at the end."""

    def __init__(
        self, settings: WarcSettings, run: Run, frontier: Inspection, *, durable: bool, user_agent: str
    ) -> None:
        assert settings.folder is not None
        self._folder = os.path.realpath(settings.folder)
        self._max_bytes = settings.max_file_bytes
        self._run_id = run.run_id
        self._prefix = _UNSAFE.sub("_", run.run_id) + "-"
        self._frontier = frontier
        self._durable = durable
        # Runs of different stores may have the same id: the time of its creation tells them apart.
        mark = f"{run.run_id} {run.created_at:.3f}"
        self._about = {
            "software": f"Shoal/{__version__}",
            "format": "WARC File Format 1.1",
            "conformsTo": "http://iipc.github.io/warc-specifications/specifications/warc-format/warc-1.1/",
            "isPartOf": run.run_id,
            "http-header-user-agent": user_agent,
            "shoalRun": mark,
        }
        self._mark = f"shoalRun: {mark}\r\n".encode()
        self._maker = RecordMaker()
        self._process = secrets.token_hex(4)
        self._number = 0
        self._file: WarcFile | None = None
        self._unsettled: dict[LeaseKey, tuple[PagePart, PageRecords]] = {}
        """Pages in the file that may or may not be done: the frontier has not answered yet."""
        self._originals: dict[str, Original] = {}

    async def open(self) -> None:
        try:
            os.makedirs(self._folder, exist_ok=True)
        except OSError as exc:
            raise SinkError(f"can't create the folder {self._folder} (warc.folder): {exc.strerror}") from exc
        await self._recover()

    # -- pages

    async def store(self, pages: Sequence[tuple[Lease, Exchange]]) -> None:
        """Store pages that are about to be done. SinkError if they cannot be written; then they must not become
        done."""
        if not pages:
            return
        if self._file is not None and self._file.size >= self._max_bytes:
            await self._end_file()
        await in_thread(self._store, pages)

    def _store(self, pages: Sequence[tuple[Lease, Exchange]]) -> None:
        keys = [LeaseKey(lease.fingerprint, lease.token) for lease, _ in pages]
        made = [
            self._maker.page(exchange, lease.request, key, self._originals)
            for key, (lease, exchange) in zip(keys, pages, strict=True)
        ]
        if self._file is None:
            self._file = self._new_file()
        parts = self._file.append([each.data for each in made], durable=self._durable)
        self._unsettled.update(zip(keys, zip(parts, made, strict=True), strict=True))

    def _new_file(self) -> WarcFile:
        self._number += 1
        now = time.strftime("%Y%m%d%H%M%S", time.gmtime())
        name = f"{self._prefix}{now}-{self._number:05d}-{self._process}{ENDING}"
        return WarcFile(os.path.join(self._folder, name), self._maker.info(name, self._about), self._run_id)

    def settled(self, leases: Sequence[Lease], done: Sequence[bool]) -> None:
        """Record the answer of the frontier. The records of pages that are not done are left out of the file later."""
        for lease, is_done in zip(leases, done, strict=True):
            self._settle(LeaseKey(lease.fingerprint, lease.token), "done" if is_done else "lost")

    def _settle(self, key: LeaseKey, outcome: LeaseOutcome) -> None:
        if outcome == "leased" or key not in self._unsettled:
            return
        part, page = self._unsettled.pop(key)
        if outcome == "lost":
            assert self._file is not None
            self._file.dropped.append(part)
        elif page.digest not in self._originals:
            self._originals[page.digest] = page.response
            if len(self._originals) > _MAX_ORIGINALS:
                del self._originals[next(iter(self._originals))]

    # -- files

    async def _end_file(self) -> None:
        """Give the file its final name, unless the frontier has not answered for all of its pages."""
        assert self._file is not None
        if self._unsettled:
            keys = list(self._unsettled)
            for key, outcome in zip(keys, await self._outcomes(keys), strict=True):
                self._settle(key, outcome)
        if not self._unsettled:
            await in_thread(self._file.finish)
            self._file = None

    async def close(self) -> None:
        """Finish the file of this process, and those that dead processes of the run left in the folder."""
        try:
            if self._file is not None:
                await self._end_file()
            await self._recover()
        except (FrontierError, SinkError) as exc:
            log.warning("cannot finish all WARC files in %s: %s", self._folder, exc)
        if self._file is not None:
            log.warning("%s keeps the ending %s until a process of the run uses the folder", self._file.path, OPEN)
            self._file.abandon()

    async def _recover(self) -> None:
        """Finish the files of dead processes of this run."""
        ending = ENDING + OPEN
        for name in sorted(os.listdir(self._folder)):
            if name.startswith(self._prefix) and name.endswith(ending):
                path = os.path.join(self._folder, name.removesuffix(OPEN))
                if self._file is None or self._file.path != path:
                    await self._recover_file(path)

    async def _recover_file(self, path: str) -> None:
        with left_by_dead(path) as file:
            if file is None:
                return
            left = await in_thread(read_leftover, file)
            if left.first and self._mark not in left.info:
                return
            outcomes = await self._outcomes([lease for _, lease in left.pages])
            if "leased" in outcomes:  # a completion may still be on its way to the store
                return
            lost = [part for (part, _), outcome in zip(left.pages, outcomes, strict=True) if outcome == "lost"]
            await in_thread(publish, path, left.first, left.size, lost)
            log.info("finished %s, which another process left: %d pages", path, len(left.pages) - len(lost))

    async def _outcomes(self, leases: Sequence[LeaseKey]) -> list[LeaseOutcome]:
        found: list[LeaseOutcome] = []
        for begin in range(0, len(leases), _QUESTIONS):
            found += await self._frontier.lease_outcomes(leases[begin : begin + _QUESTIONS])
        return found
