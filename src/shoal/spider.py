"""The class that users write: where to start, and what to do with a page."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from shoal.errors import SpiderError
from shoal.http import Request, Response


class Spider:
    """Base class of all spiders. Set ``name`` and ``start_urls``, and write ``parse``.

    A callback takes a response and returns items (dict, dataclass, msgspec Struct, pydantic or attrs), requests, and
    batches of links, as a generator, an async generator, a list, or None. An errback takes the failed request and its
    error, and returns the same.
    """

    name: ClassVar[str] = ""
    start_urls: Sequence[str] = ()
    allowed_domains: Sequence[str] = ()
    """Follow only links to these domains and their subdomains; empty: all."""
    settings: ClassVar[Mapping[str, object]] = {}
    """This spider's own settings. The environment and the command line override them."""
    pipelines: Sequence[Callable[..., object]] = ()
    """Each takes (item, spider) and returns the item, changed or not. It may be async and may raise DropItem."""
    middlewares: Sequence[Callable[..., Awaitable[Response]]] = ()
    """Layers around every fetch, after robots.txt, outermost first: async ``(request, fetch) -> response``."""
    handle_statuses: Collection[int] = ()
    """Statuses other than 2xx whose pages go to the callback instead of being errors."""

    arguments: Mapping[str, object] = {}
    """The arguments this spider was started with."""

    def __init__(self, **arguments: object) -> None:
        """``arguments`` (``-a key=value`` on the command line) become attributes."""
        self.arguments = arguments
        for name, value in arguments.items():
            if name in ("log", "arguments") or callable(getattr(type(self), name, None)):
                raise SpiderError(f"{type(self).__name__}: argument {name!r} would replace the spider's own {name}")
            setattr(self, name, value)
        self.log = logging.getLogger(f"shoal.spider.{self.spider_name()}")

    @classmethod
    def spider_name(cls) -> str:
        return cls.name or cls.__name__.lower()

    def start(self) -> Iterable[Request | str] | AsyncIterable[Request | str]:
        """Return the first requests, or their URLs; may be a generator or an async one. Default: ``start_urls``."""
        return [self.start_urls] if isinstance(self.start_urls, str) else self.start_urls

    def parse(self, response: Response) -> object:
        """Handle the response of a request that has no callback of its own."""
        raise SpiderError(f"{type(self).__name__} has no parse() method; write one, or give every request a callback")

    def callback(self, name: str | None) -> Callable[..., object]:
        """Return the method with this name. SpiderError if the spider does not have it."""
        found: object = getattr(self, name or "parse", None)
        if not callable(found) or (name or "").startswith("__"):
            raise SpiderError(f"{type(self).__name__} has no method {name!r}, but a request has it as its callback")
        return found


def load_spider(reference: str) -> type[Spider]:
    """Load the spider class from ``file.py``, or from ``file.py:ClassOrName`` if the file has several.

    SpiderError says what is wrong with the file, and in which line.
    """
    path_text, _, wanted = reference.partition(".py:")
    path = Path(path_text + ".py" if wanted else reference)
    spiders = spiders_in(path)
    if wanted:
        spiders = [spider for spider in spiders if wanted in (spider.__name__, spider.spider_name())]
    if len(spiders) == 1:
        return spiders[0]
    if not spiders:
        which = f"no spider {wanted!r}" if wanted else "no spider: write a class that inherits from shoal.Spider"
        raise SpiderError(f"{path}: {which}")
    names = ", ".join(f"{path}:{spider.__name__}" for spider in spiders)
    raise SpiderError(f"{path} has several spiders; choose one: {names}")


def spiders_in(path: Path) -> list[type[Spider]]:
    """Return the spider classes that a file defines."""
    if not path.is_file():
        raise SpiderError(f"spider file {path} does not exist; `shoal new NAME` creates one")
    module_name = f"shoal_spider_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path.resolve())
    if spec is None or spec.loader is None:
        raise SpiderError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up the file's classes there
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as exc:
        place = path if exc.filename in (None, str(path.resolve())) else exc.filename  # or a module that it imports
        raise SpiderError(f"{place}, line {exc.lineno or 1}: {exc.msg}: {(exc.text or '').strip()}") from exc
    except (Exception, SystemExit) as exc:  # the user's file may raise anything
        raise SpiderError(f"{path}, line {_line_in(path, exc)}: {type(exc).__name__}: {exc}") from exc
    classes = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    return [each for each in classes if issubclass(each, Spider) and each.__module__ == module_name]


def _line_in(path: Path, exc: BaseException) -> int:
    """Return the last line of this file in the error's traceback."""
    line, trace, name = 0, exc.__traceback__, str(path.resolve())
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
