"""The frontier of a run in a SQLite file, composed of its parts.

One process works on a file at a time. So the frontier keeps in memory what it needs most often: the best requests of
each lane, the politeness of each host, the held leases, the newest fingerprints. It reads all of that from the file
when the run is opened, and again after a transaction was rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shoal.frontier.composed import ComposedFrontier
from shoal.frontier.local_workers import LocalSessions, LocalWorkers
from shoal.frontier.politeness import OpenRuns
from shoal.frontier.rules import HALTED, RESTING
from shoal.frontier.sqlite.file import SQLiteFile
from shoal.frontier.sqlite.history import Histories
from shoal.frontier.sqlite.hosts import SQLiteHosts
from shoal.frontier.sqlite.inspection import SQLiteInspection
from shoal.frontier.sqlite.items import SQLiteItemLog
from shoal.frontier.sqlite.lanes import SharedHosts, StoredLanes
from shoal.frontier.sqlite.leases import Leases
from shoal.frontier.sqlite.queue import SQLiteQueue, Tables
from shoal.frontier.sqlite.roles import SQLiteRoles
from shoal.frontier.sqlite.run_file import RunFile
from shoal.frontier.sqlite.seen import Seen
from shoal.ports import Documents, FrontierOptions, Holder, RunState


class SQLiteFrontier(ComposedFrontier):
    """See `shoal.ports.Frontier`. Each call is one transaction."""

    def __init__(
        self,
        file: SQLiteFile,
        run_id: str,
        number: int,
        hosts: SharedHosts,
        clock: Callable[[], float],
        runs: OpenRuns[SQLiteFrontier],
        sessions: LocalSessions,
        documents: Documents,
    ) -> None:
        """``hosts``, ``runs``, ``sessions`` and ``documents`` are shared by all runs of the file."""
        self._run = run = RunFile(file, number, clock)
        self._seen = seen = Seen(file.db, number)
        self._lanes = lanes = StoredLanes(run, run_id, hosts)
        self._roles = roles = SQLiteRoles(run)
        histories, items = Histories(run), SQLiteItemLog(run, roles)
        self._leases = Leases(run, lanes, hosts, histories)
        tables = Tables(run, seen, lanes, self._leases, histories, items, roles)
        self._queue = queue = SQLiteQueue(tables, lambda now: runs.expire_others(self, now), documents)
        self.expire_leases = queue.expire_leases
        self.held_at = self._leases.held_at
        holders = partial(sessions.holders, runs)
        inspection = SQLiteInspection(run, seen, lanes, histories, roles, queue.stages, holders)
        workers = LocalWorkers(run_id, sessions, queue.fence, self._leases.holders)
        sqlite_hosts = SQLiteHosts(run, hosts, lanes, self._load_queue)
        super().__init__(queue, roles, workers, items, sqlite_hosts, inspection)

    def enter(self, state: RunState) -> None:
        """Stop or resume leasing: the run is paused or cancelled, or runs again."""
        self._queue.halted = state in HALTED
        self._lanes.rest(state in RESTING)

    # -- memory and file; the store calls these within a transaction

    def load(self) -> None:
        """Read from the file everything that the frontier keeps in memory, with new hosts. When all runs are loaded,
        the store calls ``place``."""
        self._load_queue()
        self.enter(self._run.state())
        self._seen.load()

    def _load_queue(self) -> None:
        self._run.load_options()
        self._lanes.load()
        self._leases.load()

    @property
    def options(self) -> FrontierOptions:
        return self._run.options

    def set_options(self, options: FrontierOptions) -> None:
        """Change the options of the run."""
        self._run.save_options(options)
        self._lanes.set_options(options, self._run.clock())

    def place(self) -> None:
        """Make the lanes available for leasing."""
        self._lanes.place(self._run.clock())

    def end_old_leases(self, keeps: Callable[[Holder | None], bool]) -> None:
        """End the leases and roles of processes that are gone. Each lease that had begun was an attempt."""
        ledger = self._run.ledger()
        self._leases.lose(self._leases.of_dead_holders(keeps), ledger, self._run.clock())
        self._run.save(ledger)
        self._roles.free(keeps)
        self.place()
