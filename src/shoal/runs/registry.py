"""The spiders of a project by name: the file of each one, and whether it runs here or on a fleet.

::

    [spiders.India]                      # in shoal.toml
    file = "spiders/india.py"            # relative to shoal.toml; or "spiders/many.py:India", "scrapy:FOLDER:name"
    execution_mode = "distributed"       # or "single", the default
    arguments = { state = "Goa" }
    outputs = ["postgresql://db.example/crawl"]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from shoal.config import find_config_file, read_toml
from shoal.errors import ConfigError, SpiderError
from shoal.spider import SCRAPY, load_spider
from shoal.suggestions import did_you_mean

ExecutionMode: TypeAlias = Literal["single", "distributed"]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One spider of the registry."""

    file: str
    execution_mode: ExecutionMode = "single"
    arguments: dict[str, object] = {}
    outputs: tuple[str, ...] = ()


class Registry(Mapping[str, Entry]):
    """The ``[spiders]`` table of a ``shoal.toml``. Empty if there is none."""

    def __init__(self, entries: Mapping[str, Entry], file: Path | None = None) -> None:
        self._entries = dict(entries)
        self._file = file

    @classmethod
    def load(cls, file: Path | None = None) -> Registry:
        """Read the registry from this file, or from the ``shoal.toml`` in use. ConfigError says what is wrong in it."""
        file = file or find_config_file(os.environ)
        if file is None:
            return cls({})
        table = read_toml(file).get("spiders", {})
        if not isinstance(table, dict):
            raise ConfigError(f'{file}: "spiders" must be a table of spiders, such as [spiders.India]')
        return cls({name: _entry(file, name, given) for name, given in table.items()}, file)

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            raise SpiderError(self._unknown(name))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def reference(self, name: str) -> str:
        """The ``file.py`` or ``file.py:Class`` of a spider, relative to the working directory."""
        entry, folder = self[name], self._file.parent if self._file is not None else Path()
        scrapy = SCRAPY if entry.file.startswith(SCRAPY) else ""
        return scrapy + os.path.relpath(folder / entry.file.removeprefix(SCRAPY))

    def get_execution_mode(self, name: str) -> ExecutionMode:
        """``single`` or ``distributed``. SpiderError if there is no such spider."""
        return self[name].execution_mode

    def name_of(self, spider: str, arguments: Mapping[str, object]) -> str | None:
        """The name under which a run was started, from its spider's own name and its arguments; None if no entry fits.

        Several entries may have the same spider: the one that fixes the most of these arguments is meant."""
        fitting = {
            name: len(entry.arguments)
            for name, entry in self.items()
            if entry.arguments.items() <= arguments.items() and spider in (name, self._spider_name(name))
        }
        return max(fitting, key=lambda name: (fitting[name], name == spider), default=None)

    def _spider_name(self, name: str) -> str | None:
        try:
            return load_spider(self.reference(name)).spider_name()
        except SpiderError:  # it cannot be the one that works
            return None

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self._entries, 1)
        known = f"did you mean {near[0]}?" if near else f"its spiders are: {', '.join(self._entries) or 'none'}"
        return f"no spider {name!r} in {self._file or 'a shoal.toml'}; {known}"


def _entry(file: Path, name: str, given: object) -> Entry:
    fields = Entry.__struct_fields__
    if isinstance(given, dict) and (unknown := [key for key in given if key not in fields]):
        hint = did_you_mean(unknown[0], fields) or f"; a spider has: {', '.join(fields)}"
        raise ConfigError(f'{file}: [spiders.{name}]: unknown key "{unknown[0]}"{hint}')
    try:
        return msgspec.convert(given, Entry)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{file}: [spiders.{name}]: {exc}") from exc
