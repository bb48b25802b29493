"""Items in PostgreSQL and MariaDB: how each value is stored, and that faults of the server lose nothing."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import pymysql
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Crawl, Response, Spider
from shoal.errors import SinkError
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.item import encode_item
from shoal.messages import pip_install
from shoal.ports import Completion, Frontier, FrontierOptions, LoggedItem, Run, Sink
from shoal.sinks import is_shared, open_sink, sink_id
from shoal.sinks.drainer import Drainer, is_retryable
from shoal.sinks.keys import SYSTEM_COLUMNS
from shoal.sinks.tables import Columns, Kind, Naming, join_kinds, kind_of
from tests.support.databases import DatabaseServer, MariaServer, PostgresServer, free_port, shared
from tests.support.patience import allowance
from tests.support.servers import SiteServer

WHEN = datetime(2024, 2, 29, 12, 30, 15, 123456, UTC)
_spaces = count()


class Place:
    """A schema (PostgreSQL) or a database (MySQL) of its own, in which items become tables."""

    def __init__(self, server: DatabaseServer) -> None:
        self.server = server
        self.name = f"space{next(_spaces)}"
        self.is_postgres = isinstance(server, PostgresServer)
        base = server.url if self.is_postgres else server.url.removesuffix("/shoal") + f"/{self.name}"
        self.url = base + (f"?schema={self.name}" if self.is_postgres else "?timeout=30")

    def spec(self, table: str | None = None, **options: Any) -> str:
        given = ({"table": table} if table else {}) | options
        return self.url + "".join(f"&{name}={quote(str(value))}" for name, value in given.items())

    async def query(self, statement: str) -> list[dict[str, Any]]:
        if self.is_postgres:
            connection = await asyncpg.connect(self.server.url)
            try:
                await connection.execute(f"SET search_path = {self.name}")
                return [dict(row) for row in await connection.fetch(statement)]
            finally:
                await connection.close()
        return await asyncio.to_thread(self._query_mysql, statement)

    def _query_mysql(self, statement: str) -> list[dict[str, Any]]:
        with closing(connect_mysql(self.server)) as connection, connection.cursor() as cursor:
            if not statement.startswith("CREATE DATABASE"):
                connection.select_db(self.name)
            cursor.execute(statement)
            return list(cursor.fetchall())

    async def create(self) -> Place:
        await self.query(f"CREATE {'SCHEMA' if self.is_postgres else 'DATABASE'} {self.name}")
        return self

    async def rows(self, table: str = "item") -> list[dict[str, Any]]:
        """Without their keys, in the order of these. JSON is read."""
        found = await self.query(f"SELECT * FROM {self.quoted(table)} ORDER BY _key")
        types = await self.types(table)
        return [
            {
                name: json.loads(value) if types[name] in ("jsonb", "json") and value is not None else value
                for name, value in row.items()
                if name not in SYSTEM_COLUMNS
            }
            for row in found
        ]

    async def types(self, table: str = "item") -> dict[str, str]:
        if self.is_postgres:
            found = await self.query(
                "SELECT column_name AS name, data_type AS type FROM information_schema.columns "
                f"WHERE table_schema = '{self.name}' AND table_name = '{table}' ORDER BY ordinal_position"
            )
            return {column["name"]: column["type"] for column in found}
        found = await self.query(f"SHOW CREATE TABLE {self.quoted(table)}")
        checked = found[0]["Create Table"]
        found = await self.query(f"SHOW COLUMNS FROM {self.quoted(table)}")
        return {
            column["Field"]: "json" if f"json_valid(`{column['Field']}`)" in checked else column["Type"]
            for column in found
        }

    def quoted(self, name: str) -> str:
        return '"' + name.replace('"', '""') + '"' if self.is_postgres else "`" + name.replace("`", "``") + "`"

    async def write(self, *parts: list[Any], table: str | None = None) -> None:
        sink = await opened(self.spec(table))
        start = 1
        for part in parts:
            await sink.write(logged(part, start))
            start += len(part)
        await sink.close(finished=True)


def connect_mysql(server: DatabaseServer) -> Any:
    return pymysql.connect(
        host="127.0.0.1", port=server.port, user="shoal", password="secret", autocommit=True, ssl_disabled=True,
        cursorclass=pymysql.cursors.DictCursor,
    )  # fmt: skip


@pytest.fixture(params=[PostgresServer, MariaServer], ids=["postgres", "maria"])
async def place(request: pytest.FixtureRequest) -> Place:
    return await Place(shared(request.param)).create()


@pytest.fixture
async def postgres() -> Place:
    return await Place(shared(PostgresServer)).create()


@pytest.fixture
async def maria() -> Place:
    return await Place(shared(MariaServer)).create()


def logged(items: Iterable[Any], start: int = 1) -> list[LoggedItem]:
    return [LoggedItem(seq, seq.to_bytes(16, "big"), 0, encode_item(item)) for seq, item in enumerate(items, start)]


async def opened(
    spec: str, run_id: str = "", state: bytes = b"", on_reject: Callable[[int], None] | None = None
) -> Sink:
    sink = open_sink(spec, run_id=run_id, on_reject=on_reject)
    await sink.open(state)
    return sink


class Book(dict[str, Any]):
    """An item with a class of its own."""


# -- values


async def test_each_type_has_its_column(place: Place) -> None:
    item = {
        "text": "Zürich 東京 🐟", "yes": True, "number": -5, "long": 2**63 - 1, "big": 2**64 - 1, "real": 1.5,
        "raw": b"\0\xff", "list": [1, "a", None], "dict": {"a": {"b": [1.5]}}, "when": WHEN,
        "naive": datetime(2024, 1, 1),
    }  # fmt: skip
    await place.write([item, dict.fromkeys(item)])
    types = await place.types()
    if place.is_postgres:
        assert types == {
            "_key": "text", "_run": "text", "_seq": "bigint",
            "text": "text", "yes": "boolean", "number": "bigint", "long": "bigint", "big": "numeric",
            "real": "double precision", "raw": "bytea", "list": "jsonb", "dict": "jsonb",
            "when": "timestamp with time zone", "naive": "text",
        }  # fmt: skip
    else:
        assert types == {
            "_key": "varchar(255)", "_run": "varchar(255)", "_seq": "bigint(20)",
            "text": "longtext", "yes": "tinyint(1)", "number": "bigint(20)",
            "long": "bigint(20)", "big": "decimal(20,0)", "real": "double", "raw": "longblob", "list": "json",
            "dict": "json", "when": "datetime(6)", "naive": "longtext",
        }  # fmt: skip
    full, empty = await place.rows()
    expected = {**item, "naive": "2024-01-01T00:00:00"}
    if not place.is_postgres:
        expected |= {"when": WHEN.replace(tzinfo=None), "yes": 1}
    assert full == expected
    assert set(empty.values()) == {None}


async def test_the_edges_of_numbers_and_times(place: Place) -> None:
    values: list[dict[str, Any]] = [
        {"n": -(2**63), "r": 5e-324, "t": datetime(1, 1, 1, 1, tzinfo=UTC)},
        {"n": 2**63 - 1, "r": 1.7976931348623157e308, "t": datetime(9999, 12, 31, 23, 59, 59, 999998, UTC)},
        {"n": 0, "r": -0.1, "t": datetime(1969, 12, 31, 23, 59, 59, 1, UTC)},
    ]
    await place.write(values)
    found = await place.rows()
    if not place.is_postgres:
        found = [row | {"t": row["t"].replace(tzinfo=UTC)} for row in found]
    assert found == values


async def test_not_a_number(place: Place) -> None:
    await place.write([{"r": 1.5}, {"r": math.nan}, {"r": math.inf}], [{"r": "n/a"}, {"r": -math.inf}])
    found = [row["r"] for row in await place.rows()]
    assert found == (["1.5", "NaN", "Infinity", "n/a", "-Infinity"] if place.is_postgres
                     else ["1.5", None, None, "n/a", "-Infinity"])  # fmt: skip


async def test_text_of_all_kinds(place: Place) -> None:
    texts = [
        "", " ", "it's", '"', "\\", "\\'; DROP TABLE item; --", "%s %(a)s", "a\nb\r\n\t\x1a\x08", "\u2028", "🐟" * 5000,
        "x" * 300_000, "e\u0301", "\ufffd", "$1", "NULL", "\\u0000",
    ]  # fmt: skip
    await place.write([{"t": text, "nested": [text, {text: 1}]} for text in texts])
    found = await place.rows()
    assert [row["t"] for row in found] == texts
    assert [row["nested"] for row in found] == [[text, {text: 1}] for text in texts]


async def test_nul(place: Place) -> None:
    await place.write([{"t": "a\0b", "nested": {"k\0": ["\0", "\\u0000", "\\\0"]}}])
    mark = "\ufffd" if place.is_postgres else "\0"
    assert await place.rows() == [
        {"t": f"a{mark}b", "nested": {f"k{mark}": [mark, "\\u0000", f"\\{mark}"]}},
    ]


async def test_very_deep_nesting(place: Place) -> None:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    await place.write([{"v": [1]}], [{"v": deep}], [{"v": {"a": 1}}])
    found = [row["v"] for row in await place.rows()]
    if not place.is_postgres:  # more than its JSON can hold: text
        assert (await place.types())["v"] == "longtext"
        found = [json.loads(value) for value in found]
    assert found == [[1], deep, {"a": 1}]


async def test_large_items(place: Place) -> None:
    """More than goes into one statement."""
    items = [
        {"n": number, "body": "abcdef"[number] * 3_000_000, "raw": bytes([number]) * 500_000} for number in range(6)
    ]
    await place.write(items)
    assert await place.rows() == items


# -- columns that become wider


WIDENED: list[tuple[list[Any], str, str, list[Any]]] = [
    ([1, 2.5, 3], "double precision", "double", [1.0, 2.5, 3.0]),
    ([2.5, 1], "double precision", "double", [2.5, 1.0]),
    ([1, 2**63, -1], "numeric", "decimal(20,0)", [1, 2**63, -1]),
    ([2**53 + 1, 2.5], "text", "longtext", [str(2**53 + 1), "2.5"]),
    ([2.5, 2**53 + 1], "text", "longtext", ["2.5", str(2**53 + 1)]),
    ([2**63, 2.5], "text", "longtext", [str(2**63), "2.5"]),
    ([12, 0.25, "n/a", 3.0, 7], "text", "longtext", ["12", "0.25", "n/a", "3", "7"]),
    (["n/a", 12, None, 1.0], "text", "longtext", ["n/a", "12", None, "1"]),
    ([True, 1, False], "text", "longtext", ["true", "1", "false"]),
    ([True, None, "yes"], "text", "longtext", ["true", None, "yes"]),
    ([b"\xff\0" * 60, "a"], "text", "longtext", [base64.b64encode(b"\xff\0" * 60).decode(), "a"]),
    ([WHEN, WHEN.replace(microsecond=0), "soon"], "text", "longtext",
     ["2024-02-29T12:30:15.123456Z", "2024-02-29T12:30:15Z", "soon"]),
    ([None, None, 5], "bigint", "bigint(20)", [None, None, 5]),
    ([[1], {"a": None}], "jsonb", "json", [[1], {"a": None}]),
    ([None, None], "text", "longtext", [None, None]),
]  # fmt: skip
"""Values that come one after the other, the types of their column at the end in both servers, and what is in it."""


@pytest.mark.parametrize("together", [True, False], ids=["together", "one-by-one"])
async def test_widening(place: Place, together: bool) -> None:
    items = [
        {f"f{number}": values[step] for number, (values, *_) in enumerate(WIDENED) if step < len(values)}
        for step in range(5)
    ]
    await place.write(*([items] if together else [[item] for item in items]))
    types, found = await place.types(), await place.rows()
    for number, (values, in_postgres, in_maria, expected) in enumerate(WIDENED):
        name = f"f{number}"
        assert types[name] == (in_postgres if place.is_postgres else in_maria), values
        assert [row[name] for row in found][: len(values)] == expected, values


async def test_nested_and_text(place: Place) -> None:
    await place.write([{"v": [1, {"a": "ü"}]}], [{"v": "none"}], [{"v": {"b": 2}}])
    first, second, third = [row["v"] for row in await place.rows()]
    assert (json.loads(first), second, json.loads(third)) == ([1, {"a": "ü"}], "none", {"b": 2})


async def test_new_fields_midway(place: Place) -> None:
    await place.write([{"a": 1}], [{"b": "x", "a": 2}, {"c": [1]}, {}], [{"a": 5, "d": None}, {"d": None}])
    assert list(await place.types()) == [*SYSTEM_COLUMNS, "a", "b", "c", "d"]
    assert [tuple(row.values()) for row in await place.rows()] == [
        (1, None, None, None), (2, "x", None, None), (None, None, [1], None), (None, None, None, None),
        (5, None, None, None), (None, None, None, None),
    ]  # fmt: skip


async def test_a_field_that_never_had_a_value_gets_its_column_at_the_end(place: Place) -> None:
    sink = await opened(place.spec())
    await sink.write(logged([{"a": None, "b": None}]))
    assert list(await place.types()) == list(SYSTEM_COLUMNS)
    await sink.write(logged([{"b": 5}], 2))
    await sink.close(finished=True)
    assert list(await place.types()) == [*SYSTEM_COLUMNS, "b", "a"]
    assert [row["b"] for row in await place.rows()] == [None, 5]


async def test_the_next_run_goes_on_with_the_columns(place: Place) -> None:
    await place.write([{"a": 1, "b": [1], "c": True}])
    await place.write([{"a": 2.5, "b": [2], "c": False}])
    assert [tuple(row.values()) for row in await place.rows()] == [(2.5, [2], False)]


async def test_types_that_the_user_has_chosen(place: Place) -> None:
    await place.write([{"a": 1, "b": "x"}])
    if place.is_postgres:
        await place.query("ALTER TABLE item ALTER a TYPE integer, ALTER b TYPE varchar(5), ADD c date")
    else:
        await place.query("ALTER TABLE item MODIFY a int, MODIFY b varchar(5), ADD c date")
    sink = await opened(place.spec())
    await sink.write(logged([{"a": 2, "b": "y", "c": "2024-02-29"}], 2))
    assert [(row["a"], row["b"], str(row["c"])) for row in await place.rows()] == [
        (1, "x", "None"), (2, "y", "2024-02-29"),
    ]  # fmt: skip
    with pytest.raises(SinkError, match=r"(?i)too long") as caught:
        await sink.write(logged([{"a": 3, "b": "much too long"}], 3))
    assert not is_retryable(caught.value)
    await sink.close(finished=False)


# -- names


async def test_tables_by_type(place: Place) -> None:
    await place.write([{"a": 1}, Book(title="T"), {"a": 2}])
    assert await place.rows() == [{"a": 1}, {"a": 2}]
    assert await place.rows("book") == [{"title": "T"}]


async def test_strange_names(place: Place) -> None:
    names = [
        *SYSTEM_COLUMNS, "select", 'a"b', "a`b", "%s", "", "a b ", "a\n", "ctid", "xmin", "DB_ROW_ID", "_shoal_widened",
        "x" * 63, "x" * 64, "x" * 65, "x" * 200, "x" * 200 + "y", "東" * 30, "東" * 70, "🐟", "🐠", "a\nb",
        "$1", "old", "new", "c1",
    ]  # fmt: skip
    item = {name: number for number, name in enumerate(names)}
    for _ in range(2):
        await place.write([item], [item | dict.fromkeys(names[:3], 0)], [item])
    for row, expected in zip(await place.rows(), (sum(range(len(names))), sum(range(3, len(names)))), strict=False):
        assert len(row) == len(names)
        assert sum(row.values()) == expected


async def test_names_that_differ_by_case_alone(place: Place) -> None:
    names = ["title", "Title", "TITLE", "Title_2", "é", "E", "É", "e\u0301", "ß", "SS", "\u0131", "I"]
    item = {name: number for number, name in enumerate(names)}
    for _ in range(2):
        await place.write([item], [dict(reversed(item.items()))])
    for row in await place.rows():
        assert sorted(row.values()) == list(range(len(names)))
    if place.is_postgres:
        assert list((await place.rows())[0]) == names


async def test_a_strange_table(place: Place) -> None:
    for table in ('my "table`', "T" * 100, "T" * 101):
        sink = await opened(place.spec(table))
        await sink.write(logged([{"a": 1}]))
        await sink.close(finished=True)
    assert await place.rows('my "table`') == [{"a": 1}]


NAMINGS = [Naming(fold=str.lower), Naming(limit=20, length=lambda name: len(name.encode()))]


@pytest.mark.parametrize("naming", NAMINGS, ids=["sqlite", "short"])
@given(
    fields=st.lists(st.text("aAé_2") | st.sampled_from(["_key", "_KEY", "x" * 30, "x" * 31]), unique=True),
    random=st.randoms(),
)
def test_each_field_has_a_column_of_its_own(naming: Naming, fields: list[str], random: Random) -> None:
    """And keeps it, in whatever order another process meets the fields."""
    columns = Columns(naming, {"_key": None})
    homes = {field: columns.column_for(field) for field in fields}
    assert len({naming.fold(home) for home in homes.values()} | {"_key"}) == len(fields) + 1
    assert all(naming.limit is None or naming.length(home) <= naming.limit for home in homes.values())
    again = Columns(naming, dict.fromkeys(["_key", *homes.values()]))
    random.shuffle(fields)
    assert {field: again.column_for(field) for field in fields} == homes


def test_kinds() -> None:
    kinds = list(Kind)
    for one in kinds:
        assert join_kinds(one, one) is one
        for other in kinds:
            assert join_kinds(one, other) is join_kinds(other, one)
            for third in kinds:
                assert join_kinds(join_kinds(one, other), third) is join_kinds(one, join_kinds(other, third))
    assert kind_of([None]) is None
    assert kind_of([2**53, None, -(2**53)]) is Kind.INT
    assert kind_of([2**53 + 1]) is kind_of([-(2**63)]) is Kind.LONG
    assert kind_of([True, 1]) is Kind.TEXT


# -- again


async def test_a_repeated_write_changes_nothing(place: Place) -> None:
    items = [{"n": number, "r": math.nan, "j": {"b": 1, "a": [number]}, "t": WHEN, "x": None} for number in range(5)]
    sink = await opened(place.spec())
    await sink.write(logged(items))
    version = "xmin::text" if place.is_postgres else "1"
    before = await place.query(f"SELECT *, {version} AS version FROM item ORDER BY _key")
    await sink.write(logged(items))
    await sink.write(logged(items)[3:] + logged(items)[:4])
    state = await sink.flush()
    await sink.close(finished=False)
    sink = await opened(place.spec(), state=state)
    await sink.write(logged(items))
    after = await place.query(f"SELECT *, {version} AS version FROM item ORDER BY _key")
    assert str(after) == str(before)
    await sink.write(logged([{"n": 100}]))
    await sink.close(finished=True)
    assert [row["n"] for row in await place.rows()] == [100, 1, 2, 3, 4]


async def test_runs_in_one_table(place: Place) -> None:
    for run_id in ("", "run-1", "run-2", "run ü 'x'", "r" * 300):
        sink = await opened(place.spec("all"), run_id)
        await sink.write(logged([{"run": run_id}, {"run": run_id}]))
        await sink.write(logged([{"run": run_id}, {"run": run_id}]))
        await sink.close(finished=True)
    assert len(await place.rows("all")) == 10


# -- a store that was rewound


def numbered(first: int, last: int, mark: str = "") -> list[LoggedItem]:
    """Items with these numbers in the log. With a mark they come from other pages, or from a page that changed."""
    return [
        LoggedItem(seq, (seq + 1000 * bool(mark)).to_bytes(16, "big"), 0, encode_item({"n": f"{seq}{mark}"}))
        for seq in range(first, last + 1)
    ]


async def names(place: Place, run_id: str, table: str = "item") -> list[str]:
    found = await place.query(f"SELECT n FROM {table} WHERE _run = '{run_id}' ORDER BY _seq")
    return [row["n"] for row in found]


TEN = [str(number) for number in range(1, 11)]
REWOUND = [*map(str, range(1, 31)), *(f"{number}x" for number in range(31, 41))]


@pytest.mark.parametrize("table", [None, "named"])
async def test_rows_behind_the_cursor_are_deleted(place: Place, table: str | None) -> None:
    spec, name = place.spec(table), table or "item"
    other = await opened(spec, "other")
    await other.write(numbered(1, 10))
    await other.close(finished=True)
    sink = await opened(spec, "mine")
    await sink.write(numbered(1, 30))
    state = await sink.flush()
    await sink.write(numbered(31, 50))
    await sink.flush()
    await sink.close(finished=False)
    sink = await opened(spec, "mine", state)
    assert len(await names(place, "mine", name)) == 50  # whoever opens it late, without a role, deletes nothing
    await sink.write(numbered(31, 35, "x"))
    assert await names(place, "mine", name) == REWOUND[:35]
    await sink.write(numbered(36, 40, "x"))
    await sink.flush()
    await sink.close(finished=True)
    assert await names(place, "mine", name) == REWOUND
    assert await names(place, "other", name) == TEN


async def test_also_in_tables_that_were_made_behind_the_cursor(place: Place) -> None:
    """And in no table of another output of the run, whose cursor is its own."""
    beside = await opened(place.spec("beside"), "mine")
    await beside.write(numbered(1, 50))
    sink = await opened(place.spec(), "mine")
    await sink.write(numbered(1, 30))
    state = await sink.flush()
    await sink.write(logged([Book(title="late")], 31))
    await sink.close(finished=False)
    sink = await opened(place.spec(), "mine", state)
    await sink.close(finished=True)
    await beside.close(finished=True)
    assert await place.rows("book") == []
    assert len(await names(place, "mine", "beside")) == 50


async def test_rewound_to_before_the_first_flush(place: Place) -> None:
    for run_id in ("other", "mine"):
        sink = await opened(place.spec(), run_id)
        await sink.write(numbered(1, 10))
        await sink.close(finished=False)
    sink = await opened(place.spec(), "mine")
    await sink.write(numbered(1, 3, "x"))
    await sink.close(finished=True)
    assert await names(place, "mine") == ["1x", "2x", "3x"]
    assert await names(place, "other") == TEN


async def test_rows_that_the_log_has_forgotten_stay(place: Place) -> None:
    """The output is the same under another name, so its cursor is new, and the log was trimmed."""
    sink = await opened(place.spec("items"), "mine")
    await sink.write(numbered(1, 10))
    await sink.close(finished=False)
    sink = await opened(place.spec("items", timeout=20), "mine")
    await sink.close(finished=True)
    assert await names(place, "mine", "items") == TEN
    sink = await opened(place.spec("items"), "mine")
    await sink.write(numbered(6, 7, "x"))
    await sink.close(finished=True)
    assert await names(place, "mine", "items") == [*TEN[:5], "6x", "7x"]


# -- keys of the user's


async def test_the_newest_row_of_each_product(place: Place) -> None:
    spec = place.spec("shop", key="sku,country")
    monday = await opened(spec, "monday")
    await monday.write(
        logged([{"sku": 1, "country": "de", "price": 5, "sale": True}, {"sku": 1, "country": "fr", "price": 6}])
    )
    await monday.write(logged([{"sku": "1", "country": "fr", "price": 7}, {"sku": 2.0, "country": "de"}], 3))
    await monday.close(finished=True)
    tuesday = await opened(spec, "tuesday")
    await tuesday.write(logged([{"sku": 1, "country": "de", "price": 4}, {"sku": 1, "country": "de", "price": 3}]))
    await tuesday.close(finished=True)
    found = await place.query("SELECT _run, _key, price, sale FROM shop ORDER BY _run, _key")
    assert [tuple(row.values()) for row in found] == [
        ("monday", '["1","fr"]', 7, None), ("monday", '["2","de"]', None, None), ("tuesday", '["1","de"]', 3, None),
    ]  # fmt: skip


async def test_an_item_without_its_key_costs_only_itself(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    rejected: list[int] = []
    sink = await opened(place.spec("shop", key="sku"), "mine", on_reject=rejected.append)
    await sink.write(logged([{"sku": 1}, {"price": 2}, {"sku": None, "price": 3}, {"sku": ""}]))
    await sink.close(finished=True)
    assert [row["sku"] for row in await place.rows("shop")] == ["", "1"]
    assert sum(rejected) == 2
    assert caplog.text.count("its field 'sku' has no value, but ?key= makes it part of the key") == 2
    assert f"{2:032x}-0 not written to" in caplog.text
    assert "2 items were not written; they are in the run's item log" in caplog.text


async def test_keys_of_any_kind(place: Place) -> None:
    keys = ["a\0b", "a b", "a", "ä", "Ä", "'", "\\", "a ", "x" * 5000, "x" * 5001, True, 1.5, [1, 2], {"b": 1, "a": 2}]
    for _ in range(2):
        sink = await opened(place.spec("shop", key="k"), "mine")
        await sink.write(logged({"k": key, "n": number} for number, key in enumerate(keys)))
        await sink.close(finished=True)
    assert sorted(row["n"] for row in await place.rows("shop")) == list(range(len(keys)))
    sink = await opened(place.spec("shop", key="k"), "next")
    await sink.write(logged([{"k": {"a": 2, "b": 1}, "n": 100}]))
    await sink.close(finished=True)
    assert sorted(row["n"] for row in await place.rows("shop")) == [*range(len(keys) - 1), 100]


async def test_rows_with_a_key_stay_until_they_are_replaced(place: Place) -> None:
    """What they replaced is gone, so to delete them would lose the product."""
    spec = place.spec("shop", key="k")
    sink = await opened(spec, "mine")
    await sink.write(logged([{"k": "a", "n": 1}, {"k": "b", "n": 2}]))
    state = await sink.flush()
    await sink.write(logged([{"k": "a", "n": 3}, {"k": "b", "n": 4}, {"k": "c", "n": 5}], 3))
    await sink.close(finished=False)
    sink = await opened(spec, "mine", state)
    assert [row["n"] for row in await place.rows("shop")] == [3, 4, 5]
    await sink.write(logged([{"k": "b", "n": 30}], 3))
    await sink.close(finished=True)
    assert [row["n"] for row in await place.rows("shop")] == [3, 30, 5]


async def test_an_older_item_never_replaces_a_newer_one(place: Place) -> None:
    """A process that lost its role writes late what another one has long gone past."""
    late, other = [await opened(place.spec("shop", key="k"), "mine") for _ in range(2)]
    await late.write(logged([{"k": "a", "n": 1}]))
    state = await late.flush()
    await other.open(state)
    await other.write(logged([{"k": "a", "n": 2}, {"k": "b", "n": 3}, {"k": "a", "n": 4}], 2))
    with pytest.raises(SinkError, match="was set back, or another program changed it"):
        await late.write(logged([{"k": "a", "n": 2}, {"k": "b", "n": 3}], 2))
    assert [row["n"] for row in await place.rows("shop")] == [4, 3]
    await late.close(finished=False)
    await other.close(finished=True)


async def test_another_key_in_the_middle_of_a_run(place: Place) -> None:
    sink = await opened(place.spec("shop"), "mine")
    await sink.write(logged([{"k": "a"}]))
    state = await sink.flush()
    await sink.close(finished=False)
    with pytest.raises(SinkError, match=r"no \?key=, but now it has \?key=k: rows would be written twice") as caught:
        await opened(place.spec("shop", key="k"), "mine", state)
    assert not is_retryable(caught.value)


# -- limits


async def test_fields_without_end(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    rejected: list[int] = []
    sink = await opened(place.spec("wide", max_columns=20), "mine", on_reject=rejected.append)
    await sink.write(logged([{"n": 0, **{f"a{number}": 1 for number in range(5000)}}, {"n": 1}]))
    await sink.write(logged([{"n": number, f"b{number}": number} for number in range(2, 40)], 3))
    await sink.write(logged([{"n": number, f"c{number}": None} for number in range(40, 80)], 41))
    await sink.write(logged([{"n": 80}], 81))
    await sink.close(finished=True)
    types = await place.types("wide")
    assert len(types) == len(SYSTEM_COLUMNS) + 20
    assert [row["n"] for row in await place.rows("wide")] == [*range(1, 21), *range(40, 81)]
    assert sum(rejected) == 1 + 19
    assert "need more than 20 columns" in caplog.text


async def test_as_many_columns_as_are_allowed_fit_into_a_row(place: Place) -> None:
    random = Random(7)
    most = 400 if place.is_postgres else 180
    await place.write([{f"f{number}": random.randbytes(20 * step).hex() for number in range(most)} for step in (1, 40)])
    assert len(await place.rows()) == 2


async def test_a_table_of_someone_else(place: Place) -> None:
    await place.query("CREATE TABLE item (a int)")
    await place.query("CREATE TABLE keyed (_key varchar(9))")
    await place.query("CREATE TABLE two (_key varchar(9), a int, PRIMARY KEY (_key, a))")
    await place.query("CREATE VIEW seen AS SELECT a AS _key FROM item")
    sink = await opened(place.spec())
    with pytest.raises(SinkError, match=r"Shoal did not create its table 'item'.*choose another table with") as caught:
        await sink.write(logged([{"a": 1}]))
    assert not is_retryable(caught.value)
    await sink.close(finished=False)
    for table in ("item", "keyed", "two", "seen"):
        with pytest.raises(SinkError, match=f"Shoal did not create its table '{table}'"):
            await opened(place.spec(table))
        assert await place.query(f"SELECT * FROM {table}") == []


async def test_too_many_fields(place: Place) -> None:
    """When more are allowed than the server can have."""
    sink = await opened(place.spec(max_columns=5000))
    with pytest.raises(SinkError, match=r"more fields than a table can have columns .*nest some of them") as caught:
        await sink.write(logged([{f"f{number}": number for number in range(2000)}]))
    assert not is_retryable(caught.value)
    await sink.close(finished=False)


async def test_a_row_that_is_too_large(maria: Place) -> None:
    sink = await opened(maria.spec(max_columns=5000))
    with pytest.raises(SinkError, match="nest some of them"):
        await sink.write(logged([{f"f{number}": "x" * 100 for number in range(600)}]))
    await sink.close(finished=False)


async def test_an_item_larger_than_the_server_takes(maria: Place, caplog: pytest.LogCaptureFixture) -> None:
    """It costs only itself. Text that grows when it is escaped is written in smaller statements."""
    rejected: list[int] = []
    sink = await opened(maria.spec(), on_reject=rejected.append)
    await sink.write(logged([{"a": "x" * 17_000_000}, {"a": "y"}, *({"a": "\0" * 1_300_000} for _ in range(8))]))
    await sink.close(finished=True)
    assert rejected == [1]
    assert "increase max_allowed_packet" in caplog.text
    assert [row["a"] for row in await maria.rows()] == ["y", *["\0" * 1_300_000] * 8]


@pytest.mark.parametrize("table", [None, "item"])
async def test_a_table_that_is_dropped_meanwhile(place: Place, table: str | None) -> None:
    """Nothing is left of what the output had, so all items are written again."""
    sink = await opened(place.spec(table))
    await sink.write(logged([{"a": 1}]))
    state = await sink.flush()
    await place.query("DROP TABLE item")
    for step in (partial(sink.write, logged([{"a": 2}], 2)), partial(sink.close, finished=True)):
        with pytest.raises(SinkError, match=r"was set back.*the table item is gone") as caught:
            await step()
        assert is_retryable(caught.value)
        assert await sink.open(state) == 0
        assert await sink.open(await sink.flush()) is None
        await sink.write(logged([{"a": 1}]))
        state = await sink.flush()
        await place.query("DROP TABLE item")
    assert await sink.open(state) == 0
    if table is not None:
        await place.query("DROP TABLE item")
        with pytest.raises(SinkError, match="the table item is gone"):
            await sink.close(finished=True)
    await sink.close(finished=False)


# -- several at once


async def test_several_alter_one_table_at_once(place: Place) -> None:
    """Each run has other fields and types, and there is one row that all of them write."""
    values: list[Any] = [1, 2.5, "x", True, [1], WHEN]
    sinks = [await opened(place.spec("item", key="id"), f"run {number}") for number in range(5)]

    async def work(number: int) -> None:
        sink = sinks[number]
        for step in range(6):
            own = {f"f{number}_{step}": step, "v": values[(number + step) % 6], "w": values[(number * step) % 6]}
            rows = [own | {"id": f"{number} {step}"}, {"id": "common", f"c{step}": 1, "v": values[step]}]
            await sink.write(logged(rows if number % 2 else rows[::-1], 1 + 2 * step))
        await sink.close(finished=True)

    await asyncio.gather(*map(work, range(5)))
    found = await place.rows()
    assert len(found) == 31
    types = await place.types()
    assert len(types) == len(SYSTEM_COLUMNS) + 3 + 30 + 6
    assert sum(row[f"f{number}_{step}"] == step for row in found for number in range(5) for step in range(6)) == 30
    written = [text for row in found if isinstance(text := row["v"], str)]
    assert len(written) == 31
    assert {text for text in written if text not in ("[1]", "2024-02-29T12:30:15.123456Z")} == {"1", "2.5", "x", "true"}


async def test_a_column_that_another_made_wider(place: Place) -> None:
    """What one process knows of a table is not older than its transaction."""
    one, other = await opened(place.spec(), "one"), await opened(place.spec(), "two")
    await one.write(logged([{"v": True, "r": 5, "b": b"abc"}]))
    await other.write(logged([{"v": "yes", "r": 2.5, "b": "text"}]))
    await one.write(logged([{"v": False, "r": 2**60, "b": b"abc"}], 2))
    assert [tuple(row.values()) for row in await place.rows()] == [
        ("true", "5", "YWJj"), ("false", str(2**60), "YWJj"), ("yes", "2.5", "text"),
    ]  # fmt: skip
    await one.close(finished=True)
    await other.close(finished=True)


async def test_waiting_for_another_that_changes_the_table(place: Place) -> None:
    """That may take longer than anything else."""
    slow: Any = await opened(place.spec(timeout=1), "slow")
    sink = await opened(place.spec(timeout=1), "mine")
    has_lock = threading.Event()

    async def change() -> None:
        async with slow._connection.exclusive("item"):
            has_lock.set()
            await slow._connection.fetch(f"SELECT {'pg_sleep' if place.is_postgres else 'sleep'}(2)", 5)

    changing = asyncio.create_task(slow._connection.run(change()))
    await asyncio.to_thread(has_lock.wait, 20)
    writing = asyncio.create_task(sink.write(logged([{"a": 1}])))
    assert (await asyncio.wait({changing, writing}, return_when=asyncio.FIRST_COMPLETED))[0] == {changing}
    await writing
    await slow.close(finished=False)
    await sink.close(finished=True)
    assert await place.rows() == [{"a": 1}]


async def test_a_process_that_died_while_it_made_columns_wider(maria: Place) -> None:
    await maria.write([{"a": True, "b": b"x"}])
    await maria.query("ALTER TABLE item ADD COLUMN _shoal_widened longtext")
    await maria.query("UPDATE item SET _shoal_widened = 'half done'")
    sink = await opened(maria.spec())
    await sink.write(logged([{"a": False, "_shoal_widened": 5}], 2))
    await sink.write(logged([{"a": "no", "b": "y"}], 3))
    await sink.close(finished=True)
    assert [[row["a"], row["b"]] for row in await maria.rows()] == [["true", "eA=="], ["false", None], ["no", "y"]]
    assert list(await maria.types())[:5] == [*SYSTEM_COLUMNS, "a", "b"]
    assert "_shoal_widened" not in await maria.types()


async def test_a_locked_table(place: Place) -> None:
    sink = await opened(place.spec(timeout=1 if place.is_postgres else 2))  # it counts in whole seconds
    await sink.write(logged([{"a": 1}]))
    async with locked(place, "item"):
        started = time.monotonic()
        with pytest.raises(SinkError, match="locked") as caught:
            await sink.write(logged([{"a": 2}], 2))
        assert time.monotonic() - started < allowance(5)
        assert is_retryable(caught.value)
    await sink.open(b"")
    await sink.write(logged([{"a": 2}], 2))
    await sink.close(finished=True)
    assert await place.rows() == [{"a": 1}, {"a": 2}]


@asynccontextmanager
async def locked(place: Place, table: str) -> AsyncIterator[None]:
    if place.is_postgres:
        connection = await asyncpg.connect(place.server.url)
        await connection.execute(f"BEGIN; LOCK TABLE {place.name}.{table}")
        yield
        await connection.close()
    else:
        with closing(connect_mysql(place.server)) as connection, connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLES {place.name}.{table} WRITE")
            yield


# -- what it says when it can't


@pytest.mark.parametrize("kind", [PostgresServer, MariaServer])
@pytest.mark.parametrize(
    ("login", "host", "database", "words", "passing"),
    [
        ("nobody:s3cret%2Fword", "127.0.0.1", "{}", "the server refuses the user", False),
        ("{}", "127.0.0.1", "nowhere", "the server has no database 'nowhere'; create it first", False),
        ("{}", "no-such-host.invalid", "{}", "no-such-host|[Nn]ame", True),
    ],
    ids=["user", "database", "host"],
)
async def test_refused(
    kind: type[DatabaseServer], login: str, host: str, database: str, words: str, passing: bool
) -> None:
    parts = urlsplit(shared(kind).url)
    login, database = login.format(parts.netloc.partition("@")[0]), database.format(parts.path[1:])
    sink = open_sink(f"{parts.scheme}://{login}@{host}:{parts.port}/{database}?table=a")
    with pytest.raises(SinkError, match=words) as caught:
        await sink.open(b"")
    assert is_retryable(caught.value) == passing
    assert "cret" not in everything(caught.value)
    await sink.close(finished=False)


async def test_a_wrong_password() -> None:
    """The server for the tests asks for none, so one that does answers here."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(8)
        if head[4:] == b"\x04\xd2\x16\x2f":  # it asks for TLS first
            writer.write(b"N")
            head = await reader.readexactly(8)
        await reader.readexactly(int.from_bytes(head[:4], "big") - 8)
        fields = b'SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user "shoal"\0\0'
        writer.write(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    sink = open_sink(f"postgresql://shoal:s3cret@127.0.0.1:{port}/db")
    with pytest.raises(SinkError, match=r"127.0.0.1:\d+/db: the server refuses the user or the password") as caught:
        await sink.open(b"")
    assert not is_retryable(caught.value)
    assert "s3cret" not in everything(caught.value)
    server.close()


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
async def test_no_server(scheme: str) -> None:
    sink = open_sink(f"{scheme}://user:s3cret@127.0.0.1:{free_port()}/db?table=a")
    words = r"can't write \w+://127.0.0.1:\d+/db: .*is the server running, and is the port correct"
    with pytest.raises(SinkError, match=words) as caught:
        await sink.open(b"")
    assert is_retryable(caught.value)
    assert "s3cret" not in everything(caught.value)
    await sink.close(finished=False)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
async def test_a_server_that_never_answers(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sink = open_sink(f"{scheme}://user:s3cret@127.0.0.1:{listening.getsockname()[1]}/db?timeout=0.3")
        started = time.monotonic()
        with pytest.raises(SinkError, match=r"no answer for 0.3 s") as caught:
            await sink.open(b"")
        assert time.monotonic() - started < allowance(30)
        assert is_retryable(caught.value)
        await sink.close(finished=False)


async def test_no_permission(place: Place) -> None:
    if place.is_postgres:
        await place.query(f"CREATE ROLE guest_{place.name} LOGIN")
        await place.query(f"GRANT USAGE ON SCHEMA {place.name} TO guest_{place.name}")
        spec = place.spec("a").replace("shoal@", f"guest_{place.name}@")
    else:
        with closing(pymysql.connect(unix_socket=str(place.server.folder / "maria.sock"), user="root")) as root:
            root.query(f"CREATE USER 'guest_{place.name}'@'127.0.0.1' IDENTIFIED BY 's3cret'")
            root.query(f"GRANT SELECT ON {place.name}.* TO 'guest_{place.name}'@'127.0.0.1'")
        spec = place.spec("a").replace("shoal:secret@", f"guest_{place.name}:s3cret@")
    with pytest.raises(SinkError, match=r"denied .*grant") as caught:
        await opened(spec)
    assert not is_retryable(caught.value)
    assert "s3cret" not in everything(caught.value)


async def test_the_disk_is_full(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sink: Any = await opened(place.spec())
    if place.is_postgres:
        failure: Exception = asyncpg.DiskFullError("could not extend file: No space left on device")
    else:
        failure = pymysql.err.OperationalError(1114, "The table 'item' is full")

    def fail(*args: Any) -> None:
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr(type(sink._connection), "insert", fail)
        with pytest.raises(SinkError, match=r"disk of the server is full.* free some space, then resume") as caught:
            await sink.write(logged([{"a": 1}]))
    assert is_retryable(caught.value)
    await sink.open(b"")
    await sink.write(logged([{"a": 1}]))
    await sink.close(finished=True)
    assert await place.rows() == [{"a": 1}]


async def test_a_bad_option(postgres: Place) -> None:
    with pytest.raises(SinkError, match=r"127.0.0.1:\d+/postgres: .*sslmode") as caught:
        await opened(postgres.server.url + "?sslmode=bogus")
    assert not is_retryable(caught.value)


async def test_no_such_schema(postgres: Place) -> None:
    with pytest.raises(SinkError, match="create the schema first"):
        await opened(postgres.server.url + "?schema=nowhere&table=a")


@pytest.mark.parametrize(
    ("scheme", "module", "extra"), [("postgresql", "asyncpg", "postgres"), ("mysql", "pymysql", "mysql")]
)
def test_without_the_library(scheme: str, module: str, extra: str) -> None:
    code = (
        f"import sys; sys.modules['{module}'] = None; from shoal import sinks;"
        f"sinks.sink_id('{scheme}://a/b'); sinks.open_sink('{scheme}://a/b')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(pip_install(extra))


def everything(error: BaseException | None) -> str:
    """All texts of an error and of those behind it."""
    text = ""
    while error is not None:
        text += f"{error!r} {error} "
        error = error.__cause__ or error.__context__
    return text


# -- faults in the middle of a run


@pytest.fixture(scope="module", params=[PostgresServer, MariaServer], ids=["postgres", "maria"])
def fragile(request: pytest.FixtureRequest) -> Iterator[DatabaseServer]:
    """A server that may be killed."""
    server: DatabaseServer = request.param()
    yield server
    server.close()


async def in_memory() -> Frontier:
    store = MemoryStore()
    await store.create_run(Run(run_id="run", spider="spider", state="running", created_at=0.0))
    return await store.frontier("run", FrontierOptions())


async def log_items(frontier: Frontier, numbers: range) -> None:
    """Items with numbers, in pages of ten."""
    for first in numbers[::10]:
        await frontier.push([Request(f"http://example.com/{first}")])
        lease = (await frontier.lease(1, 600)).leases[0]
        items = [encode_item({"n": number, "text": f"item {number}"}) for number in range(first, first + 10)]
        await frontier.complete([Completion(lease=lease, items=items)])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_server_killed_and_started_again(fragile: DatabaseServer) -> None:
    place = await Place(fragile).create()
    frontier = await in_memory()
    drainer = Drainer(frontier, open_sink(place.spec(timeout=5)), "out", batch=7, poll=0.02)
    await drainer.start()
    running = asyncio.create_task(drainer.run())
    logging = asyncio.create_task(log_slowly(frontier, 1500))
    for kill in range(2):
        await until(partial(is_beyond, drainer, 400 * (kill + 1)))
        await asyncio.to_thread(fragile.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(fragile.start)
    await logging
    await drainer.finish(True)
    await running
    found = await place.rows()
    assert sorted(row["n"] for row in found) == list(range(1500))
    assert all(row["text"] == f"item {row['n']}" for row in found)


async def test_a_server_that_is_read_only_for_a_while(fragile: DatabaseServer) -> None:
    """As in a failover. The connection stays open, and the drainer waits."""
    place = await Place(fragile).create()
    spec = place.spec(timeout=5)
    if isinstance(fragile, PostgresServer):
        switches = [f"ALTER SYSTEM SET default_transaction_read_only = {to}" for to in ("on", "off")]
    else:
        with closing(pymysql.connect(unix_socket=str(fragile.folder / "maria.sock"), user="root")) as root:
            root.query("CREATE USER 'plain'@'127.0.0.1' IDENTIFIED BY 's3cret'")  # without READ ONLY ADMIN
            root.query(f"GRANT ALL ON {place.name}.* TO 'plain'@'127.0.0.1'")
        spec = spec.replace("shoal:secret@", "plain:s3cret@")
        switches = ["SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0"]
    frontier = await in_memory()
    drainer = Drainer(frontier, open_sink(spec), "out", batch=7, poll=0.02)
    await drainer.start()
    running = asyncio.create_task(drainer.run())
    await log_items(frontier, range(100))
    await until(partial(is_beyond, drainer, 100))
    for switch in switches:
        await place.query(switch)
        if place.is_postgres:
            await place.query("SELECT pg_reload_conf()")
        if switch == switches[0]:
            await log_items(frontier, range(100, 600))
            await until(lambda: drainer.failing_since is not None)
            await asyncio.sleep(1)
            assert not running.done()
    await drainer.finish(True)
    await running
    assert sorted(row["n"] for row in await place.rows()) == list(range(600))


def is_beyond(drainer: Drainer, position: int) -> bool:
    return drainer.position >= position


async def log_slowly(frontier: Frontier, total: int) -> None:
    for first in range(0, total, 50):
        await log_items(frontier, range(first, first + 50))
        await asyncio.sleep(0.02)


async def test_a_frozen_server(fragile: DatabaseServer) -> None:
    place = await Place(fragile).create()
    sink = await opened(place.spec(timeout=2))
    await sink.write(logged([{"n": 1}]))
    with fragile.frozen():
        started = time.monotonic()
        with pytest.raises(SinkError, match=r"no answer for 2 s") as caught:
            await sink.write(logged([{"n": 2}], 2))
        assert is_retryable(caught.value)
        await sink.close(finished=False)
        with pytest.raises(SinkError, match=r"no answer for 2 s") as caught:
            await sink.open(b"")
        assert is_retryable(caught.value)
        assert time.monotonic() - started < allowance(30)
    await sink.open(b"")
    await sink.write(logged([{"n": 2}], 2))
    with fragile.frozen():
        started = time.monotonic()
        await sink.close(finished=False)
        assert time.monotonic() - started < allowance(7)
    assert [row["n"] for row in await place.rows()] == [1, 2]


async def test_cancelled_while_the_server_is_frozen(fragile: DatabaseServer) -> None:
    place = await Place(fragile).create()
    sink = await opened(place.spec(timeout=2))
    await sink.write(logged([{"n": 1}]))
    with fragile.frozen():
        writing = asyncio.create_task(sink.write(logged([{"n": 2}], 2)))
        await asyncio.sleep(0.1)
        writing.cancel()
        started = time.monotonic()
        await asyncio.gather(writing, return_exceptions=True)
        assert writing.cancelled()
        assert time.monotonic() - started < allowance(1)
        await sink.close(finished=False)
    await sink.open(b"")
    await sink.write(logged([{"n": 2}], 2))
    await sink.close(finished=True)
    assert [row["n"] for row in await place.rows()] == [1, 2]


async def test_a_drainer_that_died_between_its_write_and_its_cursor(place: Place) -> None:
    class Witness:
        """Stops the world as soon as a batch is written."""

        def __init__(self, sink: Sink) -> None:
            self.open, self.flush, self.close = sink.open, sink.flush, sink.close
            self.sink = sink
            self.written = asyncio.Event()

        async def write(self, items: Sequence[LoggedItem]) -> None:
            await self.sink.write(items)
            self.written.set()
            await asyncio.Event().wait()

    frontier = await in_memory()
    await log_items(frontier, range(60))
    for _ in range(3):
        witness = Witness(open_sink(place.spec()))
        drainer = Drainer(frontier, witness, "out", batch=20)
        await drainer.start()
        running = asyncio.create_task(drainer.run())
        await witness.written.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await drainer.abandon()
        assert len(await place.rows()) == 20
    drainer = Drainer(frontier, open_sink(place.spec()), "out", batch=20)
    await drainer.start()
    assert drainer.position == 0
    await drainer.finish(True)
    assert sorted(row["n"] for row in await place.rows()) == list(range(60))


# -- crawls


class Pages(Spider):
    """One page in ten has no number."""

    name = "pages"

    def parse(self, response: Response) -> Any:
        number = response.url.rpartition("/")[2]
        yield {"url": response.url, "number": None if number.endswith("7") else number}
        yield response.follow_all("a")


async def crawl_once(site: SiteServer, output: str, frontier: str = "memory:", run: Run | None = None) -> Crawl:
    made = Crawl(
        Pages(start_urls=[site.url]),
        {"download_delay": 0, "frontier": frontier},
        outputs=[output],
        new_run=run is None,
    )
    made.run = run
    return await made


@pytest.mark.parametrize("server", [PostgresServer, MariaServer, None], ids=["postgres", "maria", "sqlite"])
async def test_crawls_into_one_table(server: type[DatabaseServer] | None, tmp_path: Path) -> None:
    """Two runs keep both; with a key, the newest is kept, and pages without one are counted as errors."""
    place = await Place(shared(server)).create() if server is not None else None
    both, newest = (
        (place.spec("every"), place.spec("newest", key="number"))
        if place is not None
        else (f"{tmp_path}/out.db?table=every", f"{tmp_path}/out.db?table=newest&key=number")
    )

    async def counted(statement: str) -> list[int]:
        if place is not None:
            return [row["count"] for row in await place.query(statement)]
        with closing(sqlite3.connect(tmp_path / "out.db")) as database:
            return [count for (count,) in database.execute(statement)]

    async with SiteServer(pages=49) as site:
        for _ in range(2):
            await crawl_once(site, both)
            done = await crawl_once(site, newest)
            assert done.summary is not None
            assert done.summary.counters.item_errors == 5
    assert await counted("SELECT count(*) AS count FROM every GROUP BY _run") == [50, 50]
    assert await counted("SELECT count(*) AS count FROM newest GROUP BY _run") == [45]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
async def test_a_file_that_is_replaced_between_two_crawls(tmp_path: Path, ending: str) -> None:
    out, frontier = tmp_path / f"out.{ending}", f"sqlite:///{tmp_path}/crawl.db"
    async with SiteServer(pages=20) as site:
        first = await crawl_once(site, str(out), frontier)
        await crawl_once(site, f"{out}?replace=yes", frontier)
        replaced = out.read_bytes()
        assert first.run is not None
        with pytest.raises(SinkError, match=f"changed since run {first.run.run_id} wrote it"):
            await crawl_once(site, str(out), frontier, first.run)
        assert out.read_bytes() == replaced
        out.unlink()
        with pytest.raises(SinkError, match=f"`shoal export {first.run.run_id} -O FILE`"):
            await crawl_once(site, str(out), frontier, first.run)
        assert not out.exists()


# -- the URL


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ("postgresql://u:p@Host/db?table=t", "postgres://host:5432/db?table=t&sslmode=disable&timeout=5"),
        ("mysql://u:p@host/db", "mariadb://v@host:3306/db?ssl_ca=x"),
        ("postgresql:///db", "postgresql://localhost/db"),
    ],
)
def test_identity(spec: str, same: str) -> None:
    assert sink_id(spec) == sink_id(same)
    assert "p@" not in sink_id(spec)
    for other in ("?table=x", "?table=y"):
        assert sink_id(spec) != sink_id(spec.partition("?")[0] + other)


def test_shown_identity() -> None:
    assert sink_id("postgresql://u:p@h/db?table=t&schema=s") == "postgresql://h:5432/db?table=t&schema=s"
    assert sink_id("mariadb://u:p@[::1]:33/d%20b") == "mysql://[::1]:33/d b"
    assert "s3cret" not in repr(vars(open_sink("mysql://u:s3cret@h/db")))


@pytest.mark.parametrize("spec", ["mysql:/u:s3cret@h/db", "postgres://u:s3cret@h/db", "mysqls://u:s3cret@h/db"])
def test_a_scheme_that_is_mistyped(spec: str) -> None:
    try:
        shown = sink_id(spec)
    except SinkError as error:
        shown = str(error)
    assert "s3cret" not in shown


def test_shared() -> None:
    assert is_shared("postgresql://h/db")
    assert is_shared("mariadb://h/db?table=a")
    assert not any(map(is_shared, ("-", "a.jsonl", "a.db", "sqlite:///a.db", "a.parquet")))


@pytest.mark.parametrize(
    "spec",
    [
        "postgresql://u:s3cret@h", "postgresql://u:s3cret@h/", "mysql://u:s3/cret@h/db", "mysql://u:1/s3cret@h/db",
        "mysql://u:s3cret#@h/db", "mysql://u:?s3cret@h/db", "mysql://u:s3cret@h:port/db", "mysql://u:s3cret@[h/db",
        "mysql://u:s3cret@h/db/more", "mysql://u:s3cret@h/db?tables=a", "mysql://u:s3cret@h/db?table=",
        "mysql://u@h/db?password=s3cret", "postgresql://u:s3cret@h/db?timeout=soon", "postgresql://u:s3cret@h/db?timeout=0",
        "mysql://u:s3cret@h/db?schema=a", "mysql://u:s3cret@h/db?s3cret", "mysql://u:s3cret@h:99999/db",
    ],
)  # fmt: skip
def test_a_url_that_can_not_be_read(spec: str) -> None:
    for function in (open_sink, sink_id, is_shared):
        with pytest.raises(SinkError, match=r"\w+://user:password@host:port/database|invalid option") as caught:
            function(spec)
        assert "s3cret" not in str(caught.value)
