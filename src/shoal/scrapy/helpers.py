"""Functions of ``scrapy.utils`` that spiders import."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
from collections.abc import AsyncIterable, Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn
from urllib.parse import ParseResult, urlparse

from shoal import http
from shoal.scrapy import project
from shoal.scrapy.components import build as build_from_crawler
from shoal.scrapy.components import load_object as load_object
from shoal.scrapy.downloadermiddlewares import response_status_message as response_status_message
from shoal.scrapy.exceptions import CloseSpider as CloseSpider
from shoal.scrapy.process import configure_logging as configure_logging
from shoal.scrapy.request import Request
from shoal.scrapy.response import Response, TextResponse
from shoal.scrapy.scope import OffsiteFilter
from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import SpiderLogger as SpiderLoggerAdapter
from shoal.scrapy.values import HasUrl, Values

if TYPE_CHECKING:
    from shoal.scrapy.spider import Spider
    from shoal.selector import Selector

__all__ = [
    "SpiderLoggerAdapter",
    "add_http_if_no_scheme",
    "arg_to_iter",
    "build_from_crawler",
    "canonicalize_url",
    "configure_logging",
    "csviter",
    "data_path",
    "fingerprint",
    "get_base_url",
    "get_project_settings",
    "gunzip",
    "is_listlike",
    "iterate_spider_output",
    "load_object",
    "md5sum",
    "object_ref",
    "open_in_browser",
    "request_fingerprint",
    "request_from_dict",
    "response_status_message",
    "to_bytes",
    "to_native_str",
    "to_unicode",
    "url_is_from_any_domain",
    "urlparse_cached",
    "walk_modules",
    "xmliter",
]


def get_project_settings() -> Settings:
    """The settings of the project that contains the working directory; Scrapy's defaults if there is none."""
    root = project.find_root(Path.cwd())
    if root is not None:
        return project.project_settings(root)
    settings = Settings()
    if name := os.environ.get("SCRAPY_SETTINGS_MODULE"):
        settings.setmodule(name, "project", f"{name.replace('.', '/')}.py")
    return settings


def to_unicode(text: str | bytes, encoding: str | None = None, errors: str = "strict") -> str:
    return text if isinstance(text, str) else text.decode(encoding or "utf-8", errors)


def to_bytes(text: str | bytes, encoding: str | None = None, errors: str = "strict") -> bytes:
    return text if isinstance(text, bytes) else text.encode(encoding or "utf-8", errors)


to_native_str = to_unicode


def is_listlike(value: object) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes)


def arg_to_iter(value: object) -> Iterable[object]:
    """Return an iterable: empty for None, one element for a dict, an item or text, and otherwise the value itself."""
    if value is None:
        return []
    if isinstance(value, Iterable) and not isinstance(value, dict | str | bytes) and not hasattr(value, "fields"):
        return value
    return [value]


def iterate_spider_output(result: object) -> Iterable[object] | AsyncIterable[object]:
    return result if isinstance(result, AsyncIterable) else arg_to_iter(result)


def csviter(
    obj: Response | str | bytes, delimiter: str | None = None, headers: list[str] | None = None,
    encoding: str | None = None, quotechar: str | None = None,
) -> Iterator[dict[str, str]]:  # fmt: skip
    """The rows of a CSV text or response."""
    from shoal.scrapy.spiders import csv_rows

    return csv_rows(obj.decode(encoding) if encoding and isinstance(obj, bytes) else obj, delimiter, headers, quotechar)


def xmliter(obj: TextResponse | str | bytes, nodename: str) -> Iterator[Selector]:
    """The elements of this name in an XML text or response."""
    from shoal.scrapy.spiders import nodes_named
    from shoal.selector import Selector

    return nodes_named(
        obj.selector if isinstance(obj, TextResponse) else Selector(text=to_unicode(obj), type="xml"), nodename
    )


xmliter_lxml = xmliter


def md5sum(file: BinaryIO) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    while chunk := file.read(8096):
        digest.update(chunk)
    return digest.hexdigest()


def gunzip(data: bytes, *, max_size: int = 0) -> bytes:
    return gzip.decompress(data)


def get_base_url(response: TextResponse) -> str:
    return response.page.base_url


def urlparse_cached(request_or_response: HasUrl) -> ParseResult:
    return urlparse(str(request_or_response.url))


def url_is_from_any_domain(url: str | HasUrl, domains: Iterable[str]) -> bool:
    chosen = list(domains)
    return bool(chosen) and OffsiteFilter(chosen).allows(url if isinstance(url, str) else url.url)


def add_http_if_no_scheme(url: str) -> str:
    return url if "://" in url else f"http:{url}" if url.startswith("//") else f"http://{url}"


def canonicalize_url(url: str | bytes | ParseResult, *args: Any, **kwargs: Any) -> str:
    from w3lib.url import canonicalize_url as canonicalize

    canonical: str = canonicalize(url, *args, **kwargs)
    return canonical


def fingerprint(request: Request, **options: object) -> bytes:
    """16 bytes that are equal for requests with the same method, URL and body."""
    return http.Request(request.url, method=request.method, body=request.body).fingerprint()


def request_fingerprint(request: Request, *args: object, **kwargs: object) -> str:
    return fingerprint(request).hex()


def request_from_dict(found: Values, *, spider: Spider | None = None) -> Request:
    """The request that ``to_dict`` described."""
    values = {name: value for name, value in found.items() if name in Request.attributes}
    for name in ("callback", "errback"):
        if isinstance(values.get(name), str) and spider is not None:
            values[name] = getattr(spider, values[name])
    return Request(**values)


def open_in_browser(response: TextResponse, **options: object) -> bool:
    """Write the page to a file and open it in a browser."""
    import tempfile
    import webbrowser

    handle, path = tempfile.mkstemp(".html")
    with os.fdopen(handle, "wb") as file:
        file.write(response.body)
    return webbrowser.open(f"file://{path}")


def data_path(path: str, createdir: bool = False) -> str:
    """A path in the folder ``.scrapy`` of the working directory."""
    place = path if os.path.isabs(path) else os.path.join(".scrapy", path)
    if createdir:
        os.makedirs(place, exist_ok=True)
    return place


class object_ref:
    """A base class without behaviour."""


def walk_modules(path: str) -> Iterator[ModuleType]:
    """Import a package with its modules."""
    package = import_module(path)
    yield package
    for _, name, is_package in iter_modules(getattr(package, "__path__", [])):
        if is_package:
            yield from walk_modules(f"{path}.{name}")
        else:
            yield import_module(f"{path}.{name}")


# Names that projects import from Scrapy, for things that Shoal does itself.


class BaseDupeFilter:
    """As DUPEFILTER_CLASS: duplicates are fetched too."""


class RFPDupeFilter(BaseDupeFilter):
    """As DUPEFILTER_CLASS: the frontier drops duplicates. This is the default."""


class LogFormatter:
    """Shoal writes its own log."""


def execute(argv: list[str] | None = None, settings: object = None) -> NoReturn:
    """Run ``scrapy crawl NAME`` and ``scrapy runspider FILE`` with Shoal."""
    words = list(sys.argv if argv is None else argv)[1:]
    if words[:1] == ["crawl"]:
        words = ["run", "--scrapy", ".", *words[1:]]
    elif words[:1] == ["runspider"]:
        words = ["run", "--scrapy", *words[1:]]
    else:
        raise SystemExit(f"scrapy.cmdline.execute: Shoal runs crawl and runspider, not {' '.join(words[:1])!r}")
    if project.current() is not None:
        _record(words)
    sys.argv = ["shoal", *words]
    import_module("shoal.cli.main").main()
    raise SystemExit(0)


def _record(words: list[str]) -> NoReturn:
    """Record the crawl instead of running it: the file is being loaded by `shoal run --scrapy`."""
    if len(words) < 4 or words[2] != ".":
        raise SystemExit("scrapy.cmdline.execute: pass the spider's file to `shoal run --scrapy` instead")
    settings = get_project_settings()
    recording = project.current()
    assert recording is not None
    kind = project.find_spider_class(settings, words[3], "the project")
    pairs = [word.split("=", 1) for flag, word in pairwise(words) if flag == "-a"]
    arguments: dict[str, object] = {name: value for name, value in pairs}  # noqa: C416 - the type is wider
    recording.runs.append(project.RecordedRun(kind, arguments, settings))
    raise project.CrawlStartReached


def inspect_response(response: HasUrl, spider: object) -> None:
    """Not supported. Scrapy opens a shell in the middle of a crawl; in Shoal, use the command ``shoal shell URL``."""
    raise NotImplementedError(f"inspect_response is not supported: run `shoal shell {response.url}`")
