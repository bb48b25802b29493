"""Find the spider that the user names, and create it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import ShoalError, SpiderError
from shoal.suggestions import did_you_mean

if TYPE_CHECKING:
    from shoal.runs.registry import Entry
    from shoal.spider import Spider

_MAX_FILES = 200
"""How many files of a folder are searched for a similar name."""


def find_spider(
    name: str, in_project: str | None = None, *, scrapy: bool = False, settings: Sequence[str] = ()
) -> tuple[str, Entry | None]:
    """The reference of a spider (``file.py`` or ``file.py:Class``), and its entry in shoal.toml if it has one.

    ``scrapy``: it is a Scrapy spider. ``in_project`` is its name if ``name`` is the folder of a Scrapy project, and
    ``settings`` are those of ``-s``."""
    from shoal.runs.registry import Registry
    from shoal.spider import SCRAPY

    if settings:
        from shoal.cli.options import pairs
        from shoal.scrapy.adapter import command_line

        if not scrapy and not name.startswith(SCRAPY):
            raise SpiderError("-s sets a setting of Scrapy: add --scrapy, or use --set for a setting of Shoal")
        command_line.update(pairs(list(settings), "-s"))
    if scrapy:
        return SCRAPY + (name if in_project is None else f"{name}:{in_project}"), None
    if in_project is not None:
        raise SpiderError(f"unexpected argument {in_project!r}: to name a spider of a Scrapy project, add --scrapy")
    registry = Registry.load()
    if name in registry:
        return registry.reference(name), registry[name]
    if ".py" in name or name.startswith(SCRAPY):
        return name, None
    hint = _did_you_mean(name, list(registry)) or "; `shoal list` shows the spiders in this folder"
    raise SpiderError(f"there is no spider {name}: use FILE.py, FILE.py:Class or a name from shoal.toml{hint}")


def make_spider(reference: str, arguments: Mapping[str, object]) -> Spider:
    """Create the spider of a file with its arguments."""
    from shoal.spider import create_spider, load_spider

    try:
        kind = load_spider(reference)
    except SpiderError as error:
        hint = _did_you_mean(reference, [])
        if not hint:
            raise
        raise SpiderError(f"{error}{hint}") from error
    try:
        return create_spider(kind, arguments)
    except ShoalError:
        raise
    except Exception as exc:  # whatever the user's __init__ raises
        frame = traceback.extract_tb(exc.__traceback__)[-1]
        place = "" if frame.name == create_spider.__name__ else f" (line {frame.lineno})"
        raise SpiderError(f"{reference}: cannot create {kind.__name__}: {type(exc).__name__}: {exc}{place}") from exc


def _did_you_mean(name: str, registered: list[str]) -> str:
    """``; did you mean ...?`` with the spider that has the nearest name, or nothing. No file is imported for it."""
    if name.startswith("scrapy:") and ".py" not in name:
        return ""  # a project: its error lists its spiders
    name = name.removeprefix("scrapy:")
    file, _, wanted = name.partition(".py:")
    path = Path(f"{file}.py") if wanted else Path(name)
    known: dict[str, str] = {each.lower(): each for each in registered}
    if path.is_file():
        if wanted in _classes(path):
            return ""  # the class exists: the error has another cause
        if wanted:
            known |= {each.lower(): f"{path}:{each}" for each in _classes(path)}
        sought = wanted.lower()
    else:
        for each in sorted(path.parent.glob("*.py"))[:_MAX_FILES]:
            classes = _classes(each)
            known |= {each.name.lower(): str(each)} if classes else {}
            for kind in classes:
                known.setdefault(kind.lower(), f"{each}:{kind}")
        sought = path.name.lower()
    return did_you_mean(sought, known)


def _classes(path: Path) -> list[str]:
    """The classes of a file that look like spiders."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return re.findall(r"^class (\w+)\(", text, re.MULTILINE) if "Spider" in text else []
