"""The screens of batches: trying a URL, sessions of callers, Celery workers."""

from __future__ import annotations

from typing import Any

from shoal.api.batch.session import Session
from shoal.ports import Store
from tests.acceptance.serving import Api, until
from tests.dashboard.browsing import OpenPage, WatchedPage
from tests.dashboard.stage import TOKENS, Stage


def fill(shown: WatchedPage, **fields: str) -> None:
    for name, value in fields.items():
        shown.page.fill(f"[name='{name.replace('__', '.')}']", value)


def session_of(shown: WatchedPage) -> str:
    shown.page.wait_for_url("**/ui/batches/*")
    return shown.page.url.rsplit("/", 1)[1]


def find(stage: Stage, session_id: str) -> tuple[str, str]:
    """The caller and the state of a session in the store."""

    async def read(store: Store) -> tuple[str, str]:
        session = await Session.find(store, session_id)
        assert session is not None
        return session.settings.caller, await session.state()

    return stage.ask(read)


def as_user(stage: Stage, user: str) -> Api:
    made = object.__new__(Api)
    made.__dict__ |= {**stage.api.__dict__, "headers": {"Authorization": f"Bearer {TOKENS[user]}"}}
    return made


def sessions(stage: Stage, user: str) -> list[dict[str, Any]]:
    status, answer = as_user(stage, user).get("/api/crawl")
    assert status == 200, answer
    found: list[dict[str, Any]] = answer["sessions"]
    return found


def test_a_url_is_tried(stage: Stage, open_page: OpenPage) -> None:
    """The result shows what was asked for, and the session belongs to whoever asked."""
    shown = open_page("/ui/batches", user="otto")
    fill(shown, urls=f"{stage.site.url}/list/7", options__fields="heading=h1\nnothing=.none")
    shown.click("Fetch")
    session_id = session_of(shown)
    shown.mark()
    shown.see("HTTP 200")
    text = shown.page.inner_text("main")
    assert "no match" in text  # one of the fields
    assert "# List 7" in text  # Markdown
    assert f"{stage.site.url}/page/70" in text  # links
    assert shown.is_same  # it changed by itself
    assert find(stage, session_id) == ("otto", "finished")


def test_a_screenshot_is_shown(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/batches", user="otto")
    fill(shown, urls=f"{stage.site.url}/page/8", options__render__wait_for="h1")
    shown.page.check("[name='options.render.screenshot']")
    shown.click("Fetch")
    session_of(shown)
    shown.page.wait_for_selector("img.shot", timeout=60_000)
    assert shown.page.evaluate("document.querySelector('img.shot').naturalWidth") > 100
    shown.see("rendered in a browser")


def test_strangers_are_shown_as_text(stage: Stage, open_page: OpenPage) -> None:
    options = {"fields": {"heading": "h1"}, "also": ["text", "markdown"]}
    shown = open_page(f"/ui/batches/{stage.batch('/hostile', options=options)}")
    shown.see("HTTP 200")
    assert "<script>" in shown.page.inner_text("main")
    assert not shown.is_hacked
    shown = open_page(f"/ui/batches/{stage.batch('/broken/0', options={'retries': 0})}")
    shown.see("http 500")


def test_what_is_wrong_is_shown_at_the_field(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/batches", user="otto")
    shown.expected = ("422",)
    before = len(sessions(stage, "otto"))
    fill(shown, urls=f"{stage.site.url}/page/1", options__fields="price=a[")
    shown.click("Fetch")
    field = shown.page.locator("[name='options.fields']")
    shown.page.wait_for_selector(".field-error")
    assert field.get_attribute("aria-invalid") == "true"
    described = field.get_attribute("aria-describedby")
    assert "valid CSS" in shown.page.locator(f"[id='{described}']").inner_text()
    assert len(sessions(stage, "otto")) == before


def test_a_session_is_cancelled(stage: Stage, open_page: OpenPage) -> None:
    """Results of several pages are listed; what is left is not fetched."""
    session_id = stage.batch("/list/900", wait=False, options={"depth": 5, "max_pages": 500})
    shown = open_page(f"/ui/batches/{session_id}")
    shown.see("/list/900")
    shown.mark()
    shown.click("Cancel", confirm=True)
    shown.toast("Cancelled")
    shown.page.locator(".badge.cancelled").wait_for()
    assert find(stage, session_id) == ("anna", "cancelled")
    assert shown.is_same
    assert not shown.page.get_by_role("button", name="Cancel", exact=True).count()


def test_callers_see_their_own_sessions(stage: Stage, open_page: OpenPage) -> None:
    """Admins see those of all."""
    status, answer = as_user(stage, "otto").ask("POST", "/api/crawl/batch", {"urls": [f"{stage.site.url}/page/77"]})
    assert status == 200
    session_id = answer["session_id"]
    listed = {user: [each["session_id"] for each in sessions(stage, user)] for user in TOKENS}
    assert [session_id in listed[user] for user in ("otto", "anna", "vera")] == [True, True, False]
    (entry,) = (each for each in sessions(stage, "anna") if each["session_id"] == session_id)
    assert (entry["caller"], entry["urls"], entry["progress"]["done"]) == ("otto", 1, 1)
    shown = open_page("/ui/batches", user="vera")
    assert "/page/77" not in shown.page.inner_text("main")
    shown = open_page(f"/ui/batches/{session_id}", user="vera")
    shown.expected = ("404",)
    assert "does not exist" in shown.page.inner_text("main")
    shown = open_page("/ui/batches")
    row = shown.page.locator("tr", has_text="/page/77").first
    assert "otto" in row.inner_text()
    shown = open_page(f"/ui/batches/{session_id}")
    shown.see("HTTP 200")


def test_celery_workers_and_their_sessions(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/batches")
    shown.mark()
    shown.see("✓ answers")
    session_id = stage.batch("/page/55", distributed=True, timeout=60)
    until(lambda: find(stage, session_id)[1] == "finished", what="the batch")
    row = shown.page.locator("tr", has_text="/page/55")
    row.locator(".badge.finished").wait_for()
    assert "Celery" in row.inner_text()
    assert shown.is_same
    status, answer = stage.api.get("/api/crawl/distributed/status")
    assert status == 200
    assert [member["answers"] for member in answer["members"]] == [True]
