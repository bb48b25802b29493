"""Two workers render a shop while browsers, their parts and workers are killed at random: nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.kills import crawl_with_kills


@pytest.mark.timeout(240)
def test_nothing_is_lost_whatever_is_killed(tmp_path: Path) -> None:
    crawl_with_kills(tmp_path, products=60, patience=120)
