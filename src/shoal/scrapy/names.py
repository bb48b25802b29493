"""Makes ``import scrapy`` find this package: every module of Scrapy that spiders import, and a part of Twisted.

A finder at the front of ``sys.meta_path`` finds the modules below. It is installed when a Scrapy spider is loaded, and
is used even if the real Scrapy is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HERE = "shoal.scrapy"

MODULES: dict[str, tuple[str, ...]] = {
    "scrapy": ("",),
    "scrapy.http": ("http",),
    "scrapy.http.headers": ("headers",),
    "scrapy.http.request": ("request",),
    "scrapy.http.request.form": ("http",),
    "scrapy.http.request.json_request": ("request",),
    "scrapy.http.response": ("response",),
    "scrapy.http.response.html": ("response",),
    "scrapy.http.response.json": ("response",),
    "scrapy.http.response.text": ("response",),
    "scrapy.http.response.xml": ("response",),
    "scrapy.responsetypes": ("response",),
    "scrapy.spiders": ("spider", "spiders"),
    "scrapy.spiders.crawl": ("spiders",),
    "scrapy.spiders.feed": ("spiders",),
    "scrapy.spiders.sitemap": ("spiders",),
    "scrapy.spiders.init": ("spiders",),
    "scrapy.spider": ("spider",),
    "scrapy.spiderloader": ("process",),
    "scrapy.item": ("item",),
    "scrapy.selector": ("selector",),
    "scrapy.selector.unified": ("selector",),
    "scrapy.loader": ("loader",),
    "scrapy.loader.processors": ("loader", "@itemloaders.processors"),
    "scrapy.loader.common": ("@itemloaders.common",),
    "scrapy.linkextractors": ("linkextractors",),
    "scrapy.linkextractors.lxmlhtml": ("linkextractors",),
    "scrapy.link": ("linkextractors",),
    "scrapy.exceptions": ("exceptions",),
    "scrapy.exporters": ("exporters",),
    "scrapy.utils.serialize": ("exporters",),
    "scrapy.settings": ("settings",),
    "scrapy.settings.default_settings": ("default_settings",),
    "scrapy.signals": ("signals",),
    "scrapy.signalmanager": ("signals",),
    "scrapy.crawler": ("process", "crawler"),
    "scrapy.statscollectors": ("crawler",),
    "scrapy.pipelines": (),
    "scrapy.pipelines.files": ("pipelines",),
    "scrapy.pipelines.images": ("pipelines",),
    "scrapy.dupefilters": ("helpers",),
    "scrapy.cmdline": ("helpers",),
    "scrapy.shell": ("helpers",),
    "scrapy.logformatter": ("helpers",),
    "scrapy.extensions": (),
    "scrapy.extensions.closespider": ("helpers",),
    "scrapy.spidermiddlewares": (),
    "scrapy.spidermiddlewares.base": ("outputs",),
    "scrapy.spidermiddlewares.httperror": ("exceptions",),
    "scrapy.downloadermiddlewares": (),
    "scrapy.utils": (),
    **dict.fromkeys(
        (f"scrapy.downloadermiddlewares.{name}"
         for name in ("retry", "useragent", "defaultheaders", "httpproxy", "redirect", "cookies", "httpcache",
                      "downloadtimeout")),
        ("downloadermiddlewares",),
    ),
    **dict.fromkeys(
        (f"scrapy.utils.{name}"
         for name in ("project", "log", "python", "misc", "request", "response", "url", "httpobj", "spider", "gz",
                      "trackref", "conf")),
        ("helpers", "@w3lib.url"),
    ),
    "scrapy.utils.markup": ("@w3lib.html",),
    "scrapy.utils.defer": ("deferred",),
    "scrapy.utils.reactor": ("deferred",),
    "scrapy.utils.iterators": ("helpers",),
    "twisted": (),
    "twisted.internet": ("deferred",),
    "twisted.internet.error": ("exceptions",),
    "twisted.internet.defer": ("deferred",),
    "twisted.internet.threads": ("deferred",),
    "twisted.internet.task": ("deferred",),
    "twisted.internet.asyncioreactor": ("deferred",),
    "pydispatch": (),
    "pydispatch.dispatcher": ("signals",),
    "scrapy.xlib": (),
    "scrapy.xlib.pydispatch": (),
    "scrapy.xlib.pydispatch.dispatcher": ("signals",),
    "twisted.enterprise": (),
    "twisted.enterprise.adbapi": ("adbapi",),
    "twisted.python": (),
    "twisted.python.failure": ("failure",),
    "twisted.web": (),
    "twisted.web.client": ("exceptions",),
    "twisted.web._newclient": ("exceptions",),
    "scrapy.core": (),
    "scrapy.core.downloader": (),
    "scrapy.core.downloader.handlers": (),
    "scrapy.core.downloader.handlers.http11": ("exceptions",),
}  # fmt: skip
"""The modules of Scrapy that Shoal has, each with the modules of this package that define its names. ``@`` marks a
module of another package."""


class _Alias(ModuleType):
    """A module whose names come from modules of this package. They are imported on first use."""

    def __init__(self, name: str, places: Sequence[str]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # every module can have submodules
        self._places = places

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        for place in self._places:
            module = _module(place)
            if (value := vars(module).get(name, self)) is not self:
                return value
            if hasattr(module, "__getattr__"):
                try:
                    return module.__getattr__(name)
                except AttributeError:
                    continue
        if f"{self.__name__}.{name}" in MODULES:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"Shoal does not have {self.__name__}.{name}")


def _module(place: str) -> ModuleType:
    return import_module(place[1:] if place.startswith("@") else f"{_HERE}.{place}" if place else _HERE)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of ``MODULES``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        if fullname.startswith("scrapy."):
            from shoal.scrapy.unsupported import advice_for

            raise ModuleNotFoundError(f"Shoal does not have {fullname}: {advice_for(fullname)}", name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, MODULES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


_finder = _Finder()


def install() -> None:
    """Let ``import scrapy`` find this package, from now on."""
    if _finder in sys.meta_path:
        return
    for name in [name for name in sys.modules if name in MODULES or name.partition(".")[0] == "scrapy"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _finder)


def submodule(name: str) -> ModuleType:
    """The module ``scrapy.NAME``, so that ``scrapy.exceptions`` works after ``import scrapy`` alone. AttributeError if
    there is none."""
    if f"scrapy.{name}" not in MODULES:
        raise AttributeError(f"Shoal does not have scrapy.{name}")
    return _Alias(f"scrapy.{name}", MODULES[f"scrapy.{name}"])


def has(module: str, name: str = "") -> bool:
    """Whether Shoal has a module of Scrapy, or a name in it."""
    if module not in MODULES:
        return False
    try:
        return not name or name == "*" or hasattr(_Alias(module, MODULES[module]), name)
    except ImportError:
        return False
