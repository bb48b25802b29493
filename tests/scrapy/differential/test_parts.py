"""Small cases for link extractors, forms, items, loaders and feeds, under Scrapy and under Shoal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scrapy.differential.runs import SCRAPY

FILE = Path(__file__).parent / "parts.py"
ERRORS = {
    "page_without_a_form", "loaders_refuse_unknown_fields", "form: number too large", "form: click nothing",
    "form: click is not clear", "form: xpath outside", "form: css missing", "form: bad data",
    "feed: other item", "export: unknown option", "export of dicts: unknown option",
}  # fmt: skip
UNDER_SHOAL = """
import runpy, sys
from shoal.scrapy import names
names.install()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def outcomes() -> tuple[dict[str, Any], dict[str, Any]]:
    """What each case returned under Scrapy, and under Shoal."""
    commands = ([str(SCRAPY), str(FILE)], [sys.executable, "-c", UNDER_SHOAL, str(FILE)])
    both = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    texts = [each.communicate(timeout=100) for each in both]
    assert [each.returncode for each in both] == [0, 0], texts
    scrapy, shoal = (json.loads(text[0]) for text in texts)
    return scrapy, shoal


def test_both_return_the_same(outcomes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    scrapy, shoal = outcomes
    assert scrapy.keys() == shoal.keys()
    different = {name: (scrapy[name], shoal[name]) for name in scrapy if scrapy[name] != shoal[name]}
    assert different == {}


def test_only_cases_about_errors_fail(outcomes: tuple[dict[str, Any], dict[str, Any]]) -> None:
    failed = {name for name, value in outcomes[0].items() if str(value).startswith("error")}
    assert failed == ERRORS
