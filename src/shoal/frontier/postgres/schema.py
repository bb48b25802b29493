"""The tables and functions in a database: made by whoever comes first, once, whoever comes at the same time.

The tables are in the schema that the URL names. The functions are in a schema of their own for each version of Shoal.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from importlib.resources import files

import asyncpg

from shoal.errors import StoreError
from shoal.frontier.postgres.address import Address
from shoal.frontier.postgres.connection import Connection

log = logging.getLogger("shoal.frontier")

VERSION = 1
"""Of the functions. Raise it with every release that changes them; the tables have a number of their own."""
_LOCK = 0x53686F616C
"""An advisory lock: "Shoal". One schema is made at a time."""
_RISKS = {
    "fsync": "a crash of its machine can destroy the whole database",
    "full_page_writes": "a crash of its machine can destroy the whole database",
    "synchronous_commit": "a crash of the server loses its last moments: pages are fetched twice, delays forgotten",
}

_warned: set[str] = set()


@cache
def _folder(name: str) -> dict[str, str]:
    found = files("shoal.frontier.postgres").joinpath(name).iterdir()
    return {each.name: each.read_text("utf-8") for each in sorted(found, key=lambda each: each.name)}


@cache
def migrations() -> dict[int, tuple[str, str]]:
    """By number, the name of each and its statements."""
    return {int(name.partition("_")[0]): (name, text) for name, text in _folder("migrations").items()}


@cache
def functions() -> str:
    """Their statements."""
    return "\n".join(_folder("functions").values())


def functions_schema(address: Address) -> str:
    """The schema in which the functions of this version of Shoal are: beside the tables, under a name that no other
    version has. So workers of several versions work on the same tables, and nobody replaces another's functions."""
    mark = hashlib.sha256(f"{address.schema}\n{functions()}".encode()).hexdigest()[:10]
    return f"{address.schema[:40]}_f{VERSION}_{mark}"


async def prepare(link: Connection, address: Address) -> str:
    """Have the schema as this version of Shoal knows it; the name of that of its functions. StoreError if a newer one
    has changed the tables."""
    made = functions_schema(address)
    async with link.transaction():
        await _warn(link, address)
        if await _is_current(link, address, made):
            return made
    async with link.transaction():
        await link.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if await _is_current(link, address, made):
            return made
        await link.execute("SET LOCAL client_min_messages = warning")
        tables = f'"{address.schema}"'
        if await link.fetchval("SELECT to_regnamespace($1) IS NULL", tables):
            await link.execute(f"CREATE SCHEMA {tables}")
        await link.execute(f"SET LOCAL search_path = {tables}, pg_temp")
        await _migrate(link, address)
        if await link.fetchval("SELECT to_regnamespace($1) IS NULL", f'"{made}"'):
            await _make_functions(link, made, tables)
    return made


async def _warn(link: Connection, address: Address) -> None:
    """Of settings with which "nothing is lost" does not hold; once in a process."""
    if address.place not in _warned:
        _warned.add(address.place)
        for setting, risk in _RISKS.items():
            if await link.fetchval("SELECT current_setting($1)", setting) == "off":
                log.warning("%s has %s off: %s", address.place, setting, risk)


async def _is_current(link: Connection, address: Address, made: str) -> bool:
    table = f'"{address.schema}".migration'
    if await link.fetchval("SELECT to_regclass($1) IS NULL", table):
        return False
    applied = await link.fetchval(f"SELECT max(number) FROM {table}")
    if applied is not None and applied > max(migrations()):
        raise StoreError(
            f"the schema {address.schema} of {address.place} was made by a newer Shoal (format {applied},"
            f" this one knows {max(migrations())}); upgrade"
        )
    there: bool = await link.fetchval("SELECT to_regnamespace($1) IS NOT NULL", f'"{made}"')
    return applied == max(migrations()) and there


async def _migrate(link: Connection, address: Address) -> None:
    await link.execute(
        "CREATE TABLE IF NOT EXISTS migration"
        " (number integer PRIMARY KEY, name text NOT NULL, at timestamptz NOT NULL DEFAULT now());"
        "CREATE TABLE IF NOT EXISTS functions"
        " (name text PRIMARY KEY, version integer NOT NULL, at timestamptz NOT NULL DEFAULT now())"
    )
    applied = {row[0] for row in await link.fetch("SELECT number FROM migration")}
    missing = {number: each for number, each in migrations().items() if number not in applied}
    if missing:  # functions of other versions do not know these tables: better they are gone than that they do harm
        for row in await link.fetch("DELETE FROM functions RETURNING name"):
            await link.execute(f'DROP SCHEMA IF EXISTS "{row[0]}" CASCADE')
    try:
        for number, (name, text) in missing.items():
            await link.execute(text)
            await link.execute("INSERT INTO migration (number, name) VALUES ($1, $2)", number, name)
    except asyncpg.DuplicateTableError as exc:
        raise StoreError(
            f"the schema {address.schema} of {address.place} has tables of something else ({exc});"
            " name another with ?schema="
        ) from exc


async def _make_functions(link: Connection, made: str, tables: str) -> None:
    await link.execute(f'CREATE SCHEMA "{made}"')
    # They run with the rights of whoever calls them, so everybody may call them.
    await link.execute(f'GRANT USAGE ON SCHEMA "{made}" TO PUBLIC')
    await link.execute(f'SET LOCAL search_path = "{made}", {tables}, pg_temp')
    await link.execute(functions())
    await link.execute("INSERT INTO functions (name, version) VALUES ($1, $2)", made, VERSION)
