"""Names that projects import from Scrapy, for things that Shoal does itself."""

from __future__ import annotations

import sys
from importlib import import_module
from itertools import pairwise
from typing import NoReturn

from shoal.scrapy import recorded_runs
from shoal.scrapy.exceptions import CloseSpider as CloseSpider
from shoal.scrapy.shared_types import HasUrl


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
    if recorded_runs.current() is not None:
        _record(words)
    sys.argv = ["shoal", *words]
    import_module("shoal.cli.main").main()
    raise SystemExit(0)


def _record(words: list[str]) -> NoReturn:
    """Record the crawl instead of running it: the file is being loaded by `shoal run --scrapy`."""
    from shoal.scrapy.helpers import get_project_settings
    from shoal.scrapy.project import find_spider_class

    if len(words) < 4 or words[2] != ".":
        raise SystemExit("scrapy.cmdline.execute: pass the spider's file to `shoal run --scrapy` instead")
    settings = get_project_settings()
    recording = recorded_runs.current()
    assert recording is not None
    kind = find_spider_class(settings, words[3], "the project")
    given = [each.split("=", 1) for flag, each in pairwise(words) if flag == "-a"]
    arguments: dict[str, object] = {name: value for name, value in given}  # noqa: C416 - the type is wider
    recording.runs.append(recorded_runs.RecordedRun(kind, arguments, settings))
    raise recorded_runs.CrawlStartReached


def inspect_response(response: HasUrl, spider: object) -> None:
    """Not supported. Scrapy opens a shell in the middle of a crawl; in Shoal, use the command ``shoal shell URL``."""
    raise NotImplementedError(f"inspect_response is not supported: run `shoal shell {response.url}`")
