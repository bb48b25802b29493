"""Files that start a crawl themselves: ``CrawlerProcess(...).crawl(Spider)`` and ``start()`` at their end.

While `shoal` loads such a file, the crawls are recorded instead of run, and execution of the file stops at ``start()``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import Spider

_STARTERS = frozenset({"CrawlerProcess", "AsyncCrawlerProcess", "CrawlerRunner", "AsyncCrawlerRunner"})


class CrawlStartReached(BaseException):
    """Stops the execution of a file where it would start its crawl."""


class RecordedRun(Struct):
    """A crawl that a file starts."""

    kind: type[Spider]
    arguments: dict[str, object]
    settings: Settings


class Recording(Struct):
    """The crawls of a file that is being loaded."""

    as_main: bool
    """Load the file under the name ``__main__``, so that its last lines run too."""
    runs: list[RecordedRun] = []


_current: Recording | None = None


def current() -> Recording | None:
    """The active recording. None if crawls of this process are run, not recorded."""
    return _current


@contextmanager
def recording(*, as_main: bool) -> Iterator[Recording]:
    """Record the crawls that a file starts."""
    global _current
    before, _current = _current, Recording(as_main)
    try:
        yield _current
    finally:
        _current = before


def has_own_run(path: Path) -> bool:
    """Whether the file starts a crawl when it is run as a program."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError, OSError):
        return False  # the import reports it
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_main_guard(node.test)]
    return any(_starts(node) for guard in guards for node in ast.walk(guard)) or any(
        _calls_starter(node, tree) for guard in guards for node in ast.walk(guard)
    )


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _starts(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in _STARTERS


def _calls_starter(node: ast.AST, tree: ast.Module) -> bool:
    """Whether this node calls a function of the file that starts a crawl."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == node.func.id]
    return any(_starts(inner) for function in functions for inner in ast.walk(function))
