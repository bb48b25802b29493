"""Who may do what: login, roles, forged requests, and content from strangers."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.dashboard.browsing import Browsers, OpenPage, WatchedPage
from tests.dashboard.site import IMAGE, SCRIPT
from tests.dashboard.stage import TOKENS, Stage

CSRF = "JSON.parse(document.body.getAttribute('hx-headers'))['X-CSRF-Token']"
SEND = f"""async ([method, path]) =>
    (await fetch(path, {{method, headers: {{"X-CSRF-Token": {CSRF}, "Content-Type": "application/json"}}}})).status"""
CONTROLS = "[hx-post]:not([hx-post='/ui/logout']), [hx-put], [hx-delete]"


def test_login_and_logout(browsers: Browsers, stage: Stage) -> None:
    context = browsers.new_context()
    shown = WatchedPage(context.new_page(), stage.url)
    shown.expected = ("401",)
    shown.open("/ui/hosts?q=a")
    assert "/ui/login" in shown.page.url
    assert shown.findings() == []
    shown.page.get_by_label("Token").fill("wrong")
    shown.click("Log in")
    shown.see("This token is not known.")
    assert context.cookies() == []
    shown.page.get_by_label("Token").fill(TOKENS["otto"])
    shown.click("Log in")
    shown.page.wait_for_url(f"{stage.url}/ui/hosts?q=a")
    shown.see("otto (operator)")
    (cookie,) = context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert shown.page.evaluate("document.cookie") == ""
    shown.click("Log out")
    shown.page.wait_for_url("**/ui/login")
    assert context.cookies() == []
    assert context.request.get(f"{stage.url}/api/runs").status == 401
    shown.check()
    context.close()


def test_login_leads_to_no_other_site(browsers: Browsers, stage: Stage) -> None:
    context = browsers.new_context()
    form: dict[str, str | float | bool] = {"token": TOKENS["vera"], "next": "//example.com/"}
    answer = context.request.post(f"{stage.url}/ui/login", form=form, max_redirects=0)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    context.close()


@pytest.mark.parametrize(
    "path", ["/ui/runs", "/ui/runs/{run}", "/ui/hosts", "/ui/hosts/{host}", "/ui/clusters/{cluster}"]
)
def test_viewer_sees_no_controls(path: str, stage: Stage, open_page: OpenPage) -> None:
    filled = path.format(run=stage.fleet.run_id, host=stage.site.host, cluster=stage.cluster.run_id)
    assert open_page(filled, user="vera").page.locator(CONTROLS).count() == 0
    assert open_page(filled, user="anna").page.locator(CONTROLS).count() > 0


def test_viewer_cannot_change_anything(stage: Stage, open_page: OpenPage) -> None:
    """The API refuses a viewer, also with the token of its session."""
    shown = open_page("/", user="vera")
    shown.expected = ("403",)
    run, host = f"/api/runs/{stage.fleet.run_id}", f"/api/hosts/{stage.site.host}"
    for method, path in (
        *(("POST", f"{run}/{step}") for step in ("pause", "cancel", "retry-failed", "url/retry")),
        *(("POST", path) for path in ("/api/runs", f"{host}/block", f"/api/clusters/{stage.cluster.run_id}/scale")),
        ("PUT", host),
        ("DELETE", run),
    ):
        assert shown.page.evaluate(SEND, [method, path]) == 403, path
    assert (found := stage.run(stage.fleet.run_id)) is not None
    assert found.state == "running"


def test_operator_cannot_delete(stage: Stage, open_page: OpenPage) -> None:
    run_id = stage.start_run(f"{stage.site.url}/page/7", mode="distributed")
    assert stage.api.ask("POST", f"/api/runs/{run_id}/cancel")[0] == 200
    shown = open_page(f"/ui/runs/{run_id}", user="otto")
    shown.expected = ("403",)
    assert shown.page.get_by_role("button", name="Resume").count() == 1
    assert shown.page.get_by_role("button", name="Delete").count() == 0
    assert shown.page.evaluate(SEND, ["DELETE", f"/api/runs/{run_id}"]) == 403
    assert stage.run(run_id) is not None


def test_forged_requests_are_refused(stage: Stage, browsers: Browsers) -> None:
    """A request with the session's cookie needs its CSRF token, and must not come from a page of another origin."""
    context = browsers.context("anna", 1440, "light")
    path = f"{stage.url}/api/runs/{stage.fleet.run_id}/cancel"
    assert context.request.get(f"{stage.url}/api/runs").status == 200
    assert context.request.post(path).status == 403
    assert context.request.post(path, headers={"X-CSRF-Token": "wrong"}).status == 403
    page = context.new_page()
    page.goto(f"{stage.site.url}/page/1")
    with page.expect_response(path) as answer:
        page.evaluate("path => fetch(path, {method: 'POST', mode: 'no-cors', credentials: 'include'})", path)
    assert answer.value.status == 403
    page.close()
    assert (found := stage.run(stage.fleet.run_id)) is not None
    assert found.state == "running"


def test_policy_allows_no_inline_scripts(stage: Stage, open_page: OpenPage) -> None:
    shown = open_page("/")
    response = shown.open("/ui/runs")
    policy = response.header_value("content-security-policy") or ""
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert shown.page.locator("script:not([src]), [onclick], [style]").count() == 0
    shown.expected = ("Content Security Policy",)
    shown.page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script);
    }""")
    assert not shown.is_hacked


@pytest.mark.parametrize(
    "path", ["/ui/runs?q={}", "/ui/hosts?q={}", "/ui/workers?q={}", "/ui/runs/{run}/url?url=http://a.example/{}"]
)
def test_hostile_addresses_are_text(path: str, stage: Stage, open_page: OpenPage) -> None:
    text = f"{IMAGE}{SCRIPT}"
    shown = open_page(path.replace("{run}", stage.fleet.run_id).replace("{}", quote(text, safe="")))
    assert text.lower() in shown.page.locator("input[type=search]").first.input_value().lower()
    assert not shown.is_hacked
    assert shown.page.locator("img[src=x]").count() == 0


def test_hostile_reasons_are_text(stage: Stage, open_page: OpenPage) -> None:
    """Of a host's block, in the list of hosts and on its page."""
    host = "hostile.example"
    body = {"seconds": 60, "reason": f"{SCRIPT}{IMAGE}"}
    assert stage.api.ask("POST", f"/api/hosts/{host}/block", body)[0] == 200
    shown = open_page(f"/ui/hosts/{host}")
    shown.see(SCRIPT)
    assert not shown.is_hacked
