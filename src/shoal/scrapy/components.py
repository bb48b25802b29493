"""Pipelines, middlewares and extensions: classes that settings name, created with Scrapy's rules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from inspect import Parameter, isasyncgenfunction, isawaitable, signature
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import SpiderError
from shoal.scrapy.exceptions import NotConfigured
from shoal.scrapy.values import Function

if TYPE_CHECKING:
    from shoal.scrapy.crawler import Crawler
    from shoal.scrapy.spider import Spider

log = logging.getLogger("shoal.scrapy")


class ProjectComponent(NamedTuple):
    """A pipeline, middleware or extension, with its order."""

    order: float
    name: str
    instance: Any


def load_object(path: object) -> Any:
    """Import the object that a dotted path names. A value that is not text is returned unchanged."""
    if not isinstance(path, str):
        return path
    module, _, name = path.rpartition(".")
    if module.startswith("scrapy."):
        from shoal.scrapy.names import install

        install()
    if not module:
        raise ValueError(f"Error loading object '{path}': not a full path")
    imported = import_module(module)
    try:
        return getattr(imported, name)
    except AttributeError:
        raise NameError(f"Module '{module}' doesn't define any object named '{name}'") from None


def class_path(component: object) -> str:
    """The dotted path of a component that settings name by path or by class."""
    if isinstance(component, str):
        return component
    return f"{getattr(component, '__module__', '')}.{getattr(component, '__qualname__', repr(component))}"


def build(kind: Any, crawler: Crawler, /, *args: object, **kwargs: object) -> Any:
    """Create a component with its ``from_crawler`` or ``from_settings``, or else with its constructor."""
    if hasattr(kind, "from_crawler"):
        return kind.from_crawler(crawler, *args, **kwargs)
    if hasattr(kind, "from_settings"):
        return kind.from_settings(crawler.settings, *args, **kwargs)
    return kind(*args, **kwargs)


def load_components(orders: Mapping[object, float | None], setting: str, crawler: Crawler) -> list[ProjectComponent]:
    """Create the components of a setting, in their order.

    A component is left out if its order is None, or if it raises NotConfigured. SpiderError if one cannot be imported
    or created.
    """
    components: list[ProjectComponent] = []
    chosen = [(key, order) for key, order in orders.items() if order is not None]
    for key, order in chosen:
        if not isinstance(order, Real):
            raise SpiderError(f"{setting}: the order of {class_path(key)} is {order!r}: write a number, or None")
    for key, order in sorted(chosen, key=lambda p: p[1]):
        name = class_path(key)
        try:
            components.append(ProjectComponent(float(order), name, build(load_object(key), crawler)))
        except NotConfigured as exc:
            log.warning("%s: %s is not used%s", setting, name, f": {exc}" if str(exc) else "")
        except SpiderError:
            raise
        except Exception as exc:  # the user's code may raise anything
            raise SpiderError(f"{setting}: cannot create {name}: {type(exc).__name__}: {exc}") from exc
    return components


def takes(function: Function, name: str) -> bool:
    """Whether a function accepts an argument of this name."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(parameter.name == name or parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)


class Hook:
    """A method of a component. It is awaited if it is a coroutine, and gets the spider if it takes one."""

    def __init__(self, component: ProjectComponent, method: str, spider: Spider | None) -> None:
        self.name = f"{component.name}.{method}"
        self.order = component.order
        self._function: Function = getattr(component.instance, method)
        self.is_async_generator = isasyncgenfunction(self._function)
        self._extra = {"spider": spider} if takes(self._function, "spider") else {}

    def call(self, **arguments: object) -> object:
        """Call it. A coroutine is returned, not awaited."""
        return self._function(**arguments, **self._extra)

    async def __call__(self, **arguments: object) -> Any:
        result = self._function(**arguments, **self._extra)
        return await result if isawaitable(result) else result


def hooks_of(components: list[ProjectComponent], method: str, spider: Spider | None) -> list[Hook]:
    """The components' methods of this name, in their order."""
    return [Hook(component, method, spider) for component in components if hasattr(component.instance, method)]
