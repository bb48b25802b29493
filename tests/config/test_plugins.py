"""Plugins: how they are found, chosen, used and refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import Config, Response, Spider, crawl
from shoal.cli.commands.doctor import CheckResult, check_plugins
from shoal.config import Resolved, WorkerSettings, plugins
from shoal.crawling.onion import SharedFetcher, make_fetcher
from shoal.errors import ConfigError, PluginError, RunError, SinkError, StoreError
from shoal.frontier import open_store
from shoal.frontier.memory import MemoryStore
from shoal.runs.trust import check_outputs
from shoal.sinks import is_shared, open_sink, sink_id
from tests.support.plugin_packages import install

SINK = """
from shoal.ports import OutputCount

written = []

class ListSink:
    def __init__(self, url, options):
        self.url, self.options = url, options
        if "explode" in url:
            raise KeyError("boom")
    async def open(self, state, epoch=0):
        pass
    async def write(self, items):
        written.extend(item.payload for item in items)
    async def flush(self):
        return b"1"
    async def close(self, *, finished):
        pass
    async def count(self, state):
        return OutputCount(items=len(written))

class OldSink(ListSink):
    async def open(self, state):
        pass

class BlindSink(ListSink):
    count = None

class FileSink(ListSink):
    shared = False

    @staticmethod
    def sink_id(url):
        return "file of " + url.partition("//")[2]
"""
FETCHER = """
from shoal import Response

class EchoFetcher:
    def __init__(self, settings, user_agent):
        self.user_agent, self.limit = user_agent, settings.max_body_bytes
    async def fetch(self, request):
        return Response(request.url, body=f"{self.user_agent} {self.limit}".encode(), request=request)
    async def close(self):
        pass

def broken(settings, user_agent):
    raise OSError("no library")
"""
FRONTIER = """
from shoal.errors import StoreAwayError
from shoal.frontier.memory import MemoryStore

calls = []

async def open_it(url, *, readonly):
    calls.append((url, readonly))
    if len(calls) == 1:
        raise StoreAwayError("not yet")
    return MemoryStore()
"""


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for packages."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


class Pages(Spider):
    start_urls = ["http://ex.com/a"]

    def parse(self, response: Response) -> Any:
        yield {"text": response.body.decode()}


# -- sinks


def test_a_sink(site_packages: Path) -> None:
    install(site_packages, "shoal-list", SINK, sinks="list = shoal_list:ListSink\nlistfile = shoal_list:FileSink")
    url = "list://me:secret@host:99/db?password=secret&b=1"
    assert "shoal_list" not in sys.modules
    assert sink_id(url) == "list://host:99/db?password=***&b=1"
    assert is_shared(url)
    sink: Any = open_sink("LIST://host/db", run_id="r", on_reject=print)
    assert (sink.url, sink.options.run_id, sink.options.on_reject) == ("LIST://host/db", "r", print)
    assert sink_id("listfile://me@x") == "file of me@x"
    assert not is_shared("listfile://x")
    with pytest.raises(SinkError, match=r"the plugin for list://u:\*\*\*@explode failed: KeyError: 'boom'"):
        open_sink("list://u:secret@explode")


@pytest.mark.parametrize(
    ("name", "says"), [("OldSink", r"an open\(\) that takes no epoch"), ("BlindSink", r"no count\(\)")]
)
def test_a_sink_that_lacks_something(site_packages: Path, name: str, says: str) -> None:
    install(site_packages, "shoal-list", SINK, sinks=f"list = shoal_list:{name}")
    with pytest.raises(SinkError, match=rf"the plugin for list://u:\*\*\*@host has {says}: see docs/plugins.md"):
        open_sink("list://u:secret@host")


def test_an_unknown_scheme_names_what_is_installed(site_packages: Path) -> None:
    with pytest.raises(SinkError, match=r"unknown output lists://; use file.jsonl, .* no plugin is installed for it$"):
        open_sink("lists://host")
    install(site_packages, "shoal-list", SINK, sinks="list = shoal_list:ListSink")
    with pytest.raises(SinkError, match=r"installed plugins: list; did you mean list://\?$"):
        open_sink("lists://host")


@pytest.mark.parametrize(
    ("code", "entry", "says"),
    [
        ("import nonsense_library", "shoal_bad:Sink", "ModuleNotFoundError: No module named 'nonsense_library'"),
        ("x = 1", "shoal_bad:Sink", "AttributeError"),
        ("x = 1", "shoal_bad:x", "shoal_bad:x is not callable"),
        ("raise SystemError('no')", "shoal_bad:x", "SystemError: no"),
        ("x = (", "shoal_bad:x", "SyntaxError"),
    ],
)
def test_a_broken_plugin(site_packages: Path, code: str, entry: str, says: str) -> None:
    install(site_packages, "shoal-bad", code, "2.3", sinks=f"bad = {entry}")
    with pytest.raises(PluginError, match=r"the plugin 'bad' of shoal-bad 2.3 is broken: ") as raised:
        open_sink("bad://host")
    assert says in str(raised.value)


def test_two_packages_with_one_name(site_packages: Path) -> None:
    install(site_packages, "shoal-one", SINK, sinks="list = shoal_one:ListSink")
    install(site_packages, "shoal-two", SINK, sinks="List = shoal_two:ListSink")
    with pytest.raises(PluginError, match=r"shoal-one 1.0 and shoal-two 1.0 both have the plugin 'list'; uninstall"):
        open_sink("list://host")


def test_the_names_of_shoal_cannot_be_replaced(site_packages: Path) -> None:
    install(
        site_packages, "shoal-list", SINK, sinks="postgresql = shoal_list:ListSink", frontiers="memory = shoal_list:x",
        fetchers="aiohttp = shoal_list:x",
    )  # fmt: skip
    assert type(open_sink("postgresql://host/db")).__name__ == "TableSink"
    for kind, names in plugins.BUILT_IN.items():
        assert {plugins.load(kind, name) for name in names} == {None}
        assert plugins.names(kind) == []


async def test_the_items_of_a_crawl(site_packages: Path) -> None:
    install(site_packages, "shoal-list", SINK, sinks="list = shoal_list:ListSink")
    install(site_packages, "shoal-echo", FETCHER, fetchers="echo = shoal_echo:EchoFetcher")
    settings = {"http.client": "echo", "http.max_body_bytes": 5, "robots.obey": False}
    await crawl(Pages, settings, outputs=["list://host/db"])
    import shoal_list  # type: ignore[import-not-found]

    (item,) = shoal_list.written
    assert b"shoal/0.1 5" in item


def test_a_worker_writes_only_to_plugins_that_it_lists(site_packages: Path) -> None:
    install(site_packages, "shoal-list", SINK, sinks="list = shoal_list:ListSink\nlistfile = shoal_list:FileSink")
    asked = ["list://host/db"]
    with pytest.raises(RunError, match=r"which worker.outputs does not list"):
        check_outputs("r", asked, [], Config())
    check_outputs("r", asked, asked, Config())
    allowed = Config().with_settings({"worker.outputs": ["list://host/db"]})
    check_outputs("r", asked, [], allowed)
    with pytest.raises(RunError, match="asks this worker to write"):
        check_outputs("r", ["listfile://x"], [], allowed)
    with pytest.raises(ConfigError, match="must contain URLs"):
        WorkerSettings(outputs=("nolist://host/db",))


# -- fetchers


def test_an_unknown_client(site_packages: Path) -> None:
    install(site_packages, "shoal-echo", FETCHER, fetchers="echo = shoal_echo:EchoFetcher")
    config = Config().with_settings({"http.client": "eco"})
    with pytest.raises(ConfigError, match=r"not 'eco'; did you mean echo\?; installed plugins: echo"):
        make_fetcher(config)


def test_the_former_name_of_our_own_client() -> None:
    make_fetcher(Config().with_settings({"http.client": "aiohttp", "http.proxy": "socks5://127.0.0.1:9"}))


def test_a_client_that_cannot_be_made(site_packages: Path) -> None:
    install(site_packages, "shoal-echo", FETCHER, fetchers="echo = shoal_echo:broken")
    with pytest.raises(PluginError, match="the plugin 'echo' failed: OSError: no library"):
        make_fetcher(Config().with_settings({"http.client": "echo"}))


def test_only_our_own_client_is_used_where_addresses_are_guarded(site_packages: Path) -> None:
    install(site_packages, "shoal-echo", FETCHER, fetchers="echo = shoal_echo:EchoFetcher")
    config = Config().with_settings({"http.client": "echo"})
    with pytest.raises(ConfigError, match=r"must not contact private addresses \(serve.allow\) needs \"auto\""):
        make_fetcher(config, [])
    with pytest.raises(ConfigError, match=r"\(serve.allow\)"):
        SharedFetcher(config, [])
    with pytest.raises(ConfigError, match="goes through Tor"):
        make_fetcher(config.with_settings({"tor.enabled": True}))


# -- frontiers


async def test_a_frontier(site_packages: Path) -> None:
    """A server that is away for a moment is asked again, as Shoal's own."""
    install(site_packages, "shoal-kept", FRONTIER, frontiers="kept = shoal_kept:open_it")
    store = await open_store("kept://host", readonly=True)
    assert isinstance(store, MemoryStore)
    import shoal_kept  # type: ignore[import-not-found]

    assert shoal_kept.calls == [("kept://host", True)] * 2
    assert Config(frontier="kept://host").frontier == "kept://host"
    settings = {"frontier": "kept://host", "robots.obey": False}
    install(site_packages, "shoal-echo", FETCHER, fetchers="echo = shoal_echo:EchoFetcher")
    done = await crawl(Pages, {**settings, "http.client": "echo"})
    assert len(done.items) == 1
    await store.close()


async def test_an_unknown_frontier(site_packages: Path) -> None:
    install(site_packages, "shoal-kept", FRONTIER, frontiers="kept = shoal_kept:open_it")
    with pytest.raises(StoreError, match=r"no frontier for 'keep'; .*; installed plugins: kept"):
        await open_store("keep://host")
    with pytest.raises(ConfigError, match=r"installed plugins: kept; did you mean kept://\?"):
        Config(frontier="keept://host")


# -- doctor


def findings() -> list[CheckResult]:
    return list(check_plugins(Resolved(Config(), {})))


def test_the_doctor_lists_plugins(site_packages: Path) -> None:
    assert findings() == [CheckResult(None, "plugins", "none installed")]
    install(site_packages, "shoal-list", SINK, sinks="list = shoal_list:ListSink\nmysql = shoal_list:ListSink")
    install(site_packages, "shoal-other", SINK, sinks="list = shoal_other:ListSink")
    install(site_packages, "shoal-echo", FETCHER, fetchers="echo = shoal_echo:EchoFetcher")
    install(site_packages, "shoal-kept", "x = 1", frontiers="kept = shoal_kept:open_it")
    both = "shoal-list 1.0 and shoal-other 1.0 both have the plugin 'list'; uninstall one of them"
    found = findings()
    assert found[:4] == [
        CheckResult(False, "plugin: output list:// (shoal-list 1.0)", both),
        CheckResult(False, "plugin: output list:// (shoal-other 1.0)", both),
        CheckResult(None, "plugin: output mysql:// (shoal-list 1.0)", "not used: output mysql:// belongs to Shoal"),
        CheckResult(True, 'plugin: http.client "echo" (shoal-echo 1.0)', ""),
    ]
    assert (found[4].passed, found[4].what) == (False, "plugin: frontier kept: (shoal-kept 1.0)")
    assert "shoal_kept:open_it cannot be imported: AttributeError" in found[4].hint
    assert len(found) == 5
