"""MySQL and MariaDB for `shoal.sinks.mysql`: names, types, values as literals, and statements."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from datetime import datetime
from typing import Any

from pymysql.converters import escape_string

from shoal.sinks.tables import Change, Kind, Naming, json_of, text_of

SPARE = "_shoal_widened"
"""The temporary column of a column rewrite. It remains only if a process dies during the rewrite."""
MAX_JSON_DEPTH = 30  # MariaDB takes JSON with up to 32 levels, MySQL with 100
_KEY_LENGTH = 255


def _fold(name: str) -> str:
    """Two names that differ only in case or accents may be the same column."""
    letters = unicodedata.normalize("NFKD", name.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


NAMING = Naming(
    fold=_fold,
    limit=64,
    forbidden=re.compile(r"[\0\U00010000-\U0010ffff]|\s+\Z"),
    reserved=frozenset({"db_row_id", "db_trx_id", "db_roll_ptr", "fts_doc_id", SPARE}),
)
_TYPES = {
    Kind.BOOL: "tinyint(1)", Kind.INT: "bigint", Kind.LONG: "bigint", Kind.BIG: "decimal(20,0)", Kind.REAL: "double",
    Kind.TEXT: "longtext", Kind.BYTES: "longblob", Kind.JSON: "json", Kind.TIME: "datetime(6)",
}  # fmt: skip
KINDS = {name: kind for kind, name in _TYPES.items()} | {"bigint(20)": Kind.LONG}
AS_TEXT = {
    Kind.BOOL: "IF({}, 'true', 'false')",
    Kind.BYTES: "REPLACE(TO_BASE64({}), '\\n', '')",
    Kind.TIME: "CONCAT(REPLACE(TRIM(TRAILING '.000000' FROM CAST({} AS CHAR)), ' ', 'T'), 'Z')",
}
"""How the values of a column become text, where a change of the type differs from `text_of`."""

SETUP = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES', time_zone = '+00:00', "
    "innodb_lock_wait_timeout = {0}, lock_wait_timeout = {0}"
)
CREATE = (
    "CREATE TABLE {table} ({key} varchar({length}) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY, "
    "{run} varchar({length}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, {seq} bigint NOT NULL, "
    "KEY {run}{seq} ({run}, {seq})) ENGINE=InnoDB ROW_FORMAT=DYNAMIC DEFAULT CHARACTER SET utf8mb4"
).replace("{length}", str(_KEY_LENGTH))
CREATE_REGISTRY = (
    "CREATE TABLE IF NOT EXISTS {registry} (name varchar(190) COLLATE utf8mb4_bin PRIMARY KEY) "
    "ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4"
)


def quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def string(text: str) -> str:
    """A text as a literal."""
    return f"'{escape_string(text)}'"


def type_of(kind: Kind) -> str:
    return _TYPES[kind] + (" CHARACTER SET utf8mb4" if kind is Kind.TEXT else "")


def alteration(change: Change) -> str:
    """The clause of ALTER TABLE for one change."""
    verb = "ADD COLUMN" if change.old is None else "MODIFY COLUMN"
    return f"{verb} {quote(change.column)} {type_of(change.new)} NULL"


def _text(value: object) -> str:
    return string(value if type(value) is str else text_of(value))


def _time(value: datetime) -> str:
    return f"'{value.replace(tzinfo=None).isoformat(' ', 'microseconds')}'"


LITERALS: dict[Kind | None, Callable[[Any], str]] = {
    Kind.BOOL: lambda value: "1" if value else "0",
    Kind.INT: str,
    Kind.LONG: str,
    Kind.BIG: str,
    Kind.REAL: lambda value: repr(value) if math.isfinite(value) else "NULL",
    Kind.TEXT: _text,
    Kind.BYTES: lambda value: f"x'{value.hex()}'",
    Kind.JSON: lambda value: string(json_of(value)),
    Kind.TIME: _time,
    None: _text,
}
"""A value as a literal, by the kind of its column."""
