"""The first hours with Shoal: what goes wrong is said, with what to write instead."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.frontier import open_store
from shoal.messages import pip_install
from shoal.runs.run_choice import WantedRun, choose_run
from tests.acceptance.fleets import KINDS, frontier_url
from tests.acceptance.serving import until
from tests.acceptance.test_cli import lines, shoal
from tests.support import forking
from tests.support.forking import SHOAL

__all__ = ["shoal"]

SPIDER = '''
from shoal import Spider


class Books(Spider):
    """The books of the demo shop."""

    name = "books"
    start_urls = ["{shop}"]
    settings = {{"download_delay": 0, "scope.deny": ["/calendar/", "/slow", "/flaky"]}}

    def parse(self, response):
        for book in response.css("article.product"):
            yield {{"title": book.css("h3 a::attr(title)").get()}}
        yield response.follow_all("li.next a")
'''


@pytest.fixture
def books(shop: str, tmp_path: Path) -> Path:
    """A spider that yields the 60 books of the shop."""
    (tmp_path / "books.py").write_text(SPIDER.format(shop=shop))
    return tmp_path / "books.py"


def commands(text: str) -> list[list[str]]:
    """The commands that a summary proposes, without `shoal`."""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    shoal ")]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_items_that_go_nowhere_are_reported_with_the_command_that_keeps_them(
    shoal, books: Path, processes: str
) -> None:
    done = shoal("run", "books.py", "--processes", processes)
    assert "the 60 items were not written anywhere and are lost; to keep them:" in done.stderr
    (command,) = commands(done.stderr)
    assert "lost" not in shoal(*command).stderr
    assert len(lines(books.parent / "books.jsonl")) == 60


def test_items_that_a_pipeline_or_the_item_log_has_are_not_reported(shoal, books: Path) -> None:
    assert "not written anywhere" not in shoal("run", "books.py", "--frontier", "sqlite:///books.db").stderr
    text = books.read_text().replace("    name =", "    pipelines = [lambda item, spider: item]\n    name =")
    books.write_text(text)
    assert "not written anywhere" not in shoal("run", "books.py").stderr


LIMITS = {
    "items": (["--max-items", "15"], "item limit reached (scope.max_items)"),
    "time": (["--max-time", "0.02m", "--delay", "0.5"], "time limit reached (scope.max_seconds)"),
    "bytes": (["--max-bytes", "1KB", "--concurrency", "1"], "byte limit reached (scope.max_bytes)"),
}


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_run_ends_at_its_limit_and_continues_with_the_command_of_the_summary(
    shoal, books: Path, limit: str, processes: str
) -> None:
    options, headline = LIMITS[limit]
    at = ["--frontier", "sqlite:///books.db"]
    done = shoal("run", "books.py", "-o", "x.jsonl", "--processes", processes, *at, *options)
    assert f"books: {headline}" in done.stderr
    first = lines(books.parent / "x.jsonl")
    assert 0 < len(first) < 60
    assert f"stopped at the limit {headline.partition('(')[2][:-1]}=" in shoal("runs", *at).stdout
    shoal("audit", *at)
    command = commands(done.stderr)[0]
    assert command[:2] == ["run", "books.py"]
    for _ in range(10):
        command = commands(shoal(*command).stderr)[0]
        if len(lines(books.parent / "x.jsonl")) == 60:
            break
    assert sorted(item["title"] for item in lines(books.parent / "x.jsonl")) == sorted(
        {item["title"] for item in lines(books.parent / "x.jsonl")}
    )
    assert "stopped at the limit" not in shoal("runs", *at).stdout


@pytest.mark.parametrize("option", [["--max-time", "soon"], ["--max-bytes", "5 parsecs"], ["--max-items", "0"]])
def test_a_limit_that_cannot_be_read_names_its_option(shoal, books: Path, option: list[str]) -> None:
    assert option[0] in shoal("run", "books.py", *option, code=2).stderr


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_spider_stops_its_run_with_a_reason(shoal, books: Path, processes: str) -> None:
    books.write_text(
        books.read_text()
        + "\n        if 'page-3' in response.url:\n            self.stop('page 3 is reached')\n"
        + "\n    def closed(self, reason):\n        open('closed', 'a').write(f'{reason} {self.stop_reason}\\n')\n"
    )
    at = ["--frontier", "sqlite:///books.db"]
    done = shoal("run", "books.py", "-o", "x.jsonl", "--processes", processes, "--delay", "0.8", *at)
    assert "books: stopped by the spider: page 3 is reached" in done.stderr
    assert 30 <= len(lines(books.parent / "x.jsonl")) < 60
    assert "limit page 3 is reached" in (books.parent / "closed").read_text()
    assert "was stopped by its spider (page 3 is reached) with 1 request left" in shoal("runs", *at).stdout
    shoal("audit", *at)
    shoal(*commands(done.stderr)[0])  # nothing asks for a stop now
    assert len(lines(books.parent / "x.jsonl")) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_a_spider_stops_all_workers_of_its_run(shoal, books: Path, kind: str) -> None:
    text = books.read_text()
    books.write_text(text + "\n        self.stop('enough')\n")
    frontier = frontier_url(kind)
    words = ["worker", "books.py", "--run-id", "one", "--frontier", frontier, "-o", "x.jsonl", "--allow-changed"]
    shoal("start", "books.py", "--delay", "1.5", "--run-id", "one", "--frontier", frontier)
    with ThreadPoolExecutor(2) as pool:
        workers = [pool.submit(shoal, *words) for _ in range(2)]
        ends = [worker.result().stderr for worker in workers]
    ends.append(shoal(*words).stderr)  # a worker that comes too late does not continue it
    assert all("books: stopped by the spider: enough" in end for end in ends)
    assert 0 < len(lines(books.parent / "x.jsonl")) < 60
    shoal("audit", "one", "--frontier", frontier)
    assert "was stopped by its spider (enough)" in shoal("runs", "--frontier", frontier).stdout
    books.write_text(text)
    shoal("resume", "one", "--frontier", frontier)
    shoal("hosts", "set", "127.0.0.1", "--delay", "0", "--frontier", frontier)
    shoal(*words)
    assert len(lines(books.parent / "x.jsonl")) == 60


def test_a_delay_for_a_host_without_its_port_says_which_host_was_meant(shoal, books: Path) -> None:
    shoal("run", "books.py", "-o", "x.jsonl", "--max-pages", "1", "--frontier", "sqlite:///x.db")
    said = shoal("hosts", "set", "127.0.0.1", "--delay", "2", "--frontier", "sqlite:///x.db").stderr
    assert "the run has no pages of 127.0.0.1 yet: this applies when it has; did you mean 127.0.0.1:" in said
    assert "later runs use it too, until: shoal hosts set 127.0.0.1 --reset" in said


@pytest.mark.parametrize(
    ("argument", "nearest"), [("start_url", "start_urls"), ("categroy", "category"), ("shelv", "shelf")]
)
def test_an_argument_that_is_a_typo_is_refused_without_an_init(shoal, books: Path, argument: str, nearest: str) -> None:
    """Of an attribute of all spiders, of the class, and of one that only a callback reads."""
    text = books.read_text().replace("    name =", "    category = None\n    name =")
    books.write_text(text + "        yield {'shelf': getattr(self, 'shelf_name', None) or self.shelf}\n")
    said = shoal("run", "books.py", "-a", f"{argument}=x", code=2).stderr
    assert f"Books has no argument '{argument}'; did you mean {nearest}?" in said
    for used in ("shelf", "shelf_name", "category"):
        assert "argument" not in shoal("run", "books.py", "-a", f"{used}=x", "-a", "shelf=1", "-o", "-").stderr
    assert "nothing in its code reads the argument 'zzz'" in shoal(
        "run", "books.py", "-a", "zzz=x", "-a", "shelf=1", "-o", "-"
    ).stderr  # fmt: skip


def test_an_attribute_that_is_nearly_one_of_shoal_is_reported(shoal, books: Path, shop: str) -> None:
    books.write_text(books.read_text().replace("start_urls =", "start_url =").replace("settings =", "setting ="))
    said = shoal("run", "books.py", code=5).stderr
    assert "Books.start_url has no effect; did you mean start_urls?" in said
    assert "Books.setting has no effect; did you mean settings?" in said
    assert "nothing was crawled: the spider has no start requests" in said
    own = "    def start(self):\n        return self.start_url\n\n    def parse"
    books.write_text(books.read_text().replace("    def parse", own).replace("    setting =", "    settings ="))
    assert "has no effect" not in shoal("run", "books.py", "-o", "-").stderr


def test_a_start_url_that_is_wrong_is_the_reason_of_the_outcome(shoal, books: Path) -> None:
    said = shoal("run", "books.py", "-a", "start_urls=htp:/x", code=5).stderr
    assert "nothing was crawled: the only start URL is wrong: " in said
    assert "htp:/x" in said.partition("is wrong: ")[2]


def test_every_command_takes_its_run_as_an_argument_and_as_an_option(shoal, books: Path, shop: str) -> None:
    at = ["--frontier", "sqlite:///books.db"]
    for _ in range(2):
        shoal("run", "books.py", "--new-run", *at)
    old = shoal("runs", *at).stdout.splitlines()[2].split()[0]
    for command in (
        "stats",
        "audit",
        "history",
        "workers",
        "session",
        "outputs",
        "identities",
        "retry-failed",
        "hosts",
    ):
        said = [shoal(command, *words, *at).stdout for words in ([old], ["--run-id", old], [f"--run-id={old}"])]
        assert len({re.sub(r"\d\d:\d\d:\d\d", "", text) for text in said}) == 1, said
        assert old not in shoal(command, *at).stdout or command in ("workers", "hosts")
        for words in (["missing"], ["--run-id", "missing"]):
            assert "missing" in shoal(command, *words, *at, code=2).stderr
    for words in ([shop, old], [shop, "--run-id", old], ["--run-id", old, shop]):
        assert "done" in shoal("why", *words, *at).stdout
    for words in ([old, "-o", "a.csv"], ["-o", "b.csv", "--run-id", old]):
        shoal("export", *words, *at)
    assert "did you mean set?" in shoal("hosts", "sett", *at, code=2).stderr
    for command in ("pause", "resume", "cancel", "rm"):
        assert f"no run {old}x" in shoal(command, "--run-id", f"{old}x", *at, code=2).stderr


def test_a_worker_takes_its_run_as_an_argument(shoal, books: Path) -> None:
    at = ["--frontier", frontier_url("redis")]
    shoal("start", "books.py", "--run-id", "monday", *at)
    shoal("worker", "books.py", "monday", "-o", "x.jsonl", *at)
    assert len(lines(books.parent / "x.jsonl")) == 60
    assert "there is no run tuesday" in shoal("worker", "books.py", "tuesday", *at, code=2).stderr


@pytest.mark.parametrize("kind", KINDS)
def test_start_says_which_settings_of_hosts_override_it(shoal, books: Path, shop: str, kind: str) -> None:
    at = ["--frontier", frontier_url(kind)]
    host = shop.split("/")[2]
    assert "note:" not in shoal("start", "books.py", "--run-id", "one", *at).stderr
    shoal("hosts", "set", host, "--delay", "3", *at)
    said = shoal("start", "books.py", "--run-id", "two", "--delay", "0.1", *at).stderr
    assert f"the delay of 3 s that was set for {host} counts, not download_delay=0.1" in said
    (command,) = re.findall(r"`shoal (hosts set .* --reset)` ends that", said)
    shoal(*shlex.split(command), *at)
    assert "note:" not in shoal("start", "books.py", "--run-id", "three", "--delay", "0.1", *at).stderr
    shoal("hosts", "set", "*", "--delay", "0", *at)
    shoal("hosts", "block", host, "--for", "60", *at)
    assert f"{host} is blocked for" in shoal("start", "books.py", "--run-id", "four", "--delay", "1", *at).stderr
    shoal("hosts", "unblock", host, *at)
    said = shoal("start", "books.py", "--run-id", "five", "--delay", "1", *at).stderr
    assert "the delay of 0 s that was set" in said


WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from shoal.cli.main import main; main()"


@pytest.mark.parametrize(
    ("module", "extra", "options"),
    [
        ("playwright", "browser", ["--render"]),
        ("playwright", "browser", ["--render-auto"]),
        ("pyarrow", "parquet", ["-o", "x.parquet"]),
        ("redis", "redis", ["--frontier", "redis://127.0.0.1:9"]),
        ("asyncpg", "postgres", ["-o", "postgresql://127.0.0.1:9/x"]),
    ],
)
def test_a_package_that_is_missing_is_reported_before_the_first_page(
    books: Path, shop: str, module: str, extra: str, options: list[str]
) -> None:
    words = [sys.executable, "-c", WITHOUT, module, "run", "books.py", *options]
    done = subprocess.run(words, cwd=books.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    assert pip_install(extra) in done.stderr
    assert "retry" not in done.stderr
    assert "fetched      1" not in done.stderr


@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_the_panel_steps_aside_for_a_debugger(books: Path, call: str) -> None:
    stop = f"        if 'page-3' in response.url:\n            {call}\n"
    books.write_text(books.read_text().replace("        yield response.follow", stop + "        yield response.follow"))
    terminal, other = pty.openpty()
    words = [*SHOAL, "run", "books.py", "--delay", "0.5", "-o", "x.jsonl"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = forking.Popen(
        words, cwd=books.parent, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True
    )
    os.close(other)
    text = read_until(terminal, "(Pdb) ")
    assert "pages/s" in text  # the panel was there
    os.write(terminal, b"response.url.rsplit('/')[-1] + str(6 * 7)\n")
    answer = read_until(terminal, "(Pdb) ")
    assert "page-3.html42" in answer
    assert "pages/s" not in answer
    os.write(terminal, b"continue\n")
    assert "pages/s" in read_until(terminal, "finished")
    assert process.wait(30) == 0
    os.close(terminal)
    assert len(lines(books.parent / "x.jsonl")) == 60


def read_until(terminal: int, words: str) -> str:
    text, end = "", time.monotonic() + 30
    while words not in text:
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 10_000).decode(errors="replace")
    return text


def test_after_a_kill_audit_and_stats_say_that_nobody_works_on_the_run(shoal, books: Path) -> None:
    at = ["--frontier", "sqlite:///books.db"]
    words = [*SHOAL, "run", "books.py", "-o", "x.jsonl", "--delay", "1", *at]
    with forking.Popen(words, cwd=books.parent, stderr=subprocess.DEVNULL) as crawl:
        until(lambda: (books.parent / "x.jsonl").exists() and len(lines(books.parent / "x.jsonl")) >= 10, 30, "items")
        assert "no process works" not in shoal("stats", *at).stdout
        run = shoal("runs", *at).stdout.splitlines()[1].split()[0]
        shoal("pause", run, *at)
        assert f"run {run} is paused: `shoal resume {run}` continues it" in shoal("stats", *at).stdout
        assert json.loads(shoal("stats", "--json", *at).stdout)["state"] == "paused"
        shoal("resume", run, *at)
        crawl.kill()
    for command in ("stats", "audit"):
        assert f"no process works on run {run} now" in shoal(command, *at).stdout


@pytest.mark.parametrize("limit", [["--max-pages", "1"], []], ids=["interrupted", "finished"])
def test_other_arguments_are_another_run(shoal, books: Path, shop: str, limit: list[str]) -> None:
    books.write_text(
        "from shoal import Request, Spider\n\n\nclass Books(Spider):\n    def start(self):\n"
        f"        yield Request('{shop}?shelf=' + self.shelf)\n        yield Request('{shop}?again=' + self.shelf)\n\n"
        "    def parse(self, response):\n        yield {'shelf': self.shelf, 'url': response.url}\n"
    )
    (books.parent / "shoal.toml").write_text(
        "frontier = 'sqlite:///books.db'\ndownload_delay = 0\n"
        "[spiders.Travel]\nfile = 'books.py'\narguments = { shelf = 'travel' }\n"
    )
    shoal("run", "Travel", "-o", "travel.jsonl", *limit)
    shoal("run", "books.py", "-a", "shelf=poetry", "-o", "poetry.jsonl")
    again = shoal("run", "Travel", "-o", "travel.jsonl").stderr
    (export,) = [command for command in commands(again) if command[0] == "export"]
    shoal(*export[:-1], "exported.jsonl")  # of this run, although the other one is newer
    assert {item["shelf"] for item in lines(books.parent / "exported.jsonl")} == {"travel"}
    assert len(shoal("runs").stdout.splitlines()) == 3  # a heading and two runs
    for shelf in ("travel", "poetry"):
        items = lines(books.parent / f"{shelf}.jsonl")
        assert len(items) == 2
        assert all(item["shelf"] == shelf and item["url"].endswith(f"={shelf}") for item in items)


def test_a_file_that_crawls_when_it_is_imported_is_refused(shoal, books: Path) -> None:
    books.write_text("from shoal import crawl\n" + books.read_text() + "\n\ncrawl(Books, outputs=['twice.jsonl'])\n")
    line = f"books.py, line {len(books.read_text().splitlines())}: "
    for command, code in ((["run", "books.py", "-o", "x.jsonl"], 2), (["list"], 0)):
        refused = shoal(*command, code=code).stderr
        assert line in refused
        assert 'put it below `if __name__ == "__main__":`' in refused
    assert not (books.parent / "twice.jsonl").exists()
    books.write_text(books.read_text().replace("\ncrawl(", '\nif __name__ == "__main__":\n    crawl('))
    shoal("run", "books.py", "-o", "x.jsonl")
    subprocess.run([sys.executable, "books.py"], cwd=books.parent, check=True)
    assert len(lines(books.parent / "x.jsonl")) == len(lines(books.parent / "twice.jsonl")) == 60


async def test_a_run_that_is_left_for_its_arguments_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def wanted(**arguments: object) -> WantedRun:
        start = {"start_urls": [], "arguments": {name: repr(value) for name, value in arguments.items()}}
        return WantedRun(spider="books", project="shop", start=start, new="never")

    store = await open_store(f"sqlite:///{tmp_path}/books.db")
    try:
        first = await choose_run(store, wanted(shelf="travel", client=object()))
        assert (await choose_run(store, wanted(shelf="travel", client=object()))).run_id == first.run_id
        assert not caplog.records
        assert (await choose_run(store, wanted(shelf="poetry"))).run_id != first.run_id
        assert f"run {first.run_id} is left as it is: it began with other arguments" in caplog.text
    finally:
        await store.close()


def test_export_does_not_replace_what_another_run_or_program_wrote(shoal, books: Path) -> None:
    at = ["--frontier", "sqlite:///books.db"]
    shoal("run", "books.py", "-o", "own.jsonl", *at)
    (books.parent / "notes.jsonl").write_text("my notes\n")
    said = shoal("export", "-o", "notes.jsonl", *at, code=2).stderr
    assert "notes.jsonl exists and is not empty. Use -O notes.jsonl to replace it" in said
    assert (books.parent / "notes.jsonl").read_text() == "my notes\n"
    shoal("export", "-O", "notes.jsonl", *at)
    shoal("export", "-o", "new.jsonl", *at)
    assert len(lines(books.parent / "notes.jsonl")) == len(lines(books.parent / "new.jsonl")) == 60


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "/proc/x.jsonl"], "the folder /proc takes no new files"),
        (["-o", "missing/x.jsonl"], "missing does not exist; create it first"),
        (["-O", "a.json"], "a.json: a JSON array is complete only at its end; use a.jsonl"),
        (["-O", "a.db"], "-O a.db: only .jsonl, .csv and .parquet files of this machine can be replaced"),
        (["-O", "a.xyz"], "unknown type of output: 'a.xyz'"),
    ],
)
def test_an_output_that_cannot_be_written_says_why(shoal, books: Path, options: list[str], words: str) -> None:
    done = forking.run([*SHOAL, "run", "books.py", *options], cwd=books.parent, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert words in done.stderr


def test_sizes_of_small_crawls_are_not_zero(shoal, books: Path) -> None:
    assert re.search(r"6 pages, \d+\.\d kB", shoal("run", "books.py", "-o", "-").stderr)


@pytest.mark.parametrize(
    ("variables", "source"),
    [
        ({"QUEUE_TYPE": "redis", "REDIS_PORT": "1"}, "QUEUE_TYPE"),
        ({"SHOAL_FRONTIER": "redis://:secret@127.0.0.1:1/0"}, "SHOAL_FRONTIER"),
        ({}, "shoal.toml"),
    ],
)
def test_a_frontier_that_does_not_respond_says_where_its_address_comes_from(
    books: Path, variables: dict[str, str], source: str
) -> None:
    if not variables:
        books.with_name("shoal.toml").write_text('frontier = "redis://127.0.0.1:1/0"\n')

    def error_of(*arguments: str) -> str:
        command, environ = [*SHOAL, *arguments], {**os.environ, **variables}
        done = forking.run(command, cwd=books.parent, capture_output=True, text=True, timeout=60, env=environ)
        assert done.returncode == 2, done.stderr
        return done.stderr.strip()

    error = error_of("run", books.name, "-o", "a.jsonl")
    assert re.search(rf"cannot reach redis://.*The address comes from (\S*/)?{source}\.$", error), error
    assert "secret" not in error
    assert "comes from" not in error_of("runs", "--frontier", "redis://127.0.0.1:2/0")


@pytest.mark.parametrize("command", ["pause r", "rm r", "retry-failed r", "audit --repair", "schedule list", "stats r"])
def test_a_typo_in_the_name_of_a_frontier_creates_no_file(shoal, tmp_path: Path, command: str) -> None:
    error = shoal(*command.split(), "--frontier", "sqlite:///typo.db", code=2).stderr
    assert "there is no file" in error
    assert not list(tmp_path.glob("typo.db*"))


def test_a_mistake_in_the_code_of_the_shell_is_one_line(shoal, shop: str) -> None:
    error = shoal("shell", shop, "-c", "x = 1\ncss('h1').gte()", code=1).stderr
    assert error == "shoal: AttributeError: 'SelectorList' object has no attribute 'gte' (-c, line 2)\n"
    error = shoal("shell", shop, "-c", "css('h1'", code=1).stderr
    assert error == "shoal: SyntaxError: '(' was never closed (-c, line 1)\n"
    assert shoal("shell", shop, "-c", "text = 'a'\nprint(text)").stdout == "a\n"


def test_the_log_has_each_page_at_debug_level(shoal, books: Path, shop: str) -> None:
    log = shoal("run", books, "-o", "a.jsonl", "--max-pages", "1", "--set", "log_level=DEBUG").stderr
    assert re.search(rf"DEBUG .*crawled url={re.escape(shop)}/? status=200 items=10 requests=1$", log, re.MULTILINE)
