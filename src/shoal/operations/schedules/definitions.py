"""Read and check definitions of schedules: from ``[schedules.NAME]`` in shoal.toml, the command line and the API.

::

    [schedules.nightly]                  # in shoal.toml
    spider = "Books"                     # a name in [spiders]
    cron = "30 2 * * *"                  # or: every = "15m"
    time_zone = "Europe/Berlin"
    arguments = { category = "travel" }
    settings = { download_delay = 2.0 }
    jitter = 60
    overlap = "skip"                     # or "wait", "cancel"
    missed = "one"                       # or "all", "none"
    keep = 30
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from shoal.config import Config, read_toml
from shoal.config.checks import unmarked
from shoal.config.layers import from_text, read_settings
from shoal.errors import DECODING_ERRORS, ConfigError, RunError
from shoal.messages import did_you_mean
from shoal.operations.schedules.schedule import (
    NAME,
    Cron,
    Definition,
    MissedPolicy,
    OverlapPolicy,
    find_zone,
    parse_interval,
)
from shoal.ports import Document, Documents
from shoal.ports.documents import StoredValue, all_documents
from shoal.runs.orchestrator import Registry
from shoal.runs.trust import check_arguments
from shoal.system import chance, clock

SETTINGS = (
    "download_delay", "weight", "concurrency", "concurrency_per_host", "user_agent", "cookies", "items.keep",
    "queue.max_size", "queue.overflow", "scope.", "retry.", "robots.", "throttle.",
)  # fmt: skip
"""The settings that a schedule may change. A dot at the end stands for a whole section. None of them names a file, a
program, a server or a proxy, because everyone who can write to the store can set them."""

_MAX_JITTER = 86400.0
_MAX_KEEP = 1_000_000


class DefinitionError(ConfigError):
    """A schedule is invalid."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key
        """The key that is invalid."""


def read_file(file: Path) -> dict[str, Definition]:
    """The schedules of a shoal.toml. ConfigError names the file, the schedule and the key."""
    table = read_toml(file).get("schedules", {})
    if not isinstance(table, dict):
        raise ConfigError(f'{file}: "schedules" must be a table of schedules, such as [schedules.nightly]')
    spiders = Registry.load(file)
    definitions = {}
    for name, values in table.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: [schedules.{name}] must be a table")
        try:
            definitions[name] = make_definition(name, values, spiders)
        except ConfigError as exc:
            raise ConfigError(f"{file}: {exc}") from exc
    return definitions


def make_definition(name: str, given: Mapping[str, object], spiders: Collection[str]) -> Definition:
    """Check what a user wrote. ``spiders``: the names in the registry. ConfigError names the schedule and the key."""
    try:
        if not NAME.fullmatch(name):
            message = "its name must have 1 to 100 letters, digits, - and _, and begin with a letter or digit"
            raise DefinitionError(message, "name")
        for key in given:
            if key not in Definition.__struct_fields__:
                near = did_you_mean(key, Definition.__struct_fields__)
                raise DefinitionError(f'unknown key "{key:.80}"{near}', key)
        values = dict(given)
        for key, check in _CHECKS.items():
            if key in values:
                try:
                    values[key] = check(values[key])
                except ConfigError as exc:
                    raise DefinitionError(f'"{key}" {exc}', key) from None
        _check_spider(values.get("spider"), spiders)
        _check_timing(values)
        return msgspec.convert(values, Definition)
    except DefinitionError as exc:
        raise DefinitionError(f"schedule {name!r:.120}: {exc}", exc.key) from None


def change_definition(
    name: str, definition: Definition, given: Mapping[str, object], reset: Collection[str], spiders: Collection[str]
) -> Definition:
    """Change some keys of a definition, and set those in ``reset`` to their defaults. A new ``cron`` replaces
    ``every``, and a new ``every`` replaces ``cron``. ConfigError as `make_definition`."""
    for key in reset:
        if key not in Definition.__struct_fields__ or key in ("spider", "cron", "every"):
            near = did_you_mean(key, [option for option in _CHECKS if option not in ("spider", "cron", "every")])
            raise DefinitionError(f"schedule {name!r:.120}: {key!r:.80} has no default{near}", key)
    dropped = {*reset, *(("every",) if "cron" in given else ()), *(("cron", "time_zone") if "every" in given else ())}
    current = {key: value for key, value in msgspec.to_builtins(definition).items() if key not in dropped}
    return make_definition(name, {**current, **given}, spiders)


def _check_spider(spider: object, spiders: Collection[str]) -> None:
    if not isinstance(spider, str) or not spider:
        raise DefinitionError('"spider" is missing: name a spider of [spiders] in shoal.toml', "spider")
    if spider not in spiders:
        hint = did_you_mean(spider, list(spiders)) or f"; its spiders are: {', '.join(spiders) or 'none'}"
        raise DefinitionError(
            f'"spider" must be a name in [spiders] of shoal.toml, not {spider!r:.120}{hint}', "spider"
        )


def _check_timing(values: Mapping[str, object]) -> None:
    cron, every = values.get("cron"), values.get("every")
    if not cron and not every:
        raise DefinitionError('it is never due: set "cron", such as "30 2 * * *", or "every", such as "15m"', "cron")
    if cron and every:
        raise DefinitionError('"cron" and "every" contradict each other; set one of them', "every")
    if every and values.get("time_zone", "UTC") != "UTC":
        raise DefinitionError('"time_zone" is for "cron"; an interval is the same in every time zone', "time_zone")
    if cron:
        try:
            Cron(str(cron), find_zone(str(values.get("time_zone", "UTC"))))
        except ConfigError as exc:
            raise DefinitionError(
                f'"cron" must be a cron expression such as "30 2 * * *", not {cron!r:.120}: {exc}', "cron"
            ) from None
    elif float(str(values.get("jitter", 0))) >= (seconds := parse_interval(str(every))):
        raise DefinitionError(f'"jitter" must be less than "every", which is {seconds} s', "jitter")


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 500 or not value.isprintable():
        raise ConfigError(f"must be text, not {value!r:.80}")
    return " ".join(value.split())


def _interval(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value}s"
    parse_interval(text := _text(value))
    return text


def _zone(value: object) -> str:
    find_zone(text := _text(value))
    return text


def _jitter(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or not 0 <= (seconds := float(str(value))) <= _MAX_JITTER:
        raise ConfigError(f"must be a number of seconds from 0 to {_MAX_JITTER:g}, not {value!r:.80}")
    return seconds


def _keep(value: object) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_KEEP):
        raise ConfigError(f"must be a number of runs from 0 to {_MAX_KEEP}, not {value!r:.80}")
    return value


def _policy(words: tuple[str, ...]) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in words:
            near = did_you_mean(str(value), words)
            raise ConfigError(f"must be one of {', '.join(words)}, not {value!r:.80}{near}")
        return str(value)

    return check


def _arguments(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"must be a table, not {value!r:.80}")
    try:
        plain: dict[str, object] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        check_arguments("of a schedule", plain)
    except (TypeError, ValueError, OverflowError, RunError) as exc:
        raise ConfigError(f"cannot be stored: {exc}") from None
    return plain


def check_settings(value: object) -> dict[str, object]:
    """The settings under their dotted keys, converted to their types. ConfigError names a bad one."""
    values = usable_settings(value)
    patterns = {key: list(unmarked(values[key])) for key in ("scope.allow", "scope.deny") if key in values}
    return values | patterns


def usable_settings(value: object) -> dict[str, Any]:
    """The same for a run: regular expressions are marked, so that they are searched in linear time."""
    if not isinstance(value, dict):
        raise ConfigError(f"must be a table, not {value!r:.80}")
    values, problems = read_settings(Config, value, parse=from_text, of_others=True)
    if problems:
        raise ConfigError(f"has a problem: {problems[0]}")
    for key in values:
        if not any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in SETTINGS):
            allowed = ", ".join(f"{setting}*" if setting.endswith(".") else setting for setting in SETTINGS)
            raise ConfigError(
                f'cannot change "{key}": set it in shoal.toml or in the spider. A schedule may change {allowed}'
            )
    plain: dict[str, Any] = msgspec.to_builtins(values)
    return plain


_CHECKS: dict[str, Callable[[object], object]] = {
    "spider": _text,
    "cron": _text,
    "every": _interval,
    "time_zone": _zone,
    "jitter": _jitter,
    "overlap": _policy(get_args(OverlapPolicy)),
    "missed": _policy(get_args(MissedPolicy)),
    "keep": _keep,
    "arguments": _arguments,
    "settings": check_settings,
}


# Which servers declare the schedules of their shoal.toml, so that a schedule that none declares is noticed.
#
# Each server writes the names that its file declares into a document of its own, and changes that document while it
# lives. Another server whose document stays the same for `SILENT` seconds is gone, by the observer's own clock.


BEAT_EVERY = 10.0
"""Seconds between two changes of a server's document."""
SILENT = 60.0
"""Seconds without a change after which a server is gone. A schedule that nobody declares is orphaned after as long: its
server may be restarting."""


class Declaration(Struct, frozen=True, kw_only=True):
    """What one server declares."""

    source: str
    """The machine and the file."""
    names: tuple[str, ...]
    at: float


_decode = msgspec.msgpack.Decoder(Declaration).decode


class Declarations:
    """The declarations of one server, and what it knows of those of others."""

    def __init__(self, documents: Documents, project: str, now: Callable[[], float] = lambda: clock.now()) -> None:
        """``now``: a clock that never goes back."""
        self.names: frozenset[str] = frozenset()
        self.source = ""
        self._documents = documents
        self._prefix = f"schedule-server/{project}/"
        self._key = self._prefix + chance.token_bytes(8).hex()
        self._now = now
        self._beat_at = -BEAT_EVERY
        self._changed: dict[str, tuple[bytes, float]] = {}
        """The version of each document of another server, and when it was new."""
        self._undeclared: dict[str, float] = {}
        """Since when nobody declares a schedule."""

    def declare(self, names: Collection[str], source: str) -> None:
        """Declare these schedules from the next ``beat`` on."""
        self.names, self.source, self._beat_at = frozenset(names), source, -BEAT_EVERY

    async def beat(self) -> None:
        """Tell the others that this server lives, if that is due."""
        if self.names and self._now() - self._beat_at >= BEAT_EVERY:
            declaration = Declaration(source=self.source, names=tuple(sorted(self.names)), at=clock.time())
            await self._stored(self._key).change(lambda _: declaration)
            self._beat_at = self._now()

    async def leave(self) -> None:
        """Withdraw the declarations: this server stops."""
        await self._stored(self._key).change(lambda _: None)

    async def orphans(self, foreign: Iterable[tuple[str, str]]) -> set[str]:
        """Which of these schedules, names and sources, no server has declared for `SILENT` seconds. A schedule of this
        server's own file is orphaned at once: its lines were removed."""
        declared, now = await self._declared_by_others(), self._now()
        sources = {name: source for name, source in foreign if name not in declared}
        self._undeclared = {name: self._undeclared.get(name, now) for name in sources}
        return {
            name
            for name, source in sources.items()
            if now - self._undeclared[name] >= SILENT or (source and source == self.source)
        }

    async def _declared_by_others(self) -> set[str]:
        documents = [
            document for document in await all_documents(self._documents, self._prefix) if document.key != self._key
        ]
        now, before = self._now(), self._changed
        self._changed = {
            document.key: before[document.key]
            if before.get(document.key, (b"",))[0] == document.version
            else (document.version, now)
            for document in documents
        }
        names: set[str] = set()
        for document in documents:
            if now - self._changed[document.key][1] < SILENT:
                names.update(_names(document))
            else:
                await self._stored(document.key).change(lambda _: None)  # if it lives after all, it writes it again
        return names

    def _stored(self, key: str) -> StoredValue[Declaration]:
        return StoredValue(self._documents, key, Declaration)


def _names(document: Document) -> tuple[str, ...]:
    try:
        return _decode(document.value).names
    except DECODING_ERRORS:  # of another version
        return ()
