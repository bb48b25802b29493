"""Crawls through a private Tor network. The site sees which exit each request came from."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.config import Config, HttpSettings, TorSettings
from shoal.crawling.onion import make_fetcher
from shoal.fetch.layers import Postponed, wrap
from shoal.fetch.tor.daemon import TorDaemon
from shoal.fetch.tor.layer import open_tor
from shoal.http import Request, Response
from shoal.ports import Fetch
from tests.acceptance.fleets import SHOAL, Fleet, frontier_url
from tests.acceptance.machine import machine
from tests.acceptance.test_cli import ROOT
from tests.acceptance.test_docs import QUICK, blocks, run_all
from tests.acceptance.tor_apart import Step, run_apart
from tests.support import forking
from tests.support.databases import free_port
from tests.support.tor_network import NAMES, TorNetwork, daemons_below, tor_network
from tests.support.tor_site import TorSite, tor_site

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "throttle.enabled": False, "concurrency": 4, "retry.max_attempts": 1}

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")
"""


@pytest.fixture(scope="module")
def tor_site_process() -> Iterator[TorSite]:
    with tor_site() as made:
        yield made


@pytest.fixture(scope="module")
def network(tor_site_process: TorSite) -> Iterator[TorNetwork]:
    with tor_network(tor_site_process.port) as made:
        yield made


@pytest.fixture
def site(tor_site_process: TorSite) -> TorSite:
    tor_site_process.forget()
    return tor_site_process


class TorFleet(Fleet):
    """Workers whose daemons have their data below ``folder``."""

    def __init__(self, folder: Path, network: TorNetwork, **settings: Any) -> None:
        super().__init__(folder, frontier_url("redis"), SPIDER)
        self._settings = {"tor.torrc": network.torrc, "tor.probe_timeout": 5, "lease.batch": 2} | settings

    def tor_worker(self, *arguments: str) -> subprocess.Popen[str]:
        return self.worker("--tor", *arguments, settings=self._settings, env={"TMPDIR": str(self.folder)})

    def daemons(self) -> dict[int, int]:
        return daemons_below(self.folder)

    def items(self) -> Counter[str]:
        done = self.shoal("export", self.run_id, "-o", "-")
        return Counter(json.loads(line)["url"] for line in done.stdout.splitlines())


def wait_until(holds: Callable[[], object], what: str, timeout: float = 120.0) -> None:
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, f"not {what} after {timeout:g} s"
        time.sleep(0.05)


def pages(site: TorSite, host: str, count: int, wait: float = 0.0) -> tuple[str, set[str]]:
    """The URL of a list, and the URLs of a crawl that begins there."""
    url = f"http://{host}:{site.port}"
    start = f"{url}/list?count={count}&wait={wait}"
    return start, {start, *(f"{url}/page/{number}?wait={wait}" for number in range(count))}


def tor_command(folder: Path, network: TorNetwork, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a daemon whose data is below the folder."""
    return forking.run(
        [*SHOAL, *words[:2], "--tor", f"--set=tor.torrc={network.torrc}", *words[2:]],
        cwd=folder, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def stored(folder: Path) -> list[str]:
    """The URLs of the items in the output of a crawl."""
    return sorted(json.loads(line)["url"] for line in (folder / "items.jsonl").read_text().splitlines())


def left_behind(folder: Path) -> list[object]:
    """Daemons and folders that nobody needs any more."""
    return [*daemons_below(folder), *folder.glob("shoal-tor-*")]


# -- a fleet


@pytest.mark.parametrize("fault", ["SIGKILL of a daemon", "SIGSTOP of a daemon", "SIGKILL of a worker"])
def test_a_fleet_survives_faults(tmp_path: Path, network: TorNetwork, site: TorSite, fault: str) -> None:
    """Two workers have two daemons. Everything is crawled once."""
    lists = [pages(site, name, 8) for name in NAMES[:2]]
    # A killed worker uses up an attempt of its pages in flight. A killed daemon uses up none, but a circuit may fail.
    attempts, session = (3, 4) if fault == "SIGKILL of a worker" else (2, 60)
    with TorFleet(tmp_path, network, **{"worker.session": session}) as fleet:
        settings = {"retry.max_attempts": attempts, "http.read_timeout": 200, "http.total_timeout": 200}
        fleet.start(*(start for start, _ in lists), settings=settings)
        with site.closed_gate():  # so the run ends after the daemon was replaced
            workers = [fleet.tor_worker(), fleet.tor_worker()]
            wait_until(lambda: len(fleet.daemons()) == 2, "two daemons")
            assert sorted(fleet.daemons().values()) == sorted(worker.pid for worker in workers)
            site.wait_for(5, timeout=90)  # more than one worker requests at the same time
            victim, parent = next(iter(fleet.daemons().items()))
            if fault == "SIGKILL of a worker":
                os.kill(parent, signal.SIGKILL)
                wait_until(lambda: victim not in fleet.daemons(), "the daemon of a killed worker ends", timeout=20)
            else:
                os.kill(victim, signal.Signals[fault.split()[0]])
                wait_until(
                    lambda: parent in (daemons := fleet.daemons()).values() and victim not in daemons, "replaced"
                )
        fleet.wait(timeout=120)
        items, wanted = fleet.items(), Counter(url for _, urls in lists for url in urls)
        missing = [fleet.shoal("why", url, "--run-id", fleet.run_id, check=False).stdout for url in wanted - items]
        assert items == wanted, "\n".join(missing)
        fleet.shoal("audit", fleet.run_id)
        assert not fleet.daemons()
    seen = site.visits("/")
    assert {visit.address for visit in seen} <= network.exits
    assert {visit.path for visit in seen} >= {"/robots.txt", "/list"}


# -- nothing goes past Tor


def test_no_packet_goes_past_tor(tmp_path: Path, network: TorNetwork, site: TorSite) -> None:
    """In a namespace where only Tor has a way out: neither while Tor cannot connect, nor while it can."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        why = "this test needs root, for a network namespace"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    (tmp_path / "spider.py").write_text(SPIDER)
    hosts = [f"{NAMES[0]}:{site.port}", f"{network.site_address}:{site.port}", network.onion]
    urls = [f"http://{host}/list?count=3&wait=0" for host in hosts]
    wanted = {*urls, *(f"http://{host}/page/{number}?wait=0" for host in hosts for number in range(3))}
    starts = "start_urls=" + json.dumps(urls)
    run = ["run", "spider.py:Listed", "--frontier", "sqlite:///crawl.db", "-o", "items.jsonl"]
    (tmp_path / "spider.py").write_text(f"{SPIDER}\nclass Listed(Pages):\n    {starts}\n")
    tor = ["--tor", f"--set=tor.torrc={network.torrc}"]
    patient = ["--set=retry.max_attempts=40", "--set=retry.max_delay=2", "--set=tor.connect_timeout=15"]
    direct, away, through = run_apart(
        tmp_path,
        network.places,
        [
            Step(["run", "spider.py:Listed", "--set=http.connect_timeout=2"], forwarded=True),
            Step([*run, *tor, "--set=tor.bootstrap_timeout=4"], forwarded=False),
            # The description of an onion service may take a while to spread. A new attempt finds it sooner.
            Step([*run, *tor, *patient], forwarded=True),
        ],
    )
    assert direct.packets > 0, "packets are not counted"
    assert (away.code, away.packets) == (1, 0), away.said
    assert "Tor did not get ready: the daemon is at" in away.said
    assert (through.code, through.packets) == (0, 0), through.said
    assert stored(tmp_path) == sorted(wanted)
    seen = {(visit.host, visit.address in network.exits) for visit in site.visits("/")}
    assert seen == {(hosts[0], True), (hosts[1], True), (hosts[2], False)}
    assert not left_behind(tmp_path)


# -- circuits


class Worker(NamedTuple):
    """A daemon of this process, as a worker has it, and the layer of a run around a fetcher."""

    daemon: TorDaemon
    fetch: Fetch

    async def get(self, site: TorSite, host: str, path: str = "/page/0") -> Response:
        return await self.fetch(Request(f"http://{host}:{site.port}{path}"))

    async def circuits(self) -> dict[str, set[tuple[str, str]]]:
        """By the number of a circuit, the SOCKS credentials of the streams that it carries or carried."""
        assert self.daemon._control is not None
        lines = await self.daemon._control.ask("GETINFO circuit-status")
        found: dict[str, set[tuple[str, str]]] = {}
        for line in lines:
            named = re.search(r'^(\d+) BUILT .*SOCKS_USERNAME="(\w+)" SOCKS_PASSWORD="(\w+)"', line)
            if named is not None:
                found.setdefault(named[1], set()).add((named[2], named[3]))
        return found


async def until_ready(daemon: TorDaemon) -> None:
    """Wait until pages can be sent. TorError if the daemon can never get ready."""
    keeping = asyncio.ensure_future(daemon.keep())
    while not daemon.ready:
        await asyncio.wait({keeping}, timeout=0.05)
        if keeping.done():
            await keeping
    keeping.cancel()


@asynccontextmanager
async def tor_worker(network: TorNetwork, run_id: str, **settings: Any) -> AsyncIterator[Worker]:
    config = Config(
        http=HttpSettings(connect_timeout=5), tor=TorSettings(enabled=True, torrc=str(network.torrc), **settings)
    )
    async with AsyncExitStack() as stack:
        fetcher = make_fetcher(config)
        stack.push_async_callback(fetcher.close)
        layer = await open_tor(config, run_id, None, stack)
        assert isinstance(layer.tor, TorDaemon)
        await until_ready(layer.tor)
        yield Worker(layer.tor, wrap(fetcher.fetch, [layer]))


async def test_runs_hosts_and_workers_share_no_circuit(
    network: TorNetwork, site: TorSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with tor_worker(network, "a") as one, tor_worker(network, "a") as two:
        for worker in (one, two):
            for name in NAMES:
                for path in ("/page/0", "/page/1"):
                    assert (await worker.get(site, name, path)).status == 200
        both = [await worker.circuits() for worker in (one, two)]
        for circuits in both:
            assert sorted(map(len, circuits.values())) == [1] * len(NAMES)  # no circuit has two hosts
        assert not set.union(*both[0].values()) & set.union(*both[1].values())
        for name in NAMES[:3]:
            monkeypatch.setattr(_layer_of(one), "_run_id", "b")  # another run of the same worker
            await one.get(site, name)
        assert len(await one.circuits()) == len(NAMES) + 3
    by_host = [{visit.address for visit in site.visits() if visit.host.startswith(f"{name}:")} for name in NAMES]
    assert set.union(*by_host) <= network.exits
    assert len(set.union(*by_host)) > 1  # by chance once in 6 ** 18
    assert not left_behind(tmp_path)


def _layer_of(worker: Worker) -> object:
    assert isinstance(worker.fetch, partial)
    return worker.fetch.func


async def test_a_host_gets_another_circuit(network: TorNetwork, site: TorSite) -> None:
    """After some pages, and when it blocks."""
    async with tor_worker(network, "a", pages_per_circuit=2) as worker:
        for number in range(16):
            await worker.get(site, NAMES[0], f"/page/{number}")
        assert len(await worker.circuits()) == 8
        addresses = [visit.address for visit in site.visits()]
        assert addresses[::2] == addresses[1::2]  # two pages for each circuit
        assert len(set(addresses)) > 1  # by chance once in 6 ** 7
    async with tor_worker(network, "a") as worker:
        assert (await worker.get(site, NAMES[1], "/blocked")).status == 403
        before = await worker.circuits()
        await worker.get(site, NAMES[1])
        after = await worker.circuits()
        assert (len(before), len(after)) == (1, 2)
        await worker.get(site, NAMES[1])
        assert await worker.circuits() == after


# -- ways to use it


def test_processes_have_daemons_of_their_own(tmp_path: Path, network: TorNetwork, site: TorSite) -> None:
    start, wanted = pages(site, NAMES[0], 20, wait=0.3)
    (tmp_path / "spider.py").write_text(f"{SPIDER}    start_urls = [{start!r}]\n")
    with machine(tmp_path) as made:
        made.environ["TMPDIR"] = str(tmp_path)
        crawl = made.start(
            "run", "spider.py", "--tor", f"--set=tor.torrc={network.torrc}", "--processes", "2", "-o", "items.jsonl"
        )
        made.wait_until(lambda: len(daemons_below(tmp_path)) == 2, "two daemons")
        assert set(daemons_below(tmp_path).values()) == set(made.workers())
        assert crawl.wait(timeout=120) == 0, made.said()
    assert stored(tmp_path) == sorted(wanted)
    assert "Tor: 100 %" in made.said()
    assert not left_behind(tmp_path)


def test_a_node_of_a_cluster(tmp_path: Path, network: TorNetwork, site: TorSite) -> None:
    start, wanted = pages(site, NAMES[0], 3)
    (tmp_path / "spider.py").write_text(f"{SPIDER}    start_urls = [{start!r}]\n")
    words = ["node", "spider.py", "--frontier", frontier_url("redis")]
    done = tor_command(tmp_path, network, *words, "-o", "items.jsonl")
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path) == sorted(wanted)
    assert {visit.address for visit in site.visits("/")} <= network.exits
    assert not left_behind(tmp_path)


def test_rendered_pages(tmp_path: Path, network: TorNetwork, site: TorSite) -> None:
    """The browser uses the same daemon, and the circuit of the host."""
    start, wanted = pages(site, NAMES[0], 3)
    (tmp_path / "spider.py").write_text(f"{SPIDER}    start_urls = [{start!r}]\n    render = True\n")
    exits: list[set[str]] = []
    while not exits or (len(exits[-1]) > 1 and len(exits) < 3):  # Tor replaces a circuit that is slow
        site.forget()
        done = tor_command(tmp_path, network, "run", "spider.py", "--set=browser.sandbox=no", "-O", "items.jsonl")
        assert done.returncode == 0, done.stderr
        assert stored(tmp_path) == sorted(wanted)
        exits.append({visit.address for visit in site.visits("/")})
        assert exits[-1] <= network.exits
        assert not left_behind(tmp_path)
    assert len(exits[-1]) == 1, exits  # robots.txt and four pages: by chance once in 6 ** 4


def test_an_existing_daemon(tmp_path: Path, network: TorNetwork, site: TorSite) -> None:
    """It is used with the same isolation. While it is away, pages wait and lose no attempt."""
    lists = [pages(site, name, 3, wait=0.5) for name in NAMES]
    starts = [start for start, _ in lists]
    (tmp_path / "spider.py").write_text(f"{SPIDER}    start_urls = {starts!r}\n")
    port = free_port()
    data = tmp_path / "data"
    command = ["tor", "-f", network.torrc, "--socksport", str(port), "--datadirectory", data, "--quiet"]
    crawl = forking.Popen(
        [*SHOAL, "run", "spider.py", "--set=tor.enabled=yes", f"--set=tor.url=socks5://127.0.0.1:{port}",
         "--set=http.connect_timeout=60", "-o", "items.jsonl"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with crawl, subprocess.Popen(command) as daemon:
        try:
            site.wait_for(3, timeout=90)
            daemon.kill()
            daemon.wait()
            with subprocess.Popen(command) as successor:
                _, said = crawl.communicate(timeout=120)
                successor.kill()
        finally:
            daemon.kill()
            crawl.kill()
    assert crawl.returncode == 0, said
    assert stored(tmp_path) == sorted(url for _, urls in lists for url in urls), said
    addresses = {visit.address for visit in site.visits()}
    assert addresses <= network.exits
    assert len(addresses) > 1


async def test_pages_wait_when_the_network_is_away(network: TorNetwork, site: TorSite) -> None:
    """The daemon runs, but it cannot reach a relay. That is no fault of the pages."""
    async with tor_worker(network, "a", connect_timeout=5.0) as worker:
        assert (await worker.get(site, NAMES[0])).status == 200
        with network.outage():
            with pytest.raises(Postponed, match="Tor failed"):
                await worker.get(site, NAMES[0])
            assert not worker.daemon.ready
            with pytest.raises(Postponed, match="Tor is not ready"):
                await worker.get(site, NAMES[0])
            await until_ready(worker.daemon)  # pages may try again
        assert worker.daemon.epoch == 1


@pytest.mark.usefixtures("site")
def test_the_code_of_the_guide_runs(
    tmp_path: Path, network: TorNetwork, shop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(QUICK, "SHOAL_TOR__TORRC", str(network.torrc))
    monkeypatch.setitem(QUICK, "SHOAL_RETRY__MAX_ATTEMPTS", "40")  # an onion service may take a while to spread
    monkeypatch.setitem(QUICK, "SHOAL_RETRY__MAX_DELAY", "2")
    monkeypatch.setitem(QUICK, "SHOAL_TOR__CONNECT_TIMEOUT", "15")
    for kind, text in blocks(ROOT / "docs" / "tor.md"):
        text = text.replace("http://127.0.0.1:8000/", shop)
        text = text.replace("http://example.onion/", f"http://{network.onion}/list?count=3")
        named = re.match(r"# (\S+\.py)\n", text)
        if named:
            (tmp_path / named[1]).write_text(text)
        else:
            assert kind == "console"
            run_all(re.findall(r"^\$ (shoal .*)$", text, re.MULTILINE), tmp_path)
    assert len((tmp_path / "pages.jsonl").read_text().splitlines()) == 5
    assert len((tmp_path / "titles.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "onion.jsonl").read_text().splitlines()) == 3
