"""Load a ``Config`` from its layers: defaults, spider, file, environment, command line and code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from shoal.config.checks import frontier_kind, mask
from shoal.config.layers import (
    Parse,
    build,
    explicit_names,
    explicit_settings,
    from_text,
    keys,
    masked,
    nearest,
    read_settings,
    read_toml,
)
from shoal.config.settings import ANY_REDIS, UNUSABLE, Config, redis_url
from shoal.errors import ConfigError

# Tables of the file that are not settings of a run. Other packages read them.
_OTHER_TABLES = ("spiders", "schedules", "notifications")

_REMEDY = {
    "standalone": "remove the mode, or choose a frontier of one process: memory: or sqlite:///file",
    "distributed": "a fleet needs redis://host:port/number or postgresql://host/database",
}
_REDIS_VARIABLES = ("REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD", "REDIS_DB")
_OTHER_NAMES = ("QUEUE_TYPE", "FILTER_TYPE", "SCHEDULER_MAX_QUEUE_SIZE", *_REDIS_VARIABLES)


class Overruled(Struct, frozen=True):
    """A value that lost: its key, its source, and the source that won. Secrets are masked."""

    key: str
    value: object
    source: str
    winner: str


class Resolved(Struct, frozen=True):
    """The effective Config, the source of each dotted key, and the values that lost, the strongest first."""

    config: Config
    sources: dict[str, str]
    overruled: tuple[Overruled, ...] = ()


def find_config_file(environ: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """Return the file in SHOAL_CONFIG, or else the nearest shoal.toml in the folder or above it.

    The default folder is the working directory.
    """
    if environ.get("SHOAL_CONFIG"):
        return Path(environ["SHOAL_CONFIG"])
    folder = (folder or Path.cwd()).absolute()
    return next((file for place in (folder, *folder.parents) if (file := place / "shoal.toml").is_file()), None)


def env_name(key: str) -> str:
    """Return the environment variable of a dotted key: SHOAL_HTTP__PROXY for ``http.proxy``."""
    return "SHOAL_" + key.upper().replace(".", "__")


def load_config(
    *,
    file: Path | None = None,
    spider: Mapping[str, object] | None = None,
    spider_name: str = "",
    spider_sources: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    command_line: Mapping[str, object] | None = None,
    options: Mapping[str, str] | None = None,
    code: Mapping[str, object] | Config | None = None,
) -> Resolved:
    """Merge all layers into one Config. The strongest is code, then command line, environment, file and spider.

    Text from the environment and the command line is converted to the type of its field. ``options`` maps a key to
    the command-line option it came from, if that was not ``--set KEY=VALUE``. ``spider_sources`` does that for the
    settings of the spider. ``code`` is a mapping that changes the keys it names, or a Config: the values that were set
    in it count, also if they are the defaults. ConfigError lists every problem of every layer.

    A layer with a mode but without a frontier decides on the frontier, too: "standalone" is in memory, whatever weaker
    layers say; "distributed" uses the server that a weaker layer names, or else Redis: the server that REDIS_HOST,
    REDIS_PORT, REDIS_PASSWORD and REDIS_DB name, or the one on this machine. The file and the environment may also use
    the names in `_OTHER_NAMES`: there QUEUE_TYPE "redis" keeps a Redis server of a weaker layer. If a
    layer has both and they contradict each other, that is an error.
    """
    in_file = read_toml(file) if file is not None else {}
    for table in _OTHER_TABLES:
        in_file.pop(table, None)
    environ = environ or {}
    in_file, file_names = _split_names(in_file)
    redis = {name: str(value) for name, value in file_names.items() if name in _REDIS_VARIABLES}
    redis |= {name: environ[name] for name in _REDIS_VARIABLES if environ.get(name)}
    typed, from_spider = options or {}, spider_sources or {}
    in_environ, problems = _from_environ(environ)
    environ_names = {name: environ[name] for name in _OTHER_NAMES if environ.get(name)}
    layers = [
        _Layer(spider or {}, lambda key: from_spider.get(key, f"spider {spider_name}".strip())),
        _Layer(in_file, lambda key: str(file)),
        _Layer(in_environ, env_name, from_text),
        _Layer(command_line or {}, lambda key: typed.get(key, f"--set {key}"), from_text),
        _layer_of_code(code, redis),
    ]
    for number, names, where in ((1, file_names, f"{file}: "), (2, environ_names, "")):
        try:
            layers[number] = layers[number].with_names(names, redis, where)
        except ConfigError as exc:
            problems.append(f"{where}{exc}")
    merge = _Merge()
    for layer in layers:
        read, wrong = read_settings(Config, layer.settings, source=layer.source, parse=layer.parse)
        problems += wrong
        problems += merge.add(read, layer.source, keeps_redis=layer.keeps_redis)
    if problems:
        raise ConfigError("\n".join(problems))
    values, sources = merge.values, merge.sources
    if values.get("mode") == "distributed" and "frontier" not in values:
        values["frontier"], sources["frontier"] = _redis_from_environ(redis), ", ".join(redis) or sources["mode"]
    return Resolved(build(Config, values), sources, tuple(merge.overruled))


class _Layer(Struct, frozen=True):
    """The settings of one place, and what returns the source of a key."""

    settings: Mapping[str, object]
    source: Callable[[str], str]
    parse: Parse | None = None
    keeps_redis: bool = False
    """It wants a frontier in Redis, but names no server: the one of a weaker layer counts, if there is one."""

    def with_names(self, names: Mapping[str, object], redis: Mapping[str, str], where: str) -> _Layer:
        """Add the `_OTHER_NAMES` of this layer. ``where`` stands before a name in its source."""
        renamed = _own_names(names, self.settings, redis)
        sources = {key: where + name for key, (name, _) in renamed.items()}
        return replace(
            self,
            settings={**self.settings, **{key: value for key, (_, value) in renamed.items()}},
            source=lambda key: sources.get(key) or self.source(key),
            keeps_redis="frontier" in renamed and not names.keys() & set(_REDIS_VARIABLES),
        )


def _layer_of_code(code: Mapping[str, object] | Config | None, redis: Mapping[str, str]) -> _Layer:
    settings = explicit_settings(code) if isinstance(code, Config) else code or {}
    keeps_redis = isinstance(code, Config) and ANY_REDIS in explicit_names(code) and "frontier" not in settings
    if keeps_redis:
        settings = {**settings, "frontier": _redis_from_environ(redis)}
    return _Layer(settings, lambda key: "code", keeps_redis=keeps_redis)


class _Merge:
    """The values of the layers so far, from the weakest to the strongest."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.sources = dict.fromkeys(keys(Config), "default")
        self.overruled: list[Overruled] = []

    def add(self, read: dict[str, object], source: Callable[[str], str], *, keeps_redis: bool) -> list[str]:
        """Add the values of a stronger layer. Return a sentence if its mode and its frontier contradict each other.
        For ``keeps_redis`` see `_Layer`."""
        mode, kind = read.get("mode"), frontier_kind(read.get("frontier"))
        unusable = UNUSABLE[str(mode)] if mode is not None else ()
        problems = []
        if kind in unusable:
            frontier = masked(Config, "frontier", read["frontier"])
            problems.append(
                f'"mode" is "{mode}" ({source("mode")}), but "frontier" is "{frontier}" ({source("frontier")}). These '
                f"contradict each other: {_REMEDY[str(mode)]}"
            )
        if keeps_redis and kind == "redis" == frontier_kind(self.values.get("frontier")):
            read = {key: value for key, value in read.items() if key != "frontier"}
        for key in read:
            self._overrule(key, source(key))
        self.values |= read
        self.sources |= {key: source(key) for key in read}
        weaker = frontier_kind(self.values.get("frontier"))
        if mode is not None and "frontier" not in read and (mode == "standalone" or weaker in unusable):
            self._overrule("frontier", source("mode"))
        elif mode is None and kind in UNUSABLE["distributed"] and self.values.get("mode") == "distributed":
            self._overrule("mode", source("frontier"))
        return problems

    def _overrule(self, key: str, winner: str) -> None:
        """Drop the value of weaker layers. Without another one, the default counts."""
        if key in self.values:
            value = masked(Config, key, self.values.pop(key))
            self.overruled.insert(0, Overruled(key, value, self.sources[key], winner))
            self.sources[key] = winner


def config_for(
    given: Config | Resolved | Mapping[str, object] | None, spider_settings: Mapping[str, object], spider_name: str
) -> Config:
    """The Config of a crawl that a program starts: ``given`` over the environment, the file and the spider's settings.

    A Resolved is used as it is: its layers were merged before.
    """
    if isinstance(given, Resolved):
        return given.config
    return load_config(
        file=find_config_file(os.environ),
        environ=os.environ,
        spider=spider_settings,
        spider_name=spider_name,
        code=given,
    ).config


# Variables that are not settings: the path of the file, and the password that `start-distributed` and Compose give
# to Flower.
_OTHER_VARIABLES = ("SHOAL_CONFIG", "SHOAL_FLOWER_PASSWORD")


def _split_names(settings: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The settings of a file under their own names, and those under the names of other crawlers, in capitals."""
    other = {name: value for name, value in settings.items() if name.upper() in _OTHER_NAMES}
    own = {name: value for name, value in settings.items() if name not in other}
    return own, {name.upper(): value for name, value in other.items()}


def _from_environ(environ: Mapping[str, str]) -> tuple[dict[str, object], list[str]]:
    variables = {env_name(key): key for key in keys(Config)}
    ours = {name: text for name, text in environ.items() if name.startswith("SHOAL_") and name not in _OTHER_VARIABLES}
    problems = []
    for name in sorted(ours.keys() - variables.keys()):
        key = name.removeprefix("SHOAL_").lower().replace("__", ".")
        problems.append(f'{name}: unknown key "{key}"{nearest(Config, key, env_name)}')
    return {variables[name]: text for name, text in ours.items() if name in variables}, problems


# -- settings under the names of other crawlers, which a file or the environment may use
#
# ``QUEUE_TYPE`` and ``FILTER_TYPE`` choose the frontier, ``SCHEDULER_MAX_QUEUE_SIZE`` is ``queue.max_size``, and
# ``REDIS_HOST`` and the others name the Redis server of a frontier without a URL.


def _redis_from_environ(environ: Mapping[str, str]) -> str:
    """The URL that the variables give; what is not set has its default.

    In Kubernetes, a service named ``redis`` sets REDIS_PORT to ``tcp://10.0.0.1:6379``.
    """
    host, port = environ.get("REDIS_HOST", ""), environ.get("REDIS_PORT", "")
    if port.startswith("tcp://"):
        try:
            service = urlsplit(port)
            host, port = host or service.hostname or "", str(service.port or "")
        except ValueError:
            raise ConfigError(f'REDIS_PORT must be a port or "tcp://host:port", not {port!r}') from None
    password, db = environ.get("REDIS_PASSWORD") or None, environ.get("REDIS_DB", "")
    return redis_url(host or "127.0.0.1", _number("REDIS_PORT", port, 6379), password, _number("REDIS_DB", db, 0))


def _number(name: str, text: str, default: int) -> int:
    if text and not (text.isdecimal() and len(text) < 6):
        raise ConfigError(f"{name} must be a whole number, not {text!r}")
    return int(text) if text else default


def _own_names(
    renamed: Mapping[str, object], layer: Mapping[str, object], redis: Mapping[str, str]
) -> dict[str, tuple[str, object]]:
    """The settings that `_OTHER_NAMES` of one layer set: by dotted key, the other name and the value.

    ``layer``: its settings under their own names. ``redis``: the `_REDIS_VARIABLES` in force. ConfigError names what
    contradicts each other.
    """
    settings: dict[str, tuple[str, object]] = {}
    if "SCHEDULER_MAX_QUEUE_SIZE" in renamed:
        table, size = layer.get("queue"), renamed["SCHEDULER_MAX_QUEUE_SIZE"]
        own = table.get("max_size") if isinstance(table, Mapping) else layer.get("queue.max_size")
        if own not in (None, size):
            raise ConfigError(
                f'SCHEDULER_MAX_QUEUE_SIZE {size} and "queue.max_size" {own} contradict each other. Remove one of them'
            )
        if own is None:
            settings["queue.max_size"] = ("SCHEDULER_MAX_QUEUE_SIZE", size)
    frontier = layer.get("frontier")
    kinds = {name: str(renamed[name]).lower() for name in ("QUEUE_TYPE", "FILTER_TYPE") if name in renamed}
    if len(set(kinds.values())) > 1:
        words = " and ".join(f'{name} "{kind}"' for name, kind in kinds.items())
        raise ConfigError(f"{words} contradict each other: seen and queued URLs are in one store. Set only QUEUE_TYPE")
    for name, kind in kinds.items():
        if frontier is not None:
            if frontier_kind(frontier) != kind:
                raise ConfigError(
                    f'{name} "{kind}" contradicts the frontier "{mask(str(frontier))}". Remove one of them'
                )
        elif kind in ("memory", "redis"):
            settings["frontier"] = (name, "memory:" if kind == "memory" else _redis_from_environ(redis))
        else:
            url = {"sqlite": "sqlite:///file.db", "postgresql": "postgresql://host/database"}.get(kind)
            hint = f"name the frontier instead: {url}" if url else "use memory or redis"
            raise ConfigError(f'{name} "{kind}" does not say where the queue is; {hint}')
    return settings
