"""The tables and functions in a database: made by whoever comes first, once, whoever comes at the same time."""

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
def functions() -> tuple[str, str]:
    """Their statements, and the hash by which they are known."""
    text = "\n".join(_folder("functions").values())
    return text, hashlib.sha256(text.encode()).hexdigest()


async def prepare(link: Connection, address: Address) -> None:
    """Have the schema as this version of Shoal knows it. StoreError if a newer one has changed it."""
    await _warn(link, address)
    if await _is_current(link, address):
        return
    async with link.transaction():
        await link.execute(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if await _is_current(link, address):
            return
        name = f'"{address.schema}"'
        if await link.fetchval("SELECT to_regnamespace($1) IS NULL", name):
            await link.execute(f"CREATE SCHEMA {name}")
        await link.execute(f"SET LOCAL search_path = {name}, pg_temp; SET LOCAL client_min_messages = warning")
        await _migrate(link, address)


async def _warn(link: Connection, address: Address) -> None:
    """Of settings with which "nothing is lost" does not hold; once in a process."""
    if address.place not in _warned:
        _warned.add(address.place)
        for setting, risk in _RISKS.items():
            if await link.fetchval("SELECT current_setting($1)", setting) == "off":
                log.warning("%s has %s off: %s", address.place, setting, risk)


async def _is_current(link: Connection, address: Address) -> bool:
    table = f'"{address.schema}".migration'
    if await link.fetchval("SELECT to_regclass($1) IS NULL", table):
        return False
    applied = await link.fetchval(f"SELECT max(number) FROM {table}")
    if applied is not None and applied > max(migrations()):
        raise StoreError(
            f"the schema {address.schema} of {address.place} was made by a newer Shoal (format {applied},"
            f" this one knows {max(migrations())}); upgrade"
        )
    made: str | None = await link.fetchval(f"SELECT functions FROM {table} WHERE number = $1", applied)
    return applied == max(migrations()) and made == functions()[1]


async def _migrate(link: Connection, address: Address) -> None:
    await link.execute(
        "CREATE TABLE IF NOT EXISTS migration"
        " (number integer PRIMARY KEY, name text NOT NULL, at timestamptz NOT NULL DEFAULT now(), functions text)"
    )
    applied = {row[0] for row in await link.fetch("SELECT number FROM migration")}
    try:
        for number, (name, text) in migrations().items():
            if number not in applied:
                await link.execute(text)
                await link.execute("INSERT INTO migration (number, name) VALUES ($1, $2)", number, name)
    except asyncpg.DuplicateTableError as exc:
        raise StoreError(
            f"the schema {address.schema} of {address.place} has tables of something else ({exc});"
            " name another with ?schema="
        ) from exc
    text, name = functions()
    await link.execute(text)
    await link.execute("UPDATE migration SET functions = $1 WHERE number = $2", name, max(migrations()))
