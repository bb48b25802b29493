"""Plugins: outputs, HTTP clients and frontiers of other packages, found by their entry points.

A package registers them in its ``pyproject.toml``::

    [project.entry-points."shoal.sinks"]
    mongodb = "shoal_mongodb:MongoSink"

The name is the scheme of an output or a frontier, or the value of ``http.client``. Nothing is imported before it is
used. The names of Shoal itself cannot be replaced. See ``docs/plugins.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from shoal.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind: TypeAlias = Literal["sinks", "fetchers", "frontiers"]
Registered: TypeAlias = Callable[..., Any]
"""What a package registered: a class or a function. Its types are unknown."""

BUILT_IN: dict[Kind, frozenset[str]] = {
    "sinks": frozenset({"sqlite", "postgresql", "postgres", "mysql", "mariadb", "s3", "gs", "az"}),
    "fetchers": frozenset({"aiohttp"}),
    "frontiers": frozenset({"memory", "sqlite", "local", "postgresql", "redis", "rediss"}),
}
"""The names that belong to Shoal."""
SHOWN: dict[Kind, str] = {"sinks": "output {}://", "fetchers": 'http.client "{}"', "frontiers": "frontier {}:"}
"""How a plugin of each kind is used."""


class Plugin(NamedTuple):
    """An entry point of an installed package."""

    kind: Kind
    name: str
    package: str
    """The package and its version."""
    entry: EntryPoint

    @property
    def shown(self) -> str:
        return SHOWN[self.kind].format(self.name)

    def load(self) -> Registered:
        """Import it. PluginError if that fails, or if it is not callable."""
        try:
            factory: object = self.entry.load()
        except Exception as exc:  # the code of a stranger may raise anything
            raise PluginError(
                f"the plugin {self.name!r} of {self.package} is broken: {self.entry.value} cannot be imported: "
                f"{type(exc).__name__}: {exc}. Update or uninstall the package"
            ) from exc
        if not callable(factory):
            raise PluginError(
                f"the plugin {self.name!r} of {self.package} is broken: {self.entry.value} is not callable"
            )
        return factory


def installed(kind: Kind) -> list[Plugin]:
    """All plugins of this kind, by name. A name may occur several times, or belong to Shoal: see `problem_of`."""
    from importlib.metadata import entry_points  # slow to import, and needed for unknown names only

    entries = {}
    for entry in entry_points(group=f"shoal.{kind}"):
        package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        entries[entry.name.lower(), entry.value, package] = entry
    return [Plugin(kind, name, package, entry) for (name, _, package), entry in sorted(entries.items())]


def names(kind: Kind) -> list[str]:
    """The names of the installed plugins that can be used, without importing them."""
    return list(dict.fromkeys(plugin.name for plugin in installed(kind) if plugin.name not in BUILT_IN[kind]))


def problem_of(plugin: Plugin, others: list[Plugin]) -> str | None:
    """Why a plugin cannot be chosen by its name. None if it can. Its code is not imported."""
    if plugin.name in BUILT_IN[plugin.kind]:
        return f"not used: {plugin.shown} belongs to Shoal"
    same = [other.package for other in others if other.name == plugin.name]
    if len(same) > 1:
        return f"{' and '.join(same)} both have the plugin {plugin.name!r}; uninstall one of them"
    return None


def load(kind: Kind, name: str) -> Registered | None:
    """The object that a package registered under this name; None if there is none.

    PluginError if several packages registered the name, or if the plugin cannot be imported."""
    name = name.lower()
    plugins = installed(kind) if name not in BUILT_IN[kind] else []
    plugin = next((candidate for candidate in plugins if candidate.name == name), None)
    if plugin is None:
        return None
    problem = problem_of(plugin, plugins)
    if problem is not None:
        raise PluginError(problem)
    return plugin.load()


def hint(kind: Kind) -> str:
    """The end of a message about an unknown name: which plugins are installed."""
    usable = names(kind)
    return f"; installed plugins: {', '.join(usable)}" if usable else "; no plugin is installed for it"
