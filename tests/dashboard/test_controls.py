"""Every control does in the store what it says, and the page shows it without being loaded again."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import Dialog

from shoal.http import Request
from shoal.ports import History, HostState, HostUpdate
from tests.acceptance.serving import until
from tests.dashboard.browsing import OpenPage
from tests.dashboard.stage import Stage, apart


def state_of(stage: Stage, run_id: str) -> str:
    run = stage.run(run_id)
    return "deleted" if run is None else run.state


def history_of(stage: Stage, run_id: str, url: str) -> History:
    found = stage.ask_run(run_id, lambda frontier: frontier.find(Request(url)))
    assert found is not None
    return found


def failures_of(stage: Stage, run_id: str, url: str) -> int:
    """How many attempts failed."""
    return sum(event.kind == "failed" for event in history_of(stage, run_id, url).events)


def host_of(stage: Stage, host: str) -> HostState:
    return stage.ask_run(stage.fleet.run_id, lambda frontier: frontier.host_state(host))


@pytest.fixture
def host(stage: Stage) -> Iterator[str]:
    """The host of the site. Its settings are reset afterwards."""
    yield stage.site.host
    update = HostUpdate(delay=None, concurrency=None, learned_delay=None, block_for=None)
    stage.ask_run(stage.fleet.run_id, lambda frontier: frontier.update_host(stage.site.host, update))


def test_pause_and_resume(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.fleet.run_id
    shown = open_page(f"/ui/runs/{run_id}", user="otto")
    shown.mark()
    shown.click("Pause")
    shown.toast("Paused")
    assert state_of(stage, run_id) == "paused"
    shown.page.locator("#live .badge.paused").wait_for()
    shown.click("Resume")
    shown.toast("Resumed")
    assert state_of(stage, run_id) == "running"
    shown.page.locator("#live .badge.running").wait_for()
    assert shown.is_same


def test_start_cancel_and_delete(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/runs")
    shown.page.get_by_text("Start a run").click()
    shown.page.get_by_label("Spider").select_option("shop")
    shown.page.get_by_label("Mode").select_option("distributed")
    shown.page.get_by_label("New run").check()
    shown.click("Start")
    shown.page.wait_for_url("**/ui/runs/2*")
    run_id = shown.page.url.rpartition("/")[2]
    assert state_of(stage, run_id) == "queued"
    shown.click("Cancel", confirm=True)
    shown.toast("Cancelled")
    assert state_of(stage, run_id) == "cancelled"
    shown.click("Delete", confirm=True)
    shown.page.wait_for_url("**/ui/runs")
    assert state_of(stage, run_id) == "deleted"


def test_running_run_is_not_deleted(stage: Stage, open_page: OpenPage) -> None:
    """A page that still shows the button, because it is outdated, cannot do it either."""
    run_id = stage.start_run(f"{stage.site.url}/page/7", mode="distributed")
    assert stage.api.ask("POST", f"/api/runs/{run_id}/cancel")[0] == 200
    shown = open_page(f"/ui/runs/{run_id}")
    shown.expected = ("409",)

    def resume_first(dialog: Dialog) -> None:
        assert stage.api.ask("POST", f"/api/runs/{run_id}/resume")[0] == 200
        dialog.accept()

    shown.page.once("dialog", resume_first)
    shown.click("Delete")
    shown.toast("cancel it first")
    assert state_of(stage, run_id) == "running"


def test_retry_failed(stage: Stage, open_page: OpenPage) -> None:
    urls = [f"{stage.site.url}/broken/{number}" for number in (71, 72)]
    run_id = stage.finished_run(*urls)
    assert {history_of(stage, run_id, url).state for url in urls} == {"dead"}
    shown = open_page(f"/ui/runs/{run_id}")
    shown.click("Retry failed", confirm=True)
    shown.toast(f"2 requests are queued again. Run {run_id} is running again: 1 process works on it")
    until(lambda: all(failures_of(stage, run_id, url) == 4 for url in urls), what="two more attempts of each")
    until(lambda: state_of(stage, run_id) == "finished", what="the end of the run")


def test_retry_one_url(stage: Stage, open_page: OpenPage) -> None:
    urls = [f"{stage.site.url}/broken/{number}" for number in (81, 82)]
    run_id = stage.finished_run(*urls)
    shown = open_page(f"/ui/runs/{run_id}/url?url={quote(urls[0], safe='')}")
    shown.mark()
    shown.see("attempt 2 failed")
    shown.click("Retry now")
    shown.toast("1 request is queued again")
    until(lambda: [failures_of(stage, run_id, url) for url in urls] == [4, 2], what="two more attempts")
    shown.see("retried")
    assert shown.is_same


def test_delay_and_reset(stage: Stage, host: str, open_page: OpenPage) -> None:
    shown = open_page(f"/ui/hosts/{host}", user="otto")
    shown.mark()
    shown.page.get_by_label("Delay in seconds").fill("1.5")
    shown.click("Change")
    shown.toast("Changed")
    state = host_of(stage, host)
    assert (state.delay, state.why) == (1.5, "set for this host")
    shown.see("set for this host")
    shown.page.get_by_label("Delay in seconds").fill("0")
    shown.page.get_by_label("Parallel requests").fill("3")
    shown.click("Change")
    until(lambda: host_of(stage, host).concurrency == 3, what="the concurrency")
    assert host_of(stage, host).delay == 0
    shown.click("Reset", confirm=True)
    shown.toast("Reset")
    assert host_of(stage, host).concurrency == 8
    assert shown.is_same


def test_block_and_unblock(stage: Stage, host: str, open_page: OpenPage) -> None:
    shown = open_page(f"/ui/hosts/{host}", user="otto")
    shown.page.get_by_label("Reason").fill("the owner asked us to")
    shown.page.get_by_label("Block for").select_option("10 minutes")
    shown.click("Block")
    shown.toast("Blocked")
    state = host_of(stage, host)
    assert 500 < state.blocked_for <= 600
    assert state.block_reason == "the owner asked us to"
    shown.see("Its requests stay queued")
    open_page("/ui/hosts").see("the owner asked us to")
    shown.click("Unblock")
    shown.toast("Unblocked")
    assert host_of(stage, host).blocked_for == 0


def test_default_of_all_hosts(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/hosts")
    shown.page.get_by_text("Defaults of all hosts").click()
    shown.page.get_by_label("Parallel requests").fill("5")
    shown.click("Change")
    shown.toast("Changed for all hosts")
    assert host_of(stage, "unknown.example").concurrency == 5
    shown.click("Reset")
    shown.toast("of their run again")
    assert host_of(stage, "unknown.example").concurrency == 8


def test_scale_a_cluster(stage: Stage, open_page: OpenPage) -> None:
    """The Backup Runner becomes a Runner, and a Runner becomes a Backup Runner again."""
    shown = open_page(f"/ui/clusters/{stage.cluster.run_id}", user="otto")
    shown.mark()
    shown.see("took over")
    shown.see("1 of 1 wanted")
    for runners, backups in ((2, 0), (1, 1)):
        shown.page.get_by_label("Runners", exact=True).fill(str(runners))
        shown.page.get_by_label("Backup Runners").fill(str(backups))
        shown.click("Scale")
        shown.toast("Scaled")
        counts = apart(stage.cluster.view).counts
        assert (counts.runner, counts.backup) == (runners, backups)
        shown.page.locator("dd", has_text=f"{runners} of {runners} wanted").first.wait_for()
    assert shown.is_same
