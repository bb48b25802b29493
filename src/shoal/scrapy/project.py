"""Finds the spiders of a file or of a Scrapy project, with their settings."""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from configparser import Error as ConfigFileError
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from msgspec import Struct

from shoal.errors import SpiderError
from shoal.messages import did_you_mean
from shoal.scrapy.adapter import ScrapyAdapter, adapt
from shoal.scrapy.names import install
from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import Spider
from shoal.scrapy.unsupported import check_file, check_settings
from shoal.spider import SCRAPY, classes_in, line_in

# Files that start a crawl themselves: ``CrawlerProcess(...).crawl(Spider)`` and ``start()`` at their end.
#
# While `shoal` loads such a file, the crawls are recorded instead of run, and execution of the file stops at
# ``start()``.


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
    functions = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == node.func.id]
    return any(_starts(inner) for function in functions for inner in ast.walk(function))


log = logging.getLogger("shoal.scrapy")


def load_scrapy_spider(reference: str) -> type[ScrapyAdapter]:
    """The adapter of the spider that a reference names: ``scrapy:FILE.py``, ``scrapy:FILE.py:Class``,
    ``scrapy:FOLDER:SPIDER``, or ``scrapy:FOLDER`` if it has one spider. SpiderError says what is wrong."""
    install()
    text = reference.removeprefix(SCRAPY)
    if text.endswith(".py") or ".py:" in text:
        file, _, name = text.partition(".py:")
        return _from_file(Path(f"{file}.py" if name else text), name)
    folder, _, name = text.rpartition(":")
    return _from_project(Path(folder or name), name if folder else "")


def _from_file(path: Path, name: str) -> type[ScrapyAdapter]:
    if not path.is_file():
        raise SpiderError(f"spider file {path} does not exist")
    root = find_root(path.resolve().parent)
    settings = Settings() if root is None else project_settings(root)
    check_file(path)
    with recording(as_main=has_own_run(path)) as runs:
        kinds: list[type[Spider]] = []
        try:
            kinds = _classes(path, root, as_main=runs.as_main)
        except CrawlStartReached:
            log.info("%s starts a crawl itself: Shoal runs this crawl, and skips the code after it", path)
    for run in runs.runs:
        if not name or name in (run.kind.__name__, getattr(run.kind, "name", None)):
            adapter = _adapted(run.kind, run.settings if len(run.settings) else settings)
            adapter.own_arguments = run.arguments
            if len(runs.runs) > 1 and not name:
                names = ", ".join(f"{path}:{run.kind.__name__}" for run in runs.runs)
                raise SpiderError(f"{path} starts several crawls; choose one: {names}")
            return adapter
    return _adapted(_choose(kinds, name, str(path)), settings)


def _classes(path: Path, root: Path | None, *, as_main: bool) -> list[type[Spider]]:
    """The spider classes of a file. A file of a project is imported as a module of its package."""
    name = None if root is None or as_main else _module_name(path.resolve(), root)
    if name is None:
        return classes_in(path, Spider, as_main=as_main)
    return list(_spiders_of(_import(name, path)))


def _from_project(folder: Path, name: str) -> type[ScrapyAdapter]:
    if not folder.is_dir():
        raise SpiderError(
            f"{folder} is not a folder: pass FILE.py, or the folder of a Scrapy project and a spider's name"
        )
    root = find_root(folder.resolve())
    if root is None:
        raise SpiderError(f"{folder} is not a Scrapy project: it has no scrapy.cfg")
    settings = project_settings(root)
    return _adapted(find_spider_class(settings, name, str(folder)), settings)


def _adapted(kind: type[Spider], settings: Settings) -> type[ScrapyAdapter]:
    adapter = adapt(kind, settings)
    check_settings(adapter.scrapy_settings, kind)
    return adapter


def find_root(folder: Path) -> Path | None:
    """The folder of the Scrapy project that contains this folder; None if there is none."""
    return next((place for place in (folder, *folder.parents) if (place / "scrapy.cfg").is_file()), None)


def project_settings(root: Path) -> Settings:
    """The settings of a project: those of its module replace Scrapy's defaults."""
    config = ConfigParser()
    try:
        config.read(root / "scrapy.cfg")
        section = os.environ.get("SCRAPY_PROJECT", "default")
        name = os.environ.get("SCRAPY_SETTINGS_MODULE") or config.get("settings", section, fallback="")
    except ConfigFileError as exc:
        raise SpiderError(f"{root / 'scrapy.cfg'}: {exc}") from exc
    if not name:
        raise SpiderError(f"{root / 'scrapy.cfg'} names no settings module: write [settings] default = NAME.settings")
    install()
    _forget_others(name.partition(".")[0], root)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    os.environ.setdefault("SCRAPY_SETTINGS_MODULE", name)
    settings = Settings()
    settings.setmodule(_import(name, root / "scrapy.cfg"), "project", f"{name.replace('.', '/')}.py")
    return settings


def _forget_others(package: str, root: Path) -> None:
    """Forget the modules of another project whose package has the same name."""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
    if module is None or any(str(root) in place for place in places):
        return
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _import(name: str, path: Path) -> ModuleType:
    """Import a module of a project. SpiderError names the line that fails."""
    try:
        return import_module(name)
    except SyntaxError as exc:
        raise SpiderError(f"{exc.filename}, line {exc.lineno}: {exc.msg}") from exc
    except (Exception, SystemExit) as exc:  # the user's module may raise anything
        place = line_in(exc)
        where = str(path) if place is None else f"{place[0]}, line {place[1]}"
        raise SpiderError(f"{where}: {type(exc).__name__}: {exc}") from exc


def _module_name(path: Path, root: Path) -> str | None:
    """The dotted name of a file below the root; None if a folder on the way is not a package."""
    if not path.is_relative_to(root):
        return None
    parts = path.relative_to(root).with_suffix("").parts
    folders = [root.joinpath(*parts[: count + 1]) for count in range(len(parts) - 1)]
    return ".".join(parts) if parts[1:] and all((parent / "__init__.py").is_file() for parent in folders) else None


def find_spider_class(settings: Settings, wanted: str, where: str) -> type[Spider]:
    """The spider with this name in SPIDER_MODULES; the only one if no name is given."""
    modules = [module for name in settings.getlist("SPIDER_MODULES") for module in _module_files(str(name))]
    if not modules:
        raise SpiderError(f"{where}: SPIDER_MODULES is empty, or its packages have no modules")
    likely = [module for module in modules if wanted and wanted in module[1].read_text(errors="replace")]
    failure: SpiderError | None = None
    kinds: dict[str, type[Spider]] = {}
    for chosen in (likely, modules):  # a name may also be made by code
        for name, path in chosen:
            try:
                for kind in _spiders_of(_import(name, path)):
                    kinds[str(kind.name or kind.__name__)] = kind
            except SpiderError as error:
                failure = failure or error
        if wanted in kinds:
            check_file(Path(sys.modules[kinds[wanted].__module__].__file__ or ""))
            return kinds[wanted]
    if not wanted and len(kinds) == 1:
        return next(iter(kinds.values()))
    if failure is not None:
        raise failure
    if not wanted:
        raise SpiderError(f"{where} has several spiders; choose one: {', '.join(sorted(kinds)) or 'none'}")
    raise SpiderError(
        f"{where} has no spider {wanted!r}{did_you_mean(wanted, list(kinds))}; it has {', '.join(sorted(kinds))}"
    )


def spider_classes(settings: Settings) -> dict[str, type[Spider]]:
    """All spiders in SPIDER_MODULES by name. SpiderError if a module cannot be imported."""
    modules = [module for name in settings.getlist("SPIDER_MODULES") for module in _module_files(str(name))]
    kinds = [kind for name, path in modules for kind in _spiders_of(_import(name, path))]
    return {str(kind.name): kind for kind in kinds if kind.name}  # a base class of the project has no name


def _module_files(name: str) -> Iterator[tuple[str, Path]]:
    """The modules of a package with their files, without importing them; or the module itself."""
    folder, _, last = name.rpartition(".")
    package = _import(folder, Path(name)) if folder else None
    places = [Path(folder) for folder in (sys.path if package is None else package.__path__)]
    for place in places:
        if (place / f"{last}.py").is_file():
            yield name, place / f"{last}.py"
            return
        if (place / last).is_dir():
            for file in sorted((place / last).rglob("*.py")):
                parts = file.relative_to(place / last).with_suffix("").parts
                yield ".".join((name, *(part for part in parts if part != "__init__"))), file
            return


def _spiders_of(module: ModuleType) -> Iterator[type[Spider]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Spider) and value.__module__ == module.__name__:
            yield value


def _choose(kinds: list[type[Spider]], name: str, where: str) -> type[Spider]:
    with_names = [kind for kind in kinds if getattr(kind, "name", None)]
    if with_names and name in [kind.__name__ for kind in kinds if kind not in with_names]:
        raise SpiderError(f"{where}: {name} has no name: set `name`, as the other spiders of the file do")
    kinds = with_names or kinds  # a base class of the project has no name
    if name:
        kinds = [kind for kind in kinds if name in (kind.__name__, getattr(kind, "name", None))]
    if len(kinds) == 1:
        return kinds[0]
    if not kinds:
        raise SpiderError(f"{where}: no spider{f' {name!r}' if name else ''}: write a subclass of scrapy.Spider")
    raise SpiderError(f"{where} has several spiders; choose one: {', '.join(f'{where}:{e.__name__}' for e in kinds)}")
