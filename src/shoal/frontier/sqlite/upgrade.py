"""Changes a frontier file of an older format into one of the format of ``schema.sql``.

A table that lacks columns, or has other defaults, is made again from its rows. What a row of an older format does not
have gets the default of the schema, or the value in `_FILLED`.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

OLDEST = 5
"""The oldest format that can be upgraded. In earlier ones tokens were numbers that could repeat."""
_LATER_TABLES = frozenset({"stage", "document", "inventory"})
"""Tables that were added since then. All others must be there."""
_FILLED = {
    ("run", "project"): "'shoal'",
    ("event", "worker"): "''",
    ("item", "id"): "(run << 40) + seq",
}
"""SQL for columns without a default, by table and column. Ids of items: see ``items.py``."""
STORED = (
    "SELECT run, 'role' AS kind, role AS name FROM role UNION ALL SELECT 0, 'document', key FROM document"
    " UNION ALL SELECT 0, 'host', name FROM host"
)
"""What the inventory lists."""
UNLISTED = f"SELECT * FROM ({STORED}) EXCEPT SELECT run, kind, name FROM inventory"
"""What the inventory lacks: in a file of an older format, everything."""


def missing_table(db: sqlite3.Connection, schema: str) -> str | None:
    """A table that a file of any format since the oldest one has, and this one does not."""
    with closing(_fresh(schema)) as fresh:
        return min(_tables(fresh).keys() - _tables(db).keys() - _LATER_TABLES, default=None)


def upgrade(db: sqlite3.Connection, schema: str) -> None:
    """Upgrade the tables in one transaction: all of it is done, or nothing."""
    with closing(_fresh(schema)) as fresh:
        db.execute("BEGIN IMMEDIATE")
        try:
            before = _tables(db)
            for table, statement in _tables(fresh).items():
                if table not in before:
                    db.execute(statement)
                elif _columns(db, table) != _columns(fresh, table):
                    _remake(db, table, statement, list(_columns(fresh, table)))
            known = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            others = fresh.execute("SELECT name, sql FROM sqlite_master WHERE type <> 'table' AND sql IS NOT NULL")
            for name, statement in others.fetchall():
                if name not in known:
                    db.execute(statement)
            db.execute(f"INSERT OR IGNORE INTO inventory {UNLISTED}")
            (version,) = fresh.execute("PRAGMA user_version").fetchone()
            db.execute(f"PRAGMA user_version = {version}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _fresh(schema: str) -> sqlite3.Connection:
    """An empty database in memory with the current tables."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(schema)
    return db


def _tables(db: sqlite3.Connection) -> dict[str, str]:
    """The statements that create the tables, by name."""
    return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())


def _columns(db: sqlite3.Connection, table: str) -> dict[str, tuple[str, int, str | None, int]]:
    """Type, NOT NULL, default, and place in the key of each column."""
    described = db.execute(f"PRAGMA table_info({table})").fetchall()
    return {name: (kind, not_null, default, key) for _, name, kind, not_null, default, key in described}


def _remake(db: sqlite3.Connection, table: str, statement: str, columns: list[str]) -> None:
    """Make a table again, with the values of the columns that it had before."""
    before = _columns(db, table)
    values = {name: name for name in columns if name in before}
    values |= {name: _FILLED[table, name] for name in columns if name not in before and (table, name) in _FILLED}
    db.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    db.execute(statement)
    db.execute(f"INSERT INTO {table} ({', '.join(values)}) SELECT {', '.join(values.values())} FROM old_{table}")
    db.execute(f"DROP TABLE old_{table}")
