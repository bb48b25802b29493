"""The class that users write: where to start, and what to do with a page."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from inspect import Parameter, getsource, signature
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol, TypeVar, cast

from shoal.config import Config
from shoal.errors import SpiderError
from shoal.http import Render, Request, Response
from shoal.item import ItemTypes
from shoal.messages import did_you_mean

if TYPE_CHECKING:
    from shoal.http.login import Login

_log = logging.getLogger("shoal.spider")
_MAX_COUNTERS = 1000
"""The limit of user counters. Further names share one counter, because names may come from pages."""
OTHER = "(other)"
SCRAPY = "scrapy:"
"""The prefix of references to Scrapy spiders."""
T = TypeVar("T")
_NOT_OF_THE_USER = (str(Path(__file__).parent) + "/", str(Path(logging.__file__).parent.parent) + "/")


class SpiderStats(Mapping[str, float]):
    """The counters of this process: those of the crawl (``fetched``, ``items``, ``bytes`` ...), and the user's own."""

    def __init__(self) -> None:
        self.own: Counter[str] = Counter()
        self._live: Callable[[], Mapping[str, float]] = dict

    def bind(self, live: Callable[[], Mapping[str, float]]) -> None:
        """Read the counters of the crawl from here."""
        self._live = live

    def inc(self, name: str, by: int = 1) -> None:
        """Add to a counter of your own."""
        if name not in self.own and len(self.own) >= _MAX_COUNTERS:
            name = OTHER
        self.own[name] += by

    def __getitem__(self, name: str) -> float:
        return self.own[name] if name in self.own else self._live()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._live(), *self.own)))

    def __len__(self) -> int:
        return len(list(iter(self)))


class RunControl(Protocol):
    """What a spider may do with the crawl that it takes part in."""

    config: Config
    is_private: bool
    """Only this process works on the run, and its frontier is in memory."""

    def stop(self) -> None:
        """End the crawl of this process: pages in flight are finished."""
        ...

    def end(self, reason: str) -> None:
        """End the run, in all its processes: pages in flight are finished."""
        ...

    async def push(self, requests: Sequence[Request]) -> int:
        """Push requests to the frontier. Returns how many were new."""
        ...

    def is_known(self, url: str) -> bool:
        """Whether the frontier surely has the page of this URL: a request for it would be a duplicate."""
        ...

    def is_in_scope(self, url: str) -> bool:
        """Whether the run takes a request for this URL, in normal form. Its depth is not checked."""
        ...


_FOREIGN_NAMES = {
    "custom_settings": "name it `settings`, with Shoal's keys: `shoal config` lists them",
    "start_requests": "name it `start`",
    "make_requests_from_url": "write `start`, and yield requests there",
    "from_crawler": "write `__init__`; arguments of the spider are keyword arguments",
    "handle_httpstatus_list": "name it `handle_statuses`",
}
"""Attributes that spiders of other frameworks define, and what to write instead."""


class EndedRun(Protocol):
    """The counts of a whole run, for `Spider.judge`."""

    @property
    def pages(self) -> int:
        """Pages that were fetched and handled."""
        ...

    @property
    def failed(self) -> int:
        """Failed pages, without those that robots.txt or the scope forbids, and without broken links."""
        ...

    @property
    def items(self) -> int: ...

    @property
    def dead_kinds(self) -> Mapping[str, int]:
        """All failed requests by kind: ``timeout``, ``http 500``, ``callback``, ``broken link``, ``robots`` ..."""
        ...


class _ForeignAttribute:
    """An attribute that spiders of other frameworks have. Reading it raises an AttributeError that says what to use
    instead. A spider may set its own."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, spider: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}: {self._instead}")


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
    setting_sources: ClassVar[Mapping[str, str]] = {}
    """Where ``settings`` come from, by key, if they were not written here."""
    pipelines: Sequence[Callable[..., object]] = ()
    """Each takes (item, spider) and returns the item, changed or not. It may be async and may raise DropItem. A class
    is created once per process; its ``open(spider)`` and ``close(spider)`` are called if it has them."""
    outputs: Sequence[str] = ()
    """Where items go, as with ``-o``, in addition to the outputs on the command line."""
    fields: Sequence[str] = ()
    """The first fields of items that are dicts, in this order. A missing field is None."""
    middlewares: Sequence[Callable[..., Awaitable[Response]]] = ()
    """Layers around every fetch, after robots.txt, outermost first: async ``(request, fetch) -> response``."""
    render: Render | Mapping[str, object] | bool | str | None = None
    """Render the pages in a browser: True, ``"auto"``, or a `Render`. A request's own ``render`` overrides it."""
    handle_statuses: Collection[int] = ()
    """Statuses other than 2xx whose pages go to the callback instead of being errors."""

    arguments: Mapping[str, object] = {}
    """The arguments this spider was started with."""
    stop_reason: str | None = None
    """What was passed to ``stop``. None: it was not called in this process."""
    _control: RunControl | None = None
    """The crawl that it takes part in."""
    _arguments_of_others: Collection[str] = ()
    """The names of arguments that others may have written: in the API, a schedule or a stored run."""

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        mistakes = [f"`{name}`; {instead}" for name, instead in _FOREIGN_NAMES.items() if name in vars(cls)]
        if mistakes:
            raise SpiderError(f"{cls.__name__}: Shoal does not use {'. It does not use '.join(mistakes)}")

    if not TYPE_CHECKING:  # a type checker reports these itself
        logger = _ForeignAttribute("use `self.log`")
        crawler = _ForeignAttribute("use `self.stats` for counters, and arguments of the spider for settings")

    def __init__(self, **arguments: object) -> None:
        """``arguments`` (``-a key=value`` on the command line) become attributes."""
        self.arguments = arguments
        for name, value in arguments.items():
            if name in ("log", "arguments", "stats") or callable(getattr(type(self), name, None)):
                raise SpiderError(f"{type(self).__name__}: argument {name!r} would replace the spider's own {name}")
            setattr(self, name, value)

    @classmethod
    def other_settings(cls) -> Sequence[str]:
        """Lines for `shoal config` about settings of the spider that are not Shoal's."""
        return ()

    @classmethod
    def spider_name(cls) -> str:
        return cls.name or cls.__name__.lower()

    def start(self) -> Iterable[Request | str] | AsyncIterable[Request | str]:
        """Return the first requests, or their URLs; may be a generator or an async one. Default: ``start_urls``."""
        return [self.start_urls] if isinstance(self.start_urls, str) else self.start_urls

    def parse(self, response: Response) -> object:
        """Handle the response of a request that has no callback of its own."""
        raise SpiderError(f"{type(self).__name__} has no parse() method; write one, or give every request a callback")

    def blocked(self, response: Response) -> bool:
        """Whether the host blocks the identity that fetched this page (setting ``proxies``). The identity then
        rests, and the page is fetched with another one. Default: 403 and 429, unless the spider handles them."""
        return response.status in (403, 429) and response.status not in self.handle_statuses

    async def log_in(self, login: Login) -> None:
        """Log in: fetch pages and submit forms with ``login.fetch``. Called once for all processes of the run before
        the first page, and again when ``logged_out`` says so. Raise LoginError, or call ``login.fail``, if it failed.
        Needs ``logged_out``."""

    def logged_out(self, response: Response) -> bool:
        """Whether a page was answered without a login. It is fetched again after the next login. Write a method, or
        ``logged_out = LoggedOut(...)``."""
        return False

    @property
    def can_log_in(self) -> bool:
        return type(self).log_in is not Spider.log_in

    @property
    def needs_login(self) -> bool:
        """Whether the spider has a rule for pages without a login. SpiderError if it has ``log_in`` and no rule."""
        has_rule = type(self).logged_out is not Spider.logged_out or "logged_out" in vars(self)
        if self.can_log_in and not has_rule:
            raise SpiderError(
                f"{type(self).__name__}: log_in() needs a rule for pages without a login; for example "
                'logged_out = LoggedOut(statuses=[401], redirect="/login")'
            )
        return has_rule

    def joined(self, run: RunControl) -> None:
        """Called in each process that works on the run, before the pipelines and the spider are opened."""

    def opened(self) -> object:
        """Called once in each process that works on the run, before its first page. It may be async."""

    def stop(self, reason: str = "") -> None:
        """End the run, in all its processes. Pages in flight are finished and their items stored; requests that are
        left stay in the queue. The summary and `shoal runs` show the reason."""
        self.stop_reason = reason
        if self._control is not None:
            self._control.end(reason)

    async def idle(self) -> bool:
        """Called when this process finds the run finished. Return True to keep it open: because requests were pushed,
        or will be. It is called again some seconds later."""
        return False

    def judge(self, run: EndedRun) -> str | None:
        """Your own rule for the outcome of a run, called when it has ended. Return why the run failed; None if it did
        not."""
        return None

    def closed(self, reason: str) -> object:
        """Called once at the end of the process's work. It may be async.

        ``reason``: ``finished``; ``limit`` (a limit is reached, or ``stop`` was called); ``stopped``; ``failed``.
        """

    @cached_property
    def log(self) -> logging.Logger:
        return logging.getLogger(f"shoal.spider.{self.spider_name()}")

    @cached_property
    def stats(self) -> SpiderStats:
        """The counters of this process, and your own: ``self.stats.inc("name")``. The summary shows yours."""
        return SpiderStats()

    @cached_property
    def item_types(self) -> ItemTypes:
        """The classes of its items, for programs that read them."""
        return ItemTypes(type(self))

    def with_outputs(self, outputs: Sequence[str]) -> tuple[str, ...]:
        """Return the outputs of the spider, and then the ``given`` ones."""
        return (*(spec for spec in self.outputs if spec not in outputs), *outputs)

    def callback(self, name: str | None) -> Callable[..., object]:
        """Return the method with this name. SpiderError if the spider does not have it."""
        method: object = getattr(self, name or "parse", None)
        if not callable(method) or (name or "").startswith("__"):
            hint = did_you_mean(name or "", self._own_methods())
            raise SpiderError(
                f"{type(self).__name__} has no method {name!r}, but a request has it as its callback{hint}"
            )
        return method

    def _own_methods(self) -> list[str]:
        """The methods that may be callbacks: those that the spider adds, and ``parse``."""
        names = (name for name in dir(type(self)) if name[0] != "_" and callable(getattr(type(self), name, None)))
        return [name for name in names if name == "parse" or not hasattr(Spider, name)]


def check_declared(kind: type[Spider], arguments: Iterable[str]) -> None:
    """SpiderError for an argument that a spider with an ``__init__`` of its own does not declare, and for one that
    looks like a typo: nothing in the code of the spider has its name, and something has a similar one."""
    if kind.__init__ is Spider.__init__:
        _check_used(kind, arguments)
        return
    parameters = [parameter for parameter in signature(kind.__init__).parameters.values() if parameter.name != "self"]
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    declared = [parameter.name for parameter in parameters if parameter.kind in by_name]
    accepts_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    for name in arguments:
        if name in declared or (accepts_any and (not declared or _is_data(kind, name))):
            continue
        near = get_close_matches(name, declared, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(declared)}" if declared else ""
        raise SpiderError(f"{kind.__name__} has no argument {name!r}{hint}")
    if not declared:
        _check_used(kind, arguments)


def _check_used(kind: type[Spider], arguments: Iterable[str]) -> None:
    unknown = [name for name in arguments if not hasattr(kind, name)]
    if not unknown or (source := _source_of(kind)) is None or re.search(r"\barguments\b", source):
        return
    for name in unknown:
        if re.search(rf"\b{re.escape(name)}\b", source):
            continue
        read = re.findall(r"\b(?:self|spider)\.([a-z]\w*)", source)
        names = (*dir(kind), *read)
        hint = did_you_mean(name, [own for own in names if own[0] != "_" and not callable(getattr(kind, own, None))])
        if hint:
            raise SpiderError(f"{kind.__name__} has no argument {name!r}{hint}")
        _log.warning("%s: nothing in its code reads the argument %r", kind.__name__, name)


def _source_of(kind: type[Spider]) -> str | None:
    """The code of the modules that define the spider, its pipelines and its layers. None if some is not available."""
    parts = (*kind.__mro__, *kind.pipelines, *kind.middlewares)
    names = {getattr(part, "__module__", type(part).__module__) for part in parts}
    try:
        return "\n".join(
            getsource(sys.modules[name]) for name in names if name != "builtins" and name.partition(".")[0] != "shoal"
        )
    except (KeyError, OSError, TypeError):
        return None


def _report_similar_names(kind: type[Spider]) -> None:
    """Log attributes that have no effect, and whose names are similar to ones that have."""
    options = [name for name in Spider.__annotations__ if name[0] != "_"]
    for name, value in vars(kind).items():
        if name[0] == "_" or callable(value) or name in options or isinstance(value, property | classmethod):
            continue
        near = get_close_matches(name, [option for option in options if option not in vars(kind)], 1, 0.8)
        if near and not re.search(rf"\b(?:self|cls|spider)\.{name}\b", _source_of(kind) or name):
            _log.warning("%s.%s has no effect; did you mean %s?", kind.__name__, name, near[0])


def create_spider(kind: type[Spider], arguments: Mapping[str, object]) -> Spider:
    """Create a spider. SpiderError for an argument that it does not declare.

    Its ``arguments`` are all of these, also those that its ``__init__`` does not pass on: workers of a fleet create it
    again from them."""
    check_declared(kind, arguments)
    _report_similar_names(kind)
    spider = kind(**arguments)
    spider.arguments = dict(arguments)
    return spider


def _is_data(kind: type[Spider], name: str) -> bool:
    """Whether the class has an attribute of this name that an argument may replace."""
    return hasattr(kind, name) and not callable(getattr(kind, name))


importing: list[Path] = []
"""The spider files that are being imported. A crawl must not begin meanwhile."""


def load_spider(reference: str) -> type[Spider]:
    """Load the spider class from ``file.py``, or from ``file.py:ClassOrName`` if the file has several.

    A reference that begins with ``scrapy:`` is a Scrapy spider. SpiderError says what is wrong with the file, and in
    which line.
    """
    if reference.startswith(SCRAPY):
        return cast("type[Spider]", import_module("shoal.scrapy.project").load_scrapy_spider(reference))
    path_text, _, class_name = reference.partition(".py:")
    path = Path(path_text + ".py" if class_name else reference)
    spiders = in_file = spiders_in(path)
    if class_name:
        spiders = [spider for spider in in_file if class_name in (spider.__name__, spider.spider_name())]
    if len(spiders) == 1:
        return spiders[0]
    if not spiders:
        which = (
            f"no spider {class_name!r}" if class_name else "no spider: write a class that inherits from shoal.Spider"
        )
        known = f"; it has {', '.join(spider.__name__ for spider in in_file)}" if in_file else ""
        raise SpiderError(f"{path}: {which}{known}")
    names = ", ".join(f"{path}:{spider.__name__}" for spider in spiders)
    raise SpiderError(f"{path} has several spiders; choose one: {names}")


def spiders_in(path: Path) -> list[type[Spider]]:
    """Return the spider classes that a file defines."""
    return classes_in(path, Spider)


def classes_in(path: Path, base: type[T], *, as_main: bool = False) -> list[type[T]]:
    """Import a file, and return the subclasses of ``base`` that it defines. ``as_main``: import it as
    ``__main__``."""
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
    importing.append(path)
    try:
        if as_main and (code := _code_of(spec.loader, module_name)):
            module.__name__ = "__main__"
            exec(code, vars(module))
        else:
            spec.loader.exec_module(module)
    except SyntaxError as exc:
        place = path if exc.filename in (None, str(path.resolve())) else exc.filename  # or a module that it imports
        raise SpiderError(f"{place}, line {exc.lineno or 1}: {exc.msg}: {(exc.text or '').strip()}") from exc
    except (Exception, SystemExit) as exc:  # the user's file may raise anything
        is_scrapy = isinstance(exc, ModuleNotFoundError) and (exc.name or "").partition(".")[0] == "scrapy"
        hint = ". Is it a Scrapy spider? Run it with --scrapy: docs/scrapy.md" if is_scrapy else ""
        line = _line_in(path, exc)
        where = f"{path}, line {line}" if line else str(path)
        raise SpiderError(f"{where}: {type(exc).__name__}: {exc}{hint}") from exc
    finally:
        importing.pop()
        module.__name__ = module_name
    classes = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    if as_main:
        for kind in classes:
            if kind.__module__ == "__main__":
                kind.__module__ = module_name
    return [kind for kind in classes if issubclass(kind, base) and kind.__module__ == module_name]


def _code_of(loader: object, module_name: str) -> CodeType | None:
    from importlib.abc import InspectLoader  # takes time, and few spiders are imported as `__main__`

    return loader.get_code(module_name) if isinstance(loader, InspectLoader) else None


def line_in(exc: BaseException) -> tuple[str, int] | None:
    """The last line of the error's traceback that is neither in Python's libraries nor in Shoal."""
    last = None
    for frame, line in walk_tb(exc.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith("<") and "site-packages" not in name and not name.startswith(_NOT_OF_THE_USER):
            last = name, line
    return last


def _line_in(path: Path, exc: BaseException) -> int:
    """Return the last line of this file in the error's traceback."""
    lines = [line for frame, line in walk_tb(exc.__traceback__) if frame.f_code.co_filename == str(path.resolve())]
    return lines[-1] if lines else 0
