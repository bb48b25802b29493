"""Pools of database connections, as pipelines with Twisted use them."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from shoal.scrapy.adbapi import ConnectionPool


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "items.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE item (name TEXT PRIMARY KEY)")
    return path


def insert(cursor: Any, name: str) -> str:
    cursor.execute("INSERT INTO item VALUES (?)", (name,))
    return name


def names(file: Path) -> list[str]:
    with sqlite3.connect(file) as database:
        return [name for (name,) in database.execute("SELECT name FROM item ORDER BY name")]


def pool_of(file: Path) -> ConnectionPool:
    return ConnectionPool("sqlite3", str(file), check_same_thread=False, cp_max=2, cp_reconnect=True)


def test_close_waits_for_all_interactions(file: Path) -> None:
    pool = pool_of(file)
    done: list[str] = []
    for number in range(20):
        pool.runInteraction(insert, f"{number:02}").addCallback(done.append)
    pool.close()
    assert names(file) == sorted(done) == [f"{number:02}" for number in range(20)]


def test_an_error_goes_to_the_errback_and_is_rolled_back(file: Path) -> None:
    pool = pool_of(file)
    failures: list[Any] = []

    def twice(cursor: Any) -> None:
        insert(cursor, "lost")
        insert(cursor, "lost")

    pool.runInteraction(twice).addErrback(lambda failure, item: failures.append((failure, item)), "item")
    pool.close()
    ((failure, item),) = failures
    assert failure.check(sqlite3.IntegrityError)
    assert item == "item"
    assert names(file) == []


def test_an_error_without_an_errback_is_logged(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of(file)
    pool.runOperation("INSERT INTO missing VALUES (1)")
    pool.close()
    assert "a query failed: OperationalError: no such table: missing" in caplog.text


def test_queries_can_be_awaited(file: Path) -> None:
    async def work() -> Any:
        pool = pool_of(file)
        await pool.runOperation("INSERT INTO item VALUES (?)", ("x",))
        assert await pool.runWithConnection(lambda connection: connection.total_changes) >= 0
        rows = await pool.runQuery("SELECT name FROM item")
        with pytest.raises(sqlite3.OperationalError):
            await pool.runQuery("SELECT nothing")
        pool.close()
        return rows

    assert asyncio.run(work()) == [("x",)]
