"""Outputs, chosen by how their name ends."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from shoal.errors import SinkError
from shoal.ports import Sink

_Kind: TypeAlias = Literal["stdout", "jsonl", "csv", "parquet", "sqlite"]

_ENDINGS: dict[str, _Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".db": "sqlite",
    ".sqlite": "sqlite",
    ".sqlite3": "sqlite",
}
_POSSIBLE = "file.jsonl, file.csv, file.parquet, file.db, sqlite:///file.db?table=name, or - for standard output"


class _Target(Struct, frozen=True):
    kind: _Kind
    path: str = ""
    table: str | None = None


def open_sink(spec: str, *, run_id: str = "") -> Sink:
    """The sink that a name stands for; nothing is touched before its ``open``. SinkError: there is none.

    A fresh run replaces a file. In a database it replaces the rows with the same key, which a page's items have in
    each run, unless ``run_id`` is given and made part of it.
    """
    target = _parse(spec)
    match target.kind:
        case "stdout":
            from shoal.sinks.files import StreamSink

            return StreamSink()
        case "jsonl":
            from shoal.sinks.files import JsonLinesSink

            return JsonLinesSink(target.path)
        case "csv":
            from shoal.sinks.files import CsvSink

            return CsvSink(target.path)
        case "parquet":
            from shoal.sinks.parquet import ParquetSink

            return ParquetSink(target.path)
        case "sqlite":
            from shoal.sinks.sqlite import SQLiteSink

            return SQLiteSink(target.path, target.table, run_id=run_id)


def sink_id(spec: str) -> str:
    """The same for every way to write the same output; the name of its drainer's role."""
    target = _parse(spec)
    if target.kind == "stdout":
        return "-"
    path = os.path.realpath(target.path)
    return path if target.table is None else f"{path}?table={target.table}"


def _parse(spec: str) -> _Target:
    if spec == "-":
        return _Target("stdout")
    scheme, mark, rest = spec.partition("://")
    if mark:
        if scheme != "sqlite":
            raise SinkError(f"no output for {scheme}://; use {_POSSIBLE}")
        return _parse_sqlite(spec, rest)
    ending = os.path.splitext(spec)[1].lower()
    if ending == ".json":
        raise SinkError(f"{spec}: one JSON array can't be written piece by piece; use {spec}l, with an object a line")
    kind = _ENDINGS.get(ending)
    if kind is None:
        raise SinkError(f"can't tell from {spec!r} what to write; use {_POSSIBLE}")
    return _Target(kind, spec)


def _parse_sqlite(spec: str, rest: str) -> _Target:
    path, _, query = rest.partition("?")
    if not path.startswith("/") or len(path) == 1:
        raise SinkError(f"{spec!r} names no file; write sqlite:///file.db, or sqlite:////folder/file.db")
    options = dict(parse_qsl(query, keep_blank_values=True))
    table = options.pop("table", None)
    if options or table == "":
        raise SinkError(f"{spec!r}: all that can stand behind the file is ?table=name")
    return _Target("sqlite", unquote(path[1:]), table)
