"""Schedules, notifications, settings and the log of actions."""

from __future__ import annotations

from shoal.operations.schedules.schedule import Schedule
from shoal.operations.schedules.service import Schedules
from tests.acceptance.serving import until
from tests.dashboard.browsing import OpenPage
from tests.dashboard.receiver import receiving
from tests.dashboard.stage import TOKENS, Stage


def schedule(stage: Stage, name: str) -> Schedule | None:
    """The schedule in the store."""
    return stage.ask(lambda store: Schedules(store, "shoal").find(name))


def is_paused(stage: Stage, name: str) -> bool:
    found = schedule(stage, name)
    assert found is not None
    return found.paused


def test_a_schedule_is_added_changed_run_and_removed(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/schedules")
    shown.expected = ("422",)
    shown.page.locator("#add summary").click()
    shown.page.fill("#add [name=name]", "weekly")
    shown.page.fill("#add [name=cron]", "0 3 * *")
    shown.page.fill("#add [name=settings]", "scope.max_pages=1")
    shown.click("Add")
    shown.page.wait_for_selector(".field-error")
    field = shown.page.locator("#add [name=cron]")
    assert field.get_attribute("aria-invalid") == "true"
    assert "5" in shown.page.locator(".field-error").inner_text()
    assert schedule(stage, "weekly") is None

    shown.page.fill("#add [name=cron]", "0 3 * * 1")
    shown.page.fill("#add [name=time_zone]", "Europe/Berlin")
    shown.click("Add")
    shown.page.wait_for_url("**/ui/schedules/weekly")
    added = schedule(stage, "weekly")
    assert added is not None
    assert (added.definition.cron, added.definition.settings) == ("0 3 * * 1", {"scope.max_pages": 1})

    shown.click("Pause weekly")
    shown.toast("Paused")
    assert is_paused(stage, "weekly")
    shown.click("Resume weekly")
    shown.toast("Resumed")
    assert not is_paused(stage, "weekly")

    shown.click("Run now: weekly")
    shown.toast("Started weekly_")
    fired = schedule(stage, "weekly")
    assert fired is not None
    assert stage.run(fired.run_id) is not None
    shown.page.locator("tbody tr", has_text=fired.run_id).wait_for()

    shown.page.locator("#edit summary").click()
    shown.page.fill("#edit [name=cron]", "")
    shown.page.fill("#edit [name=time_zone]", "")
    shown.page.fill("#edit [name=every]", "2h")
    shown.click("Save")
    shown.toast("Changed")
    shown.see("every 2h")
    changed = schedule(stage, "weekly")
    assert changed is not None
    assert (changed.definition.cron, changed.definition.every) == ("", "2h")

    shown.click("Remove", confirm=True)
    shown.page.wait_for_url("**/ui/schedules")
    assert schedule(stage, "weekly") is None


def test_a_schedule_of_the_file_cannot_be_changed_here(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/schedules/yearly")
    shown.see("This schedule is defined in shoal.toml")
    assert not shown.page.locator("#edit").count()
    assert not shown.page.get_by_role("button", name="Remove").count()
    status, answer = stage.api.ask("PUT", "/api/schedules/yearly", {"spider": "shop", "every": "1h"})
    assert status == 409, answer
    assert stage.api.ask("PUT", "/api/schedules/none", {"spider": "shop", "every": "1h"})[0] == 404


def test_viewers_cannot_steer_schedules(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/schedules", user="vera")
    assert "yearly" in shown.page.inner_text("main")
    assert not shown.page.locator("main button").count()


def test_a_channel_is_tested(stage: Stage, open_page: OpenPage) -> None:
    """First while its receiver is away, then while it listens."""
    shown = open_page("/ui/notifications", user="otto")
    assert "quiet" in shown.page.inner_text("main")  # the rule
    shown.click("Test ops")
    shown.page.locator("#toasts .bad", has_text="connection").wait_for(timeout=60_000)
    with receiving(stage.channel_port) as received:
        shown.click("Test ops")
        shown.toast("The test message was delivered through ops")
        assert [message["event"] for message in received] == ["test"]
    assert not open_page("/ui/notifications", user="vera").page.locator("main button").count()


def test_actions_are_logged(stage: Stage, open_page: OpenPage) -> None:
    """With who did it, and on the page without a reload."""
    shown = open_page("/ui/actions")
    shown.mark()
    run_id = stage.start_run(f"{stage.site.url}/list/300")
    other = open_page(f"/ui/runs/{run_id}", user="otto")
    other.click("Cancel", confirm=True)
    other.toast("Cancelled")
    row = shown.page.locator("tbody tr", has_text=run_id).filter(has_text="cancel").first
    row.wait_for(timeout=60_000)
    assert "otto (127.0.0.1)" in row.inner_text()
    assert shown.is_same
    until(lambda: "otto" in other.page.inner_text("section[aria-labelledby=run-events]"), what="the run's own log")
    shown.open(f"/ui/actions?q={run_id}")
    assert all(run_id in text for text in shown.page.locator("tbody tr").all_inner_texts())


def test_settings_are_for_admins_and_have_no_secrets(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/settings")
    content = shown.page.content()
    assert not any(token in content for token in TOKENS.values())
    row = shown.page.locator("tbody tr", has_text="browser.sandbox")
    assert row.locator("td").all_inner_texts() == ["browser.sandbox", "false", "SHOAL_BROWSER__SANDBOX"]
    shown.open("/ui/settings?q=serve.port&changed=on")
    assert shown.page.locator("tbody tr").count() == 1
    status, answer = stage.api.get("/api/settings")
    assert status == 200
    sources = {each["key"]: each["source"] for each in answer["settings"]}
    assert sources["serve.port"] == "command line or code"
    assert sources["serve.roles"].endswith("shoal.toml")
    assert not any(token in str(answer) for token in TOKENS.values())
    for user in ("otto", "vera"):
        other = open_page("/ui/settings", user=user)
        other.expected = ("403",)
        other.see("needs the role admin")
        assert not other.page.locator("nav a", has_text="Settings").count()
        headers = {"Authorization": f"Bearer {TOKENS[user]}"}
        assert stage.api.ask("GET", "/api/settings", headers=headers)[0] == 403
