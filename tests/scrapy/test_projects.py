"""Whole projects and single files: how they are found, loaded and run, and what is reported when that fails."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import SpiderError
from shoal.scrapy import names
from shoal.scrapy.project import load_scrapy_spider
from shoal.scrapy.unsupported import advice_for
from shoal.spider import load_spider
from tests.scrapy.crawling import SITE, crawl_adapter

SETTINGS = """
BOT_NAME = "bookshop"
SPIDER_MODULES = ["bookshop.spiders"]
ITEM_PIPELINES = {"bookshop.pipelines.Upper": 300}
DOWNLOADER_MIDDLEWARES = {"bookshop.middlewares.Agent": 543}
DOWNLOAD_DELAY = 0
"""
FILES = {
    "scrapy.cfg": "[settings]\ndefault = bookshop.settings\n",
    "bookshop/__init__.py": "",
    "bookshop/settings.py": SETTINGS,
    "bookshop/items.py": "import scrapy\n\nclass Book(scrapy.Item):\n    title = scrapy.Field()\n",
    "bookshop/pipelines.py": """
        from itemadapter import ItemAdapter

        class Upper:
            def process_item(self, item, spider):
                adapter = ItemAdapter(item)
                adapter["title"] = adapter["title"].upper()
                return item
        """,
    "bookshop/middlewares.py": """
        from scrapy import signals

        class Agent:
            @classmethod
            def from_crawler(cls, crawler):
                made = cls()
                crawler.signals.connect(made.spider_opened, signal=signals.spider_opened)
                return made

            def process_request(self, request, spider):
                request.headers["X-Shop"] = self.name

            def spider_opened(self, spider):
                self.name = spider.name
        """,
    "bookshop/spiders/__init__.py": "",
    "bookshop/spiders/books.py": """
        import scrapy
        from scrapy.http import Request

        from ..items import Book


        class Base(scrapy.Spider):
            pass


        class Books(Base):
            name = "books"
            start_urls = ["http://site.test/"]

            def parse(self, response):
                yield Book(title=response.css("h1::text").get())
        """,
    "bookshop/spiders/other.py": "import scrapy\n\nclass Other(scrapy.Spider):\n    name = 'other'\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project, and a process in which nothing of it stays."""
    path, modules, environ = list(sys.path), set(sys.modules), dict(os.environ)
    write(tmp_path, FILES)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("bookshop", "shoal_spider_")):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environ)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


async def test_a_whole_project(project: Path) -> None:
    adapter = load_spider(f"scrapy:{project}:books")()
    done = await crawl_adapter(adapter, {"/": "<h1>title</h1>"})  # type: ignore[arg-type]
    assert done.items == [{"title": "TITLE"}]
    assert done.web.header("/", "x-shop") == ["books"]
    assert adapter.setting_sources["download_delay"] == "DOWNLOAD_DELAY in bookshop/settings.py"


async def test_a_file_of_a_project_has_the_settings_of_the_project(project: Path) -> None:
    kind = load_scrapy_spider(f"scrapy:{project}/bookshop/spiders/books.py")
    assert kind.name == "books"
    assert kind.spider_class.__module__ == "bookshop.spiders.books", "so its relative imports work"
    done = await crawl_adapter(kind(), {"/": "<h1>title</h1>"})
    assert done.items == [{"title": "TITLE"}]


def test_a_program_that_runs_all_spiders(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, {"bookshop/spiders/shop/__init__.py": "", "bookshop/spiders/shop/more.py": """
        import scrapy

        class More(scrapy.Spider):
            name = "more"
        """})  # fmt: skip
    program = """
        from scrapy.crawler import CrawlerProcess
        from scrapy.spiderloader import SpiderLoader
        from scrapy.utils.project import get_project_settings

        process = CrawlerProcess(get_project_settings())
        assert SpiderLoader.from_settings(process.settings).load("more").name == "more"
        for name in process.spider_loader.list():
            process.crawl(name)
        process.start()
        """
    write(project, {"run_all.py": program})
    monkeypatch.chdir(project)
    with pytest.raises(SpiderError, match=r"run_all\.py starts several crawls; choose one: .*, .*:More"):
        load_scrapy_spider(f"{project}/run_all.py")


def test_another_project_with_the_same_package(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert load_scrapy_spider(f"scrapy:{project}:books").scrapy_settings["BOT_NAME"] == "bookshop"
    second = tmp_path_factory.mktemp("second")
    write(second, {**FILES, "bookshop/settings.py": SETTINGS.replace('"bookshop"\n', '"second"\n', 1)})
    assert load_scrapy_spider(f"scrapy:{second}:books").scrapy_settings["BOT_NAME"] == "second"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("{0}:boks", r"has no spider 'boks'; did you mean books\?"),
        ("{0}", "has several spiders; choose one: Base, books, other"),
        ("{0}/missing:books", "is not a folder"),
        ("{0}/missing.py", "does not exist"),
        ("/:books", "is not a Scrapy project: it has no scrapy.cfg"),
        ("{0}/bookshop/items.py", "no spider"),
        ("{0}/bookshop/spiders/books.py:Missing", "no spider 'Missing'"),
    ],
)
def test_a_spider_that_is_not_there(project: Path, reference: str, message: str) -> None:
    with pytest.raises(SpiderError, match=message):
        load_scrapy_spider("scrapy:" + reference.format(project))


def test_an_error_in_a_module_names_its_line(project: Path) -> None:
    write(project, {"bookshop/items.py": "import scrapy\n\nraise ValueError('broken')\n"})
    with pytest.raises(SpiderError, match=r"bookshop/items\.py, line 3: ValueError: broken"):
        load_scrapy_spider(f"scrapy:{project}:books")


def test_a_settings_module_that_is_not_there_has_no_line(project: Path) -> None:
    write(project, {"scrapy.cfg": "[settings]\ndefault = bookshop.typo\n"})
    with pytest.raises(SpiderError, match=r"scrapy\.cfg: ModuleNotFoundError: No module named 'bookshop\.typo'"):
        load_scrapy_spider(f"scrapy:{project}:books")


def test_imports_that_shoal_does_not_have_are_all_reported(tmp_path: Path) -> None:
    write(tmp_path, {"own.py": """
        import scrapy
        from scrapy.pipelines.media import MediaPipeline
        from scrapy.mail import MailSender
        from twisted.web.server import Site
        try:
            from scrapy.missing import Optional
        except ImportError:
            Optional = None
        from scrapy.utils.project import get_project_settings
        """})  # fmt: skip
    with pytest.raises(SpiderError) as found:
        load_scrapy_spider(f"scrapy:{tmp_path}/own.py")
    lines = str(found.value).splitlines()
    assert lines[0] == (
        f"{tmp_path}/own.py, line 3: Shoal does not have scrapy.pipelines.media.MediaPipeline: "
        "use FilesPipeline, or yield shoal.File(url): docs/files.md"
    )
    assert ["scrapy.mail.MailSender" in lines[1], "twisted.web.server.Site" in lines[2], len(lines)] == [True, True, 3]


def test_a_meta_key_without_effect_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"own.py": """
        import scrapy
        class Own(scrapy.Spider):
            name = "own"
            def parse(self, response):
                yield scrapy.Request("http://x.test", meta={"bindaddress": "127.0.0.1"})
        """})  # fmt: skip
    with caplog.at_level(logging.WARNING):
        load_scrapy_spider(f"scrapy:{tmp_path}/own.py")
    assert f"{tmp_path}/own.py, line 6: meta key 'bindaddress' has no effect" in caplog.text


INLINE = """
import scrapy
from scrapy.crawler import CrawlerProcess

class First(scrapy.Spider):
    name = "first"
    def __init__(self, page="", **kwargs):
        super().__init__(**kwargs)
        self.start_urls = ["http://site.test/" + page]
    def parse(self, response):
        yield {"text": response.text}

class Second(First):
    name = "second"

"""


@pytest.mark.parametrize("guarded", [True, False])
async def test_the_run_of_the_file_is_what_runs(tmp_path: Path, guarded: bool) -> None:
    start = 'process = CrawlerProcess({"DOWNLOAD_DELAY": 0.5})\nprocess.crawl(Second, page="2")\nprocess.start()\n'
    end = start + "raise AssertionError('after the crawl')\n"
    if guarded:
        end = 'if __name__ == "__main__":\n' + textwrap.indent(end, "    ")
    (tmp_path / "inline.py").write_text(INLINE + end)
    kind = load_scrapy_spider(f"scrapy:{tmp_path}/inline.py")
    assert (kind.name, kind.settings["download_delay"]) == ("second", 0.5)
    assert (await crawl_adapter(kind(), {"/2": "two"})).items == [{"text": "two"}]
    assert (await crawl_adapter(kind(page="3"), {"/3": "three"})).items == [{"text": "three"}]


def test_a_file_with_two_runs_asks_which(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        INLINE + "p = CrawlerProcess()\np.crawl(First)\np.crawl(Second, page='2')\np.start()\n"
    )
    with pytest.raises(SpiderError, match=r"starts several crawls; choose one: .*two\.py:First, .*two\.py:Second"):
        load_scrapy_spider(f"scrapy:{tmp_path}/two.py")
    assert load_scrapy_spider(f"scrapy:{tmp_path}/two.py:second").own_arguments == {"page": "2"}


def test_a_runner_with_a_reactor(tmp_path: Path) -> None:
    (tmp_path / "runner.py").write_text(
        INLINE
        + textwrap.dedent("""
        from twisted.internet import reactor, defer
        from scrapy.crawler import CrawlerRunner
        from scrapy.utils.log import configure_logging
        from scrapy.utils.project import get_project_settings

        configure_logging()
        runner = CrawlerRunner(get_project_settings())

        @defer.inlineCallbacks
        def crawl():
            yield runner.crawl(First, page="1")
            reactor.stop()

        crawl()
        reactor.run()
        """)
    )
    assert load_scrapy_spider(f"scrapy:{tmp_path}/runner.py").own_arguments == {"page": "1"}


async def test_the_command_line_of_scrapy_in_a_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, {"main.py": "from scrapy import cmdline\ncmdline.execute('scrapy crawl books -a x=1'.split())\n"})
    monkeypatch.chdir(project)
    kind = load_scrapy_spider("scrapy:main.py")
    assert (kind.name, kind.own_arguments) == ("books", {"x": "1"})


def test_a_program_with_changed_imports(tmp_path: Path) -> None:
    """The file runs by itself. Its address is refused, so nothing is fetched, but the errback's item is written."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        from shoal import scrapy
        from shoal.scrapy.process import CrawlerProcess

        class Own(scrapy.Spider):
            name = "own"
            custom_settings = {"RETRY_ENABLED": False, "FEEDS": {"items.jsonl": {"format": "jsonlines"}}}

            def start_requests(self):
                yield scrapy.Request("http://127.0.0.1:9/", errback=self.failed)

            def failed(self, failure):
                yield {"error": type(failure.value).__name__}

        process = CrawlerProcess(settings={"LOG_LEVEL": "ERROR"})
        process.crawl(Own)
        process.start()
        print("after the crawl")
        """)
    )
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.returncode) == ("after the crawl\n", 0), ran.stderr
    found = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
    assert found == [{"error": "DownloadConnectionRefusedError"}]


def test_every_module_that_is_named_can_be_imported() -> None:
    names.install()
    from importlib import import_module

    for name in names.MODULES:
        module = import_module(name)
        for place in names.MODULES[name]:
            assert names._module(place), (name, place)
        assert module.__name__ == name


def test_the_usual_imports_work() -> None:
    names.install()
    lines = """
        import scrapy
        from scrapy import Field, FormRequest, Item, Request, Selector, Spider, signals
        from scrapy.crawler import AsyncCrawlerProcess, CrawlerProcess, CrawlerRunner
        from scrapy.downloadermiddlewares.retry import RetryMiddleware, get_retry_request
        from scrapy.downloadermiddlewares.useragent import UserAgentMiddleware
        from scrapy.exceptions import CloseSpider, DontCloseSpider, DropItem, IgnoreRequest, NotConfigured
        from scrapy.http import FormRequest, HtmlResponse, JsonRequest, Request, Response, TextResponse, XmlResponse
        from scrapy.linkextractors import LinkExtractor
        from scrapy.loader import ItemLoader
        from scrapy.loader.processors import Compose, Identity, Join, MapCompose, TakeFirst
        from scrapy.selector import Selector, SelectorList
        from scrapy.http.response.json import JsonResponse
        from scrapy.settings import Settings
        from scrapy.settings.default_settings import RETRY_HTTP_CODES
        from scrapy.signalmanager import SignalManager
        from scrapy.spidermiddlewares.base import BaseSpiderMiddleware
        from scrapy.spidermiddlewares.httperror import HttpError
        from scrapy.spiders import CrawlSpider, CSVFeedSpider, Rule, SitemapSpider, Spider, XMLFeedSpider
        from scrapy.utils.defer import maybe_deferred_to_future
        from scrapy.utils.log import configure_logging
        from scrapy.utils.misc import arg_to_iter, build_from_crawler, load_object
        from scrapy.utils.project import get_project_settings
        from scrapy.utils.python import to_bytes, to_unicode
        from scrapy.utils.request import fingerprint
        from scrapy.utils.response import get_base_url, open_in_browser, response_status_message
        from scrapy.utils.url import add_http_if_no_scheme, canonicalize_url
        from twisted.internet import defer, reactor, threads
        from twisted.internet.error import ConnectionRefusedError, DNSLookupError, TCPTimedOutError, TimeoutError
        from twisted.internet.threads import deferToThread
        from twisted.python.failure import Failure
        from twisted.web._newclient import ResponseFailed
        """
    found: dict[str, object] = {}
    exec(textwrap.dedent(lines), found)
    assert found["scrapy"].exceptions.CloseSpider is found["CloseSpider"]  # type: ignore[attr-defined]
    assert found["scrapy"].Request is found["Request"]  # type: ignore[attr-defined]
    assert found["scrapy"].__version__ == "2.19.0"  # type: ignore[attr-defined]
    assert 503 in found["RETRY_HTTP_CODES"]  # type: ignore[operator]


def test_a_spider_without_a_name_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "shop.py"
    file.write_text("import scrapy\n\nclass A(scrapy.Spider):\n    name = 'a'\n\nclass B(scrapy.Spider):\n    pass\n")
    with pytest.raises(SpiderError, match=r"shop\.py: B has no name: set `name`"):
        load_scrapy_spider(f"{file}:B")


def test_what_is_missing_says_what_to_do() -> None:
    names.install()
    assert (
        advice_for("scrapy.contrib.linkextractors.sgml.SgmlLinkExtractor")
        == "use LinkExtractor of scrapy.linkextractors"
    )
    assert advice_for("scrapy.selector.HtmlXPathSelector") == "use response.xpath()"
    with pytest.raises(ModuleNotFoundError, match=r"Shoal does not have scrapy\.mail: use notifications"):
        import scrapy.mail  # type: ignore[import-not-found]  # noqa: F401
    assert SITE
