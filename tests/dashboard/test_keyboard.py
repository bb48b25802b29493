"""The dashboard without a mouse, and with a screen reader."""

from __future__ import annotations

import re

import pytest

from tests.acceptance.serving import until
from tests.api.test_dashboard_controls import TEMPLATES
from tests.dashboard.browsing import Browsers, OpenPage, WatchedPage
from tests.dashboard.stage import Stage
from tests.dashboard.test_screens import SCREENS

WALKED = ("overview", "runs", "run", "url", "hosts", "host", "workers", "cluster", "batches", "schedules", "settings")

CONTROLS = """() => {
  const found = [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
    .filter((each) => each.type !== 'hidden' && !each.disabled && each.checkVisibility());
  found.forEach((each, number) => { each.walked = number; });
  return found.map((each) => each.outerHTML.slice(0, 200));
}"""
WATCH = """() => {
  window.focused = [];
  document.addEventListener('focusin', ({target}) => {
    const style = getComputedStyle(target), box = target.getBoundingClientRect();
    const isSeen = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 && box.width > 0;
    focused.push({number: target.walked ?? -1, html: target.outerHTML.slice(0, 200), isSeen});
  });
}"""
IS_ROUND = "focused.filter(({number}) => number === focused[0].number).length > 1"
"""Whether the focus has left the page and come back to its first control."""
LOOK_EVERY = 20
"""Presses of a key: asking the page takes longer than pressing it."""


def still(shown: WatchedPage) -> None:
    """Open what can be opened, and end the live updates, so that the controls stay the same."""
    shown.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    shown.page.evaluate("document.getElementById('live').replaceWith(document.getElementById('live').cloneNode(true))")


@pytest.mark.parametrize("name", WALKED)
def test_every_control_is_reached_with_tab_and_the_focus_is_seen(name: str, stage: Stage, open_page: OpenPage) -> None:
    shown = open_page(SCREENS[name](stage))
    still(shown)
    controls = shown.page.evaluate(CONTROLS)
    assert len(controls) > 10
    shown.page.evaluate(WATCH)
    for presses in range(1, len(controls) + 50):  # a field of a date or a number has parts
        shown.page.keyboard.press("Tab")
        if presses % LOOK_EVERY == 0 and shown.page.evaluate(IS_ROUND):
            break
    focused = shown.page.evaluate("focused")
    unseen = [each["html"] for each in focused if not each["isSeen"]]
    assert not unseen, f"no visible focus: {unseen}"
    reached = {each["number"] for each in focused}
    missed = [html for number, html in enumerate(controls) if number not in reached]
    assert not missed, missed


def test_the_first_control_skips_to_the_content(open_page: OpenPage) -> None:
    shown = open_page("/ui/runs")
    shown.page.keyboard.press("Tab")
    skip = shown.page.get_by_role("link", name="Skip to content")
    assert skip.evaluate("each => each === document.activeElement && each.getBoundingClientRect().left >= 0")
    shown.page.keyboard.press("Enter")
    assert shown.page.evaluate("document.activeElement.id") == "main"
    shown.page.keyboard.press("Tab")
    assert shown.page.evaluate("document.activeElement.closest('main') !== null")


def test_a_live_update_keeps_the_focus(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/")
    link = shown.page.locator(f"#live a[href='/ui/runs/{stage.fleet.run_id}']").first
    link.focus()
    before = shown.page.inner_text(".figures")
    until(lambda: shown.page.inner_text(".figures") != before, what="a live update")
    assert shown.page.evaluate("document.activeElement.getAttribute('href')") == f"/ui/runs/{stage.fleet.run_id}"


def test_a_form_is_sent_and_a_button_is_pressed_with_the_keyboard(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page(f"/ui/hosts/{stage.site.host}", user="otto")
    shown.page.get_by_label("Reason").focus()
    shown.page.keyboard.type("by keyboard")
    shown.page.keyboard.press("Enter")
    shown.toast("Blocked")
    shown.page.get_by_role("button", name="Unblock", exact=True).focus()
    shown.page.keyboard.press("Space")
    shown.toast("Unblocked")


def test_the_login_by_keyboard(browsers: Browsers, stage: Stage) -> None:
    context = browsers.new_context()
    try:
        shown = WatchedPage(context.new_page(), stage.url)
        shown.open("/ui/login")
        assert shown.page.evaluate("document.activeElement.id") == "token"
        assert shown.findings() == []
        shown.check()
    finally:
        context.close()


def test_live_regions_are_polite() -> None:
    """Updates never interrupt a reader. Only pages that say from the start that something is wrong have an alert."""
    for file in TEMPLATES.glob("*.html"):
        text = file.read_text()
        assert "assertive" not in text, file.name
        assert 'role="alert"' not in text or file.name in ("login.html", "error.html"), file.name
    base = (TEMPLATES / "base.html").read_text()
    assert re.search(r'id="toasts" role="status" aria-live="polite"', base)
    assert re.search(r'id="connection"[^>]*role="status"', base)
