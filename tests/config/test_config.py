"""Settings: the layers and their order, conversion, and the message for each mistake."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from copy import copy, deepcopy
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Crawl, Node, Spider
from shoal.cli.commands.spiders import IMPORTANT, explanations
from shoal.config import (
    Config,
    HttpSettings,
    QueueSettings,
    RetrySettings,
    ScopeSettings,
    ServerSettings,
    ThrottleSettings,
    env_name,
    find_config_file,
    flatten,
    load_config,
    mask,
)
from shoal.config.layers import explicit_settings, keys
from shoal.errors import ConfigError
from shoal.ports import FrontierOptions
from shoal.runs.orchestrator import Registry


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        file = tmp_path / "shoal.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


# Values


def test_defaults() -> None:
    config = Config()
    assert (config.mode, config.frontier, config.concurrency, config.download_delay) == (
        "standalone",
        "memory:",
        32,
        0.5,
    )
    assert config.http.max_body_bytes == 33_554_432
    assert config.retry.statuses == (408, 425, 429, 500, 502, 503, 504, 522, 524)
    assert config.queue.max_size is None
    assert config.cache.folder == ".shoal-cache"
    assert config.lease.ttl == 300.0
    assert config.items.keep


def test_frozen_and_keywords_only() -> None:
    with pytest.raises(AttributeError):
        Config().concurrency = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        HttpSettings(5.0)  # type: ignore[call-arg]


def test_values_are_held_in_the_type_of_their_field() -> None:
    given = {"A": "1"}
    config = Config(download_delay=2, http=HttpSettings(headers=given), scope=ScopeSettings(allow=["a"]))  # type: ignore[arg-type]
    given["A"] = "2"
    assert isinstance(config.download_delay, float)
    assert config.scope.allow == ("a",)
    assert config.http.headers == {"A": "1"}
    assert Config(log_level="debug").log_level == "DEBUG"  # type: ignore[arg-type]


def test_any_number_of_seconds_is_a_timedelta() -> None:
    assert timedelta(seconds=Config(download_delay=1e9).download_delay)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("concurrency", 0, "must be an integer, at least 1, not 0"),
        ("concurrency", True, "must be an integer, at least 1, not True"),
        ("concurrency", 1.5, "must be an integer, at least 1, not 1.5"),
        ("concurrency_per_host", 0, "must be an integer, at least 1, not 0"),
        ("download_delay", -0.1, "must be a number, at least 0, at most 1e+09, not -0.1"),
        ("download_delay", float("nan"), "must be a number, at least 0, at most 1e+09, not nan"),
        ("shutdown_grace", float("inf"), "must be a number, at least 0, at most 1e+09, not inf"),
        ("lease.ttl", 0, "must be a number, more than 0, at most 1e+09, not 0"),
        ("http.read_timeout", 0, "must be a number, more than 0, at most 1e+09, not 0"),
        ("http.max_redirects", -1, "must be an integer, at least 0, not -1"),
        ("http.verify_tls", "yes", "must be true or false, not 'yes'"),
        ("throttle.backoff_factor", 0.5, "must be a number, at least 1, at most 100, not 0.5"),
        ("retry.max_attempts", 0, "must be an integer, at least 1, not 0"),
        ("retry.statuses", [42], "must be a list (each an integer, at least 100, at most 599), not [42]"),
        ("scope.max_depth", -1, "must be an integer, at least 0, or none, not -1"),
        ("scope.max_pages", 0, "must be an integer, at least 1, or none, not 0"),
        ("queue.max_size", 0, "must be an integer, at least 1, or none, not 0"),
        ("queue.overflow", "drop", 'must be one of "accept", "refuse", not \'drop\''),
        ("cache.folder", "", "must be non-empty text, not ''"),
        ("cache.ttl", "1h", "must be a number, at least 0, at most 1e+09, or none, not '1h'"),
        ("mode", "cluster", 'must be one of "distributed", "standalone", not \'cluster\''),
        ("log_level", "LOUD", 'must be one of "CRITICAL", "DEBUG", "ERROR", "INFO", "WARNING", not \'LOUD\''),
        ("user_agent", "a\nb", "must be one line"),
        ("scope.allow", "one", "must be a list (each text), not 'one'"),
        ("scope.deny", ["ok", "("], "must contain regular expressions; '(' does not compile: missing )"),
        ("scope.deny", ["a{99999999999}"], "must contain regular expressions; 'a{99999999999}' does not compile"),
        ("scope.allowed_domains", ["https://a.org"], "host names such as \"example.com\", not 'https://a.org'"),
        ("scope.allowed_domains", [""], "not ''"),
        ("http.headers", {"A": 1}, "must be a table (text to text)"),
        ("http.headers", {"A B": "x"}, "must contain valid header names, not 'A B'"),
        ("http.headers", {"A": "x\r\nB: y"}, "must contain values of one line; the value of 'A' has several"),
        ("http.proxy", "ftp://p:1", "must be http://, https:// or socks5:// with a host, not 'ftp://p:1'"),
        ("http.proxy", "http://", "with a host, not 'http://'"),
        ("http.proxy", "http://p:99999", "not 'http://p:99999'"),
        ("frontier", "mysql://host", "must be memory:, sqlite:///file, redis://host:port/number, rediss://"),
        ("frontier", "memory", "or postgresql://host/database, not 'memory'"),
        ("frontier", "sqlite:///", "not 'sqlite:///'"),
        ("frontier", "sqlite://file", "not 'sqlite://file'"),
        ("frontier", "sqlite://crawl.db", "did you mean sqlite:///crawl.db?"),
        ("frontier", "sqlite:crawl.db", "did you mean sqlite:///crawl.db?"),
        ("frontier", "crawl.db", "did you mean sqlite:///crawl.db?"),
        ("frontier", "/var/crawl.sqlite", "did you mean sqlite:////var/crawl.sqlite?"),
        ("frontier", "redis://h:x/0", "not 'redis://h:x/0'"),
        ("frontier", "redis://h/name", "not 'redis://h/name'"),
        ("frontier", "redis://[::1", "not 'redis://[::1'"),
    ],
)
def test_bad_values(key: str, value: object, said: str) -> None:
    told = message(Config().with_settings, {key: value})
    assert told.startswith(f'"{key}" must')
    assert said in told


def test_bad_values_by_hand() -> None:
    assert message(Config, concurrency=0) == '"Config.concurrency" must be an integer, at least 1, not 0'
    assert message(HttpSettings, proxy="p").startswith('"HttpSettings.proxy" must be http://')
    assert message(Config, http=RetrySettings()) == '"Config.http" must be of type HttpSettings, not RetrySettings'
    assert message(msgspec.structs.replace, ThrottleSettings(), slow_after=0).startswith(
        '"ThrottleSettings.slow_after" must be'
    )


@pytest.mark.parametrize(
    "frontier",
    [
        "memory:",
        "sqlite:///crawl.db",
        "sqlite:////var/crawl.db",
        "redis://h",
        "redis://u:p@[::1]:6379/3",
        "rediss://h:1/0?ssl_cert_reqs=none",
        "postgresql://u@h/db",
        "postgresql:///db?host=/run",
    ],
)
def test_good_frontiers(frontier: str) -> None:
    assert Config(frontier=frontier).frontier == frontier


@pytest.mark.parametrize(
    "proxy", [None, "http://p:8080", "https://u:p@p:1", "socks5://127.0.0.1:9050", "http://[::1]:1"]
)
def test_good_proxies(proxy: str | None) -> None:
    assert HttpSettings(proxy=proxy).proxy == proxy


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///crawl.db"])
def test_a_fleet_needs_a_frontier_to_share(frontier: str) -> None:
    told = message(Config, mode="distributed", frontier=frontier)
    assert f'cannot share the frontier "{frontier}"' in told
    assert 'set "frontier" to redis://host:port/number or postgresql://host/database' in told


def test_with_settings() -> None:
    config = Config(concurrency=5).with_settings({"http.proxy": "http://p:1", "retry": {"max_attempts": 7}})
    assert (config.concurrency, config.http.proxy, config.retry.max_attempts) == (5, "http://p:1", 7)
    assert config.with_settings({"http": HttpSettings(max_redirects=1)}).http == HttpSettings(max_redirects=1)
    assert config.with_settings({}) == config


def test_with_settings_checks_only_what_changes() -> None:
    """A server does this for each batch: to check all settings again took a third of the time of a small one."""
    config = Config(serve=ServerSettings(max_urls=5), concurrency=7)
    changed = config.with_settings({"http.max_redirects": 3})
    assert changed.serve is config.serve
    assert (changed.http.max_redirects, changed.http.total_timeout) == (3, config.http.total_timeout)
    explicit = {"serve.max_urls": 5, "concurrency": 7}
    assert explicit_settings(config) == explicit
    assert explicit_settings(changed) == {**explicit, "http.max_redirects": 3}


def test_with_settings_names_all_that_is_wrong() -> None:
    told = message(Config().with_settings, {"concurrency": 0, "http": {"prxy": None}, "retry": 3, "htp": {}})
    assert told.splitlines() == [
        '"concurrency" must be an integer, at least 1, not 0',
        'unknown key "http.prxy"; did you mean "http.proxy"?',
        '"retry" must be a table; its keys are retry.max_attempts, retry.max_retries, retry.base_delay, '
        "retry.max_delay, retry.statuses",
        'unknown key "htp"',
    ]


def test_a_key_given_twice() -> None:
    settings = {"http.proxy": None, "http": {"proxy": "http://p"}}
    assert message(Config().with_settings, settings) == '"http.proxy" is set twice'


def test_a_section_of_another_kind() -> None:
    assert message(Config().with_settings, {"http": RetrySettings()}).startswith(
        '"http" must be a table; its keys are http.'
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("downlod_delay", '"download_delay"'),
        ("DOWNLOAD_DELAY", '"download_delay"'),
        ("obey", '"robots.obey"'),
        ("ttl", '"cache.ttl" or "lease.ttl"'),
        ("shoal.concurrency", '"concurrency"'),
        ("http.headers.Accept", '"http.headers"'),
        ("delay", '"download_delay"'),
        ("http.delay", '"download_delay"'),
        ("retry.delay", '"retry.base_delay" or "retry.max_delay"'),
        ("timeout", '"http.connect_timeout" or "http.read_timeout" or "http.total_timeout"'),
        ("depth", '"scope.max_depth"'),
        ("user-agent", '"user_agent"'),
        ("ROBOTSTXT_OBEY", '"robots.obey"'),
        ("CONCURRENT_REQUESTS_PER_DOMAIN", '"concurrency_per_host"'),
        ("DOWNLOAD_TIMEOUT", '"http.total_timeout"'),
    ],
)
def test_the_nearest_key(key: str, meant: str) -> None:
    assert message(Config().with_settings, {key: 1}) == f'unknown key "{key}"; did you mean {meant}?'


def test_a_suggestion_is_a_key_and_an_alias_is_not() -> None:
    assert set(Config.aliases.values()) <= set(keys(Config))
    assert not set(Config.aliases) & set(keys(Config))


def test_every_layer_suggests_the_nearest_key(toml: Any) -> None:
    file = toml("delay = 3")
    found = message(
        load_config, file=file, spider={"delay": 3}, spider_name="Books", environ={"SHOAL_DELAY": "3"},
        command_line={"delay": "3"}, code={"delay": 3},
    )  # fmt: skip
    assert sorted(found.splitlines()) == sorted(
        [
            f'{file}: unknown key "delay"; did you mean "download_delay"?',
            'spider Books: unknown key "delay"; did you mean "download_delay"?',
            'SHOAL_DELAY: unknown key "delay"; did you mean SHOAL_DOWNLOAD_DELAY?',
            '--set delay: unknown key "delay"; did you mean "download_delay"?',
            'code: unknown key "delay"; did you mean "download_delay"?',
        ]
    )


def test_nothing_near() -> None:
    assert message(Config().with_settings, {"zzz": 1}) == 'unknown key "zzz"'


def test_flatten() -> None:
    flat = flatten(Config(concurrency=5, http=HttpSettings(proxy="http://p")))
    assert list(flat) == list(keys(Config))
    assert (flat["concurrency"], flat["http.proxy"], flat["items.keep"]) == (5, "http://p", True)
    assert "http" not in flat


# Secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:se/cr:e@t@h", "redis://:***@h"),
        ("redis:///:secret@h", "redis:///:***@h"),
        ("http://me@mail.org:secret@h:1", "http://me@mail.org:***@h:1"),
        ("me:secret@h:1", "me:***@h:1"),
        ("postgresql://u@h:5432/db", "postgresql://u@h:5432/db"),
        ("postgresql://h/db?password=secret&x=1", "postgresql://h/db?password=***&x=1"),
        ("host=h password='se cret' user=u", "host=h password=*** user=u"),
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("sqlite:///a@b.db", "sqlite:///a@b.db"),
        ("memory:", "memory:"),
    ],
)
def test_mask(url: str, shown: str) -> None:
    assert mask(url) == shown


@given(password=st.text(min_size=1))
def test_no_password_is_shown(password: str) -> None:
    url = f"redis://:{password}@host:1/0"
    assert mask(url) == "redis://:***@host:1/0"


def test_secrets_are_nowhere_to_be_seen() -> None:
    config = Config.distributed(
        redis_password="secret",
        http={
            "proxy": "http://u:secret@p",
            "headers": {"Authorization": "secret", "X-Api-Key": "secret", "Accept": "*"},
        },
        serve={"token": "secret", "tokens": {"alice": "secret"}, "webhook_key": "secret"},
    )
    resolved = load_config(code=config)
    shown = [repr(config), str(config), repr(config.__rich_repr__()), repr(resolved), repr(flatten(config))]
    assert not [text for text in shown if "secret" in text]
    assert "redis://:***@127.0.0.1:6379/0" in repr(config)
    assert flatten(config)["http.headers"] == {"Authorization": "***", "X-Api-Key": "***", "Accept": "*"}
    assert flatten(config)["serve.tokens"] == {"alice": "***"}
    assert flatten(config, reveal=True)["frontier"] == "redis://:secret@127.0.0.1:6379/0"
    assert msgspec.json.decode(msgspec.json.encode(config), type=Config) == config


@pytest.mark.parametrize(
    "environ",
    [
        {"SHOAL_FRONTIER": "reds://:secret@h"},
        {"SHOAL_HTTP__PROXY": "u:secret@h:80"},
        {"SHOAL_HTTP__HEADERS": '{"Authorization": "secret"'},
        {"SHOAL_HTTP__HEADERS": '["secret"]'},
        {"SHOAL_REDIS_PASSWORD": "secret"},
    ],
)
def test_no_secret_in_an_error(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    told = message(load_config, code={"frontier": ["redis://:secret@h"], "http.headers": ["secret"]})
    assert "secret" not in told


# Factories


def test_standalone() -> None:
    config = Config.standalone(project_name="my_standalone_project", concurrency=10, download_delay=1.0)
    assert config == Config(project_name="my_standalone_project", concurrency=10, download_delay=1.0)
    assert Config.standalone() == Config.standalone(queue_type="memory", filter_type="memory") == Config()


def test_standalone_with_more() -> None:
    config = Config.standalone(max_queue_size=50_000, http={"proxy": "http://p"}, scope=ScopeSettings(max_depth=2))
    assert config == Config(
        queue=QueueSettings(max_size=50_000), http=HttpSettings(proxy="http://p"), scope=ScopeSettings(max_depth=2)
    )
    file = "sqlite:///crawl.db"
    assert Config.standalone(frontier=file) == Config.standalone(queue_type="sqlite", frontier=file)


def test_distributed() -> None:
    config = Config.distributed(
        project_name="my_distributed_project",
        redis_host="127.0.0.1",
        redis_port=6379,
        redis_password="mypassword",
        concurrency=20,
        download_delay=0.5,
    )
    assert (config.mode, config.concurrency) == ("distributed", 20)
    assert config.frontier == "redis://:mypassword@127.0.0.1:6379/0"
    plain = Config.distributed(project_name="example", redis_host="127.0.0.1", redis_port=6379)
    assert plain.frontier == "redis://127.0.0.1:6379/0"
    assert Config.distributed(queue_type="redis", filter_type="redis").frontier == plain.frontier
    assert Config.distributed(redis_host="::1", redis_db=3).frontier == "redis://[::1]:6379/3"


def test_distributed_on_postgresql() -> None:
    url = "postgresql://u:p@h/db"
    assert Config.distributed(frontier=url) == Config.distributed(queue_type="postgresql", frontier=url)
    assert Config.distributed(frontier=url).mode == "distributed"


@given(password=st.text(min_size=1, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_password_survives_the_url(password: str) -> None:
    url = urlsplit(Config.distributed(redis_password=password).frontier)
    assert unquote(url.password or "") == password
    assert (url.hostname, url.port, url.path) == ("127.0.0.1", 6379, "/0")


@pytest.mark.parametrize(
    ("factory", "arguments", "said"),
    [
        ("standalone", {"queue_type": "redis"}, 'does not support queue_type "redis"; use Config.distributed'),
        (
            "standalone",
            {"frontier": "postgresql://h/d"},
            'not support a frontier of the kind "postgresql"; use',
        ),
        ("standalone", {"queue_type": "sqlite"}, 'does not match the frontier "memory:"; set "frontier" to'),
        ("standalone", {"queue_type": "kafka"}, 'queue_type "kafka" does not match the frontier'),
        ("standalone", {"filter_type": "redis"}, 'filter_type "redis" does not match queue_type "memory"'),
        ("standalone", {"mode": "distributed"}, '"mode" is always "standalone" here; remove it'),
        ("standalone", {"concurency": 1}, 'unknown key "concurency"; did you mean "concurrency"?'),
        ("standalone", {"max_queue_size": 0}, '"queue.max_size" must be an integer, at least 1, or none, not 0'),
        ("standalone", {"queue.overflow": "refuse"}, 'but the queue has no maximum; set "queue.max_size"'),
        ("distributed", {"queue_type": "memory"}, 'does not support queue_type "memory"; use Config.standalone'),
        ("distributed", {"frontier": "sqlite:///f"}, 'does not support a frontier of the kind "sqlite"; use'),
        ("standalone", {"frontier": "redis://h"}, 'does not support a frontier of the kind "redis"; use'),
        ("distributed", {"queue_type": "postgresql"}, 'set "frontier" to a URL of that kind'),
        ("distributed", {"filter_type": "memory"}, "remove filter_type"),
        ("distributed", {"frontier": "redis://h", "redis_password": "x"}, "give either frontier or redis_host"),
        ("distributed", {"redis_port": 70000}, '"frontier" must be'),
        ("distributed", {"redis_db": -1}, '"frontier" must be'),
        ("distributed", {"redis_host": ""}, '"frontier" must be'),
    ],
)
def test_factories_refuse(factory: str, arguments: dict[str, Any], said: str) -> None:
    assert said in message(getattr(Config, factory), **arguments)


# Layers


def test_no_layer_at_all() -> None:
    resolved = load_config()
    assert resolved.config == Config()
    assert set(resolved.sources) == set(keys(Config))
    assert set(resolved.sources.values()) == {"default"}


def test_each_layer_is_stronger_than_the_one_before(toml: Any) -> None:
    file = toml("concurrency = 3")
    layers: list[tuple[dict[str, Any], str]] = [
        ({"spider": {"concurrency": 2}, "spider_name": "Books"}, "spider Books"),
        ({"file": file}, str(file)),
        ({"environ": {"SHOAL_CONCURRENCY": "4"}}, "SHOAL_CONCURRENCY"),
        ({"command_line": {"concurrency": "5"}}, "--set concurrency"),
        ({"code": {"concurrency": 6}}, "code"),
    ]
    arguments: dict[str, Any] = {}
    for number, (layer, source) in enumerate(layers, start=2):
        arguments |= layer
        resolved = load_config(**arguments)
        assert (resolved.config.concurrency, resolved.sources["concurrency"]) == (number, source)
        assert resolved.sources["download_delay"] == "default"
    lost = [(overruled.value, overruled.source, overruled.winner) for overruled in resolved.overruled]
    sources = [source for _, source in layers]
    assert lost == [(5 - weaker, sources[3 - weaker], sources[4 - weaker]) for weaker in range(4)]


def test_layers_add_up(toml: Any) -> None:
    file = toml(
        """
        project_name = "books"
        "retry.max_attempts" = 4
        [http]
        proxy = "http://file:1"
        read_timeout = 5
        [http.headers]
        Accept = "text/html"
        [spiders]
        books = "books.py:Books"
        """
    )
    resolved = load_config(
        file=file,
        spider={"scope.max_depth": 2, "http": {"max_redirects": 1}},
        environ={"SHOAL_HTTP__PROXY": "http://env:1", "PATH": "/bin", "SHOAL_CONFIG": "elsewhere"},
        command_line={"scope.max_pages": 9, "frontier": "sqlite:///f"},
        options={"frontier": "--frontier"},
        code={"throttle": ThrottleSettings(enabled=False)},
    )
    config = resolved.config
    assert (config.project_name, config.retry.max_attempts, config.scope) == (
        "books",
        4,
        ScopeSettings(max_depth=2, max_pages=9),
    )
    assert config.http == HttpSettings(
        proxy="http://env:1", read_timeout=5, max_redirects=1, headers={"Accept": "text/html"}
    )
    named = {
        "project_name": str(file),
        "retry.max_attempts": str(file),
        "http.headers": str(file),
        "http.max_redirects": "spider",
        "http.proxy": "SHOAL_HTTP__PROXY",
        "scope.max_pages": "--set scope.max_pages",
        "frontier": "--frontier",
        "throttle.enabled": "code",
        "cookies": "default",
    }
    assert {key: resolved.sources[key] for key in named} == named


def test_a_config_in_code_is_a_layer() -> None:
    code = Config.standalone(project_name="example", download_delay=2)
    spider = {"download_delay": 1, "user_agent": "books/1.0"}
    resolved = load_config(environ={"SHOAL_CONCURRENCY": "5"}, spider=spider, code=code)
    assert resolved.config == Config(project_name="example", concurrency=5, download_delay=2, user_agent="books/1.0")
    in_code = {key for key, source in resolved.sources.items() if source == "code"}
    assert in_code == {"project_name", "download_delay", "mode", "frontier"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CONCURRENT_REQUESTS", 'did you mean "concurrency"?'),
        ("DOWNLOAD_DELAY", 'did you mean "download_delay"?'),
        ("QUEUE_TYPE", 'did you mean "frontier"?'),
        ("FILTER_TYPE", 'did you mean "frontier"?'),
        ("REDIS_HOST", 'did you mean "frontier"?'),
        ("SCHEDULER_MAX_QUEUE_SIZE", 'did you mean "queue.max_size"?'),
        ("PROJECT_NAME", 'did you mean "project_name"?'),
        ("RUN_MODE", 'did you mean "mode"?'),
        ("ITEM_PIPELINES", "list them in the spider's attribute `pipelines`"),
        ("DOWNLOADER_MIDDLEWARES", "list them in the spider's attribute `middlewares`"),
    ],
)
def test_names_known_from_elsewhere(name: str, said: str) -> None:
    value = {"books.Clean": 300} if name in ("ITEM_PIPELINES", "DOWNLOADER_MIDDLEWARES") else "x"
    assert message(load_config, spider={name: value}, spider_name="Books").endswith(f"; {said}")


def test_every_alias_is_a_setting() -> None:
    assert set(Config.aliases.values()) <= keys(Config).keys()


class Layered(Spider):
    name = "layered"
    settings = {"user_agent": "books/1.0", "download_delay": 1.0, "frontier": "redis://127.0.0.1:1/0"}


def test_a_program_passes_a_config_over_all_other_layers(monkeypatch: pytest.MonkeyPatch, toml: Any) -> None:
    monkeypatch.setenv("SHOAL_CONFIG", str(toml("[retry]\nmax_attempts = 7")))
    monkeypatch.setenv("SHOAL_CONCURRENCY", "5")
    expected = Config(
        user_agent="books/1.0", download_delay=2.0, frontier="redis://127.0.0.1:1/0", concurrency=5,
        retry=RetrySettings(max_attempts=7),
    )  # fmt: skip
    for passed in (Config(download_delay=2.0), {"download_delay": 2.0}):
        assert Crawl(Layered, passed).config == expected
        assert Node(Layered, passed).config == expected
    assert Node(Layered).config.user_agent == "books/1.0"


def test_resolved_layers_are_not_merged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line may set what the environment sets otherwise back to the default."""
    monkeypatch.setenv("SHOAL_CONCURRENCY", "5")
    resolved = load_config(environ={"SHOAL_CONCURRENCY": "5"}, command_line={"concurrency": 32})
    assert Crawl(Layered, resolved).config.concurrency == 32


DISTRIBUTED = 'mode = "distributed"\nfrontier = "redis://:secret@file:1/0"\ndownload_delay = 7\nconcurrency = 7'


@pytest.mark.parametrize(
    ("passed", "frontier"),
    [
        (Config.standalone(), "memory:"),
        (Config.standalone(frontier="sqlite:///a.db"), "sqlite:///a.db"),
        (Config.standalone(concurrency=32), "memory:"),
        (pickle.loads(pickle.dumps(Config.standalone(concurrency=32))), "memory:"),
        (copy(Config.standalone(concurrency=32)), "memory:"),
        (Config(mode="standalone"), "memory:"),
        (Config(frontier="memory:"), "memory:"),
        ({"mode": "standalone"}, "memory:"),
        (Config(), "redis://:secret@env:1/0"),  # nothing is set in it
        (Config.distributed(), "redis://:secret@env:1/0"),  # a fleet, but no server
        (Config.distributed(queue_type="redis"), "redis://:secret@env:1/0"),
        (Config.distributed(redis_host="127.0.0.1"), "redis://127.0.0.1:6379/0"),
    ],
)
def test_a_config_in_code_has_the_last_word(
    monkeypatch: pytest.MonkeyPatch, toml: Any, passed: Any, frontier: str
) -> None:
    monkeypatch.setenv("SHOAL_CONFIG", str(toml(DISTRIBUTED)))
    monkeypatch.setenv("SHOAL_MODE", "distributed")
    monkeypatch.setenv("SHOAL_FRONTIER", "redis://:secret@env:1/0")
    made = Crawl(Layered, passed).config
    assert made.frontier == frontier
    assert made.mode == ("distributed" if frontier.startswith("redis:") else "standalone")
    is_set = isinstance(passed, Config) and "concurrency" in explicit_settings(passed)
    assert made.concurrency == (32 if is_set else 7)
    assert made.download_delay == 7  # the file, although the spider has another


def test_values_that_were_set_are_known_by_key() -> None:
    made = Config(concurrency=32, http=HttpSettings(read_timeout=30.0)).with_settings({"retry.max_attempts": 4})
    expected = {"concurrency": 32, "http.read_timeout": 30.0, "retry.max_attempts": 4, "retry.max_retries": 3}
    assert explicit_settings(made) == explicit_settings(deepcopy(made)) == expected
    assert explicit_settings(Config()) == {}
    assert explicit_settings(msgspec.structs.replace(Config(), concurrency=5)) == {"concurrency": 5}
    assert made == Config()


@pytest.mark.parametrize(
    ("options", "mode", "frontier", "lost"),
    [
        ({"mode": "standalone"}, "standalone", "memory:", {"mode": "--mode", "frontier": "--mode"}),
        ({"mode": "standalone", "frontier": "sqlite:///a.db"}, "standalone", "sqlite:///a.db",
         {"mode": "--mode", "frontier": "--frontier"}),
        ({"frontier": "sqlite:///a.db"}, "standalone", "sqlite:///a.db",
         {"mode": "--frontier", "frontier": "--frontier"}),
        ({"frontier": "postgresql://h/d"}, "distributed", "postgresql://h/d", {"frontier": "--frontier"}),
        ({"mode": "distributed"}, "distributed", "redis://:secret@file:1/0", {"mode": "--mode"}),
        ({}, "distributed", "redis://:secret@file:1/0", {}),
    ],
)  # fmt: skip
def test_the_stronger_of_mode_and_frontier_wins(
    toml: Any, options: dict[str, str], mode: str, frontier: str, lost: dict[str, str]
) -> None:
    names = {"mode": "--mode", "frontier": "--frontier"}
    resolved = load_config(file=toml(DISTRIBUTED), command_line=options, options=names)
    assert (resolved.config.mode, resolved.config.frontier) == (mode, frontier)
    assert {overruled.key: overruled.winner for overruled in resolved.overruled} == lost
    assert "secret" not in repr(resolved.overruled)


def test_a_fleet_does_not_use_the_file_of_a_weaker_layer(toml: Any) -> None:
    file = toml('frontier = "sqlite:///a.db"')
    resolved = load_config(file=file, environ={"SHOAL_MODE": "distributed", "REDIS_HOST": "h"})
    assert resolved.config.frontier == "redis://h:6379/0"
    assert [overruled.winner for overruled in resolved.overruled] == ["SHOAL_MODE"]


@pytest.mark.parametrize(
    ("mode", "frontier"), [("standalone", "redis://:secret@h"), ("standalone", "postgresql://h/d"),
                           ("distributed", "memory:"), ("distributed", "sqlite:///a.db")],
)  # fmt: skip
def test_a_mode_and_a_frontier_of_one_layer_that_contradict_each_other(toml: Any, mode: str, frontier: str) -> None:
    both = {"mode": mode, "frontier": frontier}
    file = toml(f'mode = "{mode}"\nfrontier = "{frontier}"')
    for layer, sources in (
        ({"file": file}, (str(file), str(file))),
        ({"environ": {"SHOAL_MODE": mode, "SHOAL_FRONTIER": frontier}}, ("SHOAL_MODE", "SHOAL_FRONTIER")),
        ({"command_line": both, "options": {"mode": "--mode", "frontier": "--frontier"}}, ("--mode", "--frontier")),
        ({"code": both}, ("code", "code")),
    ):
        told = message(load_config, **layer)
        assert told.startswith(
            f'"mode" is "{mode}" ({sources[0]}), but "frontier" is "{mask(frontier)}" ({sources[1]})'
        )


@pytest.mark.parametrize(
    "layers",
    [
        {"file": 'mode = "distributed"'},
        {"environ": {"SHOAL_MODE": "distributed"}},
        {"command_line": {"mode": "distributed"}},
        {"spider": {"mode": "distributed"}},
        {"code": {"mode": "distributed"}},
        {"code": Config.distributed()},
    ],
)
def test_the_mode_alone_switches_to_the_default_redis(toml: Any, layers: dict[str, Any]) -> None:
    resolved = load_config(**{name: toml(layer) if name == "file" else layer for name, layer in layers.items()})
    assert (resolved.config.mode, resolved.config.frontier) == ("distributed", "redis://127.0.0.1:6379/0")
    assert resolved.sources["frontier"] == resolved.sources["mode"] != "default"


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({"REDIS_HOST": "cache"}, "redis://cache:6379/0"),
        ({"REDIS_HOST": "cache", "REDIS_PORT": "7000", "REDIS_DB": "2"}, "redis://cache:7000/2"),
        ({"REDIS_PASSWORD": "p@ss/word"}, "redis://:p%40ss%2Fword@127.0.0.1:6379/0"),
        ({"REDIS_PORT": "tcp://10.0.0.7:6380"}, "redis://10.0.0.7:6380/0"),  # Kubernetes
        ({"REDIS_PORT": "tcp://10.0.0.7:6380", "REDIS_HOST": "redis"}, "redis://redis:6380/0"),
        ({"REDIS_HOST": "::1"}, "redis://[::1]:6379/0"),
    ],
)
def test_redis_variables_name_the_server_of_a_fleet(environ: dict[str, str], url: str) -> None:
    resolved = load_config(environ={"SHOAL_MODE": "distributed", **environ})
    assert resolved.config.frontier == url
    assert set(resolved.sources["frontier"].split(", ")) == environ.keys()
    assert load_config(environ=environ).config.frontier == "memory:"  # they mean nothing to one process
    named = load_config(environ={"SHOAL_MODE": "distributed", "SHOAL_FRONTIER": "redis://h/0", **environ})
    assert named.config.frontier == "redis://h/0"


@pytest.mark.parametrize(
    ("names", "frontier"),
    [
        ({"QUEUE_TYPE": "memory"}, "memory:"),
        ({"QUEUE_TYPE": "redis", "REDIS_HOST": "h", "REDIS_PORT": 7000, "REDIS_PASSWORD": "p"}, "redis://:p@h:7000/0"),
        ({"QUEUE_TYPE": "Redis", "FILTER_TYPE": "redis"}, "redis://127.0.0.1:6379/0"),
        ({"FILTER_TYPE": "redis", "REDIS_HOST": "h"}, "redis://h:6379/0"),
    ],
)
def test_other_names_choose_the_frontier(toml: Any, names: dict[str, Any], frontier: str) -> None:
    for spell in (str, str.lower):
        file = toml("".join(f"{spell(name)} = {json.dumps(value)}\n" for name, value in names.items()))
        assert load_config(file=file).config.frontier == frontier
    resolved = load_config(environ={name: str(value) for name, value in names.items()})
    assert resolved.config.frontier == frontier
    assert resolved.sources["frontier"] in names
    over = load_config(file=file, command_line={"frontier": "sqlite:///a.db"})
    assert over.config.frontier == "sqlite:///a.db"


def test_other_names_have_the_strength_of_their_layer(toml: Any) -> None:
    file = toml("SCHEDULER_MAX_QUEUE_SIZE = 50000\nREDIS_HOST = 'file'\nREDIS_DB = 3\nmode = 'distributed'")
    resolved = load_config(file=file)
    assert (resolved.config.queue.max_size, resolved.config.frontier) == (50_000, "redis://file:6379/3")
    resolved = load_config(file=file, environ={"SCHEDULER_MAX_QUEUE_SIZE": "7", "REDIS_HOST": "env"})
    assert (resolved.config.queue.max_size, resolved.config.frontier) == (7, "redis://env:6379/3")
    assert resolved.sources["queue.max_size"] == "SCHEDULER_MAX_QUEUE_SIZE"
    assert load_config(file=file, environ={"QUEUE_TYPE": "memory"}).config.mode == "standalone"
    twice = {"SCHEDULER_MAX_QUEUE_SIZE": "7", "SHOAL_QUEUE__MAX_SIZE": "5"}
    assert 'SCHEDULER_MAX_QUEUE_SIZE 7 and "queue.max_size" 5 contradict' in message(load_config, environ=twice)
    assert load_config(code=Config.standalone(), environ={"QUEUE_TYPE": "redis"}).config.frontier == "memory:"


@pytest.mark.parametrize(
    ("weaker", "frontier"),
    [
        ("redis://h:1/5", "redis://h:1/5"),
        ("rediss://h:1/5", "rediss://h:1/5"),
        ("postgresql://h/db", "redis://127.0.0.1:6379/0"),
        ("sqlite:///a.db", "redis://127.0.0.1:6379/0"),
    ],
)
@pytest.mark.parametrize(
    "layer",
    [
        {"environ": {"QUEUE_TYPE": "redis"}},
        {"code": Config.distributed(queue_type="redis")},
        {"code": pickle.loads(pickle.dumps(Config.distributed(filter_type="redis").with_settings({"concurrency": 5})))},
    ],
)
def test_who_wants_redis_keeps_the_redis_server_of_a_weaker_layer(
    toml: Any, weaker: str, frontier: str, layer: dict[str, Any]
) -> None:
    file = toml(f"frontier = '{weaker}'")
    assert load_config(file=file, **layer).config.frontier == frontier
    named = load_config(file=file, environ={"QUEUE_TYPE": "redis", "REDIS_HOST": "own"})
    assert named.config.frontier == "redis://own:6379/0"
    code = Config.distributed(queue_type="redis").with_settings({"frontier": "redis://code/0"})
    assert load_config(file=file, code=code).config.frontier == "redis://code/0"


def test_other_names_in_a_file_are_named_as_they_were_written(toml: Any) -> None:
    file = toml("QUEUE_TYPE = 'redis'\nmode = 'standalone'")
    assert f"({file}: QUEUE_TYPE). These contradict" in message(load_config, file=file)
    file = toml("SCHEDULER_MAX_QUEUE_SIZE = 6\n[queue]\nmax_size = 5")
    assert 'SCHEDULER_MAX_QUEUE_SIZE 6 and "queue.max_size" 5 contradict' in message(load_config, file=file)
    assert load_config(file=toml("SCHEDULER_MAX_QUEUE_SIZE = 5\n[queue]\nmax_size = 5")).config.queue.max_size == 5


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"QUEUE_TYPE": "redis", "FILTER_TYPE": "memory"}, 'QUEUE_TYPE "redis" and FILTER_TYPE "memory" contradict'),
        ({"QUEUE_TYPE": "redis", "SHOAL_FRONTIER": "sqlite:///a.db"}, 'contradicts the frontier "sqlite:///a.db"'),
        ({"QUEUE_TYPE": "redis", "SHOAL_MODE": "standalone"}, '"redis://127.0.0.1:6379/0" (QUEUE_TYPE). These contrad'),
        ({"QUEUE_TYPE": "memory", "SHOAL_MODE": "distributed"}, "These contradict each other"),
        ({"QUEUE_TYPE": "sqlite"}, "name the frontier instead: sqlite:///file.db"),
        ({"FILTER_TYPE": "kafka"}, 'FILTER_TYPE "kafka" does not say where the queue is; use memory or redis'),
        ({"SCHEDULER_MAX_QUEUE_SIZE": "many"}, 'SCHEDULER_MAX_QUEUE_SIZE: "queue.max_size" must be an integer'),
    ],
)
def test_other_names_that_contradict_something(environ: dict[str, str], said: str) -> None:
    assert said in message(load_config, environ=environ)


@pytest.mark.parametrize("name", ["REDIS_PORT", "REDIS_DB"])
def test_a_bad_redis_variable_is_named(name: str) -> None:
    environ = {"SHOAL_MODE": "distributed", name: "tcp://[" if name == "REDIS_PORT" else "one"}
    assert message(load_config, environ=environ).startswith(f"{name} must be ")


def test_mistakes_name_their_layer(toml: Any) -> None:
    file = toml('downlod_delay = 1\nconcurrency = "5"\n[http]\nproxy = 3')
    told = message(
        load_config,
        file=file,
        spider={"robots": {"obay": False}},
        spider_name="Books",
        environ={"SHOAL_CONCURRENCY": "five"},
        command_line={"retry.max_attempts": "0", "frontier": "x:", "nope.ttl": "1"},
        options={"frontier": "--frontier"},
        code={"cookies": "yes"},
    )
    frontiers = "memory:, sqlite:///file, redis://host:port/number, rediss://host:port/number"
    assert told.splitlines() == [
        'spider Books: unknown key "robots.obay"; did you mean "robots.obey"?',
        f'{file}: unknown key "downlod_delay"; did you mean "download_delay"?',
        f"{file}: \"concurrency\" must be an integer, at least 1, not '5'",
        f'{file}: "http.proxy" must be text, or none',
        "SHOAL_CONCURRENCY: \"concurrency\" must be an integer, at least 1, not 'five'",
        '--set retry.max_attempts: "retry.max_attempts" must be an integer, at least 1, not 0',
        f"--frontier: \"frontier\" must be {frontiers} or postgresql://host/database, not 'x:'",
        '--set nope.ttl: unknown key "nope.ttl"; did you mean "cache.ttl" or "lease.ttl"?',
        "code: \"cookies\" must be true or false, not 'yes'",
    ]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SHOAL_DOWNLOD_DELAY", 'unknown key "downlod_delay"; did you mean SHOAL_DOWNLOAD_DELAY?'),
        ("SHOAL_HTTP_PROXY", 'unknown key "http_proxy"; did you mean SHOAL_HTTP__PROXY?'),
        ("SHOAL_PROXY", 'unknown key "proxy"; did you mean SHOAL_HTTP__PROXY?'),
        ("SHOAL_ZZZ", 'unknown key "zzz"'),
    ],
)
def test_unknown_variables(name: str, said: str) -> None:
    assert message(load_config, environ={name: "1"}) == f"{name}: {said}"


def test_a_file_that_is_not_toml(toml: Any) -> None:
    file = toml('concurrency = 5\nproject_name = "open\n')
    assert message(load_config, file=file).startswith(f"{file}: not valid TOML: ")
    assert "line 2" in message(load_config, file=file)
    file.write_bytes(b"project_name = '\xff'")
    assert message(load_config, file=file) == f"{file}: not valid TOML: not UTF-8 at byte 16"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    assert message(load_config, file=file) == f"cannot read {file}: No such file or directory"


def test_the_file_is_found_here_or_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    above = tmp_path / "shoal.toml"
    above.touch()
    assert find_config_file({}, inner) == above
    (inner / "shoal.toml").mkdir()  # a folder is no file
    monkeypatch.chdir(inner)
    assert find_config_file({}) == above
    nearer = tmp_path / "a" / "shoal.toml"
    nearer.touch()
    assert find_config_file({}) == nearer
    assert find_config_file({"SHOAL_CONFIG": "other.toml"}) == Path("other.toml")
    assert find_config_file({"SHOAL_CONFIG": ""}) == nearer


# Text


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("concurrency", "5", 5),
        ("queue.in_memory", "200_000", 200_000),
        ("download_delay", "0.25", 0.25),
        ("download_delay", "2", 2.0),
        ("project_name", "5", "5"),
        ("mode", "Standalone", "standalone"),
        ("log_level", "debug", "DEBUG"),
        ("cookies", "true", True),
        ("cookies", "1", True),
        ("cookies", "YES", True),
        ("cookies", "on", True),
        ("cookies", "False", False),
        ("cookies", "0", False),
        ("cookies", "no", False),
        ("cookies", "off", False),
        ("http.proxy", "none", None),
        ("http.proxy", "http://p", "http://p"),
        ("cache.ttl", "None", None),
        ("cache.ttl", "60", 60.0),
        ("scope.max_depth", "3", 3),
        ("scope.allowed_domains", "a.org, b.org,", ("a.org", "b.org")),
        ("scope.allowed_domains", "", ()),
        ("scope.allow", "[0-9]", ("[0-9]",)),
        ("scope.allow", "[1]", ("[1]",)),
        ("scope.allow", '["a{1,2}", "b"]', ("a{1,2}", "b")),
        ("retry.statuses", "500,503", (500, 503)),
        ("retry.statuses", "[500, 503]", (500, 503)),
        ("http.headers", '{"Accept": "*/*"}', {"Accept": "*/*"}),
    ],
)
def test_text_becomes_what_the_field_is(key: str, text: str, value: object) -> None:
    for layer in ({"environ": {env_name(key): text}}, {"command_line": {key: text}}):
        found = flatten(load_config(**layer).config)[key]  # type: ignore[arg-type]
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("concurrency", "5.0"),
        ("concurrency", "none"),
        ("concurrency", ""),
        ("download_delay", "soon"),
        ("download_delay", "nan"),
        ("cookies", "maybe"),
        ("cookies", "2"),
        ("scope.max_depth", ""),
        ("retry.statuses", "500,many"),
        ("http.headers", "Accept: x"),
        ("http.headers", '{"Accept": 1}'),
        ("http.proxy", ""),
    ],
)
def test_text_that_means_nothing(key: str, text: str) -> None:
    assert message(load_config, environ={env_name(key): text}).startswith(f'{env_name(key)}: "{key}" must be')


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "project_name": st.text(min_size=1),
    "concurrency": st.integers(min_value=1),
    "download_delay": st.floats(min_value=0, max_value=1e9),
    "cookies": st.booleans(),
    "cache.ttl": st.none() | st.floats(min_value=0, max_value=1e9),
    "scope.max_depth": st.none() | st.integers(min_value=0),
    "scope.allow": st.lists(st.sampled_from(["a{1,2}", " b ", "[0-9]", '"', ""])).map(tuple),
    "retry.statuses": st.lists(st.integers(min_value=100, max_value=599)).map(tuple),
    "http.headers": st.dictionaries(st.sampled_from(["Accept", "X-1"]), st.text(alphabet=st.characters(codec="utf-8"))),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_what_is_written_out_is_read_back(values: dict[str, Any]) -> None:
    headers = values.get("http.headers", {})
    values |= {"http.headers": {name: "".join(text.split()) for name, text in headers.items()}}
    text = {
        env_name(key): json.dumps(value) if isinstance(value, tuple | dict) else str(value)
        for key, value in values.items()
    }
    assert load_config(environ=text).config == Config().with_settings(values) == load_config(code=values).config


def test_every_key_has_a_variable_of_its_own() -> None:
    assert len({env_name(key) for key in keys(Config)}) == len(keys(Config))


def test_every_kind_of_field_has_words() -> None:
    for key in keys(Config):
        assert message(Config().with_settings, {key: object}).startswith(f'"{key}" must be ')


def test_importing_is_light() -> None:
    heavy = "{'aiohttp', 'rich', 'typer', 'turbohtml', 'pydantic'}"
    code = f"import sys, shoal.config; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


# -- a file that others could have written


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("concurrency = 3\n")
    assert load_config(file=file).config.concurrency == 3
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345.*chown"):
        load_config(file=file)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        Registry.load(file)
    link = tmp_path / "link.toml"
    link.symlink_to(file)  # ours, but it leads to a file of another
    with pytest.raises(ConfigError, match=r"refusing to read .*link\.toml: it belongs to user 12345"):
        load_config(file=link)


@pytest.mark.parametrize(
    ("mode", "says"), [(0o666, "every user"), (0o602, "every user"), (0o664, "group 12345"), (0o640, ""), (0o444, "")]
)
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int, says: str) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("concurrency = 3\n")
    os.chown(file, -1, 12345)
    file.chmod(mode)
    if says:
        with pytest.raises(ConfigError, match=rf"{says}.*can write to it.*chmod"):
            load_config(file=file)
    else:
        assert load_config(file=file).config.concurrency == 3


def test_the_group_of_one_user_may_write(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("concurrency = 3\n")
    file.chmod(0o664)  # root's own group has nobody else in it
    assert load_config(file=file).config.concurrency == 3


def test_another_user_may_use_a_file_of_root(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from shoal.config import load_config\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "print(load_config(file=Path(sys.argv[1])).config.concurrency)"
    )
    with TemporaryDirectory() as folder:  # not below tmp_path, which no other user can enter
        os.chmod(folder, 0o755)
        file = Path(folder, "shoal.toml")
        file.write_text("concurrency = 3\n")
        command = [sys.executable, "-c", script, str(file)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "3\n"


def test_the_command_says_why_it_does_not_use_a_file(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("concurrency = 3\n")
    os.chown(file, 54321, -1)
    command = [sys.executable, "-m", "shoal.cli.main", "config"]
    for environ in ({}, {"SHOAL_CONFIG": str(file)}):  # found, or named
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert f"refusing to read {file}: it belongs to user 54321" in done.stderr


# -- attempts and retries


@pytest.mark.parametrize(
    ("settings", "attempts"),
    [({}, 4), ({"max_retries": 5}, 6), ({"max_retries": 0}, 1), ({"max_attempts": 4}, 4),
     ({"max_attempts": 4, "max_retries": 3}, 4)],
)  # fmt: skip
def test_retries_are_attempts_without_the_first(settings: dict[str, int], attempts: int) -> None:
    for config in (Config().with_settings({"retry": settings}), Config(retry=RetrySettings(**settings))):
        assert (config.retry.max_attempts, config.retry.max_retries) == (attempts, attempts - 1)
    changed = Config().with_settings({"retry": settings}).with_settings({"retry.max_attempts": 9})
    assert (changed.retry.max_attempts, changed.retry.max_retries) == (9, 8)


def test_attempts_and_retries_that_contradict_each_other(tmp_path: Path) -> None:
    for make in (
        lambda: Config().with_settings({"retry.max_attempts": 4, "retry.max_retries": 4}),
        lambda: RetrySettings(max_attempts=5, max_retries=5),
        lambda: load_config(environ={"SHOAL_RETRY__MAX_ATTEMPTS": "4", "SHOAL_RETRY__MAX_RETRIES": "1"}),
    ):
        with pytest.raises(ConfigError, match="contradict each other"):
            make()


def test_the_later_of_attempts_and_retries_wins() -> None:
    loaded = load_config(spider={"retry.max_retries": 7}, environ={"SHOAL_RETRY__MAX_ATTEMPTS": "2"})
    assert (loaded.config.retry.max_attempts, loaded.config.retry.max_retries) == (2, 1)
    loaded = load_config(spider={"retry.max_attempts": 7}, command_line={"retry.max_retries": "1"})
    assert loaded.config.retry.max_attempts == 2


def test_the_command_explains_every_setting() -> None:
    meanings = explanations()
    assert {key for key in flatten(Config()) if not meanings.get(key)} == set()
    assert meanings["download_delay"].startswith("From the end of one fetch")
    assert meanings["queue.overflow"].startswith("Links of pages beyond max_size")
    assert len(IMPORTANT) == 10
    assert set(IMPORTANT) <= set(flatten(Config()))
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    chapter = text.partition("## The ten that matter")[2].partition("## Top level")[0]
    names = [line.partition(":")[0] for line in chapter.splitlines() if line.startswith("- ")]
    listed = [word for name in names for word in name.split("`")[1::2]]
    assert sorted(listed) == sorted(IMPORTANT)


def test_the_null_device_is_no_file() -> None:
    assert load_config(file=Path("/dev/null")).config == Config()


def test_a_frontier_and_a_crawl_have_the_same_attempts() -> None:
    assert FrontierOptions().max_attempts == Config().retry.max_attempts == 4
