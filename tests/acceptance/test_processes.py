"""`shoal run --processes N` without a server. Any process is killed; the site and the output are the judges."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.fleets import frontier_url, site, visits
from tests.acceptance.machine import Machine, machine

PAGES = 600
SPIDER = """
from shoal import Request, Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8}

    def start(self):
        yield Request(self.start_url)

    def parse(self, response):
        self.stats.inc("pages seen")
        yield {"url": response.url, "title": response.css("h1::text").get(), "price": response.css("p.prise").get()}
        yield response.follow_all("a")
"""
LATE_WORK = """
import atexit, os, threading, time
from concurrent.futures import ThreadPoolExecutor

def note(what):
    with open(f"{what}-{os.getpid()}", "w") as file:
        file.write(what)

def note_late(what):
    time.sleep(0.2)
    note(what)

class Slow(Pages):
    def opened(self):
        atexit.register(note, "handler")
        self.pool = ThreadPoolExecutor()

    def closed(self, reason):
        self.pool.submit(note_late, "pool")
        threading.Thread(target=note_late, args=["thread"]).start()
        print("printed", end="")
"""

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "pages.py").write_text(SPIDER)
    with machine(tmp_path) as made:
        yield made


@pytest.fixture
def url() -> Iterator[str]:
    """Slow enough that a crawl lasts for a few seconds."""
    with site(PAGES, latency=0.04) as made:
        yield made


def run(url: str, *more: str) -> list[str]:
    return ["run", "pages.py", "-a", f"start_url={url}", "-o", "out.jsonl", "--processes", "2", *more]


def pages_of(url: str) -> Counter[str]:
    return Counter([f"{url}/", *(f"{url}/p/{number}" for number in range(PAGES))])


def written(here: Machine) -> Counter[str]:
    return Counter(json.loads(line)["url"] for line in (here.folder / "out.jsonl").read_text().splitlines())


def visited(url: str) -> Counter[str]:
    """How often each page was asked for."""
    return Counter(url + path for _, path, *_ in visits(url) if not path.startswith("/-/"))


def wait_for_pages(here: Machine, url: str, count: int) -> None:
    def holds() -> bool:
        assert here.processes(), here.said()
        return len(visits(url)) >= count

    here.wait_until(holds, f"{count} pages fetched")


def ended(here: Machine, crawl: subprocess.Popen[str], timeout: float = 120.0) -> str:
    """What a crawl that must end well has said."""
    code = crawl.wait(timeout)
    assert code == 0, here.said()
    return here.said()


FRONTIERS = {"memory": (), "sqlite": ("--frontier", "sqlite:///crawl.db")}


@pytest.mark.parametrize("frontier", FRONTIERS.values(), ids=FRONTIERS)
def test_every_page_once_and_nobody_stays(here: Machine, url: str, frontier: tuple[str, ...]) -> None:
    crawl = here.start(*run(url, *frontier))
    here.wait_until(lambda: len(here.workers()) == 2 and len(here.owners()) == 1, "all processes started")
    said = ended(here, crawl)
    assert written(here) == visited(url) == pages_of(url)
    assert re.search(rf"fetched +{PAGES + 1} pages", said), said
    assert "finished: every page found is accounted for" in said
    assert "these 2 processes" in said
    assert re.search(rf"pages seen +{PAGES + 1} ", said), said
    assert f"`p.prise` matched nothing on {PAGES + 1} pages" in said
    assert "`h1" not in said
    here.wait_until(lambda: not here.processes(), "all processes ended", 20)
    assert list((here.runtime / "shoal").iterdir()) == []


def test_workers_end_like_other_programs(here: Machine) -> None:
    """They leave their memory to the system, but not what a spider still has to do."""
    (here.folder / "pages.py").write_text(SPIDER + LATE_WORK)
    with site(10) as url:
        crawl = here.start(*[word.replace("pages.py", "pages.py:Slow") for word in run(url)])
        said = ended(here, crawl)
    assert said.count("printed") >= 2, said
    for what in ("handler", "pool", "thread"):
        assert len(list(here.folder.glob(f"{what}-*"))) >= 2, what


def test_a_frontier_on_a_server_needs_no_owner(here: Machine, url: str) -> None:
    crawl = here.start(*run(url, "--frontier", frontier_url("redis")))
    here.wait_until(lambda: len(here.workers()) == 2, "all processes started")
    assert here.owners() == []
    said = ended(here, crawl)
    assert written(here) == visited(url) == pages_of(url)
    assert re.search(rf"fetched +{PAGES + 1} pages", said), said
    here.wait_until(lambda: not here.processes(), "all processes ended", 20)


@pytest.mark.parametrize("frontier", FRONTIERS.values(), ids=FRONTIERS)
def test_a_killed_worker_costs_only_time(here: Machine, url: str, frontier: tuple[str, ...]) -> None:
    """Its leases are free at once, not after their 300 seconds. Another worker process takes its place."""
    crawl = here.start(*run(url, *frontier))
    wait_for_pages(here, url, 60)
    victim = here.workers()[0]
    here.kill(victim)
    here.wait_until(lambda: len(set(here.workers()) - {victim}) == 2, "a successor started")
    said = ended(here, crawl)
    assert "was killed by SIGKILL" in said
    assert written(here) == pages_of(url)
    seen = visited(url)
    assert seen.keys() == pages_of(url).keys()
    assert sum(seen.values()) <= PAGES + 1 + 8  # at most what the victim had in flight was fetched again


def test_a_crawl_without_code_uses_several_processes_too(here: Machine, url: str) -> None:
    options = ("-o", "out.jsonl", "--item", "title=h1", "--depth", "1000", "--delay", "0", "--set", "robots.obey=false")
    crawl = here.start("crawl", f"{url}/", *options, "--processes", "2")
    wait_for_pages(here, url, 100)
    here.kill(here.workers()[0])
    said = ended(here, crawl)
    assert written(here) == pages_of(url)
    assert "these 2 processes" in said
    here.wait_until(lambda: not here.processes(), "all processes ended", 20)


def test_a_killed_owner_of_a_file_is_replaced(here: Machine, url: str) -> None:
    """The workers keep their leases: no attempt is lost, so three kills do not make a page dead."""
    crawl = here.start(*run(url, *FRONTIERS["sqlite"], "--set", "retry.max_attempts=2"))
    for count in (50, 150, 250, 350):
        wait_for_pages(here, url, count)
        here.wait_until(lambda: len(here.owners()) == 1, "an owner")
        here.kill(here.owners()[0])
    ended(here, crawl)
    assert written(here) == visited(url) == pages_of(url)
    audit = here.shoal("audit", *FRONTIERS["sqlite"])
    assert "balanced: nothing lost" in audit.stdout


def test_the_end_of_an_owner_in_memory_ends_the_crawl(here: Machine, url: str) -> None:
    crawl = here.start(*run(url))
    wait_for_pages(here, url, 60)
    here.kill(here.owners()[0])
    assert crawl.wait(60) == 1
    assert "the process that held the frontier in memory has ended" in here.said()
    here.wait_until(lambda: not here.processes(), "all processes ended", 20)


def test_a_killed_command_leaves_nobody_and_resumes(here: Machine, url: str) -> None:
    """The same command may even be started before the others have noticed."""
    for count in (50, 200, 350):
        crawl = here.start(*run(url, *FRONTIERS["sqlite"]))
        wait_for_pages(here, url, count)
        crawl.kill()
        crawl.wait()
    here.wait_until(lambda: not here.processes(), "all processes ended", 20)
    ended(here, here.start(*run(url, *FRONTIERS["sqlite"])))
    assert written(here) == pages_of(url)
    assert "balanced: nothing lost" in here.shoal("audit", *FRONTIERS["sqlite"]).stdout


def test_ctrl_c_stops_in_good_order(here: Machine, url: str) -> None:
    crawl = here.start(*run(url, *FRONTIERS["sqlite"]))
    wait_for_pages(here, url, 60)
    crawl.send_signal(signal.SIGINT)
    said = ended(here, crawl, 30)
    assert "stopped before it was finished" in said
    stats = json.loads(here.shoal("stats", "--json", *FRONTIERS["sqlite"]).stdout)
    assert stats["in_flight"] == 0
    assert stats["done"] == len(written(here))
    fetched = visited(url)
    assert set(written(here)) == set(fetched)  # pages in flight were completed, not dropped
    ended(here, here.start(*run(url, *FRONTIERS["sqlite"])))
    assert written(here) == visited(url) == pages_of(url)


def test_a_second_ctrl_c_ends_it_at_once(here: Machine) -> None:
    with site(20, latency=30.0) as url:
        crawl = here.start(*run(url, "--set", "shutdown_grace=60", "--set", "http.read_timeout=100"))
        wait_for_pages(here, url, 1)
        crawl.send_signal(signal.SIGINT)
        here.wait_until(lambda: "stopping" in here.said(), "the first signal was noticed")
        crawl.send_signal(signal.SIGINT)
        assert crawl.wait(5) == 128 + signal.SIGINT
        here.wait_until(lambda: not here.processes(), "all processes ended", 20)


def test_a_page_limit_is_that_of_the_run(here: Machine, url: str) -> None:
    said = ended(here, here.start(*run(url, "--max-pages", "100")))
    assert "page limit reached" in said
    fetched = re.search(r"fetched +(\d+) pages", said)
    assert fetched, said
    assert len(written(here)) == int(fetched[1])
    assert 100 <= int(fetched[1]) <= 116  # by what another process holds at that moment, see docs/fleet.md


# -- a running crawl and other commands


def running(here: Machine, url: str, *more: str) -> subprocess.Popen[str]:
    """A crawl that would take minutes."""
    crawl = here.start("run", "pages.py", "-a", f"start_url={url}", "-o", "out.jsonl", "--delay", "0.5", *more)
    wait_for_pages(here, url, 3)
    return crawl


WAYS = {
    "memory": ((), ()),
    "memory by name": ((), ("--frontier", "local:pages")),
    "sqlite": (FRONTIERS["sqlite"], FRONTIERS["sqlite"]),
    "processes": (("--processes", "2"), ("--frontier", "local:pages")),
}


@pytest.mark.parametrize(("mine", "theirs"), WAYS.values(), ids=WAYS)
def test_commands_on_a_running_crawl(here: Machine, url: str, mine: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    crawl = running(here, url, *mine)
    stats = json.loads(here.shoal("stats", "--json", *theirs).stdout)
    assert stats["done"] > 0
    assert stats["left"] > 0
    run_id = stats["run_id"]
    listed = here.shoal("runs", *theirs)
    assert run_id in listed.stdout
    assert ("using --frontier local:pages, the only crawl" in listed.stderr) == (not theirs)
    assert "127.0.0.1" in here.shoal("hosts", *theirs).stdout
    assert "state     done" in here.shoal("why", f"{url}/", *theirs).stdout
    here.shoal("pause", run_id, *theirs)
    time.sleep(1.5)  # pages in flight end
    before = len(visits(url))
    time.sleep(1.0)
    assert len(visits(url)) == before, "a paused crawl fetches nothing"
    assert "balanced" in here.shoal("audit", *theirs).stdout
    here.shoal("hosts", "set", url.removeprefix("http://"), "--delay", "0", *theirs)
    here.shoal("resume", run_id, *theirs)
    ended(here, crawl)
    assert written(here) == visited(url) == pages_of(url)


def test_a_running_crawl_is_cancelled(here: Machine, url: str) -> None:
    crawl = running(here, url, *FRONTIERS["sqlite"])
    run_id = json.loads(here.shoal("stats", "--json", *FRONTIERS["sqlite"]).stdout)["run_id"]
    here.shoal("cancel", run_id, *FRONTIERS["sqlite"])
    assert "stopped before it was finished" in ended(here, crawl, 30)
    assert len(visits(url)) < PAGES


def test_a_second_crawl_on_the_same_file_is_refused(here: Machine, url: str) -> None:
    running(here, url, *FRONTIERS["sqlite"])
    refused = here.shoal(*run(url, *FRONTIERS["sqlite"]), check=False)
    assert refused.returncode == 2
    assert "works on" in refused.stderr


def test_without_a_running_crawl_there_is_nothing_to_show(here: Machine) -> None:
    refused = here.shoal("stats", check=False)
    assert refused.returncode == 2
    assert "no crawl in memory runs on this machine now" in refused.stderr
    refused = here.shoal("stats", "--frontier", "local:pages", check=False)
    assert "no crawl named 'pages' runs on this machine; running now: none" in refused.stderr


def test_a_crawl_that_cannot_begin_says_so_once(here: Machine) -> None:
    for words in (["nosuch.py"], ["pages.py", "-o", "missing/folder.jsonl"]):
        refused = here.shoal("run", *words, "--processes", "3", check=False)
        assert refused.returncode == 2
        assert refused.stderr.count("shoal: ") == len(refused.stderr.splitlines()) == 1
    here.wait_until(lambda: not here.processes(), "all processes ended", 20)
