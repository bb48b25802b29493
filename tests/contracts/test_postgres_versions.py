"""Workers of several versions of Shoal on the same PostgreSQL tables: each has its own functions."""

from __future__ import annotations

import asyncio
import sys

import pytest

from shoal.clients import postgres_schema
from shoal.clients.postgres import PostgresAddress
from shoal.errors import StoreError
from shoal.frontier.postgres import PostgresStore
from shoal.frontier.postgres.store import COMPONENT
from shoal.http import Request
from shoal.ports import Claim, Completion, FrontierOptions, RoleState, Run
from tests.contracts.postgres_steps import ask, schema_of

# A worker of another version, whose functions are written in another way.
_OTHER = """
import asyncio, sys
from shoal.frontier.postgres import PostgresStore
from shoal.frontier.postgres.store import COMPONENT
from shoal.clients import postgres_schema as schema
from shoal.ports import Completion, FrontierOptions
url, version = sys.argv[1], int(sys.argv[2])
known = schema.functions(COMPONENT)
text = known.replace("_width integer := least(", "_width integer := " + str(version) + " * 0 + least(")
assert text != known
schema.functions = lambda component: text
schema.VERSION = version
async def main():
    store = await PostgresStore.open(url)
    frontier = await store.frontier("run", FrontierOptions(concurrency_per_host=100))
    print(schema.functions_schema(store._database.address, COMPONENT), flush=True)
    for line in sys.stdin:
        leases = (await frontier.lease(2, 600)).leases
        answers = await frontier.complete([Completion(lease=lease) for lease in leases])
        print(len([answer for answer in answers if answer]), flush=True)
    await store.close()
asyncio.run(main())
"""


class Worker:
    """A process of another version."""

    def __init__(self, process: asyncio.subprocess.Process, functions: str) -> None:
        self._process = process
        self.functions = functions

    @classmethod
    async def start(cls, url: str, version: int) -> Worker:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _OTHER, url, str(version), stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None
        return cls(process, (await process.stdout.readline()).decode().strip())

    async def work(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return int(await self._process.stdout.readline())

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await self._process.wait() == 0


async def test_an_older_and_a_newer_worker_side_by_side(url: str) -> None:
    """An upgrade while a worker is at work, and the way back: nobody touches the functions of the others."""
    store = await PostgresStore.open(url)
    ours = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
    made = f"SELECT array_agg(oid::text ORDER BY oid) FROM pg_proc WHERE pronamespace = '{ours}'::regnamespace"
    before = await ask(url, made)
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    frontier = await store.frontier("run", FrontierOptions(concurrency_per_host=100))
    await frontier.push([Request(f"http://a.example/{number}") for number in range(40)])
    older = await Worker.start(url, postgres_schema.VERSION - 1)
    assert await older.work() == 2
    newer = await Worker.start(url, postgres_schema.VERSION + 1)
    assert len({older.functions, newer.functions, ours}) == 3
    for _ in range(3):
        assert await newer.work() == await older.work() == 2
        leases = (await frontier.lease(2, 600)).leases
        assert None not in await frontier.complete([Completion(lease=lease) for lease in leases])
    await older.stop()
    again = await Worker.start(url, postgres_schema.VERSION - 1)  # back to it, after the newer one was there
    assert again.functions == older.functions
    assert await again.work() == 2
    for worker in (again, newer):
        await worker.stop()
    assert await ask(url, made) == before
    stats = await frontier.stats()
    assert stats.done == 22
    assert await frontier.audit() == stats
    names = f"SELECT array_agg(name ORDER BY version) FROM {PostgresAddress.parse(url).schema}.functions"
    assert await ask(url, names) == [older.functions, ours, newer.functions]
    await store.close()


async def test_functions_that_a_backup_did_not_have_are_installed_again(url: str) -> None:
    """The backup is from before this version was first started."""
    store = await PostgresStore.open(url)
    await store.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    frontier = await store.frontier("run", FrontierOptions(concurrency_per_host=100))
    await frontier.push([Request("http://a.example/1")])
    ours = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
    await ask(url, f'DROP SCHEMA "{ours}" CASCADE')
    await ask(url, f"DELETE FROM {PostgresAddress.parse(url).schema}.functions WHERE name = $1", ours)
    (lease,) = (await frontier.lease(1, 60)).leases
    assert None not in await frontier.complete([Completion(lease=lease)])
    assert (await frontier.stats()).done == 1
    await store.close()


async def test_a_new_format_ends_the_functions_of_the_old_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not know the new tables. A worker that goes on with them is told so, and so is one that starts."""
    old = await PostgresStore.open(url)
    ours = postgres_schema.functions_schema(PostgresAddress.parse(url), COMPONENT)
    await old.create_run(Run(run_id="run", spider="s", state="running", created_at=0.0))
    known = postgres_schema.migrations
    later = {**known(COMPONENT), 99: ("0099_later.sql", "ALTER TABLE run ADD COLUMN later integer")}
    text = postgres_schema.functions(COMPONENT) + "\n-- of a later version"
    with monkeypatch.context() as patch:
        patch.setattr(
            postgres_schema, "migrations", lambda component: later if component == COMPONENT else known(component)
        )
        patch.setattr(postgres_schema, "functions", lambda component: text)
        new = await PostgresStore.open(url)
    assert [run.run_id for run in await new.list_runs()] == ["run"]
    assert await ask(url, "SELECT to_regnamespace($1) IS NULL", f'"{ours}"')
    with pytest.raises(StoreError, match="newer Shoal"):
        await old.list_runs()
    with pytest.raises(StoreError, match="newer Shoal"):
        await PostgresStore.open(url)
    await new.close()
    await old.close()


async def _make_old_tables(url: str, patch: pytest.MonkeyPatch) -> None:
    """Make the tables of earlier migrations, with a run."""
    patch.setattr(postgres_schema, "functions", lambda component: "SELECT 1")  # those of this version need its tables
    await (await PostgresStore.open(url)).close()
    tables = schema_of(url)
    columns = "(run_id, spider, state, created_at, settings, project)"
    await ask(url, f"INSERT INTO {tables}.run {columns} VALUES ('run', 's', 'running', 0, $1, 'shoal')", b"\x80")
    await ask(url, f"INSERT INTO {tables}.ledger (run) SELECT id FROM {tables}.run")


async def test_tables_from_before_claims_had_epochs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = postgres_schema.migrations
    with monkeypatch.context() as patch:
        patch.setattr(postgres_schema, "migrations", lambda component: {1: known(component)[1]})
        await _make_old_tables(url, patch)
    tables = schema_of(url)
    claims = "SELECT id, 'drain', 7, 9e9, 'far', false, 'w', 1 FROM"
    await ask(
        url, f"INSERT INTO {tables}.role (run, role, token, until, cursor, finished, slot, epoch) {claims} {tables}.run"
    )
    store = await PostgresStore.open(url)
    frontier = await store.frontier("run", FrontierOptions())
    assert await frontier.roles() == [RoleState(role="drain", cursor=b"far", held=True, finished=False, holder="w")]
    assert await frontier.claim("drain", 600) is None
    assert await frontier.relinquish(Claim("drain", 7, b"far"))
    claim = await frontier.claim("drain", 600)
    assert claim is not None
    assert (claim.cursor, claim.epoch > 1_600_000_000_000_000) == (b"far", True)
    assert (await frontier.audit()).balanced
    await ask(url, f"DELETE FROM {tables}.role")  # the migration has listed it
    assert [(fault.kind, fault.example) for fault in (await frontier.audit()).faults] == [("roles", "drain")]
    await store.close()


async def test_tables_of_an_unreleased_version_are_refused(url: str) -> None:
    """They have the number of a known migration, but other columns."""
    await (await PostgresStore.open(url)).close()
    table = f"{PostgresAddress.parse(url).schema}.migration"
    await ask(url, f"UPDATE {table} SET digest = 'another' WHERE component = $1 AND number = 1", COMPONENT.name)
    advice = r"made by an unreleased Shoal .* Finish its runs with that version, and export .* with \?schema=name"
    with pytest.raises(StoreError, match=advice) as caught:
        await PostgresStore.open(url)
    assert "drop" not in str(caught.value)
    await ask(url, f"ALTER TABLE {table} DROP COLUMN digest")  # before there were digests
    with pytest.raises(StoreError, match="unreleased"):
        await PostgresStore.open(url)


@pytest.mark.parametrize("has_digest", [True, False])
async def test_tables_whose_lanes_had_a_generated_key_are_repaired(
    url: str, has_digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions before the second migration made them. What is in them stays."""
    known, tables = postgres_schema.migrations, schema_of(url)
    name, text = known(COMPONENT)[1]
    start, lane, rest = text.partition("CREATE TABLE lane (")
    before = start + lane + rest.replace("id bigint", f"id bigint {_GENERATED}", 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            postgres_schema, "migrations", lambda each: {1: (name, before)} if each == COMPONENT else known(each)
        )
        await _make_old_tables(url, patch)
    await ask(url, f"INSERT INTO {tables}.lane (run, host, ready, place) VALUES (7, 9, 0, 0)")
    if not has_digest:
        await ask(url, f"ALTER TABLE {tables}.migration DROP COLUMN digest")
    for opening in range(2):  # the second time, nothing is left to change
        store = await PostgresStore.open(url)
        frontier = await store.frontier("run", FrontierOptions())
        assert (await frontier.push([Request(f"http://{opening}.example/")])).added == 1
        assert len((await frontier.lease(5, 600)).leases) == 1
        await store.close()
    assert await ask(url, f"SELECT id FROM {tables}.lane WHERE run = 7") == (7 << 32) + 9


_GENERATED = "GENERATED ALWAYS AS ((run::bigint << 32) + host) STORED"
