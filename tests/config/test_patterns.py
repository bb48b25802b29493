"""Regular expressions of others run in linear time, those of the user with `re`."""

from __future__ import annotations

import logging
import re
import sys

import pytest

from shoal import SitemapSpider
from shoal.config import Config, ScopeSettings
from shoal.config.checks import check_regexes, compile_pattern, linear, unmarked
from shoal.errors import ConfigError, RunError, SpiderError
from shoal.frontier.memory import MemoryStore
from shoal.runs.start import start_run
from shoal.runs.trust import with_run_settings
from shoal.scrapy.adapter import adapt
from shoal.scrapy.settings import Settings
from shoal.scrapy.spiders import SitemapSpider as ScrapySitemapSpider
from shoal.urls.normalize import Scope

POISON = "(?:a|a)*!$"


def test_patterns_of_the_user_stay_with_re() -> None:
    scope = ScopeSettings(allow=("(?=x)x",), deny=(r"(a)\1",))
    assert isinstance(compile_pattern(scope.allow[0]), re.Pattern)
    assert Scope(scope).refuses("http://x/aa") == r"denied by the rule '(a)\\1'"


@pytest.mark.timeout(10)
def test_patterns_of_others_are_linear() -> None:
    scope = Scope(ScopeSettings(deny=linear([POISON, "private"])))
    assert scope.refuses("http://h/" + "a" * 2000) is None
    assert scope.refuses("http://h/aaa!") == f"denied by the rule {POISON!r}"
    assert scope.refuses("http://h/private/1") == "denied by the rule 'private'"


def test_marks() -> None:
    assert linear(["a", "b"], own=["a"])[0] == "a"
    assert linear(linear(["a"])) == linear(["a"]) != ("a",)
    assert unmarked(linear(["a", "b"])) == ("a", "b")


@pytest.mark.parametrize("text", ["(?=a)", r"(a)\1", "a++", "(", "a{1001}", "\ud800", r"\pL{900}", "(?#x)a"])
def test_what_re2_refuses_is_said(text: str) -> None:
    problem = check_regexes(linear([text]))
    assert problem is not None
    assert problem.startswith(f"must contain regular expressions; {text!r} does not compile: ")


def test_many_large_patterns_are_refused() -> None:
    assert check_regexes(linear(f"/category-{number}/.*[.]html$" for number in range(100))) is None
    problem = check_regexes(linear([f"(?:a?){{1000}}{number}" for number in range(3)]))
    assert problem is not None
    assert "more than 5000 steps" in problem
    assert check_regexes(("(?:a?){1000}b",) * 3) is None


def test_without_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    assert check_regexes(("a",)) is None
    with pytest.raises(ConfigError, match=r"need RE2; install it with: pip install '.*\[re2\]'"):
        check_regexes(linear(["a"]))


def test_a_worker_trusts_only_its_own_patterns() -> None:
    own = Config().with_settings({"scope.allow": ["(?!a)b"], "scope.deny": ["c"]})
    assert with_run_settings("r", {"scope.allow": ["(?!a)b", "c"]}, own).scope.allow == ("(?!a)b", "c")
    changed = with_run_settings("r", {"scope.allow": ["(?!a)b", "d"], "scope.deny": ["c"]}, own)
    assert changed.scope == ScopeSettings(allow=("(?!a)b", *linear(["d"])), deny=("c",))
    with pytest.raises(RunError, match=r"run r has invalid settings: .*'\(\?!a\)' does not compile"):
        with_run_settings("r", {"scope.allow": ["(?!a)"]}, own)


class Listed(SitemapSpider):
    sitemap_urls = ["http://a/sitemap.xml"]
    follow = "(?!b)"


@pytest.mark.timeout(10)
def test_arguments_of_a_sitemap_spider() -> None:
    assert Listed()._choice.follows("http://a/")
    assert Listed(follow="(?!a)b")._choice.follows("b")  # of the command line
    spider = Listed(follow=POISON, rules=[[POISON, "parse"]])
    spider._arguments_of_others = ("follow", "rules")
    assert not spider._choice.follows("a" * 2000)
    assert spider.page_request("http://a/" + "a" * 2000, None) is None  # type: ignore[arg-type]
    spider = Listed(follow="(?!a)b")
    spider._arguments_of_others = ("follow",)
    with pytest.raises(SpiderError, match=r"invalid follow: .*RE2"):
        list(spider.start())


async def test_a_start_warns_of_patterns_that_workers_may_refuse(caplog: pytest.LogCaptureFixture) -> None:
    spider = Listed()
    spider.settings = {**spider.settings, "scope.deny": ["(?!own)x"]}
    config = Config().with_settings(spider.settings)
    with caplog.at_level(logging.WARNING):
        await start_run(MemoryStore(), spider, config, urls=["http://a/"], run_id="one")
    assert caplog.messages == []
    config = config.with_settings({"scope.allow": ["(?=h)h"]})
    await start_run(MemoryStore(), spider, config, urls=["http://a/"], run_id="two")
    (message,) = caplog.messages
    assert "only workers whose own shoal.toml or SHOAL_SCOPE__ALLOW has the same expressions accept the run" in message


@pytest.mark.timeout(10)
def test_arguments_of_a_scrapy_sitemap_spider() -> None:
    class Maps(ScrapySitemapSpider):
        name = "maps"
        sitemap_follow = ["(?!b)"]

    kind = adapt(Maps, Settings())
    assert isinstance(kind().spider._follow[0], re.Pattern)  # type: ignore[attr-defined]
    spider = kind(sitemap_follow=[POISON], sitemap_rules=[[POISON, "parse"]])
    inner = spider.spider
    assert not inner._follow[0].search("a" * 2000)  # type: ignore[attr-defined]
    assert not inner._cbs[0][0].search("a" * 2000)  # type: ignore[attr-defined]
    assert spider.arguments["sitemap_follow"] == [POISON]
    with pytest.raises(ValueError, match="RE2"):
        kind(sitemap_follow=["(?!a)"])
