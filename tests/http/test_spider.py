"""Spiders: their attributes and methods, and the message for a file without a usable spider."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from shoal.config import Config, ScopeSettings
from shoal.crawling.callbacks import Callbacks
from shoal.crawling.files import FileChains
from shoal.crawling.stats import Counters
from shoal.errors import ConfigError, RunError, SpiderError
from shoal.http import Request, Response
from shoal.runs.crawl import crawl
from shoal.spider import Spider, create_spider, load_spider, spiders_in
from shoal.urls.normalize import Scope


class Books(Spider):
    start_urls = ["http://ex.com/1", "http://ex.com/2"]
    limit = 3

    def parse(self, response: Response) -> str:
        return "parsed"

    def book(self, response: Response) -> None: ...


class Named(Books):
    name = "my-books"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory. Modules imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "books.py") -> str:
    (folder / name).write_text("from shoal import Spider\n" + dedent(text))
    return name


# -- the class


def test_start() -> None:
    assert list(Books().start()) == Books.start_urls  # type: ignore[arg-type]
    assert list(Spider().start()) == []  # type: ignore[arg-type]
    assert list(Books(start_urls="http://ex.com/").start()) == ["http://ex.com/"]  # type: ignore[arg-type]


def test_arguments_become_attributes() -> None:
    books = Books(limit="7", category="poetry")
    assert (books.limit, books.category) == ("7", "poetry")  # type: ignore[attr-defined, comparison-overlap]
    assert (Books().limit, Books.limit) == (3, 3)


def test_arguments_are_kept_whatever_the_spider_does_with_them() -> None:
    class Selfish(Spider):
        def __init__(self, category: str, limit: str = "3") -> None:
            self.wanted = category * 2  # and no super().__init__()

    spider = create_spider(Selfish, {"category": "a"})
    assert (spider.arguments, spider.wanted) == ({"category": "a"}, "aa")  # type: ignore[attr-defined]
    assert spider.log.name == "shoal.spider.selfish"
    assert create_spider(Books, {"limit": "7"}).arguments == {"limit": "7"}
    with pytest.raises(SpiderError, match="no argument 'limits'; did you mean limit"):
        create_spider(Selfish, {"limits": "1"})


@pytest.mark.parametrize(
    "name", ["parse", "book", "start", "spider_name", "callback", "log", "stats", "closed", "__init__"]
)
def test_an_argument_can_not_hide_what_the_spider_needs(name: str) -> None:
    with pytest.raises(SpiderError, match=f"Books: argument '{name}' would replace"):
        Books(**{name: "x"})


def test_names() -> None:
    assert Books.spider_name() == "books"
    assert Named.spider_name() == "my-books"
    assert Books().log.name == "shoal.spider.books"


def test_callbacks() -> None:
    books = Books()
    assert books.callback(None) == books.callback("") == books.parse
    assert books.callback("book") == books.book


@pytest.mark.parametrize("name", ["nope", "limit", "start_urls", "__init__", "__class__", "book.__func__", "log"])
def test_callbacks_that_are_none(name: str) -> None:
    with pytest.raises(SpiderError, match=f"Books has no method '{name}', but a request has it as its callback"):
        Books().callback(name)


def test_a_spider_without_parse() -> None:
    with pytest.raises(SpiderError, match=r"Spider has no parse\(\) method"):
        Spider().parse(Response("http://ex.com/"))


# -- files


def test_load(folder: Path) -> None:
    name = write(folder, "class Books(Spider):\n    start_urls = ['http://ex.com/']")
    for reference in (name, f"./{name}", str(folder / name), f"{name}:Books", f"{name}:books"):
        assert load_spider(reference).__name__ == "Books"
    assert issubclass(load_spider(name), Spider)


def test_a_file_may_use_what_is_beside_it_and_dataclasses(folder: Path) -> None:
    write(folder, "x = 1", "beside_it.py")
    text = """
        from __future__ import annotations
        from dataclasses import dataclass
        from beside_it import x
        @dataclass
        class Book:
            title: str
        class Books(Spider): ...
    """
    (folder / "books.py").write_text(dedent(text).replace("from beside_it", "from shoal import Spider\nfrom beside_it"))
    assert load_spider("books.py").__name__ == "Books"


SEVERAL = """
class Base(Spider): ...
class Poems(Base):
    name = "verse"
Alias = Poems
"""


def test_several_spiders(folder: Path) -> None:
    name = write(folder, SEVERAL)
    assert [spider.__name__ for spider in spiders_in(folder / name)] == ["Base", "Poems"]
    assert load_spider(f"{name}:Poems") is not load_spider(f"{name}:Base")
    assert load_spider(f"{name}:verse").__name__ == "Poems"
    with pytest.raises(SpiderError, match=r"several spiders; choose one: books.py:Base, books.py:Poems$"):
        load_spider(name)
    with pytest.raises(SpiderError, match=r"books.py: no spider 'Prose'; it has \w+"):
        load_spider(f"{name}:Prose")


def test_spiders_of_other_files_are_not_counted(folder: Path) -> None:
    write(folder, "class Base(Spider): ...", "base_of_books.py")
    name = write(folder, "from base_of_books import Base\nclass Books(Base): ...")
    assert load_spider(name).__name__ == "Books"


@pytest.mark.parametrize("reference", ["nope.py", "nope.py:X", "nope", ".", ""])
def test_no_such_file(folder: Path, reference: str) -> None:
    with pytest.raises(SpiderError, match=r"spider file .* does not exist; `shoal new NAME` creates one"):
        load_spider(reference)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^books\.py: no spider: write a class that inherits from shoal\.Spider$"),
        ("x = 1\nclass A(Spider)\n    pass", r"^books\.py, line 3: expected ':': class A\(Spider\)$"),
        ("def f():\nx = 1", r"^books\.py, line 3: expected an indented block"),
        ("x = 'a", r"^books\.py, line 2: unterminated string literal"),
        ("x = 1\n1 / 0", r"^books\.py, line 3: ZeroDivisionError: division by zero$"),
        ("def f():\n    raise KeyError('k')\n\nf()", r"^books\.py, line 3: KeyError: 'k'$"),
        ("import no_such_module", r"^books\.py, line 2: ModuleNotFoundError: No module named 'no_such_module'$"),
        ("from shoal import nonsense", r"^books\.py, line 2: ImportError: cannot import name 'nonsense'"),
        ("import sys\nsys.exit(3)", r"^books\.py, line 3: SystemExit: 3$"),
        ("import json\njson.loads('{')", r"^books\.py, line 3: JSONDecodeError: "),
        ("class A(Spider):\n    x = y", r"^books\.py, line 3: NameError: name 'y' is not defined"),
    ],
)
def test_a_file_that_can_not_be_used(folder: Path, text: str, message: str) -> None:
    name = write(folder, text)
    for reference in (name, str(folder / name)):
        with pytest.raises(SpiderError, match=message if reference == name else message.replace("^", "/")):
            load_spider(reference)


def test_an_error_in_a_module_beside_it_is_said_to_be_there(folder: Path) -> None:
    write(folder, "x = = 1", "broken_beside.py")
    with pytest.raises(SpiderError, match=r"/broken_beside\.py, line 2: invalid syntax: x = = 1"):
        load_spider(write(folder, "import broken_beside"))
    write(folder, "1 / 0", "raising_beside.py")
    with pytest.raises(SpiderError, match=r"^books\.py, line 2: ZeroDivisionError"):
        load_spider(write(folder, "import raising_beside"))


@pytest.mark.parametrize("data", [b"\0", b"x = '\xff'", b"# coding: nonsense"])
def test_a_file_that_is_no_text(folder: Path, data: bytes) -> None:
    (folder / "books.py").write_bytes(data)
    with pytest.raises(SpiderError, match=r"^books\.py, line "):
        load_spider("books.py")


def test_a_file_that_is_no_python(folder: Path) -> None:
    (folder / "books.txt").write_text("class A(Spider): ...")
    with pytest.raises(SpiderError, match=r"books\.txt is not a Python file"):
        load_spider("books.txt")


def test_what_stops_the_process_is_not_held_back(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_spider(write(folder, "raise KeyboardInterrupt"))


def test_pages_may_be_of_any_kind() -> None:
    found: Any = Books().callback(None)(Response("http://ex.com/"))
    assert found == "parsed"


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("custom_settings = {}", "`custom_settings`; name it `settings`"),
        ("def start_requests(self): ...", "`start_requests`; name it `start`"),
        ("handle_httpstatus_list = [404]", "`handle_httpstatus_list`; name it `handle_statuses`"),
    ],
)
def test_attributes_known_from_elsewhere(folder: Path, line: str, instead: str) -> None:
    with pytest.raises(SpiderError, match=r"^books\.py, line \d+: .*Shop: Shoal does not use ") as caught:
        load_spider(write(folder, f"from shoal import Spider\nclass Shop(Spider):\n    {line}"))
    assert instead in str(caught.value)


def test_all_attributes_known_from_elsewhere_are_named_at_once(folder: Path) -> None:
    body = "custom_settings = {}\n    def start_requests(self): ..."
    with pytest.raises(SpiderError) as caught:
        load_spider(write(folder, f"from shoal import Spider\nclass Shop(Spider):\n    {body}"))
    assert "use `custom_settings`; name it `settings`" in str(caught.value)
    assert "It does not use `start_requests`; name it `start`" in str(caught.value)


def test_a_spider_of_scrapy_gets_the_page_about_porting(folder: Path) -> None:
    missing = 'raise ModuleNotFoundError("No module named \'scrapy\'", name="scrapy")'
    with pytest.raises(SpiderError, match=r"No module named 'scrapy'\. .* Run it with --scrapy: docs/scrapy\.md"):
        load_spider(write(folder, missing))


def test_attributes_of_other_spiders_name_the_equivalent() -> None:
    spider: Any = Books()
    with pytest.raises(AttributeError, match=r"Books has no attribute 'logger': use `self\.log`"):
        spider.logger.info("x")
    assert not hasattr(spider, "crawler")
    spider.logger = "own"
    assert spider.logger == "own"


async def test_a_callback_that_takes_no_response_says_what_to_write() -> None:
    class Books(Spider):
        def parse(self) -> None:  # type: ignore[override]
            pass

        def shop(self, response: Response) -> None:
            raise TypeError("its own")

    spider = Books()
    callbacks = Callbacks(spider, Counters(), FileChains(Config(), Scope(ScopeSettings()), spider.stats))
    page = Response("http://a.example/")
    with pytest.raises(SpiderError, match=r"Books\.parse\(\) does not .*write `def parse\(self, response\)` \(.*test_"):
        await callbacks.call(None, Request(page.url), page)
    with pytest.raises(SpiderError, match=r"write `def shop\(self, response, page\)`"):
        await callbacks.call("shop", Request(page.url), page, page=2)
    with pytest.raises(TypeError, match="its own"):
        await callbacks.call("shop", Request(page.url), page)


def test_a_misspelled_callback_suggests_the_nearest() -> None:
    class Books(Spider):
        def parse_book(self, response: Response) -> None:
            pass

    with pytest.raises(SpiderError, match=r"no method 'parse_bok', .*; did you mean parse_book\?"):
        Books().callback("parse_bok")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("download_delay", "it is a setting: write crawl\\(..., {'download_delay': ...}\\)"),
        ("downlod_delay", 'did you mean "download_delay"'),
        ("output", "did you mean outputs"),
        ("category", "arguments={'category': ...}"),
    ],
)
def test_a_keyword_that_crawl_does_not_take_says_where_it_belongs(name: str, words: str) -> None:
    unknown: Any = {name: 0}
    with pytest.raises(ConfigError, match=words):
        crawl(Spider, **unknown)


async def test_a_crawl_that_was_not_awaited_says_what_to_write() -> None:
    made = crawl(Spider, {"download_delay": 0})
    made.must_be_awaited = False
    with pytest.raises(RunError, match=r"async for item in crawl"):
        list(made)
