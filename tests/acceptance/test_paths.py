"""The number of modules that a page passes through."""

from __future__ import annotations

from pathlib import Path

from scripts.paths import LIMITS, local


def test_a_page_passes_through_few_modules(tmp_path: Path) -> None:
    modules = local(tmp_path)
    assert {"shoal.crawling.engine", "shoal.fetch.http_fetcher", "shoal.sinks.files"} <= set(modules)
    assert len(modules) <= LIMITS["local"], modules
