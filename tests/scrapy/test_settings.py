"""Settings: their class, their translation, and what `shoal config` shows."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from shoal import scrapy
from shoal.errors import ConfigError
from shoal.scrapy.adapter import adapt
from shoal.scrapy.http import Request
from shoal.scrapy.settings import BaseSettings, Settings
from shoal.scrapy.translation import translate, unused_settings
from shoal.scrapy.unsupported import unsupported_settings
from tests.scrapy.crawling import SITE, crawl


class Plain(scrapy.Spider):
    name = "plain"
    start_urls = [f"{SITE}/"]

    def parse(self, response: Any, **named: Any) -> Any:
        yield {"url": response.url}


def test_the_getters() -> None:
    settings = Settings({"B": "True", "I": "3", "F": "1.5", "L": "a,b", "D": '{"x": 1}', "NONE": None})
    assert (settings.getbool("B"), settings.getint("I"), settings.getfloat("F")) == (True, 3, 1.5)
    assert (settings.getlist("L"), settings.getdict("D")) == (["a", "b"], {"x": 1})
    assert (settings["MISSING"], settings.get("NONE", 5), "MISSING" in settings) == (None, 5, False)
    assert settings.getint("CONCURRENT_REQUESTS") == 16, "the default of Scrapy"
    with pytest.raises(ValueError, match="boolean"):
        Settings({"B": "maybe"}).getbool("B")


def test_a_higher_priority_wins() -> None:
    settings = Settings({"A": 1})
    settings.set("A", 2, "spider")
    settings.set("A", 3, "project")
    assert (settings["A"], settings.getpriority("A")) == (2, 30)
    copy = settings.copy()
    copy.set("A", 4, "cmdline")
    assert (settings["A"], copy["A"]) == (2, 4)
    settings.freeze()
    with pytest.raises(TypeError, match="immutable"):
        settings["B"] = 1
    assert isinstance(settings.getwithbase("ITEM_PIPELINES"), BaseSettings)


def test_the_settings_of_shoal() -> None:
    given = {
        "ROBOTSTXT_OBEY": True, "DOWNLOAD_DELAY": "0.25", "CONCURRENT_REQUESTS": 32,
        "CONCURRENT_REQUESTS_PER_DOMAIN": 4, "USER_AGENT": "me", "DEFAULT_REQUEST_HEADERS": {"Accept": "x", "No": None},
        "RETRY_TIMES": 5, "RETRY_HTTP_CODES": [500, "429"], "DOWNLOAD_TIMEOUT": 20, "DEPTH_LIMIT": 3,
        "CLOSESPIDER_PAGECOUNT": 9, "AUTOTHROTTLE_ENABLED": True, "AUTOTHROTTLE_MAX_DELAY": 7,
        "HTTPCACHE_ENABLED": True, "HTTPCACHE_DIR": "cache", "HTTPCACHE_EXPIRATION_SECS": 60, "REDIRECT_MAX_TIMES": 2,
        "LOG_LEVEL": "WARN", "URLLENGTH_LIMIT": 100, "DOWNLOAD_MAXSIZE": 1000, "JOBDIR": "jobs/one",
    }  # fmt: skip
    found = translate(Settings(given))
    assert found.settings == {
        "robots.obey": True, "download_delay": 0.25, "concurrency": 32, "concurrency_per_host": 4, "user_agent": "me",
        "http.headers": {"Accept": "x"}, "retry.max_attempts": 6, "retry.statuses": (429, 500),
        "http.total_timeout": 20.0, "http.read_timeout": 20.0, "scope.max_depth": 3, "scope.max_pages": 9,
        "throttle.enabled": True, "throttle.max_delay": 7.0, "cache.enabled": True, "cache.folder": "cache",
        "cache.ttl": 60.0, "http.max_redirects": 2, "log_level": "WARNING", "scope.max_url_length": 100,
        "http.max_body_bytes": 1000, "frontier": "sqlite:///jobs/one/shoal.db", "cookies": False,
    }  # fmt: skip
    assert found.sources["download_delay"] == "DOWNLOAD_DELAY in project"
    assert found.notes == []


def test_the_defaults_are_those_of_scrapy_and_robots_are_mentioned() -> None:
    found = translate(Settings())
    expected = {"download_delay": 0.0, "concurrency": 16, "concurrency_per_host": 8, "robots.obey": False}
    assert expected.items() <= found.settings.items()
    assert found.sources["concurrency"] == "CONCURRENT_REQUESTS, default of Scrapy"
    assert found.notes == ["robots.txt is not obeyed: ROBOTSTXT_OBEY is not set, which means False in Scrapy"]
    assert "ROBOTSTXT_OBEY is False" in translate(Settings({"ROBOTSTXT_OBEY": False})).notes[0]


def test_a_limit_per_address_is_one_per_host() -> None:
    assert translate(Settings({"CONCURRENT_REQUESTS_PER_IP": 2})).settings["concurrency_per_host"] == 2


@pytest.mark.parametrize(
    ("name", "value"), [("DOWNLOAD_DELAY", "slow"), ("RETRY_HTTP_CODES", ["x"]), ("DEFAULT_REQUEST_HEADERS", 3)]
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} = .* is not a valid value"):
        translate(Settings({name: value}))


def test_a_feed_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not write 'xml'"):
        translate(Settings({"FEEDS": {"items.xml": {"format": "xml"}}}))
    with pytest.raises(ConfigError, match="which Shoal does not know: use name or time"):
        translate(Settings({"FEEDS": {"%(site)s.jsonl": {"format": "jsonlines"}}}))
    assert translate(Settings({"FEED_URI": "stdout:", "FEED_FORMAT": "json"})).outputs == ["-"]
    feeds = dict.fromkeys(["s3://b/a.csv", "s3://b/a.csv?region=x", "s3://b/a.jsonl", "what?.csv"])
    assert translate(Settings({"FEEDS": feeds})).outputs == [
        "s3://b/a.csv?formulas=keep", "s3://b/a.csv?region=x&formulas=keep", "s3://b/a.jsonl",
        "what?.csv?formulas=keep",
    ]  # fmt: skip


def test_custom_settings_win_over_the_project() -> None:
    class Own(Plain):
        custom_settings = {"DOWNLOAD_DELAY": 2}
        user_agent = "own"

    made = adapt(Own, Settings({"DOWNLOAD_DELAY": 1, "USER_AGENT": "project"}))
    assert (made.settings["download_delay"], made.settings["user_agent"]) == (2.0, "own")
    assert made.setting_sources["download_delay"] == "DOWNLOAD_DELAY in custom_settings of Own"


def test_attributes_of_older_spiders() -> None:
    class Own(Plain):
        download_delay = 3
        download_timeout = 5

    made = adapt(Own, Settings({"DOWNLOAD_DELAY": 1}))
    assert (made.settings["download_delay"], made.settings["http.total_timeout"]) == (3.0, 5.0)
    assert made.setting_sources["download_delay"] == "DOWNLOAD_DELAY in download_delay of Own"


async def test_unknown_settings_are_kept_for_the_spider() -> None:
    class Own(Plain):
        custom_settings = {"MY_KEY": {"a": 1}, "TELNETCONSOLE_ENABLED": False}

        def parse(self, response: Any, **named: Any) -> Any:
            yield {"mine": self.settings["MY_KEY"]["a"]}

    done = await crawl(Own, {"/": ""})
    assert done.items == [{"mine": 1}]
    names = [name for name, _ in unused_settings(done.adapter.scrapy_settings)]
    assert sorted(names) == ["MY_KEY", "TELNETCONSOLE_ENABLED"]
    assert any("MY_KEY" in line and "kept for self.settings" in line for line in done.adapter.other_settings())


async def test_a_spider_without_a_filter_of_duplicates() -> None:
    class Own(scrapy.Spider):
        name = "own"
        custom_settings = {"DUPEFILTER_CLASS": "scrapy.dupefilters.BaseDupeFilter"}
        start_urls = [f"{SITE}/"]

        def parse(self, response: Any, **named: Any) -> Any:
            for _ in range(3):
                yield Request(f"{SITE}/same", self.leaf)

        def leaf(self, response: Any) -> Any:
            yield {"url": response.url}

    done = await crawl(Own, {"/": "", "/same": ""})
    assert len(done.items) == 3


def test_settings_without_effect_are_reported_with_their_line(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Plain):
        custom_settings = {
            "SCHEDULER": "scrapy_redis.scheduler.Scheduler",
            "ITEM_PIPELINES": {"scrapy.pipelines.media.MediaPipeline": 1},
            "DUPEFILTER_CLASS": "scrapy_redis.dupefilter.RFPDupeFilter",
        }

    made = adapt(Own, Settings())
    found = {each.name: each for each in unsupported_settings(made.scrapy_settings, Own)}
    assert found.keys() == {"SCHEDULER", "scrapy.pipelines.media.MediaPipeline", "DUPEFILTER_CLASS"}
    assert "--frontier redis://HOST" in found["SCHEDULER"].advice
    assert "yield shoal.File(url)" in found["scrapy.pipelines.media.MediaPipeline"].advice
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if '"SCHEDULER": "scrapy_redis' in text)
    assert found["SCHEDULER"].place == f"{__file__}, line {line}"


def test_options_of_a_feed_without_effect_are_reported() -> None:
    class Own(Plain):
        custom_settings = {
            "FEEDS": {"a.csv": {"format": "csv", "fields": ["title"], "overwrite": True}, "b.jsonl": {}},
            "IMAGES_MIN_HEIGHT": 100,
        }

    made = adapt(Own, Settings())
    found = {each.name: each.advice for each in unsupported_settings(made.scrapy_settings, Own)}
    assert found.keys() == {"fields of the feed a.csv", "IMAGES_MIN_HEIGHT"}
    assert "FEED_EXPORT_FIELDS" in found["fields of the feed a.csv"]


async def test_the_log_says_once_that_robots_are_not_obeyed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shoal"):  # other tests may have changed it
        await crawl(Plain, {"/": ""})
    assert caplog.text.count("robots.txt is not obeyed") == 1


async def test_robots_are_obeyed_if_the_project_says_so() -> None:
    done = await crawl(Plain, {"/": "", "/robots.txt": "User-agent: *\nDisallow: /"}, settings={"ROBOTSTXT_OBEY": True})
    assert done.items == []
    assert done.web.paths == ["/robots.txt"]
