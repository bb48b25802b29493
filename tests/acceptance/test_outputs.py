"""`shoal outputs`, `audit` and `export --missing`: what is in an output is counted there."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.nemesis.destinations import DESTINATIONS, MySQL, Postgres
from tests.support import forking
from tests.support.databases import RedisServer, shared
from tests.support.forking import SHOAL

ITEMS = 40
SPIDER = """
from shoal import Spider

class Numbers(Spider):
    name = "numbers"
    start_urls = ["{url}"]

    def parse(self, response):
        for number in range({items}):
            yield {{"page": f"p/{{number}}", "record": number, "visit": 1, "sku": number % 10}}
"""
Shoal = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shoal(tmp_path: Path, shop: str) -> Shoal:
    (tmp_path / "numbers.py").write_text(SPIDER.format(url=shop, items=ITEMS))

    def run(*words: str, code: int = 0, frontier: str = "sqlite:///store.db") -> subprocess.CompletedProcess[str]:
        done = forking.run(
            [*SHOAL, *words, "--frontier", frontier], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def crawl(shoal: Shoal, *outputs: str) -> None:
    shoal("run", "numbers.py", "--delay", "0", "--quiet", *(word for spec in outputs for word in ("-o", spec)))


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet", "x.db"])
def test_files_are_found_and_counted(shoal: Shoal, name: str) -> None:
    crawl(shoal, name)
    assert f"  {name}: {ITEMS} of {ITEMS} items\n" in shoal("outputs").stdout
    audit = shoal("audit").stdout
    assert f"  {name}: {ITEMS} of {ITEMS} items\n" in audit
    assert "balanced: nothing lost" in audit


def test_a_file_that_lost_lines_after_the_run(shoal: Shoal, tmp_path: Path) -> None:
    """The command below the line completes it."""
    crawl(shoal, "x.jsonl")
    file = tmp_path / "x.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:30]))
    audit = shoal("audit", code=1).stdout
    assert f"x.jsonl: 30 of {ITEMS} items: 10 MISSING" in audit
    assert "an output does not have the items of the run" in audit
    assert "nothing lost" not in audit
    words = next(line for line in audit.splitlines() if "shoal export" in line).split()
    assert words[1] == "export"
    shoal("export", *words[2:5])
    assert file.read_bytes() == whole
    shoal("audit")
    with file.open("a") as lines:
        lines.write("{}\n")
    assert "1 TOO MANY" in shoal("outputs", code=1).stdout


@pytest.mark.parametrize("option", ["", "?table=item&key=sku"])
def test_missing_rows_are_added_and_others_stay(shoal: Shoal, tmp_path: Path, option: str) -> None:
    """With a key, a row of a later run is never replaced by an item of an earlier one."""
    spec = f"sqlite:///x.db{option}"
    crawl(shoal, spec)
    rows = 10 if option else ITEMS
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.execute("DELETE FROM item WHERE sku < 3")
        database.execute("UPDATE item SET _run = 'later', page = 'of a later run' WHERE sku = 7")
        database.commit()
        kept = database.execute("SELECT * FROM item ORDER BY _key").fetchall()
        if not option:
            assert f"x.db?table=item: {24} of" in shoal("outputs", code=1).stdout.replace("x.db:", "x.db?table=item:")
        shoal("export", "--missing", "-o", spec)
        completed = database.execute("SELECT * FROM item ORDER BY _key").fetchall()
        assert set(kept) < set(completed)
        assert len(completed) == rows
        assert database.execute("SELECT count(*) FROM item WHERE page = 'of a later run'").fetchone()[0] == rows // 10
    message = shoal("export", "--missing", "-o", spec).stderr
    assert "wrote 0 missing items" in message


def test_rows_with_a_key(shoal: Shoal, tmp_path: Path) -> None:
    """Several items share a row, so the position in the output counts. The key is known from the run."""
    crawl(shoal, "sqlite:///x.db?table=item&key=sku")
    assert f"10 rows (one per key) from {ITEMS} items" in shoal("outputs").stdout
    with closing(sqlite3.connect(tmp_path / "x.db")) as database:
        database.executescript("DROP TABLE item; DROP TABLE _shoal_outputs")
        audit = shoal("audit", code=1).stdout
        assert f"0 rows (one per key) from {ITEMS} items: {ITEMS} MISSING" in audit
        words = shlex.split(next(line for line in audit.splitlines() if "shoal export" in line))
        assert "key=sku" in words[words.index("-o") + 1]
        shoal(*words[1 : words.index("--frontier")])
        assert database.execute("SELECT count(*) FROM item").fetchone() == (10,)
    assert f"10 rows (one per key) from {ITEMS} items\n" in shoal("audit").stdout


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_a_file_that_is_gone_with_its_identity(shoal: Shoal, tmp_path: Path, name: str) -> None:
    crawl(shoal, name)
    for file in (tmp_path / name, tmp_path / f"{name}.shoal"):
        file.unlink()
    audit = shoal("audit", code=1).stdout
    assert f"{name}: 0 of {ITEMS} items: {ITEMS} MISSING" in audit
    shoal("export", "-O", name)
    assert f"{name}: {ITEMS} of {ITEMS} items" in shoal("audit").stdout


@pytest.mark.parametrize("name", ["y.jsonl", "y.csv", "y.parquet"])
def test_a_file_that_was_refused_is_no_output_of_the_run(shoal: Shoal, tmp_path: Path, name: str) -> None:
    """Its items are not missed, and the log is not kept for it."""
    crawl(shoal, "x.jsonl")
    (tmp_path / name).write_text("the file of somebody\n")
    refused = shoal("run", "numbers.py", "--delay", "0", "--quiet", "-o", name, code=2)
    assert f"{name} exists and is not empty. Use -O {name}" in refused.stderr
    assert name not in shoal("outputs").stdout
    assert "balanced: nothing lost" in shoal("audit").stdout


def test_a_file_that_was_moved_with_its_identity(shoal: Shoal, tmp_path: Path) -> None:
    crawl(shoal, "x.jsonl")
    (tmp_path / "new").mkdir()
    for name in ("x.jsonl", "x.jsonl.shoal"):
        (tmp_path / name).rename(tmp_path / "new" / name)
    assert "If you moved it together with its .shoal file, pass its name with -o" in shoal("audit", code=1).stdout
    assert f"{ITEMS} of {ITEMS} items\n" in shoal("audit", "-o", "new/x.jsonl").stdout


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
def test_a_file_that_a_later_run_replaced(shoal: Shoal, tmp_path: Path, name: str) -> None:
    """The advised command leaves the output of the later run as it is."""
    crawl(shoal, name)
    first = shoal("audit").stdout.split()[1]
    shoal("run", "numbers.py", "--delay", "0", "--quiet", "--new-run", "-O", name)
    whole = (tmp_path / name).read_bytes()
    said = shoal("outputs", first, code=1).stdout
    assert f"{name}: 0 of {ITEMS} items: {ITEMS} MISSING" in said
    assert "has replaced the file, so write the items to another one" in said
    words = shlex.split(next(line for line in said.splitlines() if "shoal export" in line))
    assert words[3] == "-o"
    shoal(*words[1 : words.index("--frontier")])
    assert (tmp_path / name).read_bytes() == whole
    assert (tmp_path / words[4]).exists()


def test_items_that_the_log_no_longer_has(shoal: Shoal, tmp_path: Path) -> None:
    """Nothing that would lose the rest of them is done or advised."""
    crawl(shoal, "x.jsonl")
    file = tmp_path / "x.jsonl"
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        database.execute("DELETE FROM item WHERE id IN (SELECT id FROM item ORDER BY id LIMIT 10)")
        database.commit()
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:30]))
    audit = shoal("audit", code=1).stdout
    assert "items 1 to 10 are no longer in the log" in audit
    assert "shoal export" not in audit
    assert "Choose another file" in shoal("export", "-O", "x.jsonl", code=2).stderr
    for gone in (file, tmp_path / "x.jsonl.shoal"):
        gone.unlink()
    spider = ("run", "numbers.py", "--delay", "0", "--quiet", "-o", "x.jsonl")
    assert "items 1 to 10 are no longer in the item log" in shoal(*spider, code=2).stderr
    assert "begins with item 11" in shoal("outputs", audit.split()[1], "forget", "x.jsonl").stdout


@pytest.mark.parametrize(("deleted", "advised"), [(10, True), (ITEMS, False)])
def test_rows_whose_items_the_log_no_longer_has(shoal: Shoal, tmp_path: Path, deleted: int, advised: bool) -> None:
    """An export is advised only if the log has something to write."""
    crawl(shoal, "x.db")
    for file, count in (("store.db", deleted), ("x.db", 15)):
        column = "id" if file == "store.db" else "_seq"
        with closing(sqlite3.connect(tmp_path / file)) as database:
            database.execute(f"DELETE FROM item WHERE {column} IN (SELECT {column} FROM item ORDER BY 1 LIMIT {count})")
            database.commit()
    said = shoal("outputs", code=1).stdout
    assert f"25 of {ITEMS} items: 15 MISSING" in said
    assert f"items 1 to {deleted} are no longer in the log" in said
    assert ("shoal export" in said) == advised


@pytest.mark.parametrize("kind", [Postgres, MySQL])
def test_databases_on_servers_need_their_url(shoal: Shoal, tmp_path: Path, kind: type[Postgres | MySQL]) -> None:
    destination = kind(tmp_path)
    crawl(shoal, destination.spec)
    unknown = shoal("outputs").stdout
    assert f"written through item {ITEMS} of {ITEMS}, not counted: pass its URL with -o" in unknown
    assert f"{ITEMS} of {ITEMS} items" in shoal("audit", "-o", destination.spec).stdout
    empty = kind(tmp_path)
    destination.set_back(empty.save())
    audit = shoal("audit", "-o", destination.spec, code=1).stdout
    assert f"0 of {ITEMS} items: {ITEMS} MISSING" in audit
    assert "shoal export" in audit
    assert "secret" not in audit
    assert f"wrote {ITEMS} missing items" in shoal("export", "--missing", "-o", destination.spec).stderr
    assert f"{ITEMS} of {ITEMS} items" in shoal("audit", "-o", destination.spec).stdout


def test_missing_items_of_a_file_are_not_added(shoal: Shoal) -> None:
    crawl(shoal, "x.jsonl")
    assert "write all of them again with -O x.jsonl" in shoal("export", "--missing", "-o", "x.jsonl", code=2).stderr


def test_outputs_of_a_fleet_are_stored_with_the_run(shoal: Shoal, tmp_path: Path) -> None:
    """The writer is named while it works. The file of another machine is abandoned, until it is forgotten."""
    frontier, destination = shared(RedisServer).url, DESTINATIONS["postgresql"](tmp_path)
    shoal("start", "numbers.py", "--run-id", tmp_path.name, "-o", destination.spec, frontier=frontier)
    shoal("worker", "numbers.py", "--run-id", tmp_path.name, "-o", "x.jsonl", "--quiet", frontier=frontier)
    listed = shoal("outputs", tmp_path.name, frontier=frontier).stdout
    assert listed.count(f"{ITEMS} of {ITEMS} items") == 2
    sidecar = tmp_path / "x.jsonl.shoal"
    sidecar.write_text(json.dumps({"identity": "other-12345678", "inode": sidecar.stat().st_ino}))
    elsewhere = shoal("audit", tmp_path.name, frontier=frontier).stdout
    assert "another file has its name now" in elsewhere
    assert "1 of 2 outputs could not be counted" in elsewhere
    error = shoal("outputs", tmp_path.name, "forget", "x", code=2, frontier=frontier).stderr
    assert "has no output x; it has:" in error
    assert "no longer keeps items" in shoal("outputs", tmp_path.name, "forget", "x.jsonl", frontier=frontier).stdout
    assert "x.jsonl" not in shoal("outputs", tmp_path.name, frontier=frontier).stdout
