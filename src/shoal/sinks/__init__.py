"""Outputs: `open_sink` makes the sink for a file name or a database URL.

`drainer` moves items from the log of a run into a sink. Each sink refuses an old writer and knows its last item. WARC
archives and downloaded files are here too. This room may import `clients`, `frontier` and what is below them. Start
with `drainer`, then `files`.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct, structs

from shoal.clients.object_urls import FORMS, SCHEMES, ObjectPlace, is_object_url, parse_place
from shoal.config import mask, plugins
from shoal.errors import ConfigError, ShoalError, SinkError
from shoal.messages import did_you_mean, did_you_mean_scheme
from shoal.ports import Run, Sink, SinkOptions
from shoal.sinks.keys import MAX_COLUMNS, Export, TableOptions
from shoal.sinks.tables import DatabaseServer

_Kind: TypeAlias = Literal["stdout", "jsonl", "csv", "parquet", "sqlite", "postgresql", "mysql", "plugin"]
_PART_FORMATS: tuple[_Kind, ...] = ("jsonl", "csv", "parquet")

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
_SERVERS: dict[str, _Kind] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
}
_PORTS: dict[_Kind, int] = {"postgresql": 5432, "mysql": 3306}
_OPTIONS: dict[_Kind, frozenset[str]] = {
    "postgresql": frozenset({"sslmode", "sslrootcert", "sslcert", "sslkey"}),
    "mysql": frozenset({"ssl_ca", "ssl_cert", "ssl_key"}),
}
_FILE_OPTIONS: dict[_Kind, dict[str, str]] = {
    "jsonl": {"replace": "replace=yes"},
    "csv": {"formulas": "formulas=keep", "max_columns": "max_columns=N", "replace": "replace=yes"},
    "parquet": {"max_columns": "max_columns=N", "replace": "replace=yes"},
    "sqlite": {"table": "table=name", "key": "key=field,field", "max_columns": "max_columns=N"},
}
"""The options of files and SQLite, and how to write them. All of them have ``identity``, too."""
_IDENTITY = {"identity": "identity=path"}
_PART_OPTIONS = {"part_mb": "part_mb=N", "part_seconds": "part_seconds=N"}
"""The options of object storage, in addition to those of the format."""
_MAX_COLUMNS: dict[_Kind, int] = {"postgresql": 400, "mysql": 180}
"""The default limit of columns. A row has room for 8 KB, and each long value needs a pointer of 18 or 40 bytes."""
_FORMS = (
    "file.jsonl, file.csv, file.parquet, file.db, sqlite:///file.db?table=name, "
    "postgresql://user:password@host/database?table=name, mysql://user:password@host/database?table=name, "
    "s3://bucket/name.jsonl (also gs:// and az://), or - for standard output"
)


class _Target(Struct, frozen=True):
    kind: _Kind
    path: str = ""
    options: TableOptions = TableOptions(replaces=False)
    """Those that the specification sets."""
    server: DatabaseServer | None = None
    by_path: bool = False
    """Whether the path alone identifies a file."""
    place: ObjectPlace | None = None
    """In object storage."""
    part_mb: float | None = None
    part_seconds: float | None = None


def open_sink(
    spec: str, *, run_id: str = "", on_reject: Callable[[int], None] | None = None, export: Export = ""
) -> Sink:
    """Make the sink for a file name or a URL. Nothing is read or written before its ``open``. SinkError if invalid.

    A new run refuses a file that another run wrote, unless the output has ``?replace=yes``. In a database it adds rows,
    unless the output has a ``?key=``. ``on_reject`` is called with the number of items that the output can't write;
    they are also logged. ``export``: it writes ``all`` items of a run, or adds those that are ``missing``, while the
    run itself may be writing the same output.
    """
    target = _parse(spec)
    replaces = target.options.replaces or not run_id
    options = structs.replace(target.options, run_id=run_id, on_reject=on_reject, replaces=replaces, export=export)
    if target.place is not None:
        return _open_objects(target, target.place, options)
    if export == "missing" and target.kind not in ("sqlite", "postgresql", "mysql"):
        name = sink_id(spec) if target.kind == "plugin" else target.path or "-"
        raise SinkError(f"can't add missing items to {name}; write all of them again with -O {name}")
    match target.kind:
        case "stdout":
            from shoal.sinks.files import StreamSink

            return StreamSink()
        case "jsonl":
            from shoal.sinks.files import JsonLinesSink

            return JsonLinesSink(target.path, options)
        case "csv":
            from shoal.sinks.csvfile import CsvSink

            return CsvSink(target.path, options)
        case "parquet":
            from shoal.sinks.parquet import ParquetSink

            return ParquetSink(target.path, options)
        case "sqlite":
            from shoal.sinks.sqlite import sqlite_sink

            return sqlite_sink(target.path, options)
        case "postgresql":
            from shoal.sinks.postgres import postgres_sink

            assert target.server is not None
            return postgres_sink(target.server, options)
        case "mysql":
            from shoal.sinks.mysql import mysql_sink

            assert target.server is not None
            return mysql_sink(target.server, options)
        case "plugin":
            return _open_plugged(spec, SinkOptions(run_id, on_reject))


def _open_objects(target: _Target, place: ObjectPlace, options: TableOptions) -> Sink:
    from shoal.sinks.objects import PART_MB, PART_SECONDS, MissingPartsSink, ObjectSink, PartOptions

    size = int((target.part_mb or PART_MB) * (1 << 20))
    parts = PartOptions(size, target.part_seconds or PART_SECONDS)
    assert target.kind == "jsonl" or target.kind == "csv" or target.kind == "parquet"
    kind = MissingPartsSink if options.export == "missing" else ObjectSink
    return kind(place, target.kind, options, parts)


def sink_id(spec: str) -> str:
    """A name for the output, without secrets, equal for every spelling of it."""
    target = _parse(spec)
    if target.kind == "stdout":
        return "-"
    if target.kind == "plugin":
        return _plugged_id(spec)
    options = [] if target.options.table is None else [f"table={target.options.table}"]
    if target.place is not None:
        name = f"{target.place.name}.{target.kind}"
        options += [f"{key}={value}" for key, value in target.place.options.items() if key != "region"]
    elif target.server is None:
        name = os.path.realpath(target.path)
    else:
        name = target.server.name
        options += [] if target.server.schema is None else [f"schema={target.server.schema}"]
    return name if not options else f"{name}?{'&'.join(options)}"


def named_for_run(specs: Sequence[str], run: Run) -> tuple[str, ...]:
    """Outputs with ``{date}`` replaced by the day on which the run was created, and ``{run}`` by its ID. So a run that
    is resumed on another day has the same outputs."""
    words = {"{date}": time.strftime("%Y-%m-%d", time.localtime(run.created_at)), "{run}": run.run_id}
    return tuple(re.sub(r"\{date\}|\{run\}", lambda match: words[match[0]], spec) for spec in specs)


def file_of(spec: str) -> str | None:
    """The real path of an output that is a file with an identity (see `shoal.sinks.identity`); None for others."""
    target = _parse(spec)
    is_file = target.kind in _FILE_OPTIONS and target.place is None and not target.by_path
    return os.path.realpath(target.path) if is_file else None


def is_sqlite(spec: str) -> bool:
    return _parse(spec).kind == "sqlite"


def is_shared(spec: str) -> bool:
    """Whether workers on any machine can write it. A plugin has the attribute ``shared``, by default True."""
    target = _parse(spec)
    if target.kind == "plugin":
        return bool(getattr(_plugin_of(spec), "shared", True))
    return target.server is not None or target.place is not None


def is_object_storage(spec: str) -> bool:
    """Whether the process that writes it uses credentials of its own environment."""
    return _parse(spec).place is not None


def is_of_plugin(spec: str) -> bool:
    """Whether the code of another package writes it."""
    return _parse(spec).kind == "plugin"


def _parse(spec: str) -> _Target:
    if spec == "-":
        return _Target("stdout")
    scheme, mark, rest = spec.partition("://")
    if mark:
        if scheme == "sqlite":
            return _parse_sqlite(spec, rest)
        if scheme in _SERVERS:
            return _parse_server(spec, scheme)
        if is_object_url(spec):
            return _parse_objects(spec)
        if scheme.lower() in plugins.names("sinks"):
            return _Target("plugin", spec)
        hint = did_you_mean_scheme(scheme, ("sqlite", *_SERVERS, *SCHEMES, *plugins.names("sinks")))
        raise SinkError(f"unknown output {scheme}://; use {_FORMS}{plugins.hint('sinks')}{hint}")
    ending = os.path.splitext(spec)[1].lower()
    if ending == ".json":
        raise SinkError(f"{spec}: a JSON array is complete only at its end; use {spec}l, with one object per line")
    if spec.lower().endswith((".warc", ".warc.gz")):
        folder = os.path.dirname(spec) or "."
        raise SinkError(
            f"{spec}: WARC files have pages, not items, and each process writes its own; use --warc {folder}"
        )
    if (kind := _ENDINGS.get(ending)) is not None:
        return _Target(kind, spec)
    for path, mark, query in (spec.partition("?"), spec.rpartition("?")):  # the name may have one, too
        if mark and (kind := _ENDINGS.get(os.path.splitext(path)[1].lower())) is not None:
            return _with_options(kind, path, spec, query)
    shown = spec.rpartition("@")[2]  # a URL with a mistyped scheme may have a password before it
    raise SinkError(f"unknown type of output: {shown!r}; use {_FORMS}{did_you_mean(ending, list(_ENDINGS))}")


def _parse_sqlite(spec: str, rest: str) -> _Target:
    path, _, query = rest.partition("?")
    if not path.startswith("/") or len(path) == 1:
        raise SinkError(f"{spec!r} has no file name; write sqlite:///file.db, or sqlite:////folder/file.db")
    return _with_options("sqlite", unquote(path[1:]), spec, query)


def _with_options(kind: _Kind, path: str, spec: str, query: str) -> _Target:
    options, forms = dict(parse_qsl(query, keep_blank_values=True)), _FILE_OPTIONS[kind] | _IDENTITY
    try:
        has_wrong_value = options.get("replace", "yes") != "yes" or options.get("identity", "path") != "path"
        if options.keys() - forms.keys() or has_wrong_value:
            raise ValueError
        table_options = _table_options(kind, options)
    except ValueError:
        allowed = "&".join(forms.values())
        raise SinkError(f"{spec!r}: invalid option after the file name; allowed: ?{allowed}") from None
    return _Target(kind, path, table_options, by_path="identity" in options)


def _parse_objects(spec: str) -> _Target:
    ending = os.path.splitext(spec.partition("?")[0])[1].lower()
    kind = _ENDINGS.get(ending)
    scheme = spec.partition("://")[0]
    if kind not in _PART_FORMATS:
        raise SinkError(
            f"unknown type of output in object storage: {ending!r}; "
            f"write {scheme}://bucket/name.jsonl, .csv or .parquet"
        )
    forms = {name: form for name, form in _FILE_OPTIONS[kind].items() if name != "replace"} | _PART_OPTIONS
    try:
        place, options = parse_place(spec, forms)
        part_mb = _number(options, "part_mb", 1024)
        part_seconds = _number(options, "part_seconds", 3600)
        table_options = _table_options(kind, options)
    except ConfigError as exc:
        raise SinkError(str(exc)) from None
    except ValueError:
        allowed = "&".join([*forms.values(), *FORMS.values()])
        raise SinkError(f"{spec.partition('?')[0]}: invalid option; allowed: ?{allowed}") from None
    place = structs.replace(place, path=os.path.splitext(place.path)[0])
    return _Target(kind, options=table_options, place=place, part_mb=part_mb, part_seconds=part_seconds)


def _number(options: dict[str, str], name: str, most: float) -> float | None:
    """Remove an option, and return its value. ValueError if it is not a positive number up to ``most``."""
    if name not in options:
        return None
    value = float(options.pop(name))
    if not 0.0 < value <= most:
        raise ValueError
    return value


def _table_options(kind: _Kind, options: dict[str, str]) -> TableOptions:
    """ValueError if one of the options is invalid."""
    table, key = options.get("table"), tuple(options["key"].split(",")) if "key" in options else ()
    max_columns = int(options.get("max_columns", _MAX_COLUMNS.get(kind, MAX_COLUMNS)))
    if table == "" or "\0" in (table or "") or not all(key) or max_columns < 1:
        raise ValueError
    formulas = options.get("formulas", "escape")
    if formulas not in ("escape", "keep"):
        raise ValueError
    return TableOptions(
        table, key=key, max_columns=max_columns, replaces="replace" in options, formulas=formulas == "keep"
    )


def _parse_server(spec: str, scheme: str) -> _Target:
    """Parse the URL of a database. Errors do not show it: any part of an invalid URL may belong to the password."""
    kind = _SERVERS[scheme]
    form = f"{scheme}://user:password@host:port/database?table=name"
    try:
        parts = urlsplit(spec)
        host, port, path = parts.hostname or "", parts.port or _PORTS[kind], parts.path.removeprefix("/")
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        host = path = "/"
    if not path or any(mark in host + path for mark in "/@") or "#" in spec:
        raise SinkError(
            f"invalid {scheme}:// output; write {form}, "
            "with / as %2F, @ as %40, ? as %3F, # as %23 and % as %25 in user and password"
        )
    own: dict[str, str] = {name: options.pop(name) for name in ("table", "key", "max_columns") if name in options}
    schema = options.pop("schema", None) if kind == "postgresql" else None
    try:
        timeout = float(options.pop("timeout", 30.0))
        table_options = _table_options(kind, own)
        if schema == "" or not 0.0 < timeout <= 3600.0 or options.keys() - _OPTIONS[kind]:
            raise ValueError
    except ValueError:
        forms = [*_FILE_OPTIONS["sqlite"].values(), "timeout=seconds"]
        forms += ["schema=name"] if kind == "postgresql" else []
        raise SinkError(
            f"{scheme}://{host}: invalid option; allowed: ?{'&'.join([*forms, *sorted(_OPTIONS[kind])])}"
        ) from None
    user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
    server = DatabaseServer(kind, host, port, unquote(path), user, password, schema, timeout, options)
    return _Target(kind, options=table_options, server=server)


# -- plugins


def _open_plugged(spec: str, options: SinkOptions) -> Sink:
    """Call the plugin. SinkError if it raises anything, or if its sink lacks what the contract asks for."""
    try:
        sink = _plugin_of(spec)(spec, options)
    except ShoalError:
        raise
    except Exception as exc:  # the code of a stranger may raise anything
        raise SinkError(f"the plugin for {mask(spec)} failed: {type(exc).__name__}: {exc}") from exc
    if lack := _lack_of(sink):
        raise SinkError(f"the plugin for {mask(spec)} {lack}: see docs/plugins.md")
    return cast(Sink, sink)


def _lack_of(sink: object) -> str | None:
    """What a sink lacks; None if it has all methods, and ``open`` takes an epoch."""
    for name in ("open", "write", "flush", "close", "count"):
        if not callable(getattr(sink, name, None)):
            return f"has no {name}()"
    try:
        inspect.signature(sink.open).bind(b"", 1)  # type: ignore[attr-defined]
    except TypeError:
        return "has an open() that takes no epoch"
    except ValueError:  # a method without a signature, of an extension in C
        pass
    return None


def _plugged_id(spec: str) -> str:
    """What the plugin's ``sink_id`` returns, or the URL without user and password."""
    own = getattr(_plugin_of(spec), "sink_id", None)
    if own is not None:
        return str(own(spec))
    try:
        parts = urlsplit(spec)
    except ValueError:
        raise SinkError(f"invalid {spec.partition(':')[0]}:// output") from None
    return mask(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


def _plugin_of(spec: str) -> plugins.Registered:
    scheme = spec.partition(":")[0]
    plugin = plugins.load("sinks", scheme)
    if plugin is None:
        raise SinkError(f"unknown output {scheme}://{plugins.hint('sinks')}")
    return plugin
