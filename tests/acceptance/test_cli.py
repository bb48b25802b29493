"""The command line as a user sees it: real processes against the demo shop."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support import forking
from tests.support.forking import SHOAL

ROOT = Path(__file__).parents[2]


@pytest.fixture
def shoal(tmp_path: Path):
    """A command, in a place where no other crawl runs."""

    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = forking.run(
            [*SHOAL, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    with TemporaryDirectory() as sockets:  # a short path: those of sockets are limited
        environment = {**os.environ, "XDG_RUNTIME_DIR": sockets, "TMPDIR": sockets}
        yield run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_crawl_without_code_writes_items_to_standard_output(shoal, shop: str) -> None:
    done = shoal("crawl", shop, "--max-pages", "3", "--delay", "0")
    items = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(items) == 3
    assert set(items[0]) == {"url", "title", "text"}
    assert "page limit reached" in done.stderr


def test_crawl_with_chosen_fields(shoal, shop: str, tmp_path: Path) -> None:
    shoal("crawl", shop, "--depth", "1", "--delay", "0", "--item", "name=h1", "--item", "price=p.price",
          "-o", "x.jsonl", "--max-pages", "20")  # fmt: skip
    assert {"url", "name", "price"} == set(lines(tmp_path / "x.jsonl")[0])


def test_crawl_for_rows_of_some_pages(shoal, shop: str, tmp_path: Path) -> None:
    """Links of all pages are followed. Only the pages of the catalogue yield items, one for each book."""
    shoal("crawl", shop, "--delay", "0", "--depth", "6", "--each", "article.product", "--item", "price=p.price",
          "--item", "title=h3 a::attr(title)", "--allow", r"/$", "--allow", "/catalogue/",
          "--deny", "/c[a-z]*/[a-z0-9]*/", "--deny", "page-3", "-o", "x.jsonl",
          "--set", 'scope.deny=["/calendar/", "/slow", "/flaky"]')  # fmt: skip
    books = lines(tmp_path / "x.jsonl")
    assert len(books) == len({book["title"] for book in books}) == 50
    assert {book["url"].removeprefix(shop) for book in books} == {
        "", *(f"catalogue/page-{number}.html" for number in (2, 4, 5, 6)),
    }  # fmt: skip
    assert all(book["price"].startswith("£") for book in books)
    shoal("crawl", shop, "--each", "p[", code=2)
    shoal("crawl", shop, "--allow", "(", code=2)


def test_rows_without_fields_are_texts(shoal, shop: str, tmp_path: Path) -> None:
    shoal("crawl", shop, "--depth", "0", "--delay", "0", "--each", "h3", "-o", "x.jsonl")
    assert len(lines(tmp_path / "x.jsonl")) == 10
    assert set(lines(tmp_path / "x.jsonl")[0]) == {"url", "text"}


def test_the_first_spider_of_the_readme_yields_each_book_once(shoal, shop: str, tmp_path: Path) -> None:
    code = re.search(r"```python\n(# books.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "books.py").write_text(code[1].replace("http://127.0.0.1:8000/", shop))
    shoal("run", "books.py", "-o", "books.jsonl", "--delay", "0")
    titles = [book["title"] for book in lines(tmp_path / "books.jsonl")]
    assert len(titles) == len(set(titles)) == 60


def test_a_new_spider_stays_on_its_site(shoal, shop: str, tmp_path: Path) -> None:
    shoal("new", "far", "https://www.example.com/start")
    assert 'allowed_domains = ["example.com"]' in (tmp_path / "far.py").read_text()


LOSSES = {
    "role WHERE role = 'seed'": ("a role is missing: its cursor is lost, and it begins again, for example seed", ""),
    "role WHERE role <> 'seed'": ("a role is missing", "the cursor of role"),
    "document WHERE key = (SELECT min(key) FROM document WHERE key LIKE 'run/%')": (
        "a document of the store is missing",
        "the document run/",
    ),
    "host": ("the record of a host is missing", "the settings of host 127.0.0.1"),
}
"""Rows to delete; what an audit says; what a repair says is lost."""


def test_rows_that_are_lost_after_the_run_are_faults_until_the_loss_is_accepted(
    shoal, shop: str, tmp_path: Path
) -> None:
    at = ["--frontier", "sqlite:///books.db"]
    shoal("crawl", shop, "--max-pages", "2", "--delay", "0", "-o", "x.jsonl", *at)
    before = shoal("audit", *at).stdout.splitlines()[-2:]
    for rows, (fault, loss) in LOSSES.items():
        with closing(sqlite3.connect(tmp_path / "books.db")) as db:
            assert db.execute(f"DELETE FROM {rows}").rowcount == 1
            db.commit()
        said = shoal("audit", *at, code=1).stdout
        assert fault in said
        assert "--repair" in said
        repaired = shoal("audit", "--repair", *at).stdout
        assert loss in repaired
        assert ("lost: it could not be restored" in repaired) == bool(loss)
        assert shoal("audit", *at).stdout.splitlines()[-2:] == before


def test_an_export_names_the_items_that_are_lost(shoal, shop: str, tmp_path: Path) -> None:
    at = ["--frontier", "sqlite:///books.db"]
    shoal("crawl", shop, "--max-pages", "8", "--delay", "0", "-o", "all.jsonl", *at)
    shoal("export", *at, "-o", "again.jsonl")
    with closing(sqlite3.connect(tmp_path / "books.db")) as db:
        assert db.execute("DELETE FROM item WHERE id IN ((1 << 40) + 2, (1 << 40) + 3, (1 << 40) + 5)").rowcount == 3
        db.commit()
    done = shoal("export", *at, "-o", "rest.jsonl", code=2)
    assert "does not have items 2 to 3 and 5" in done.stderr
    assert "items are missing in the log of run" in done.stderr
    written = lines(tmp_path / "again.jsonl")
    assert lines(tmp_path / "rest.jsonl") == [written[0], written[3], *written[5:]]
    assert "3 items are missing in the item log, for example item 2" in shoal("audit", *at, code=1).stdout


def test_a_run_whose_log_lacks_an_item_ends_with_an_error(shoal, shop: str, tmp_path: Path) -> None:
    """The output has all other items, and the run is finished."""
    at = ["--frontier", "sqlite:///r.db"]
    shoal("crawl", shop, "--max-pages", "4", "--delay", "0", "-o", "first.jsonl", *at)
    with closing(sqlite3.connect(tmp_path / "r.db")) as db:
        db.execute("DELETE FROM item WHERE id = (1 << 40) + 2")
        db.commit()
    for _ in range(2):
        done = shoal("crawl", shop, "--max-pages", "6", "--delay", "0", "-o", "x.jsonl", *at, code=1)
        assert "x.jsonl" in done.stderr
        assert "lacks item 2, which the item log of this run does not have" in done.stderr
        assert len(lines(tmp_path / "x.jsonl")) == 5
    assert re.search(r"finished +degraded", shoal("runs", *at).stdout)
    audit = shoal("audit", *at, code=1).stdout
    assert "the item log lacked 1 item: another program changed the store" in audit
    keep = "the log of this run does not have item 2: keep the file, and export what the log has to another one"
    assert f"x.jsonl: 5 of 6 items: 1 MISSING\n      {keep}\n" in audit
    assert f"first.jsonl: 4 of 6 items: 2 MISSING\n      {keep}\n" in audit, "it has item 2"
    assert "shoal export" not in audit


@pytest.mark.parametrize(("rows", "advised"), [("_seq = 2", False), ("_seq <= 3", True)])
def test_a_table_that_lacks_what_the_log_lacks(shoal, shop: str, tmp_path: Path, rows: str, advised: bool) -> None:
    """An export is advised only if it can write something."""
    at = ["--frontier", "sqlite:///r.db"]
    shoal("crawl", shop, "--max-pages", "4", "--delay", "0", "-o", "x.db?table=t", *at)
    deletions = {"r.db": "DELETE FROM item WHERE id = (1 << 40) + 2", "x.db": f"DELETE FROM t WHERE {rows}"}
    for file, statement in deletions.items():
        with closing(sqlite3.connect(tmp_path / file)) as db:
            db.execute(statement)
            db.commit()
    said = shoal("outputs", *at, code=1).stdout
    assert "does not have item 2: if some of them are missing, restore the output" in said
    assert ("shoal export" in said) == advised


@pytest.mark.parametrize(("key", "other"), [("", "&key=url"), ("&key=url", ""), ("&key=url", "&key=title")])
@pytest.mark.parametrize("how", [[], ["--missing"]])
def test_an_export_with_another_key_than_that_of_the_run(
    shoal, shop: str, tmp_path: Path, key: str, other: str, how: list[str]
) -> None:
    """Each item would have two rows, or the rows of the run would be replaced."""
    at = ["--frontier", "sqlite:///r.db"]
    shoal("crawl", shop, "--max-pages", "4", "--delay", "0", "-o", f"x.db?table=t{key}", *at)
    said = shoal("export", *how, "-o", f"x.db?table=t{other}", *at, code=2).stderr
    assert "Use the same key as before, or another table" in said
    with closing(sqlite3.connect(tmp_path / "x.db")) as db:
        assert db.execute("SELECT count(*) FROM t").fetchone() == (4,)
    shoal("export", *how, "-o", f"x.db?table=t{key}", *at)
    shoal("export", *how, "-o", f"x.db?table=u{other}", *at)


def test_new_list_and_run(shoal, shop: str, tmp_path: Path) -> None:
    assert "wrote my_shop.py" in shoal("new", "my-shop", shop).stdout
    assert "my-shop" in shoal("list").stdout
    shoal("new", "my-shop", shop, code=2)
    done = shoal("run", "my_shop.py", "-o", "x.jsonl", "-o", "x.csv", "--delay", "0", "--max-pages", "10")
    assert len(lines(tmp_path / "x.jsonl")) == 10
    assert (tmp_path / "x.csv").read_text().splitlines()[0] == "url,title"
    for word in ("this process", "fetched", "time", "pages/s", "run 20", "done", "items", "left", "written to"):
        assert word in done.stderr


def test_the_demo_spider_finds_every_book_and_its_store_answers(shoal, shop: str, tmp_path: Path) -> None:
    at = ["--frontier", "sqlite:///books.db"]
    spider = str(ROOT / "examples" / "books.py")
    command = ["run", spider, "-a", f"start_url={shop}", "-o", "books.jsonl", "--delay", "0", *at]
    done = shoal(*command)
    assert len({item["url"] for item in lines(tmp_path / "books.jsonl")}) == 60
    assert "next:" in done.stderr

    audit = shoal("audit", *at).stdout
    assert "balanced: nothing lost" in audit
    assert "robots" in audit
    why = shoal("why", shop + "missing", *at).stdout
    assert "answered 404" in why
    assert "found on" in why
    assert "robots.txt" in shoal("why", shop + "admin/", *at).stdout
    assert "attempts  3" in shoal("why", shop + "flaky", *at).stdout
    assert "has not seen" in shoal("why", shop + "nowhere", *at, code=1).stdout

    assert "1 request is queued again" in shoal("retry-failed", *at).stdout
    shoal(*command)
    assert len(lines(tmp_path / "books.jsonl")) == 60
    shoal("export", *at, "-o", "again.csv")
    assert len((tmp_path / "again.csv").read_text().splitlines()) == 61
    shoal(*("-O" if word == "-o" else word for word in command), "--new-run")
    assert len(lines(tmp_path / "books.jsonl")) == 60


def test_shell_config_doctor_version(shoal, shop: str) -> None:
    assert "Shoal Bookshop" in shoal("shell", shop, "-c", "css('title::text').get()").stdout
    config = shoal("config", "--set", "http.proxy=http://user:secret@127.0.0.1:1").stdout
    assert "download_delay" in config
    assert "--set http.proxy" in config
    assert "secret" not in config
    assert "aiohttp" in shoal("doctor").stdout
    assert shoal("--version").stdout.startswith("shoal ")


def test_mode_is_an_option(shoal, shop: str, tmp_path: Path) -> None:
    shown = {line.split()[0]: line.split()[1:] for line in shoal("config", "--mode", "distributed").stdout.splitlines()}
    assert shown["mode"] == ["distributed", "--mode"]
    assert shown["frontier"] == ["redis://127.0.0.1:6379/0", "--mode"]
    refused = shoal("crawl", shop, "--mode", "distributed", "--frontier", "sqlite:///x.db", code=2).stderr
    assert '"mode" is "distributed" (--mode), but "frontier" is "sqlite:///x.db" (--frontier)' in refused
    assert '--mode: "mode" must be' in shoal("run", str(ROOT / "examples/books.py"), "--mode", "both", code=2).stderr
    spider = str(ROOT / "examples" / "books.py")
    one = ["-a", f"start_url={shop}", "-o", "x.jsonl", "--delay", "0", "--max-pages", "2"]
    (tmp_path / "shoal.toml").write_text('mode = "distributed"\nfrontier = "redis://127.0.0.1:9/0"\n')
    shoal("run", spider, "--mode", "standalone", *one)
    shoal("start", spider, "--mode", "standalone", "-a", f"start_url={shop}", "-o", "y.jsonl",
          "--set", "scope.max_pages=2", "--delay", "0")  # fmt: skip
    assert lines(tmp_path / "x.jsonl")
    assert lines(tmp_path / "y.jsonl")
    shown = [line.split() for line in shoal("config", "--mode", "standalone").stdout.splitlines()]
    file = f"{tmp_path}/shoal.toml:"
    assert ["redis://127.0.0.1:9/0", file, "lost", "to", "--mode"] == shown[
        shown.index(["frontier", "memory:", "--mode"]) + 1
    ]


def test_every_command_reads_the_file_that_config_names(shoal, shop: str, tmp_path: Path) -> None:
    (tmp_path / "shoal.toml").write_text('frontier = "redis://127.0.0.1:9/0"\n')
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "other.toml").write_text(
        f'frontier = "sqlite:///{tmp_path}/x.db"\nscope.max_pages = 3\ndownload_delay = 0\n'
        f'[spiders.Shop]\nfile = "{ROOT}/examples/books.py"\narguments = {{ start_url = "{shop}" }}\n'
    )
    use = ["--config", "local/other.toml"]
    shoal("run", "Shop", *use, "-o", "x.jsonl")
    assert lines(tmp_path / "x.jsonl")
    assert "done" in shoal("stats", *use).stdout
    assert "cannot read" in shoal("runs", "--config", "none.toml", code=2).stderr


def test_a_finished_crawl_says_so(shoal, shop: str, tmp_path: Path) -> None:
    spider = str(ROOT / "examples" / "books.py")
    command = ["run", spider, "-a", f"start_url={shop}", "-o", "books.jsonl", "--delay", "0"]
    command += ["--frontier", "sqlite:///x.db"]
    assert "already finished" not in shoal(*command).stderr
    again = " ".join(shoal(*command).stderr.split())
    assert "already finished at 20" in again
    assert "use --new-run to crawl again" in again
    assert len(lines(tmp_path / "books.jsonl")) == 60
    for policy in ("after_finish", "always"):
        anew = ["-O" if word == "-o" else word for word in command]
        assert "already finished" not in shoal(*anew, "--set", f"new_run={policy}").stderr
    listed = shoal("runs", "--frontier", "sqlite:///x.db").stdout
    assert listed.count(" finished ") == 3


def test_runs_of_another_project_are_not_listed(shoal, shop: str) -> None:
    at = ["--frontier", "sqlite:///x.db"]
    shoal("crawl", shop, "--max-pages", "1", "--delay", "0", "--set", "project_name=other", *at)
    assert len(shoal("runs", *at).stdout.splitlines()) == 1
    assert shoal("runs", "--all-projects", *at).stdout.splitlines()[1].split()[10] == "other"
    assert "the project 'shoal' has no runs" in shoal("stats", *at, code=2).stderr


def test_mistakes_get_one_clear_line(shoal, tmp_path: Path) -> None:
    assert "did you mean" in shoal("config", "--set", "downlod_delay=1", code=2).stderr
    assert 'did you mean "download_delay"?' in shoal("config", "--set", "delay=3", code=2).stderr
    assert "nothing.py does not exist" in shoal("run", "nothing.py", code=2).stderr
    assert "--frontier" in shoal("audit", code=2).stderr
    (tmp_path / "s.py").write_text(
        "from shoal import Spider\nclass S(Spider):\n    start_urls = ['http://127.0.0.1:9/']\n"
    )
    assert "x.xyz" in shoal("run", "s.py", "-o", "x.xyz", code=2).stderr
    assert "redis" in shoal("run", "s.py", "--frontier", "redis://127.0.0.1/0", code=2).stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_good_order_and_the_same_command_goes_on(
    shoal, shop: str, tmp_path: Path, number: signal.Signals
) -> None:
    spider = str(ROOT / "examples" / "books.py")
    command = [
        "run",
        spider,
        "-a",
        f"start_url={shop}",
        "-o",
        "b.jsonl",
        "--delay",
        "0.05",
        "--frontier",
        "sqlite:///b.db",
    ]
    with subprocess.Popen([*SHOAL, *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as crawl:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "b.jsonl").exists() and (tmp_path / "b.jsonl").stat().st_size):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        crawl.send_signal(number)
        _, stderr = crawl.communicate(timeout=15)
    assert crawl.returncode == 0, stderr
    assert "stopped before it was finished" in stderr
    assert re.search(r"next:\n    shoal run \S*books.py .*-o b.jsonl", stderr), stderr
    shoal(*command[:-4], "--delay", "0", *command[-2:])
    assert len({item["url"] for item in lines(tmp_path / "b.jsonl")}) == len(lines(tmp_path / "b.jsonl")) == 60


def test_a_second_signal_ends_it_at_once_also_while_a_callback_blocks(shop: str, tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "import time\nfrom shoal import Spider\n"
        f"class Stuck(Spider):\n    start_urls = ['{shop}']\n"
        "    def parse(self, response):\n        print('stuck', flush=True)\n        time.sleep(60)\n"
    )
    with subprocess.Popen([*SHOAL, "run", "stuck.py", "-q"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as crawl:
        assert crawl.stdout is not None
        assert crawl.stdout.readline() == "stuck\n"
        crawl.send_signal(signal.SIGINT)
        time.sleep(0.3)  # so that the two are not taken for one
        crawl.send_signal(signal.SIGINT)
        assert crawl.wait(10) == 130
