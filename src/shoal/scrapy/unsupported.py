"""Finds features of Scrapy that Shoal does not support when a spider is loaded: their names, their lines, and what to
do."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from shoal.errors import SpiderError
from shoal.scrapy.names import has
from shoal.scrapy.settings import Settings
from shoal.scrapy.spider import Spider
from shoal.scrapy.translation import filters_nothing

log = logging.getLogger("shoal.scrapy")

_MODULE_ADVICE = {
    "scrapy.pipelines.media": "use FilesPipeline, or yield shoal.File(url): docs/files.md",
    "scrapy.contrib.pipeline": "import FilesPipeline and ImagesPipeline from scrapy.pipelines",
    "scrapy.mail": "use notifications of Shoal: docs/notifications.md",
    "scrapy.contracts": "write a test that calls the callback with a response",
    "scrapy.commands": "write a program that calls shoal.crawl()",
    "scrapy.squeues": "remove it: Shoal has its own frontier",
    "scrapy.pqueues": "remove it: Shoal has its own frontier",
    "scrapy.core": "remove it: Shoal has its own engine",
    "scrapy.extensions": "connect to the signals in an extension of your own",
    "scrapy.conf": "use self.settings, or get_project_settings() of scrapy.utils.project",
    "scrapy.log": "use self.logger",
    "scrapy.contrib.linkextractors": "use LinkExtractor of scrapy.linkextractors",
    "scrapy.selector.HtmlXPathSelector": "use response.xpath()",
    "scrapy.http.cookies": "use meta={'cookiejar': KEY}, or the cookies of a request",
    "scrapy.contrib": "import it from the module that has it since Scrapy 1.0",
    "twisted": "use asyncio: callbacks, pipelines and middlewares may be coroutines",
}
_NOT_USED = {
    "SCHEDULER": "the frontier replaces it: --frontier redis://HOST shares it between workers",
    "SCHEDULER_DISK_QUEUE": "the frontier replaces it",
    "DOWNLOADER": "remove it: Shoal has its own fetcher",
    "DOWNLOAD_HANDLERS": "remove it; for pages with JavaScript set `render = True`: docs/rendering.md",
    "ADDONS": "put their middlewares and pipelines into the settings",
    "FEED_EXPORTERS": "write a pipeline, or use jsonlines, csv or parquet",
    "FEED_STORAGES": "name the output with -o",
    "STATS_CLASS": "read the statistics with `shoal stats` or from the metrics",
    "REQUEST_FINGERPRINTER_CLASS": "requests are identified by method, URL and body",
    "SPIDER_LOADER_CLASS": "list the modules in SPIDER_MODULES",
    "DOWNLOAD_SLOTS": "set download_delay for all hosts, or `shoal hosts` for one",
    "LOG_FILE": "redirect standard error to a file",
    "AWS_ACCESS_KEY_ID": "set the environment variable of this name: docs/outputs.md",
    "AWS_SECRET_ACCESS_KEY": "set the environment variable of this name: docs/outputs.md",
    "AWS_ENDPOINT_URL": "set the environment variable of this name: docs/outputs.md",
    "CLOSESPIDER_PAGECOUNT_NO_ITEM": "set CLOSESPIDER_PAGECOUNT",
    "CLOSESPIDER_TIMEOUT_NO_ITEM": "set CLOSESPIDER_TIMEOUT",
    "FEED_EXPORT_BATCH_ITEM_COUNT": "write to object storage, which has parts: docs/outputs.md",
    "HTTPCACHE_IGNORE_HTTP_CODES": "the cache stores every page",
    "HTTPCACHE_POLICY": "the cache stores every page",
    "IMAGES_MIN_HEIGHT": "small images are stored too; drop their items in a pipeline",
    "IMAGES_MIN_WIDTH": "small images are stored too; drop their items in a pipeline",
    "MEMUSAGE_LIMIT_MB": "limit the memory of the process with the operating system",
    "RETRY_EXCEPTIONS": "write a RetryMiddleware with EXCEPTIONS_TO_RETRY",
    "ROBOTSTXT_USER_AGENT": "robots.txt is read for USER_AGENT",
}
"""Settings that change the behaviour of a project and have no effect here."""
_FEED_OPTIONS = {
    "batch_item_count": "write to object storage, which has parts: docs/outputs.md",
    "fields": "every feed has all fields; FEED_EXPORT_FIELDS sets those of all feeds",
    "item_classes": "every feed has all items; choose them in a pipeline",
    "item_export_kwargs": "remove it",
    "item_filter": "every feed has all items; choose them in a pipeline",
    "postprocessing": "compress the file after the run",
    "uri_params": "use %(name)s and %(time)s",
}
"""Options of a feed that change what is written and have no effect here."""
_META_KEYS = {
    "bindaddress": "the address that requests come from cannot be chosen",
    "download_slot": "requests are limited by host",
    "dont_cache": "the cache stores every page",
    "dont_obey_robotstxt": "set ROBOTSTXT_OBEY for the spider instead",
    "download_maxsize": "set DOWNLOAD_MAXSIZE for the spider instead",
    "ftp_user": "only http:// and https:// are fetched",
    "splash": "set `render = True`: docs/rendering.md",
    "playwright": "set `render = True`: docs/rendering.md",
    "selenium": "set `render = True`: docs/rendering.md",
}


class Unsupported(Struct, frozen=True):
    """Something that is not supported."""

    name: str
    place: str
    advice: str

    def __str__(self) -> str:
        return f"{self.place}: Shoal does not have {self.name}: {self.advice}"


def check_file(path: Path) -> None:
    """Raise SpiderError if the file imports something from Scrapy that Shoal does not have; it lists all of them. Keys
    of ``meta`` without effect are logged."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError, OSError):
        return  # the import reports it
    missing = list(missing_imports(tree, str(path)))
    if missing:
        raise SpiderError("\n".join(map(str, missing)))
    for finding in _meta_keys(tree, str(path)):
        log.warning("%s: meta key %r has no effect: %s", finding.place, finding.name, finding.advice)


def missing_imports(tree: ast.AST, path: str) -> Iterator[Unsupported]:
    """The imports that would fail. Those in a ``try`` block, or for type checkers, are left out."""
    optional = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in optional:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_theirs(alias.name) and not has(alias.name):
                    yield _missing(alias.name, path, node.lineno)
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_theirs(node.module or ""):
            module = node.module or ""
            for alias in node.names:
                if not has(module, alias.name) and not has(f"{module}.{alias.name}"):
                    yield _missing(f"{module}.{alias.name}", path, node.lineno)


def _is_theirs(module: str) -> bool:
    return module.partition(".")[0] in ("scrapy", "twisted")


def _missing(name: str, path: str, line: int) -> Unsupported:
    return Unsupported(name, f"{path}, line {line}", advice_for(name))


def advice_for(name: str) -> str:
    """What to do about a name of Scrapy or Twisted that Shoal does not have."""
    for module in sorted(_MODULE_ADVICE, key=len, reverse=True):
        if name == module or name.startswith(f"{module}."):
            return _MODULE_ADVICE[module]
    return "remove it, or write what it does yourself; docs/scrapy.md lists what is covered"


def _meta_keys(tree: ast.AST, path: str) -> Iterator[Unsupported]:
    """Keys in ``meta={...}`` and ``meta["key"]`` that have no effect."""
    for node in ast.walk(tree):
        keys: list[ast.expr | None] = []
        if isinstance(node, ast.keyword) and node.arg == "meta" and isinstance(node.value, ast.Dict):
            keys = list(node.value.keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_meta(node.value):
            keys = [node.slice]
        for key in keys:
            if isinstance(key, ast.Constant) and key.value in _META_KEYS:
                yield Unsupported(str(key.value), f"{path}, line {key.lineno}", _META_KEYS[str(key.value)])


def _is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def check_settings(settings: Settings, kind: type[Spider]) -> None:
    """Log the settings that change a project's behaviour under Scrapy and have no effect here."""
    for finding in unsupported_settings(settings, kind):
        log.warning("%s: %s has no effect: %s", finding.place, finding.name, finding.advice)


def unsupported_settings(settings: Settings, kind: type[Spider]) -> list[Unsupported]:
    """The settings, and the components of Scrapy itself, that have no effect."""
    names = [
        Unsupported(name, _place(settings, name, kind), advice)
        for name, advice in _NOT_USED.items()
        if settings.source(name) and settings.get(name)
    ]
    own_filter = settings.source("DUPEFILTER_CLASS") and not str(settings["DUPEFILTER_CLASS"]).startswith("scrapy.")
    if own_filter and not filters_nothing(settings):
        place = _place(settings, "DUPEFILTER_CLASS", kind)
        names.append(Unsupported("DUPEFILTER_CLASS", place, "the frontier drops duplicates by method, URL and body"))
    for uri, options in settings.getdict("FEEDS").items():
        names += [
            Unsupported(f"{option} of the feed {uri}", _place(settings, "FEEDS", kind), _FEED_OPTIONS[option])
            for option in _FEED_OPTIONS
            if (options or {}).get(option)
        ]
    for name in ("ITEM_PIPELINES", "EXTENSIONS"):
        components = settings.getdictorlist(name)
        for key in components:
            switched_on = not isinstance(components, dict) or components[key] is not None
            if switched_on and str(key).startswith("scrapy.") and not has(*str(key).rsplit(".", 1)):
                names.append(Unsupported(str(key), _place(settings, name, kind), advice_for(str(key))))
    return names


def _place(settings: Settings, name: str, kind: type[Spider]) -> str:
    """The file and line where a setting is set."""
    source = settings.source(name)
    module = sys.modules.get(source.removesuffix(".py").replace("/", "."))
    of_spider = source == "spider" or source.startswith("custom_settings")
    file = inspect.getsourcefile(kind) if of_spider else getattr(module, "__file__", None)
    if file is None:
        return source
    try:
        lines = Path(file).read_text(errors="replace").splitlines()
    except OSError:
        return source
    pattern = re.compile(rf"\s*[\"']?{name}[\"']?\s*[:=]")
    line = next((number for number, text in enumerate(lines, 1) if pattern.match(text)), 1)
    return f"{file}, line {line}"
