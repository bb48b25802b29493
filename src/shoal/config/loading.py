"""Load a ``Config`` from its layers: defaults, file, spider, environment, command line and code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from shoal.config.layers import Parse, build, flatten, from_text, keys, nearest, read_settings, read_toml
from shoal.config.redis_variables import REDIS_VARIABLES, redis_from_environ
from shoal.config.root import Config
from shoal.errors import ConfigError

# Tables of the file that are not settings of a run. Other packages read them.
_OTHER_TABLES = ("spiders", "schedules", "notifications")


class Resolved(Struct, frozen=True):
    """The effective Config, and the source of each dotted key."""

    config: Config
    sources: dict[str, str]


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
    """Merge all layers into one Config. Later layers win: defaults, file, spider, environment, command line, code.

    Text from the environment and the command line is converted to the type of its field. ``options`` maps a key to
    the command-line option it came from, if that was not ``--set KEY=VALUE``. ``spider_sources`` does that for the
    settings of the spider. ``code`` is a mapping that changes the
    keys it names, or a Config: its values that are not defaults are used. ConfigError lists every problem of every
    layer.

    If the mode is "distributed" and no layer names a frontier, the frontier is in Redis: the server that REDIS_HOST,
    REDIS_PORT, REDIS_PASSWORD and REDIS_DB name, or else the one on this machine.
    """
    in_file = read_toml(file) if file is not None else {}
    for table in _OTHER_TABLES:
        in_file.pop(table, None)
    typed, from_spider = options or {}, spider_sources or {}
    in_code = changed(code) if isinstance(code, Config) else code
    in_environ, problems = _from_environ(environ or {})
    layers: list[tuple[Mapping[str, object] | None, Callable[[str], str], Parse | None]] = [
        (in_file, lambda key: str(file), None),
        (spider, lambda key: from_spider.get(key, f"spider {spider_name}".strip()), None),
        (in_environ, env_name, from_text),
        (command_line, lambda key: typed.get(key, f"--set {key}"), from_text),
        (in_code, lambda key: "code", None),
    ]
    values: dict[str, object] = {}
    sources = dict.fromkeys(keys(Config), "default")
    for settings, source, parse in layers:
        read, wrong = read_settings(Config, settings or {}, source=source, parse=parse)
        values |= read
        sources |= {key: source(key) for key in read}
        problems += wrong
    if problems:
        raise ConfigError("\n".join(problems))
    if values.get("mode") == "distributed" and "frontier" not in values:
        values["frontier"], sources["frontier"] = redis_from_environ(environ or {}), sources["mode"]
        if names := [name for name in REDIS_VARIABLES if (environ or {}).get(name)]:
            sources["frontier"] = ", ".join(names)
    try:
        return Resolved(build(Config, values), sources)
    except ConfigError as exc:  # each value is valid by itself: only the mode can contradict others
        raise ConfigError(f"{sources['mode']}: {exc}") from exc


def config_for(
    given: Config | Resolved | Mapping[str, object] | None, spider_settings: Mapping[str, object], spider_name: str
) -> Config:
    """The Config of a crawl that a program starts: ``given`` over the environment, the spider's settings and the file.

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


def changed(config: Config) -> dict[str, object]:
    """The settings of a Config that are not the defaults, by dotted key."""
    defaults = flatten(Config(), reveal=True)
    return {key: value for key, value in flatten(config, reveal=True).items() if value != defaults[key]}


# Variables that are not settings: the path of the file, and the password that `start-distributed` and Compose give
# to Flower.
_OTHER_VARIABLES = ("SHOAL_CONFIG", "SHOAL_FLOWER_PASSWORD")


def _from_environ(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    known = {env_name(key): key for key in keys(Config)}
    ours = {name: text for name, text in environ.items() if name.startswith("SHOAL_") and name not in _OTHER_VARIABLES}
    problems = []
    for name in sorted(ours.keys() - known.keys()):
        key = name.removeprefix("SHOAL_").lower().replace("__", ".")
        problems.append(f'{name}: unknown key "{key}"{nearest(Config, key, env_name)}')
    return {known[name]: text for name, text in ours.items() if name in known}, problems
