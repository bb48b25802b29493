"""A writer to the store cannot make a worker write files, use proxies, or change its spider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config import Config
from shoal.errors import RunError
from shoal.frontier import open_store
from shoal.http import Request, Response
from shoal.ports import Run
from shoal.runs.start import RunSettings
from shoal.runs.worker import Worker
from shoal.spider import Spider
from shoal.urls.normalize import Scope
from tests.acceptance.fleets import SHOAL, SPIDER, frontier_url
from tests.support import forking
from tests.support.servers import MisbehavingServer, ProxyServer


class Pages(Spider):
    name = "pages"

    def parse(self, response: Response) -> Any:
        yield {"url": response.url}


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as made:
        yield made


async def hostile_run(url: str, *requests: Request, **settings: Any) -> None:
    """A run as somebody writes it to the store, past `shoal start`."""
    store = await open_store(url)
    try:
        plain = {**msgspec.to_builtins(RunSettings(seeds="urls")), **settings}
        await store.create_run(Run(run_id="evil", spider="pages", state="running", created_at=1.0, settings=plain))
        frontier = await store.frontier("evil", RunSettings().options)
        claim = await frontier.claim("seed", 60)
        assert claim is not None
        await frontier.push(requests, seed=claim, cursor=b"1")
        await frontier.relinquish(claim.moved_to(b"1"), finished=True)
    finally:
        await store.close()


def config_of(url: str, **more: Any) -> Config:
    return Config().with_settings({"frontier": url, "robots.obey": False, "download_delay": 0, **more})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outputs": ["{folder}/evil.jsonl"]}, r"asks this worker to write '.*evil\.jsonl'.*pass it with -o"),
        ({"outputs": ["sqlite:///{folder}/evil.db"]}, "pass it with -o"),
        ({"outputs": ["-"]}, "pass it with -o"),
        ({"outputs": ["postgresql://db.example/a?sslkey=/etc/shadow"]}, "files of this machine as certificates"),
        ({"outputs": ["postgresql://db.example/a?ssl%6bey=/etc/shadow"]}, "files of this machine as certificates"),
        ({"outputs": ["gopher://x"]}, "an invalid output"),
        ({"outputs": ["postgresql://db.example/a"] * 21}, "21 outputs; the limit is 20"),
        ({"arguments": {"settings": {"http.proxy": "http://evil.example"}}}, "argument 'settings'.*an attribute"),
        ({"arguments": {"middlewares": ["x"]}}, "an attribute of the spider"),
        ({"arguments": {"_private": 1}}, "an attribute of the spider"),
        ({"arguments": {"x": "y" * 300_000}}, "too many arguments"),
        ({"arguments": {f"x{number}": 1 for number in range(101)}}, "too many arguments"),
        ({"networks": ["everywhere"]}, "is not a network"),
        ({"delay": -1.0}, "invalid settings"),
        ({"max_attempts": 0}, "invalid settings"),
        ({"setting of tomorrow": 1}, "invalid settings"),
        ({"scope": {"http.proxy": "http://evil.example"}}, "unknown key"),
        ({"scope": {"proxies": ["http://evil.example"]}}, "unknown key"),
        ({"proxies": ["http://evil.example"]}, "invalid settings"),
        ({"scope": {"allow": ["(?=x)x"]}}, r"invalid settings: \"scope.allow\".*RE2.*set it in the spider"),
        ({"scope": {"deny": ["(?:a?){1000}b"] * 3}}, "more than 5000 steps"),
        ({"scope": {"deny": "(a+)+$"}}, "run evil has invalid settings"),
    ],
)  # fmt: skip
async def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    filled = {
        name: [each.format(folder=tmp_path) if isinstance(each, str) else each for each in value]
        if name == "outputs"
        else value
        for name, value in settings.items()
    }
    url = frontier_url("redis")
    await hostile_run(url, **filled)
    worker = Worker(Pages(), config_of(url), "evil")
    with pytest.raises((RunError, ValueError), match=message):
        await worker.run()
    assert list(tmp_path.iterdir()) == []


POISON = r"(?:a|a)*!$"
"""`re` needs 2 to the power of the number of letters steps."""


@pytest.mark.timeout(30)
async def test_a_poisonous_pattern_does_not_hang_a_worker(server: MisbehavingServer) -> None:
    url, page = frontier_url("redis"), server.url + "/leaf/1?" + "a" * 200
    await hostile_run(url, Request(server.url + "/leaf/2"), scope={"deny": [POISON]})
    worker = Worker(Pages(), config_of(url), "evil")
    summary = await worker.run()
    assert (summary.state, summary.stats.done) == ("finished", 1)
    scope = Scope(worker.config.scope)
    assert scope.refuses(page) is None
    assert scope.refuses(page + "!") == f"denied by the rule {POISON!r}"


async def test_a_pattern_that_the_worker_has_itself_may_look_ahead(server: MisbehavingServer) -> None:
    url = frontier_url("redis")
    await hostile_run(url, Request(server.url + "/leaf/1"), scope={"allow": ["/leaf/(?!2)"]})
    worker = Worker(Pages(), config_of(url, **{"scope.allow": ["/leaf/(?!2)"]}), "evil")
    summary = await worker.run()
    assert (summary.state, summary.stats.done) == ("finished", 1)
    assert worker.config.scope.allow == ("/leaf/(?!2)",)


async def test_what_the_worker_is_given_itself_it_writes(tmp_path: Path, server: MisbehavingServer) -> None:
    url, file = frontier_url("redis"), str(tmp_path / "items.jsonl")
    await hostile_run(url, Request(server.url + "/leaf/1"), outputs=[file])
    summary = await Worker(Pages(), config_of(url), "evil", outputs=[file]).run()
    assert (summary.state, summary.stats.done) == ("finished", 1)
    assert (tmp_path / "items.jsonl").read_text().count("/leaf/1") == 1


@pytest.mark.parametrize(
    ("allowed", "output", "good"),
    [
        ((), "postgresql://db.example/crawl", True),
        (("postgresql://db.example/crawl",), "postgresql://u:p@db.example/crawl?table=x", True),
        (("postgresql://db.example",), "postgresql://db.example/other", True),
        (("postgresql://db.example/crawl",), "postgresql://db.example/other", False),
        (("postgresql://db.example/crawl",), "postgresql://db.example:5433/crawl", False),
        (("postgresql://db.example/crawl",), "mysql://db.example/crawl", False),
    ],
)
def test_databases_are_those_that_are_listed(allowed: tuple[str, ...], output: str, good: bool) -> None:
    from shoal.runs.trust import check_outputs

    config = Config().with_settings({"worker.outputs": allowed})
    if good:
        check_outputs("r", [output], [], config)
    else:
        with pytest.raises(RunError, match=r"worker\.outputs.*SHOAL_WORKER__OUTPUTS"):
            check_outputs("r", [output], [], config)


@pytest.mark.parametrize("told", [True, False])
async def test_a_proxy_is_one_that_the_worker_was_told_of(server: MisbehavingServer, told: bool) -> None:
    url = frontier_url("redis")
    async with ProxyServer() as proxy:
        await hostile_run(url, Request(server.url + "/leaf/1", proxy=proxy.url.replace("//", "//user:pass@")))
        more = {"worker.proxies": (proxy.url,)} if told else {}
        worker = Worker(Pages(), config_of(url, **more), "evil")
        summary = await worker.run()
        assert (summary.stats.done, summary.dead_kinds) == ((1, {}) if told else (0, {"proxy": 1}))
        assert bool(proxy.connections) == told
    assert bool(server.connections) == told


async def test_a_layer_of_the_spider_may_choose_a_proxy(server: MisbehavingServer) -> None:
    """It is code of this machine."""
    url = frontier_url("redis")
    async with ProxyServer() as proxy:

        async def rotate(request: Request, fetch: Any) -> Response:
            return await fetch(request.replace(proxy=proxy.url))  # type: ignore[no-any-return]

        class Rotating(Pages):
            middlewares = (rotate,)

        await hostile_run(url, Request(server.url + "/leaf/1"))
        summary = await Worker(Rotating(), config_of(url), "evil").run()
        assert summary.stats.done == 1
        assert proxy.connections


def test_the_command_says_what_it_refuses(tmp_path: Path) -> None:
    url = frontier_url("redis")
    (tmp_path / "pages.py").write_text(SPIDER)
    for settings, says in (
        ({"outputs": [f"{tmp_path}/evil.jsonl"]}, "pass it with -o"),
        ({"arguments": {"settings": {"cache.folder": "/tmp"}}}, "an attribute of the spider"),
    ):
        url = frontier_url("redis")
        asyncio.run(hostile_run(url, **settings))
        command = [*SHOAL, "worker", "pages.py", "--run-id", "evil", "--frontier", url, "--allow-changed"]
        done = forking.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2, done.stderr
        assert says in done.stderr
    assert not (tmp_path / "evil.jsonl").exists()
