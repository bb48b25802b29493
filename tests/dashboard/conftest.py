"""Fixtures for the tests of the dashboard: see `stage.Stage` and `browsing.WatchedPage`.

They belong to the whole folder, because starting them takes many seconds. No test in this folder may be async:
Playwright runs an event loop in the thread of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.dashboard.browsing import Browsers, OpenPage, Theme, WatchedPage, chromium
from tests.dashboard.stage import Stage, staged


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server, a fleet and a cluster that crawl."""
    with staged(tmp_path_factory.mktemp("dashboard")) as made:
        yield made


@pytest.fixture(scope="package")
def browsers(stage: Stage) -> Iterator[Browsers]:
    """Chromium, with one context per user."""
    with chromium() as browser:
        yield Browsers(browser, stage)


@pytest.fixture
def open_page(browsers: Browsers) -> Iterator[OpenPage]:
    """Opens pages: ``open_page("/ui/runs", user="vera")``. Checks at the end that none logged an error."""
    opened: list[WatchedPage] = []
    with ExitStack() as stack:

        def open_one(path: str, user: str = "anna", width: int = 1440, theme: Theme = "light") -> WatchedPage:
            opened.append(stack.enter_context(browsers.open(path, user, width, theme)))
            return opened[-1]

        yield open_one
    for each in opened:
        each.check()
