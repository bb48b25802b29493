"""Pages that are open show changes by themselves, and what the fleet and the cluster do."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest

from tests.acceptance.serving import until
from tests.dashboard.browsing import OpenPage, WatchedPage
from tests.dashboard.stage import Stage


def figure(shown: WatchedPage, name: str) -> str:
    """The text of a figure at the top of a screen."""
    return shown.page.locator(".figures div", has=shown.page.get_by_text(name, exact=True)).locator("dd").inner_text()


@pytest.mark.parametrize(("path", "name"), [("/", "Pages/s"), ("/ui/runs/{run}", "Items")])
def test_figures_change_without_reload(path: str, name: str, stage: Stage, open_page: OpenPage) -> None:
    shown = open_page(path.format(run=stage.fleet.run_id))
    shown.mark()
    before = figure(shown, name)
    until(lambda: figure(shown, name) != before, what="an update")
    assert shown.is_same


def test_change_by_someone_else_is_shown(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.start_run(f"{stage.site.url}/list/900")
    shown = open_page(f"/ui/runs/{run_id}", user="vera")
    shown.mark()
    shown.page.locator("#live .badge.running").wait_for()
    assert stage.api.ask("POST", f"/api/runs/{run_id}/cancel")[0] == 200
    shown.page.locator("#live .badge.cancelled").wait_for()
    assert shown.is_same


def test_workers_and_a_lost_one(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page(f"/ui/workers?q={stage.fleet.run_id}")
    shown.mark()
    until(lambda: shown.page.locator("#live .badge.working").count() == 2, what="two workers")
    until(lambda: shown.page.locator("#live .badge.lost").count() == 1, what="one lost worker")
    rows = shown.page.locator("[aria-labelledby=processes] tbody tr").all_inner_texts()
    pids = {worker.pid for worker in stage.fleet.workers}
    assert {pid for pid in pids if any(f"pid {pid}" in row for row in rows)} == pids
    (lost,) = [row for row in rows if "lost" in row]
    assert f"pid {stage.killed_worker}" in lost
    assert all("worker" in row and " MB" in row and "ago" in row for row in rows)
    assert shown.is_same


def test_cluster_and_its_takeover(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/workers")
    shown.page.get_by_role("link", name=stage.cluster.run_id).first.click()
    shown.see("took over")
    rows = shown.page.locator("tbody tr").all_inner_texts()
    assert len(rows) == 2
    assert any("Runner" in row and "Backup" not in row and "crawling" in row for row in rows)
    assert any("Backup Runner" in row and "standing by" in row for row in rows)
    assert int(figure(shown, "Takeovers")) >= 1
    shown.page.get_by_role("link", name="shop").click()
    shown.page.wait_for_url(f"**/ui/runs/{stage.cluster.run_id}")


def test_timeline_of_urls(stage: Stage, open_page: OpenPage) -> None:
    """Found from the screen of the run: attempts, robots.txt, a redirect and its target."""
    shown = open_page(f"/ui/runs/{stage.fleet.run_id}")

    def ask(path: str) -> None:
        shown.page.get_by_role("searchbox").fill(stage.site.url + path)
        shown.click("Show")

    ask("/flaky")
    shown.see("attempt 1 failed")
    shown.see("status 200")
    item = json.loads(shown.page.locator("pre.item").inner_text())
    assert (item["url"], item["empty"]) == (f"{stage.site.url}/flaky", None)
    ask("/secret/1")
    shown.page.locator(".facts dd", has_text="disallowed").wait_for()
    ask("/moved")
    shown.see("redirected to")
    shown.page.locator("#redirects").get_by_role("link", name=f"{stage.site.url}/page/3").click()
    shown.page.wait_for_url(f"**?url={quote(stage.site.url + '/page/3', safe='')}")
    shown.page.get_by_role("link", name=f"{stage.site.url}/", exact=True).click()
    shown.see("start request")
    ask("/nowhere")
    shown.see("has not seen")


def test_host_from_the_list(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/hosts")
    shown.page.get_by_role("link", name=stage.site.host).click()
    shown.page.locator("pre", has_text="Disallow: /secret").wait_for()
    shown.open("/ui/hosts?q=elsewhere.example")
    shown.page.get_by_role("link", name="Open the host elsewhere.example").click()
    shown.see("No worker has read it")


def test_filters_of_workers(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/ui/workers?q=nobody")
    shown.see("No process matches")
    shown.page.get_by_role("link", name="Show all").click()
    shown.page.get_by_label("State").select_option("working")
    shown.click("Filter")
    until(lambda: shown.page.locator("#live .badge.working").count() == 3, what="three processes")
    assert shown.page.locator("#live .badge.lost").count() == 0
