"""Creates and upgrades Shoal's tables and functions in a database.

The tables are in the schema that the URL names. They are made by the migrations of the components that use the
database: the clock that all share, the frontier, the cluster. The functions of a component are in a schema of their
own for each version of Shoal. So workers of several versions can use the same tables at the same time, and no version
replaces the functions of another one.
"""

from __future__ import annotations

import hashlib
import logging
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import asyncpg

from shoal.clients.postgres import Connection, PostgresAddress
from shoal.errors import StoreError

log = logging.getLogger("shoal.frontier")

VERSION = 3
"""Version of the functions. Raise it with every release that changes them. Migrations have numbers of their own."""
_LOCK = 0x53686F616C
"""The number of an advisory lock ("Shoal"): one process at a time changes a schema."""
_RISKS = {
    "fsync": "a crash of its machine can destroy the whole database",
    "full_page_writes": "a crash of its machine can destroy the whole database",
    "synchronous_commit": "a crash of the server loses its last changes: pages are fetched twice, delays are forgotten",
}
_REGISTRY = """
    CREATE TABLE IF NOT EXISTS migration (
        component text NOT NULL, number integer NOT NULL, name text NOT NULL, at timestamptz NOT NULL DEFAULT now(),
        digest text, PRIMARY KEY (component, number));
    ALTER TABLE migration ADD COLUMN IF NOT EXISTS digest text;
    CREATE TABLE IF NOT EXISTS functions (
        name text PRIMARY KEY, component text NOT NULL, version integer NOT NULL, at timestamptz NOT NULL DEFAULT now())
"""

_warned: set[str] = set()


class Repair(NamedTuple):
    """A migration that an earlier version made in another way, and how its tables become those of today."""

    number: int
    digests: tuple[str | None, ...]
    """What that version stored as its digest. None: it stored none."""
    applies: str
    """A query that returns whether the tables were made that way. ``{schema}`` stands for the name of the schema."""
    statement: str


class Component(NamedTuple):
    """A package with SQL files in its folders ``migrations`` and ``functions``."""

    name: str
    package: str
    constants: tuple[tuple[str, str], ...] = ()
    """Names and values: ``{NAME}`` in a function stands for the value. Migrations have none, as they never change."""
    repairs: tuple[Repair, ...] = ()


# Before there were digests, all versions made the same clock.
CLOCK = Component("clock", "shoal.clients", repairs=(Repair(1, (None,), "SELECT true", "SELECT"),))
"""Every component needs it."""


@cache
def _folder(component: Component, name: str) -> dict[str, str]:
    sql_files = (file for file in files(component.package).joinpath(name).iterdir() if file.name.endswith(".sql"))
    return {file.name: file.read_text("utf-8") for file in sorted(sql_files, key=lambda file: file.name)}


@cache
def migrations(component: Component) -> dict[int, tuple[str, str]]:
    """Name and statements of each migration, by number."""
    return {int(name.partition("_")[0]): (name, text) for name, text in _folder(component, "migrations").items()}


@cache
def functions(component: Component) -> str:
    """The statements that create the functions of a component."""
    text = "\n".join((*_folder(CLOCK, "functions").values(), *_folder(component, "functions").values()))
    values = dict(component.constants)
    return re.sub(r"\{([A-Z_]+)\}", lambda name: values[name[1]], text)


def functions_schema(address: PostgresAddress, component: Component) -> str:
    """The name of the schema with the functions of this version of Shoal. No other version has the same name."""
    digest = hashlib.sha256(f"{address.schema}\n{functions(component)}".encode()).hexdigest()[:10]
    return f"{address.schema[:40]}_{component.name}{VERSION}_{digest}"


async def install(link: Connection, address: PostgresAddress, component: Component) -> str:
    """Create or upgrade tables and functions, if part. Returns the schema of the functions.

    Many processes may do this at the same time. StoreError if a newer Shoal has changed the tables, or an unreleased
    one made other tables.
    """
    name = functions_schema(address, component)
    async with link.transaction():
        await _warn(link, address)
        if await _is_current(link, address, component, name):
            return name
    async with link.transaction():
        await link.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if await _is_current(link, address, component, name):
            return name
        await link.execute("SET LOCAL client_min_messages = warning")
        tables = f'"{address.schema}"'
        if await link.fetchval("SELECT to_regnamespace($1) IS NULL", tables):
            await link.execute(f"CREATE SCHEMA {tables}")
        await link.execute(f"SET LOCAL search_path = {tables}, pg_temp")
        await link.execute(_REGISTRY)
        for part in (CLOCK, component):
            await _repair(link, address, part)
            await _migrate(link, address, part)
        if await link.fetchval("SELECT to_regnamespace($1) IS NULL", f'"{name}"'):
            await _create_functions(link, component, name, tables)
    return name


async def _warn(link: Connection, address: PostgresAddress) -> None:
    """Warn about settings with which the server may lose data. Once per process."""
    if address.place not in _warned:
        _warned.add(address.place)
        for setting, risk in _RISKS.items():
            if await link.fetchval("SELECT current_setting($1)", setting) == "off":
                log.warning("%s has %s off: %s", address.place, setting, risk)


async def _is_current(link: Connection, address: PostgresAddress, component: Component, name: str) -> bool:
    if await link.fetchval("SELECT to_regclass($1) IS NULL", f'"{address.schema}".migration'):
        return False
    current = True
    for part in (CLOCK, component):
        digests, current_migrations = await _digests(link, address, part), migrations(part)
        if digests and max(digests) > max(current_migrations):
            raise StoreError(
                f"the schema {address.schema} of {address.place} was made by a newer Shoal ({part.name} format "
                f"{max(digests)}, this one knows {max(current_migrations)}); upgrade"
            )
        changed = _changed(part, digests)
        if changed - (await _repairs(link, address, part, digests)).keys():
            raise StoreError(
                f"the tables in the schema {address.schema} of {address.place} were made by an unreleased Shoal "
                f"({part.name}), and this one cannot use them. Finish its runs with that version, and export their "
                "items; meanwhile use another schema for new runs, with ?schema=name"
            )
        current = current and not changed and digests.keys() == current_migrations.keys()
    if not current:
        return False
    exists: bool = await link.fetchval("SELECT to_regnamespace($1) IS NOT NULL", f'"{name}"')
    return exists


async def _digests(link: Connection, address: PostgresAddress, component: Component) -> dict[int, str | None]:
    """The digest of each migration that was applied; None if it is older than digests."""
    # As JSON, because tables of unreleased versions may lack the column.
    query = f"""SELECT number, to_jsonb(m) ->> 'digest' FROM "{address.schema}".migration m WHERE component = $1"""
    return {row[0]: row[1] for row in await link.fetch(query, component.name)}


def _changed(component: Component, digests: dict[int, str | None]) -> set[int]:
    """The migrations that were made in another way."""
    return {number for number, digest in digests.items() if digest != _digest(migrations(component)[number][1])}


async def _repairs(
    link: Connection, address: PostgresAddress, component: Component, digests: dict[int, str | None]
) -> dict[int, Repair]:
    """The repairs for the migrations that an earlier version made."""
    return {
        repair.number: repair
        for repair in component.repairs
        if repair.number in digests
        and digests[repair.number] in repair.digests
        and await link.fetchval(repair.applies.format(schema=f'"{address.schema}"'))
    }


async def _repair(link: Connection, address: PostgresAddress, component: Component) -> None:
    repairs = await _repairs(link, address, component, await _digests(link, address, component))
    for number, repair in repairs.items():
        await link.execute(repair.statement)
        update = "UPDATE migration SET digest = $3 WHERE component = $1 AND number = $2"
        await link.execute(update, component.name, number, _digest(migrations(component)[number][1]))


def _digest(statements: str) -> str:
    """Identifies a migration. Comments and white space do not count."""
    return hashlib.sha256(" ".join(re.sub(r"--.*", "", statements).split()).encode()).hexdigest()[:16]


async def _migrate(link: Connection, address: PostgresAddress, component: Component) -> None:
    rows = await link.fetch("SELECT number FROM migration WHERE component = $1", component.name)
    applied = {row[0] for row in rows}
    missing = {number: migration for number, migration in migrations(component).items() if number not in applied}
    if missing:  # functions of other versions do not know these tables: drop them before they do harm
        old = "DELETE FROM functions WHERE component = $1 OR $1 = $2 RETURNING name"
        for row in await link.fetch(old, component.name, CLOCK.name):
            await link.execute(f'DROP SCHEMA IF EXISTS "{row[0]}" CASCADE')
    try:
        for number, (name, text) in missing.items():
            await link.execute(text)
            await link.execute(
                "INSERT INTO migration (component, number, name, digest) VALUES ($1, $2, $3, $4)",
                component.name,
                number,
                name,
                _digest(text),
            )
    except asyncpg.DuplicateTableError as exc:
        raise StoreError(
            f"the schema {address.schema} of {address.place} has tables of another program ({exc});"
            " use another ?schema=name"
        ) from exc


async def _create_functions(link: Connection, component: Component, name: str, tables: str) -> None:
    await link.execute(f'CREATE SCHEMA "{name}"')
    # They run with the caller's permissions, so everybody may call them.
    await link.execute(f'GRANT USAGE ON SCHEMA "{name}" TO PUBLIC')
    await link.execute(f'SET LOCAL search_path = "{name}", {tables}, pg_temp')
    await link.execute(functions(component))
    await link.execute(
        # A dump of the tables alone has the entry, but not the functions.
        "INSERT INTO functions (name, component, version) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING",
        name,
        component.name,
        VERSION,
    )
