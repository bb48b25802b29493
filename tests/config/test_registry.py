"""The registry of spiders in shoal.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError, SpiderError
from shoal.runs.orchestrator import Registry

TOML = """
concurrency = 4

[spiders.India]
file = "spiders/india.py"
execution_mode = "distributed"
arguments = { state = "Goa" }

[spiders.Russia]
file = "spiders/russia.py:Russia"
"""


def registry(tmp_path: Path, text: str = TOML) -> Registry:
    file = tmp_path / "shoal.toml"
    file.write_text(text)
    return Registry.load(file)


def test_spiders_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = registry(tmp_path)
    assert list(found) == ["India", "Russia"]
    assert found["India"].execution_mode == "distributed"
    assert found["Russia"].execution_mode == "single"
    assert [found.get_execution_mode(name) for name in found] == ["distributed", "single"]
    assert found["India"].arguments == {"state": "Goa"}
    assert found.reference("India") == "spiders/india.py"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert found.reference("Russia") == "../spiders/russia.py:Russia"


def test_the_name_of_a_run_is_found_by_its_spider_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pages.py").write_text('from shoal import Spider\nclass Pages(Spider):\n    name = "pages"\n')
    Path("broken.py").write_text("1 / 0\n")
    found = registry(
        tmp_path,
        '[spiders.Broken]\nfile = "broken.py"\n[spiders.All]\nfile = "pages.py"\n'
        '[spiders.Goa]\nfile = "pages.py"\narguments = { state = "Goa" }\n',
    )
    assert found.name_of("pages", {}) == "All"
    assert found.name_of("pages", {"state": "Kerala"}) == "All"
    assert found.name_of("pages", {"state": "Goa", "year": "2026"}) == "Goa"
    assert found.name_of("Goa", {"state": "Goa"}) == "Goa"
    assert found.name_of("books", {}) is None


def test_a_scrapy_spider_is_relative_to_the_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = registry(tmp_path, "[spiders.Books]\nfile = 'scrapy:shop:books'\n")
    assert found.reference("Books") == "scrapy:shop:books"
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert found.reference("Books") == "scrapy:../shop:books"


def test_an_unknown_spider_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SpiderError, match=r"no spider 'Indio' in .*shoal\.toml; did you mean India\?"):
        registry(tmp_path)["Indio"]
    with pytest.raises(SpiderError, match="its spiders are: India, Russia"):
        registry(tmp_path)["zzz"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[spiders.A]\nexecution_mode = 'single'", r"\[spiders\.A\].*missing required field `file`"),
        ("[spiders.A]\nfile = 'a.py'\nexecution_mode = 'both'", r"\[spiders\.A\].*'both'"),
        (
            "[spiders.A]\nfile = 'a.py'\nmode = 'single'",
            r"\[spiders\.A\].*unknown key \"mode\"; a spider has: file, execution_mode",
        ),
        (
            "[spiders.A]\nspider = 'a.py'",
            r'unknown key "spider"; a spider has: file, execution_mode, arguments, outputs',
        ),
        ("spiders = 3", "must be a table"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry(tmp_path, text)


def test_without_a_file_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(Registry.load()) == []
    with pytest.raises(SpiderError, match=r"no spider 'India' in a shoal\.toml; its spiders are: none"):
        Registry.load()["India"]
