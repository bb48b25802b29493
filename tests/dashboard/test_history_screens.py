"""Charts, failures, items, comparisons, and what needs attention."""

from __future__ import annotations

from shoal.http import Request
from shoal.ports import Stats
from tests.acceptance.serving import until
from tests.dashboard.browsing import OpenPage, WatchedPage
from tests.dashboard.stage import Stage


def stats(stage: Stage, run_id: str) -> Stats:
    return stage.ask_run(run_id, lambda frontier: frontier.stats())


def wait_for_chart(shown: WatchedPage, chart: str) -> None:
    shown.page.wait_for_selector(f"#{chart} canvas", timeout=60_000)


def test_the_overview_has_a_chart_of_all_runs(stage: Stage, open_page: OpenPage) -> None:
    def speeds() -> list[float]:
        status, chart = stage.api.get("/api/charts/speed?hours=1")
        assert status == 200
        assert all(len(each["values"]) == len(chart["times"]) for each in chart["series"])
        return [value for each in chart["series"] if each["label"] == "pages/s" for value in each["values"]]

    until(lambda: max(speeds(), default=0) > 0, what="a speed")
    shown = open_page("/?hours=1")
    wait_for_chart(shown, "speed-chart")
    assert "pages/s" in shown.page.inner_text("#speed-chart")


def test_a_run_has_charts_of_states_and_speed(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.fleet.run_id
    shown = open_page(f"/ui/runs/{run_id}")
    wait_for_chart(shown, "states-chart")
    wait_for_chart(shown, "speed-chart")
    shown.page.evaluate("document.querySelector('#states-chart canvas').marked = true")
    before = shown.page.inner_text(".figures")
    until(lambda: shown.page.inner_text(".figures") != before, what="a live update")
    assert shown.page.evaluate("document.querySelector('#states-chart canvas').marked")  # it is not drawn anew
    status, chart = stage.api.get(f"/api/runs/{run_id}/charts/states")
    assert status == 200
    done = next(each["values"] for each in chart["series"] if each["label"] == "done")
    assert done == sorted(done)
    assert done[-1] > 0
    assert stage.api.get("/api/runs/none/charts/states")[0] == 404
    assert stage.api.get(f"/api/runs/{run_id}/charts/nonsense")[0] == 422


def was_retried(stage: Stage, run_id: str, path: str) -> bool:
    found = stage.ask_run(run_id, lambda frontier: frontier.find(Request(stage.site.url + path)))
    assert found is not None
    return any(event.kind == "retried" for event in found.events)


def test_a_kind_of_failure_is_retried(stage: Stage, open_page: OpenPage) -> None:
    """Only this kind: what robots.txt forbids stays failed."""
    run_id = stage.finished_run(f"{stage.site.url}/broken/21", f"{stage.site.url}/secret/1")
    assert stats(stage, run_id).dead == 2
    shown = open_page(f"/ui/runs/{run_id}", user="otto")
    shown.see("http 500")
    assert f"{stage.site.url}/broken/21" in shown.page.inner_text("main")
    shown.click("Retry http 500")
    shown.toast(f"1 request is queued again. Run {run_id} is running again: 1 process works on it")
    assert was_retried(stage, run_id, "/broken/21")
    assert not was_retried(stage, run_id, "/secret/1")


def test_failures_of_a_url_pattern_are_retried(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.finished_run(*(f"{stage.site.url}/broken/{number}" for number in (31, 32)))
    shown = open_page(f"/ui/runs/{run_id}", user="otto")
    shown.page.locator("summary", has_text="Retry some").click()
    shown.page.fill("#retry-some [name=url]", "*/broken/32")
    shown.page.locator("#retry-some button").click()
    shown.toast("1 request is queued again")
    assert [was_retried(stage, run_id, f"/broken/{number}") for number in (31, 32)] == [False, True]


def test_viewers_see_failures_but_no_buttons(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.finished_run(f"{stage.site.url}/broken/41")
    shown = open_page(f"/ui/runs/{run_id}", user="vera")
    shown.see("http 500")
    assert not shown.page.locator("main button", has_text="Retry").count()


def test_last_items_and_field_coverage(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.finished_run(f"{stage.site.url}/hostile")
    shown = open_page(f"/ui/runs/{run_id}")
    shown.see("Fields that have a value")
    text = shown.page.inner_text("main")
    assert "100.0 %" in text
    row = shown.page.locator("tr", has=shown.page.locator("td:text-is('empty')"))
    assert "0.0 %" in row.inner_text()  # a field that never has a value
    assert "<script>" in shown.page.inner_text("pre.item >> nth=0") + shown.page.inner_text("pre.item >> nth=-1")
    assert not shown.is_hacked


def test_two_runs_are_compared(stage: Stage, open_page: OpenPage) -> None:
    earlier = stage.finished_run(f"{stage.site.url}/page/1")
    later = stage.finished_run(f"{stage.site.url}/page/1", f"{stage.site.url}/page/2", f"{stage.site.url}/broken/51")
    shown = open_page(f"/ui/compare?a={earlier}&b={later}")
    rows = {
        row.locator("td").first.inner_text(): row.locator("td").all_inner_texts()[1:]
        for row in shown.page.locator("tbody tr").all()
    }
    assert rows["pages"] == ["1", "2", "+100.0 %"]
    assert rows["failed"] == ["0", "1", "new"]
    assert rows["field title"][2] == "="
    shown = open_page(f"/ui/compare?b={later}")  # with the run before it
    assert shown.page.locator("select[name=b]").input_value() == later
    assert shown.page.locator("tbody tr").count() > 5
    shown = open_page("/ui/compare?a=none")
    shown.expected = ("404",)
    shown.see("There is no run")


def test_what_needs_attention(stage: Stage, open_page: OpenPage) -> None:
    """A run whose pages all failed is on the overview, without a reload."""
    shown = open_page("/")
    shown.mark()
    run_id = stage.finished_run(f"{stage.site.url}/broken/61")
    problem = shown.page.locator(".problems li", has=shown.page.locator(f"a[href='/ui/runs/{run_id}']"))
    problem.wait_for(timeout=60_000)
    assert "Critical" in problem.inner_text()
    assert shown.is_same


def test_events_of_a_run(stage: Stage, open_page: OpenPage) -> None:
    """Processes that began and were lost, and what users did, without a reload."""
    shown = open_page(f"/ui/runs/{stage.fleet.run_id}")
    rows = shown.page.locator("section[aria-labelledby=run-events] tbody tr")
    rows.filter(has_text="worker was lost").wait_for(timeout=120_000)
    assert rows.filter(has_text="worker began").count() == 3
    assert rows.filter(has_text="created").count() == 1
    assert "anna" in rows.filter(has_text="start").first.inner_text()
