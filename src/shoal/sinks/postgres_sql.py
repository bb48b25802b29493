"""PostgreSQL for `shoal.sinks.postgres`: names, types, values as parameters, and statements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shoal.sinks.tables import Change, Columns, Kind, Naming, json_of, text_of

NAMING = Naming(
    limit=63,
    length=lambda name: len(name.encode()),
    forbidden=re.compile("\0"),
    reserved=frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"}),
)
TYPES = {
    Kind.BOOL: "boolean", Kind.INT: "bigint", Kind.LONG: "bigint", Kind.BIG: "numeric", Kind.REAL: "double precision",
    Kind.TEXT: "text", Kind.BYTES: "bytea", Kind.JSON: "jsonb", Kind.TIME: "timestamp with time zone",
}  # fmt: skip
_KINDS = {name: kind for kind, name in TYPES.items()}
_AS_TEXT = {
    Kind.BYTES: "replace(encode({}, 'base64'), E'\\n', '')",
    Kind.TIME: """
        coalesce(replace(to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), '.000000Z', 'Z'), {0}::text)
    """,  # to_char returns NULL for infinity
}
"""How the values of a column become text, where a cast differs from `text_of`."""
_NUL_IN_JSON = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")

SELECT_COLUMNS = """
    SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = a.attrelid AND i.indisprimary AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum
    ) AS is_key
    FROM pg_attribute a
    WHERE a.attrelid = to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""
BEGIN = """
    BEGIN;
    SELECT set_config('statement_timeout', '{0}', true), set_config('lock_timeout', '{0}', true);
    SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off';
"""


class PostgresColumns(Columns):
    """``casts`` are for columns whose type the user chose: they get text, and the server converts it."""

    def __init__(self, types: Mapping[str, str]) -> None:
        super().__init__(NAMING, {name: _KINDS.get(kind) for name, kind in types.items()})
        self.casts = {
            name: f"::{kind}"
            for name, kind in types.items()
            if kind not in _KINDS and not kind.startswith("character")  # a cast would cut a text that is too long
        }


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def alteration(change: Change) -> str:
    """The clause of ALTER TABLE for one change."""
    column, kind = quote(change.column), TYPES[change.new]
    if change.old is None:
        return f"ADD COLUMN IF NOT EXISTS {column} {kind}"
    as_text = _AS_TEXT.get(change.old, "{}::text").format(column)
    return f"ALTER COLUMN {column} TYPE {kind} USING {as_text if change.new is Kind.TEXT else f'{column}::{kind}'}"


def update_clause(columns: Sequence[str], *, comparable: bool) -> str:
    """What ON CONFLICT does. It skips a row that is already equal: an update costs as much as a new row."""
    if not columns:
        return "NOTHING"
    updates = ", ".join(f"{column} = excluded.{column}" for column in columns)
    old, new = (", ".join(f"{row}.{column}" for column in columns) for row in ("old", "excluded"))
    return f"UPDATE SET {updates}" + (f" WHERE ROW({old}) IS DISTINCT FROM ROW({new})" if comparable else "")


def cells(kind: Kind | None, values: Sequence[object]) -> list[object]:
    """Values as asyncpg takes them for a column of this kind. NUL becomes U+FFFD."""
    match kind:
        case Kind.TEXT | None:
            return [value if type(value) is str and "\0" not in value else _text(value) for value in values]
        case Kind.JSON:
            return [None if value is None else _json(value) for value in values]
        case _:
            return list(values)


def _text(value: object) -> str | None:
    return None if value is None else text_of(value).replace("\0", "\ufffd")


def _json(value: object) -> str:
    text = json_of(value)
    return text if "\\u0000" not in text else _NUL_IN_JSON.sub("\\1\ufffd", text)
