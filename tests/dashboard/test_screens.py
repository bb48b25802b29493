"""Every screen: it opens without errors, needs no other server, fits on a phone, and is accessible."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.dashboard.browsing import COLOURS, NARROW, WIDE, OpenPage, Theme
from tests.dashboard.site import HOSTILE_QUERY, SCRIPT
from tests.dashboard.stage import Stage


def url_path(stage: Stage, path: str) -> str:
    """The address of the screen of a URL."""
    return f"/ui/runs/{stage.fleet.run_id}/url?url={quote(stage.site.url + path, safe='')}"


SCREENS: dict[str, Callable[[Stage], str]] = {
    "overview": lambda stage: "/",
    "runs": lambda stage: "/ui/runs",
    "run": lambda stage: f"/ui/runs/{stage.fleet.run_id}",
    "compare": lambda stage: f"/ui/compare?a={stage.fleet.run_id}&b={stage.cluster.run_id}",
    "batches": lambda stage: "/ui/batches",
    "batch": lambda stage: f"/ui/batches/{stage.batch()}",
    "schedules": lambda stage: "/ui/schedules",
    "schedule": lambda stage: "/ui/schedules/yearly",
    "notifications": lambda stage: "/ui/notifications",
    "actions": lambda stage: "/ui/actions",
    "settings": lambda stage: "/ui/settings",
    "url": lambda stage: url_path(stage, "/broken/1"),
    "url of a hostile page": lambda stage: url_path(stage, HOSTILE_QUERY),
    "unknown url": lambda stage: url_path(stage, f"/{SCRIPT}"),
    "hosts": lambda stage: "/ui/hosts",
    "host": lambda stage: f"/ui/hosts/{stage.site.host}",
    "workers": lambda stage: "/ui/workers",
    "cluster": lambda stage: f"/ui/clusters/{stage.cluster.run_id}",
}
"""Name and address of every screen."""
APPEARANCES: tuple[tuple[int, Theme], ...] = ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark"))
SCREENSHOTS = os.environ.get("DASHBOARD_SCREENSHOTS")
"""A folder: if it is set, a picture of every screen is saved there."""


@pytest.mark.parametrize("name", SCREENS)
def test_screen_is_sound(name: str, stage: Stage, open_page: OpenPage) -> None:
    """On a wide screen and on a phone, light and dark."""
    shown = open_page(SCREENS[name](stage))
    assert shown.page.locator("h1").count() == 1
    for width, theme in APPEARANCES:
        shown.appear(width, theme)
        assert shown.overflow <= 0
        assert shown.findings(*(COLOURS if theme == "dark" else ())) == []
        if SCREENSHOTS:
            shown.page.screenshot(path=Path(SCREENSHOTS) / f"{name}-{width}-{theme}.png", full_page=True)
    assert not shown.is_hacked
