"""The public API: exact names, imports in one direction, the tree of errors, and fast imports."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from scripts.modules import ROOMS

import shoal
import shoal.errors

SOURCE = Path(shoal.__file__).parent

# Exceptions that never reach a user: they end a step, and the code around it catches them.
CONTROL_FLOW = {
    "shoal.fetch.browser.rendering._NotAPageError",
    "shoal.cli.help.OutputClosed",
    "shoal.fetch.connecting.RefusedAddressError",
    "shoal.fetch.resolving.UnresolvedError",
    "shoal.http.decompress._TruncatedError",
    "shoal.frontier.redis.records.UnreadableError",
    "shoal.fetch.layers.Postponed",
    "shoal.fetch.layers.Replaced",
    "shoal.scrapy.chain._Out",
    "shoal.scrapy.project.CrawlStartReached",
    "shoal.sinks.tablesink._SetBackError",
    "shoal.sinks.tablesink._TableChangedError",
    "shoal.sinks.tablesink._TableGoneError",
    "shoal.api.server.bodies.BodyError",
    "shoal.api.server.budgets.BusyError",
    "shoal.api.server.errors.ProblemError",
    "shoal.fetch.tor.daemon.ControlError",
}


def room_of(module: str) -> int:
    return ROOMS.index(module.split(".")[1])


@cache
def imports_of(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shoal."):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.startswith("shoal."))
    return frozenset(found)


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    module = "shoal." + str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
    for imported in imports_of(path):
        assert room_of(imported) <= room_of(module), f"{module} imports {imported}, which is above it"


@cache
def module_paths() -> dict[str, Path]:
    return {
        "shoal." + str(path.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
        if path != SOURCE / "__init__.py"
    }


@cache
def import_graph() -> dict[str, set[str]]:
    """All modules with the modules they import, also within functions and as ``from package import module``."""
    graph: dict[str, set[str]] = {}
    for module, path in module_paths().items():
        imported = set(imports_of(path))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported |= names_imported(node)
        graph[module] = imported & module_paths().keys()
    return graph


def names_imported(node: ast.ImportFrom) -> set[str]:
    if not node.module or node.module.split(".")[0] != "shoal":
        return set()
    return {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}


def eager_imports(path: Path) -> set[str]:
    """The modules that are imported when this one is: a module of a package instead of the package, if it is named."""
    imported: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            modules = names_imported(node) & module_paths().keys()
            imported |= modules - {node.module} or modules
    return imported


def reachable_from(package: str, graph: dict[str, set[str]]) -> dict[str, str]:
    """All modules that ``package`` imports, directly or not, each with a module that imports it."""
    found: dict[str, str] = {}
    stack = [module for module in graph if f"{module}.".startswith(f"{package}.")]
    while stack:
        module = stack.pop()
        for imported in graph[module] - found.keys():
            found[imported] = module
            stack.append(imported)
    return found


@pytest.mark.parametrize(("leaf", "importers"), [("testing", set()), ("scrapy", {"cli"})])
def test_a_leaf_is_imported_by_no_other_room(leaf: str, importers: set[str]) -> None:
    rooms = {
        module.split(".")[1]
        for module, imported in import_graph().items()
        if any(f"{name}.".startswith(f"shoal.{leaf}.") for name in imported)
    }
    assert rooms - {leaf} == importers


@pytest.mark.parametrize("package", ["shoal.api.batch", "shoal.api.celery"])
def test_nothing_below_the_server_imports_it(package: str) -> None:
    """So there is no path from the server through the tasks back to the server either."""
    back = {
        module: importer
        for module, importer in reachable_from(package, import_graph()).items()
        if module.startswith(("shoal.api.server", "shoal.api.resources", "shoal.api.dashboard", "shoal.cli."))
    }
    assert back == {}


@pytest.mark.parametrize("room", [room for room in ROOMS if (SOURCE / room).is_dir()])
def test_a_room_says_what_it_is_for(room: str) -> None:
    """What it is for, what it may import, and where to start reading."""
    docstring = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text())) or ""
    words = " ".join(docstring.split())
    assert "This room " in words
    assert "may import " in words
    assert "Start with `" in words


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Imports at the top of modules. Some within functions point back."""
    left = {module: eager_imports(path) for module, path in module_paths().items()}
    while free := [module for module, imported in left.items() if not imported & left.keys() - {module}]:
        for module in free:
            del left[module]
    assert left == {}


@pytest.mark.parametrize("package", ["shoal.api.batch", "shoal.api.celery"])
def test_batches_do_not_import_each_other_in_a_circle(package: str) -> None:
    """Not even within functions."""
    graph = import_graph()
    own = {module: graph[module] - {module} for module in graph if f"{module}.".startswith(f"{package}.")}
    left = {module: {name for name in imported if name in own} for module, imported in own.items()}
    while free := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


def test_all_is_exact() -> None:
    assert set(shoal.__all__) == {
        "Spider", "SitemapSpider", "Request", "Response", "Render", "File", "Selector", "Login", "LoggedOut", "Config",
        "crawl", "Crawl", "Orchestrator", "Scheduler", "SyncScheduler", "UrlWorkQueue", "SyncUrlWorkQueue", "Node",
        "ZookeeperCrawler", "DropItem", "ShoalError", "__version__",
    }  # fmt: skip
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError):
        shoal.nonsense  # noqa: B018


def test_a_setting_class_shares_its_name_with_no_other_class() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    values = ("config/", "selector/", "urls/", "errors.py", "http/", "item.py", "parsing.py", "spider.py")
    homes = {name: [each for each in found if not each.startswith("scrapy/")] for name, found in homes.items()}
    assert [
        found for found in homes.values() if len(found) > 1 and any(each.startswith(values) for each in found)
    ] == []


def test_every_error_derives_from_shoal_error_and_is_in_the_tree() -> None:
    for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, pending = set(), [BaseException]
    while pending:
        pending += (derived := type.__subclasses__(pending.pop()))
        found.update(each for each in derived if each.__module__.split(".")[0] == "shoal")
    tree = re.findall(r"(\w+) {2,}\S", shoal.errors.__doc__ or "")
    apart = ("shoal.scrapy.exceptions", "shoal.scrapy.deferred", "shoal.testing.")  # Scrapy's names; errors of tests
    found = {error for error in found if not error.__module__.startswith(apart)}
    errors = {each for each in found if f"{each.__module__}.{each.__qualname__}" not in CONTROL_FLOW}
    assert [each for each in errors if not issubclass(each, shoal.ShoalError)] == []
    assert sorted([*tree, "ShoalError"]) == sorted(each.__name__ for each in errors)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import shoal", ["msgspec", "aiohttp", "turbohtml", "rich", "typer"]),
        ("from shoal import Spider, Request, Config", ["aiohttp", "turbohtml", "rich", "typer", "pyarrow"]),
        ("import shoal.cli.main", ["aiohttp", "turbohtml", "uvloop", "pyarrow", "sqlite3"]),
    ],
)
def test_importing_costs_little(code: str, absent: list[str]) -> None:
    """Slow modules are not imported before they are needed."""
    script = f"{code}\nimport sys\nprint(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
