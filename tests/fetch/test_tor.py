"""Circuits, the layer for Tor with a daemon that is a fake, and the engine that waits for it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Request, Response, Spider
from shoal.config import Config, TorSettings
from shoal.crawling.engine import Engine, Participation
from shoal.crawling.onion import make_onion
from shoal.crawling.run_queue import make_run_queue
from shoal.crawling.seeder import start_requests
from shoal.errors import ConfigError, FetchError, RunError, TorError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.layers import Postponed
from shoal.fetch.tor import process
from shoal.fetch.tor.circuits import Circuit, Circuits
from shoal.fetch.tor.layer import TorLayer
from shoal.ports import Run
from shoal.runs.start import RunSettings
from tests.support.fakes import CONFIG, SITE, Calls, Web, eventually, memory_frontier


class FakeTor:
    """A daemon that is ready when the test says so."""

    def __init__(self, pages: int | None = None) -> None:
        self.ready = True
        self.epoch = 1
        self.is_to_blame = False
        self.circuits = Circuits(pages)

    def url_of(self, circuit: Circuit) -> str:
        return f"socks5://{circuit.user}:{circuit.password}@127.0.0.1:1"

    def arrived(self, epoch: int) -> None:
        pass

    async def explains_failure(self, epoch: int, sent: float | None = None) -> bool:
        return self.is_to_blame or epoch != self.epoch

    async def keep(self) -> None:
        await asyncio.Event().wait()


class Site:
    """Answers every request, and keeps it."""

    def __init__(self, status: int = 200, error: FetchError | None = None) -> None:
        self.requests: list[Request] = []
        self.status = status
        self.error = error

    async def fetch(self, request: Request) -> Response:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return Response(request.url, status=self.status, request=request)

    async def close(self) -> None:
        pass


def layer(tor: FakeTor, run_id: str = "run", guard: AddressGuard | None = None) -> TorLayer:
    return TorLayer(tor, run_id, TorSettings(), guard)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["take", "renew", "block"]))), st.integers(1, 4))
def test_no_two_keys_ever_share_a_circuit(steps: list[tuple[str, str]], most: int) -> None:
    now = 0.0
    circuits = Circuits(most, clock=lambda: now)
    owners: dict[Circuit, str] = {}
    pages: dict[Circuit, int] = {}
    last: dict[str, Circuit] = {}
    renewed: set[Circuit] = set()
    for key, step in steps:
        now += 4.0
        if step == "renew":
            circuits.renew(key)
            renewed |= {last[key]} if key in last else set()
        elif step == "block" and key in last and circuits.blocked(key, last[key]):
            renewed.add(last[key])
        circuit = last[key] = circuits.take(key)
        assert owners.setdefault(circuit, key) == key
        assert circuit not in renewed
        pages[circuit] = pages.get(circuit, 0) + 1
        assert pages[circuit] <= most


def test_circuits_of_two_workers_differ() -> None:
    assert Circuits().take("run host").user != Circuits().take("run host").user


def test_a_block_renews_once() -> None:
    now = 0.0
    circuits = Circuits(clock=lambda: now)
    first = circuits.take("a")
    assert circuits.blocked("a", first)
    second = circuits.take("a")
    assert not circuits.blocked("a", first)  # another page of the old circuit
    assert not circuits.blocked("a", second)  # too soon
    now = 10.0
    assert circuits.blocked("a", second)
    assert circuits.take("a") not in (first, second)


def test_many_hosts_are_forgotten() -> None:
    circuits = Circuits()
    first = circuits.take("host 0")
    for number in range(1, 10_001):
        circuits.take(f"host {number}")
    assert len(circuits._current) == 10_000
    assert circuits.take("host 0") != first


async def test_each_run_and_host_has_its_own_credentials() -> None:
    tor, site = FakeTor(), Site()
    for run_id in ("one", "two"):
        for url in ("http://a.test/", "http://a.test/2", "http://b.test/", "http://a.test:81/"):
            response = await layer(tor, run_id)(Request(url), site.fetch)
            assert response.request.proxy is None
    proxies = [request.proxy for request in site.requests]
    assert proxies[0] == proxies[1]
    assert len(set(proxies)) == 6


async def test_a_request_waits_while_tor_is_not_ready() -> None:
    tor, site = FakeTor(), Site()
    tor.ready = False
    with pytest.raises(Postponed) as postponed:
        await layer(tor)(Request("http://a.test/"), site.fetch)
    assert not postponed.value.contacted
    assert not site.requests


async def test_a_failure_of_the_daemon_costs_no_attempt() -> None:
    tor, error = FakeTor(), FetchError("reset", kind="reset", retryable=True)
    site = Site(error=error)
    with pytest.raises(FetchError):
        await layer(tor)(Request("http://a.test/"), site.fetch)
    tor.is_to_blame = True
    with pytest.raises(Postponed) as postponed:
        await layer(tor)(Request("http://a.test/"), site.fetch)
    assert postponed.value.contacted


async def test_a_proxy_of_a_request_is_refused() -> None:
    site = Site()
    with pytest.raises(FetchError, match="this run goes through Tor") as failure:
        await layer(FakeTor())(Request("http://a.test/", proxy="http://127.0.0.1:1"), site.fetch)
    assert not failure.value.retryable
    assert not site.requests


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "localhost", "printer", "169.254.169.254", "[::1]"])
async def test_a_guard_applies_to_names_that_tor_resolves(host: str) -> None:
    site = Site()
    with pytest.raises(FetchError, match="may not be contacted"):
        await layer(FakeTor(), guard=AddressGuard(()))(Request(f"http://{host}/"), site.fetch)
    assert not site.requests
    await layer(FakeTor(), guard=AddressGuard(()))(Request("http://a.example/"), site.fetch)


class Pages(Spider):
    name = "pages"

    def parse(self, response: Response) -> object:
        return response.follow_all()


async def test_other_commands_do_not_ignore_the_setting() -> None:
    config = Config(tor=TorSettings(enabled=True))
    with pytest.raises(ConfigError, match=r"tor\.enabled"):
        make_onion(Pages(), config, await memory_frontier(), Site())


async def test_the_engine_leases_nothing_while_tor_is_away() -> None:
    """Neither before the first page, nor in the middle of a crawl. Nothing is lost, and it does not poll in a loop."""
    tor, web = FakeTor(), Web({"": "".join(f"<a href=/{number}>x</a>" for number in range(20))})
    tor.ready = False
    frontier = Calls(await memory_frontier())
    spider, config = Pages(start_urls=[SITE]), CONFIG.with_settings({"concurrency": 2, "retry.max_attempts": 1})
    onion = make_onion(spider, config, frontier, web, tor=layer(tor))
    queue = make_run_queue(spider, config, frontier, shared=False)
    engine = Engine(Participation(spider=spider, config=config, source=lambda: start_requests(spider)), queue, onion)
    crawling = asyncio.create_task(engine.run())
    await asyncio.sleep(0.7)
    assert frontier.count("lease") == 0
    assert not web.fetched
    web.delay = lambda path: 0.05
    tor.ready = True
    await eventually(lambda: len(web.fetched) > 5)
    tor.ready = False
    await eventually(lambda: engine.in_flight == 0)
    before, leases = len(web.fetched), frontier.count("lease")
    await asyncio.sleep(0.7)
    assert len(web.fetched) == before
    assert frontier.count("lease") - leases <= 1  # one that began before
    tor.ready = True
    async with asyncio.timeout(30):
        await crawling
    assert sorted(web.fetched) == sorted(["", *map(str, range(20))])
    assert engine.counters.retried == 0


async def test_tor_that_never_gets_ready_ends_the_crawl() -> None:
    class NeverReady(FakeTor):
        async def keep(self) -> None:
            raise TorError("Tor did not get ready")

    tor, web, frontier = NeverReady(), Web({}), await memory_frontier()
    tor.ready = False
    spider = Pages(start_urls=[SITE])
    onion = make_onion(spider, CONFIG, frontier, web, tor=layer(tor))
    part = Participation(spider=spider, config=CONFIG, source=lambda: start_requests(spider))
    engine = Engine(part, make_run_queue(spider, CONFIG, frontier, shared=False), onion)
    with pytest.raises(TorError):
        async with asyncio.timeout(30):
            await engine.run()
    stats = await frontier.stats()
    assert (stats.leased, stats.dead) == (0, 0)
    assert not web.fetched


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match=r"http\.proxy.*tor\.enabled"):
        Config().with_settings({"tor.enabled": True, "http.proxy": "http://127.0.0.1:1"})
    for url in ("http://127.0.0.1:9050", "socks5://127.0.0.1", "socks5://a:b@127.0.0.1:9050", "socks5://[::"):
        with pytest.raises(ConfigError, match=r"tor\.url"):
            Config().with_settings({"tor.url": url})


def test_folders_of_dead_workers_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    alive = process.Folder()
    assert alive.path.stat().st_mode & 0o777 == 0o700
    dead = tmp_path / "shoal-tor-dead"
    dead.mkdir()
    (dead / "owner").write_text("")
    (dead / "data").mkdir()
    unfinished = tmp_path / "shoal-tor-new"
    unfinished.mkdir()
    other = process.Folder()
    assert sorted(os.listdir(tmp_path)) == sorted([alive.path.name, other.path.name, unfinished.name])
    alive.delete()
    other.delete()
    assert os.listdir(tmp_path) == [unfinished.name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'Tor version 0.3.5.7.'", "is Tor 0.3.5.7, which is too old: Shoal needs 0.4.7 or later"),
        ("echo 'GNU bash'; exit 3", "is not Tor"),
    ],
)
async def test_a_wrong_program(tmp_path: Path, text: str, message: str) -> None:
    program = tmp_path / "tor"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    with pytest.raises(TorError, match=message):
        await process.version_of(process.find_program(TorSettings(executable=str(program))))


def test_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TorError, match=r"tor\.executable: there is no program /no/tor\. Install it"):
        process.find_program(TorSettings(executable="/no/tor"))
    monkeypatch.setattr(process.shutil, "which", lambda name, path: None)
    with pytest.raises(TorError, match=r"Tor is not installed\. Install it \(Debian: apt-get install tor"):
        process.find_program(TorSettings())


@pytest.mark.parametrize(
    "settings",
    [
        {"tor": {"enabled": False}},
        {"tor.torrc": "/tmp/torrc"},
        {"arguments": {"settings": {"tor.enabled": False}}},
    ],
)
def test_a_run_cannot_change_how_a_worker_uses_tor(settings: dict[str, object]) -> None:
    run = Run(run_id="r", spider="pages", state="running", created_at=0.0, settings={"seeds": "urls", **settings})
    with pytest.raises(RunError):
        RunSettings.of(run)


def test_what_a_run_decides_for_its_workers() -> None:
    run = Run(run_id="r", spider="pages", state="running", created_at=0.0, settings={"seeds": "urls", "scope": {}})
    changed = RunSettings.of(run).shared_settings()
    assert not [key for key in changed if not key.startswith(("scope.", "retry."))]
