"""Identities: their rules, where they come from, what they remember, and the layer with a store that is a dict."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Config, Request, Response, Spider
from shoal.cli.commands.hosts import _print_states
from shoal.config import IdentitySettings, flatten, load_config
from shoal.errors import ConfigError, FetchError, ProxyError, StoreAwayError
from shoal.fetch.layers import Postponed
from shoal.fetch.layers.identities import (
    Fault,
    Identities,
    ShortMemory,
    fault_of,
    free_failures,
    is_removed,
    rest_seconds,
)
from shoal.fetch.layers.identity_facts import (
    IdentityFacts,
    IdentityState,
    list_identities,
    make_roster,
    name_of,
    read_proxies,
)
from shoal.ports import HostState, HostUpdate

URL = "http://site.example/page"
HOST = "site.example"

# -- rules


@given(st.integers(0, 10_000), st.floats(0, 1e6))
def test_a_rest_is_bounded_but_never_shorter_than_asked(streak: int, asked: float) -> None:
    settings = IdentitySettings(rest=60, max_rest=3600)
    seconds = rest_seconds(settings, streak, asked)
    assert max(60, asked) <= seconds <= max(3600, asked)
    assert rest_seconds(settings, streak + 1, asked) >= seconds


def test_rests_double() -> None:
    settings = IdentitySettings(rest=60, max_rest=3600)
    assert [rest_seconds(settings, streak) for streak in range(8)] == [60, 120, 240, 480, 960, 1920, 3600, 3600]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ProxyError("", retryable=False), Fault.REFUSED),
        (ProxyError("", retryable=True), Fault.PROXY),
        (FetchError("", kind="proxy", retryable=True), Fault.UNSURE),  # the proxy can't reach the host
        (FetchError("", kind="reset", retryable=True), Fault.UNSURE),
        (FetchError("", kind="protocol", retryable=False), Fault.UNSURE),
        (FetchError("", kind="http 404", retryable=False, status=404), Fault.PAGE),
        (FetchError("", kind="too large", retryable=False), Fault.PAGE),
        (FetchError("", kind="address", retryable=False), Fault.PAGE),
    ],
)
def test_whose_fault_it_is(error: FetchError, fault: Fault) -> None:
    assert fault_of(error) is fault


def test_a_short_outage_removes_nobody() -> None:
    settings = IdentitySettings(max_failures=3, remove_after=30)
    assert not is_removed(settings, 100, 29.0)
    assert not is_removed(settings, 2, 1000.0)
    assert is_removed(settings, 3, 30.0)


def test_free_failures() -> None:
    settings = IdentitySettings(max_blocks=5)
    assert [free_failures(settings, count) for count in (0, 1, 3, 100)] == [0, 0, 2, 5]


# -- roster


@pytest.mark.parametrize(
    ("proxy", "name"),
    [
        ("http://ann:s3cret@10.0.0.1:3128", "http://ann@10.0.0.1:3128"),
        ("socks5://10.0.0.1:1080", "socks5://10.0.0.1:1080"),
        ("https://a%40b:p%3Aq@[::1]:8443", "https://a%40b@[::1]:8443"),
        ("http://:s3cret@proxy.example", "http://proxy.example"),
    ],
)
def test_a_name_has_no_password(proxy: str, name: str) -> None:
    assert name_of(proxy) == name


def test_names_are_unique_and_headers_take_turns() -> None:
    proxies = ["http://a:1@h:1", "http://a:2@h:1", "http://a:1@h:1", "http://b:1@h:1"]
    roster = make_roster(proxies, IdentitySettings(headers=({"X": "1"}, {"X": "2"})))
    assert [each.name for each in roster] == ["http://a@h:1", "http://a@h:1#2", "http://b@h:1"]
    assert [each.headers["X"] for each in roster] == ["1", "2", "1"]
    assert [each.proxy for each in roster] == ["http://a:1@h:1", "http://a:2@h:1", "http://b:1@h:1"]


def test_a_file_of_proxies(tmp_path: Path) -> None:
    file = tmp_path / "proxies.txt"
    file.write_text("\ufeff# ours\n10.0.0.1:3128\n\n  socks5://u:p@10.0.0.2:1080  \n")
    file.chmod(0o600)
    assert read_proxies(file) == ["http://10.0.0.1:3128", "socks5://u:p@10.0.0.2:1080"]
    roster = make_roster(["http://first:1", f"@{file}"], IdentitySettings())
    assert [each.name for each in roster] == ["http://first:1", "http://10.0.0.1:3128", "socks5://u@10.0.0.2:1080"]


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("http://ok:1\nftp://u:s3cret@h:1", 0o600, r"line 2: a proxy must be http.*not 'ftp://u:\*\*\*@h:1'"),
        ("http://ok:99999", 0o600, "line 1"),
        ("# nothing\n", 0o600, "has no proxies"),
        ("http://ok:1", 0o666, "every user can write to it"),
    ],
)
def test_a_bad_file(tmp_path: Path, text: str, mode: int, message: str) -> None:
    file = tmp_path / "proxies.txt"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=message) as failure:
        read_proxies(file)
    assert "s3cret" not in str(failure.value)
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.txt: No such file"):
        read_proxies(tmp_path / "gone.txt")


# -- settings


def test_settings() -> None:
    environ = {
        "SHOAL_PROXIES": "http://u:s3cret@a:1, @more.txt",
        "SHOAL_IDENTITIES__HEADERS": '[{"User-Agent": "x", "X-Api-Key": "s3cret"}]',
    }
    config = load_config(environ=environ).config
    assert config.proxies == ("http://u:s3cret@a:1", "@more.txt")
    assert config.identities.headers == ({"User-Agent": "x", "X-Api-Key": "s3cret"},)
    assert "s3cret" not in repr(flatten(config))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proxies": ["ftp://u:s3cret@h"]}, '"proxies" must be http'),
        ({"proxies": ["@"]}, "must name a file"),
        ({"proxies": ["http://a:1"], "http.proxy": "http://b:1"}, '"proxies" and "http.proxy" contradict'),
        ({"identities.headers": [{"bad name": "x"}]}, "valid header names"),
        ({"identities.rest": 0}, "identities.rest"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as failure:
        Config().with_settings(settings)
    assert "s3cret" not in str(failure.value)


# -- memory


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_host_that_is_down_is_no_evidence_against_an_identity() -> None:
    clock = Clock()
    memory = ShortMemory(clock)
    memory.succeeded("b", HOST)
    clock.now += 1
    assert memory.answers_another("a", HOST)
    memory.failed("a", HOST, counts=True)
    clock.now += 1
    assert not memory.answers_another("a", HOST)  # nobody was answered since
    memory.succeeded("a", HOST)
    assert not memory.answers_another("a", HOST)
    memory.succeeded("b", HOST)
    assert memory.answers_another("a", HOST)
    clock.now += 61
    assert not memory.answers_another("a", HOST)


def test_failures_in_a_row() -> None:
    clock = Clock()
    memory = ShortMemory(clock)
    assert memory.failed("a", HOST, counts=True) == (1, 0.0)
    clock.now += 10
    assert memory.failed("a", "other.example", counts=True) == (2, 10.0)
    assert memory.failed("a", HOST, counts=False) == (2, 10.0)
    memory.succeeded("a", HOST)
    assert memory.failed("a", HOST, counts=True) == (1, 0.0)


def test_a_long_rest_is_asked_for_again() -> None:
    clock = Clock()
    memory = ShortMemory(clock)
    memory.rest("a", HOST, 3600, is_final=True)
    assert (memory.rests("a", HOST), memory.is_final("a", HOST), memory.resting()) == (True, True, 1)
    assert memory.returns_in(["a"], HOST) == 3600
    clock.now += 6
    assert not memory.rests("a", HOST)


def test_another_identity_must_prove_itself_again() -> None:
    memory = ShortMemory()
    memory.assign(HOST, "a", 60)
    memory.set_works("a", HOST)
    memory.assign(HOST, "b", 60)
    assert not memory.works("a", HOST)


# -- the layer


class Store:
    """Facts and blocks of hosts, without time."""

    def __init__(self) -> None:
        self.facts: dict[str, bytes] = {}
        self.blocked: list[tuple[str, HostUpdate]] = []
        self.is_away = False

    async def update_host(self, host: str, update: HostUpdate) -> None:
        self.blocked.append((host, update))

    async def host_states(self, limit: int = 100) -> list[HostState]:
        return []

    async def host_state(self, host: str) -> HostState:
        raise NotImplementedError

    async def remember(self, key: str, value: bytes, ttl: float) -> None:
        if self.is_away:
            raise StoreAwayError("away")
        self.facts[key] = value
        if ttl < 0.01:
            del self.facts[key]

    async def recall(self, key: str) -> bytes | None:
        if self.is_away:
            raise StoreAwayError("away")
        return self.facts.get(key)


class Net:
    """Answers requests. ``statuses`` has what the next ones get; then 200."""

    def __init__(self, *answers: int | FetchError) -> None:
        self.answers = list(answers)
        self.sent: list[Request] = []

    async def __call__(self, request: Request) -> Response:
        self.sent.append(request)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, FetchError):
            raise answer
        return Response(request.url, status=answer, request=request, headers=[("Set-Cookie", "a=1")])

    @property
    def proxies(self) -> list[str | None]:
        return [request.proxy for request in self.sent]


def layer(store: Store, *proxies: str, **settings: Any) -> Identities:
    made = IdentitySettings(**settings)
    return Identities(make_roster(proxies, made), made, IdentityFacts(store), store, Spider().blocked)


async def test_a_host_keeps_its_identity_and_workers_agree() -> None:
    store, net = Store(), Net()
    for worker in (layer(store, "http://a:1", "http://b:1", "http://c:1") for _ in range(5)):
        response = await worker(Request(URL), net)
        assert response.request is not None
        assert response.request.proxy is None  # nothing of the identity is stored with links
    assert len(set(net.proxies)) == 1


async def test_a_block_moves_the_page_to_another_identity() -> None:
    store, net = Store(), Net(403)
    worker, other = layer(store, "http://a:1", "http://b:1"), layer(store, "http://a:1", "http://b:1")
    with pytest.raises(Postponed) as postponed:
        await worker(Request(URL), net)
    assert postponed.value.contacted
    await worker(Request(URL), net)
    await other(Request(URL), net)
    blocked, *rest = net.proxies
    assert blocked not in rest
    assert worker.counts.blocks == 1
    states = {state.state: state for state in await list_identities(IdentityFacts(store), [HOST], 10)}
    assert states.keys() == {"active", "resting"}
    assert (states["resting"].identity, states["resting"].reason) == (blocked, "answered 403")


async def test_no_identity_is_available() -> None:
    store, net = Store(), Net(429)
    worker = layer(store, "http://a:1", rest=7)
    with pytest.raises(Postponed):
        await worker(Request(URL), net)
    for _ in range(3):
        with pytest.raises(Postponed, match="1 rest, 0 are removed") as postponed:
            await worker(Request(URL), net)
        assert not postponed.value.contacted
    assert len(net.sent) == 1  # nothing goes out, least of all directly
    host, update = store.blocked[0]
    assert host == HOST
    assert isinstance(update.block_for, float)
    assert 6 < update.block_for <= 7


async def test_the_store_is_away() -> None:
    store, net = Store(), Net()
    worker = layer(store, "http://a:1")
    store.is_away = True
    with pytest.raises(Postponed, match="can't be read: away"):
        await worker(Request(URL), net)
    assert net.sent == []


async def test_workers_with_different_proxies_do_not_fight() -> None:
    store, net = Store(), Net()
    one, two = layer(store, "http://a:1"), layer(store, "http://b:1", "http://c:1")
    await one(Request(URL), net)
    for _ in range(10):
        await two(Request(URL), net)
        await one(Request(URL), net)
    assert await IdentityFacts(store).assigned(HOST) == "http://a:1"
    assert len(set(net.proxies)) == 2


async def test_a_request_with_its_own_proxy_keeps_it() -> None:
    net = Net(403)
    worker = layer(Store(), "http://a:1")
    response = await worker(Request(URL, proxy="http://mine:1"), net)
    assert (response.status, net.proxies, worker.counts.blocks) == (403, ["http://mine:1"], 0)


@pytest.mark.parametrize(("status", "blocks"), [(403, 0), (429, 1)])
async def test_many_sites_forbid_a_robots_txt_that_does_not_exist(status: int, blocks: int) -> None:
    worker = layer(Store(), "http://a:1")
    try:
        await worker(Request("http://site.example/robots.txt"), Net(status))
    except Postponed:
        assert blocks
    assert worker.counts.blocks == blocks


async def test_headers_of_the_request_win() -> None:
    net = Net()
    worker = layer(Store(), "http://a:1", headers=({"User-Agent": "u", "X-Extra": "e"},))
    await worker(Request(URL, headers={"user-agent": "mine"}), net)
    await worker(Request(URL), net)
    assert net.sent[0].headers == {"X-Extra": "e", "user-agent": "mine"}
    assert net.sent[1].headers == {"User-Agent": "u", "X-Extra": "e", "Cookie": "a=1"}


async def test_a_corrected_password_is_tried_by_a_new_process() -> None:
    store = Store()
    ended: list[ConfigError] = []
    worker = layer(store, "http://u:wrong@a:1")
    worker.on_exhausted = ended.append
    with pytest.raises(Postponed):
        await worker(Request(URL), Net(ProxyError("it answered 407", retryable=False)))
    assert "it answered 407" in str(ended[0])
    assert [state.state for state in await list_identities(IdentityFacts(store), [HOST], 10)] == ["removed"]
    again = layer(store, "http://u:right@a:1")
    store.facts.pop(f"identity rests {HOST} http://u@a:1", None)
    assert (await again(Request(URL), Net())).status == 200
    assert [state.state for state in await list_identities(IdentityFacts(store), [HOST], 10)] == ["active"]


async def test_a_wrong_password_of_one_worker_does_not_stop_the_others() -> None:
    store = Store()
    good, bad = layer(store, "http://u:right@a:1"), layer(store, "http://u:wrong@a:1")
    await good(Request(URL), Net())
    with pytest.raises(Postponed):
        await bad(Request(URL), Net(ProxyError("it answered 407", retryable=False)))
    good._checked.clear()
    assert (await good(Request(URL), Net())).status == 200


async def test_one_failure_of_an_identity_that_works_is_the_hosts() -> None:
    reset = FetchError("closed", kind="reset", retryable=True)
    worker, net = layer(Store(), "http://a:1", "http://b:1"), Net(200, reset, reset)
    await worker(Request(URL), net)
    with pytest.raises(FetchError):
        await worker(Request(URL), net)
    with pytest.raises(Postponed):  # the second in a row: another identity tries
        await worker(Request(URL), net)
    await worker(Request(URL), net)
    first, *_, last = net.proxies
    assert first != last


async def test_a_dead_host_costs_attempts_and_no_identity() -> None:
    store = Store()
    worker = layer(store, "http://a:1", "http://b:1", rest=0.001, remove_after=0)
    net = Net(*(FetchError("no connection", kind="connect", retryable=True) for _ in range(9)))
    outcomes: list[type[Exception]] = []
    for _ in range(9):
        with pytest.raises((FetchError, Postponed)) as failure:
            await worker(Request(URL), net)
        outcomes.append(failure.type)
        store.facts = {key: value for key, value in store.facts.items() if "rests" not in key}
        await asyncio.sleep(0.002)
    assert outcomes == [Postponed, *[FetchError] * 8]
    assert worker.counts.removed == 0


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _print_states(
        [
            IdentityState("http://ann@a:1", "resting", HOST, "answered 403", 12.4),
            IdentityState("http://b:1", "removed", reason="no connection\x1b[2J"),
        ]
    )
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["http://ann@a:1", "resting", HOST, "12", "s", "answered", "403"]
    assert second.endswith("no connection\\x1b[2J")
