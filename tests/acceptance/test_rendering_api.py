"""Rendering for callers from outside: the API with real Chromium, and what strangers may try with it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import struct
import subprocess
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.fleets import SHOAL, frontier_url
from tests.acceptance.serving import Api, beside, celery, serving, until
from tests.support import forking
from tests.support.databases import free_port
from tests.support.servers import StreamServer, answer, read_head

FORBIDDEN = "127.0.0.2"
"""An address of this machine that is not listed as allowed."""
RENDERING = {"SHOAL_BROWSER__SANDBOX": "false"}
ANN, BOB = "the-token-of-ann", "the-token-of-bob"

VISITS = """<title>Visits</title><p id=seen></p><script>
const seen = Number(localStorage.visits || 0), cookies = document.cookie;
localStorage.visits = seen + 1;
document.cookie = "script=1; max-age=1000";
document.getElementById("seen").textContent = JSON.stringify({seen, cookies});
</script>"""
FORM = """<title>Form</title><input name=word><button id=add>Add</button><ul></ul><script>
const field = document.querySelector("input"), list = document.querySelector("ul");
function add(word) { const row = document.createElement("li"); row.textContent = word; list.append(row); }
document.querySelector("#add").onclick = () => setTimeout(() => add("clicked"), 200);
field.onkeydown = event => { if (event.key === "Enter") add(field.value); };
</script>"""
SIZED = """<title>Sized</title><style>body { margin: 0; width: 700px; height: 3000px; background: #123456 }
#box { width: 120px; height: 45px; background: red }</style><div id=box></div>"""


NOISE = """<style>canvas { break-after: page }</style><body><script>
for (let sheet = 0; sheet < 15; sheet++) {
  const canvas = document.createElement("canvas"); canvas.width = canvas.height = 700; document.body.append(canvas);
  const context = canvas.getContext("2d"), noise = context.createImageData(700, 700);
  for (let at = 0; at < noise.data.length; at += 65536) crypto.getRandomValues(noise.data.subarray(at, at + 65536));
  context.putImageData(noise, 0, 0);
}</script>"""


class Site(StreamServer):
    """Pages with JavaScript."""

    def __init__(self) -> None:
        super().__init__()
        self.trap = ""
        self.cookies: list[tuple[str, str]] = []

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            self._log(request)
            self.cookies.append((request.path, request.header("cookie")))
            writer.write(self._respond(request.path))
            await writer.drain()

    def _respond(self, path: str) -> bytes:
        match path:
            case "/visits" | "/visits2":
                return answer(VISITS, ("Set-Cookie", "server=1; Path=/"))
            case "/form":
                return answer(FORM)
            case "/sized":
                return answer(SIZED)
            case "/data.json":
                return answer('{"price": 12345678901234567890123}', content_type="application/json")
            case "/loads":
                return answer("<p id=x>-</p><script>fetch('/data.json').then(r => r.text()).then(t => {"
                              "document.getElementById('x').textContent = t; fetch('/other') })</script>")  # fmt: skip
            case "/nosy":
                return answer(self._nosy())
            case "/away":
                return answer("", ("Location", f"{self.trap}/redirected"), status=302)
            case "/big":
                return answer("<p>.</p><script>document.body.textContent = 'x'.repeat(3000000)</script>")
            case "/prints":  # 15 sheets of noise, about 1.5 MB each
                return answer(NOISE)
            case "/plain":
                return answer("<title>Plain</title><h1>A page</h1><p>" + "It needs no browser at all. " * 20)
            case _:
                return answer(status=404)

    def _nosy(self) -> str:
        """A page that tries every way to a private address."""
        trap = self.trap
        return f"""<p id=out></p><iframe src="{trap}/frame"></iframe><img src="{trap}/image">
<link rel=stylesheet href="{trap}/style"><script src="{trap}/script"></script><script>
const out = document.getElementById("out");
function tell(word) {{ out.textContent += word + " "; }}
const tries = [
    fetch("{trap}/fetch", {{mode: "no-cors"}}).catch(() => 0).then(() => tell("tried")),
    new Promise(done => {{
        const socket = new WebSocket("{trap}/socket".replace("http", "ws"));
        socket.onopen = socket.onerror = () => {{ tell("tried"); done(); }};
    }}),
    new Promise(done => {{
        const code = 'fetch("{trap}/worker", {{mode: "no-cors"}}).catch(() => 0).then(() => postMessage(1))';
        const worker = new Worker(URL.createObjectURL(new Blob([code])));
        worker.onmessage = () => {{ tell("tried"); done(); }};
    }}),
];
navigator.sendBeacon("{trap}/beacon", "x");
Promise.all(tries).then(() => {{ out.className = "done"; }});
</script>"""


class Trap:
    """Listens on an address that nobody may contact. It counts connections, and closes them."""

    def __init__(self) -> None:
        self.connections = 0
        self._listener = socket.create_server((FORBIDDEN, 0))
        self.url = f"http://{FORBIDDEN}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                self._listener.accept()[0].close()
            except OSError:
                return
            self.connections += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with beside(Site()) as made:
        yield made


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("api")
    (folder / "shoal.toml").write_text(
        "concurrency_per_host = 1\n[retry]\nbase_delay = 0.05\n[browser]\nblock = []\n"
        f'[serve]\nallow = ["127.0.0.1/32"]\n[serve.tokens]\nann = "{ANN}"\nbob = "{BOB}"\n'
    )
    folder.joinpath("shoal.toml").chmod(0o600)
    with serving(folder, {**RENDERING, "SHOAL_SERVE__ALLOW": "127.0.0.1/32"}) as made:
        made.headers = {"Authorization": f"Bearer {ANN}"}
        yield made


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


def render(api: Api, *urls: str, headers: dict[str, str] | None = None, **options: Any) -> list[dict[str, Any]]:
    body = {"urls": urls, "options": {"render": True, "robots": False, "retries": 0, **options}}
    status, found = api.ask("POST", "/api/crawl/batch", body, headers)
    assert status == 200, found
    assert found["state"] == "finished"
    results: list[dict[str, Any]] = found["results"]
    return results


def decode_png(data: bytes) -> tuple[int, int, bytes]:
    """Width, height and the first pixel. It checks every chunk and the number of decompressed bytes."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, image, header = 8, b"", b""
    while place < len(data):
        (length,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        chunk = data[place + 8 : place + 8 + length]
        assert struct.unpack(">I", data[place + 8 + length : place + 12 + length]) == (zlib.crc32(kind + chunk),)
        header, image = (chunk if kind == b"IHDR" else header), (image + chunk if kind == b"IDAT" else image)
        place += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", header[:10])
    channels = {2: 3, 6: 4}[colour]
    raw = zlib.decompress(image)
    assert depth == 8
    assert len(raw) == height * (1 + width * channels)
    return width, height, raw[1:4]


# -- what callers get


def test_the_content_is_that_of_the_rendered_page(api: Api, site: Site) -> None:
    (result,) = render(api, f"{site.url}/loads", format="fields", fields={"x": "#x"})
    assert result["status"] == "success", result
    assert (result["rendered"], result["content"]) == (True, {"x": '{"price": 12345678901234567890123}'})
    assert (result["screenshot"], result["pdf"], result["captured"]) == (None, None, [])
    (plain,) = api.batch([f"{site.url}/loads"], options={"format": "fields", "fields": {"x": "#x"}})["results"]
    assert plain["content"] == {"x": "-"}
    assert "rendered" not in plain


@pytest.mark.parametrize(
    ("screenshot", "size", "colour"),
    [(True, (1280, 720), b"\x12\x34\x56"), ("full", (1280, 3000), None), ("#box", (120, 45), b"\xff\x00\x00")],
)
def test_screenshots(api: Api, site: Site, screenshot: object, size: tuple[int, int], colour: bytes | None) -> None:
    (result,) = render(api, f"{site.url}/sized", render={"screenshot": screenshot})
    assert result["status"] == "success", result
    width, height, first = decode_png(base64.b64decode(result["screenshot"], validate=True))
    assert (width, height) == size
    if screenshot == "#box":
        assert first == colour


def test_a_pdf_and_captured_json(api: Api, site: Site) -> None:
    (result,) = render(api, f"{site.url}/loads", render={"pdf": True, "capture": ["*/data.json", "*/nothing*"]})
    assert base64.b64decode(result["pdf"], validate=True).startswith(b"%PDF-")
    assert [(each["url"], each["status"], json.loads(each["body"])) for each in result["captured"]] == [
        (f"{site.url}/data.json", 200, {"price": 12345678901234567890123})
    ]


def test_a_pdf_that_is_too_large_fails_its_page_only(api: Api, site: Site) -> None:
    large, small = render(api, f"{site.url}/prints", f"{site.url}/sized", render={"pdf": True})
    assert large["status"] == "failed", len(large["pdf"])
    assert large["error"]["kind"] in ("too large", "timeout"), large["error"]
    assert small["status"] == "success", small
    assert base64.b64decode(small["pdf"], validate=True).startswith(b"%PDF-")


def test_actions(api: Api, site: Site) -> None:
    actions = [
        {"do": "fill", "selector": "input", "text": "typed"},
        {"do": "press", "key": "Enter", "selector": "input"},
        {"do": "click", "selector": "#add"},
        {"do": "wait", "wait_for": "li:nth-child(2)"},
    ]
    (result,) = render(
        api, f"{site.url}/form", render={"actions": actions}, format="fields", fields={"li": {"css": "li", "all": True}}
    )
    assert result["content"] == {"li": ["typed", "clicked"]}, result


def test_an_endless_list_is_scrolled_to_its_end(api: Api, shop: str) -> None:
    (result,) = render(
        api, f"{shop}app", render={"wait_for": "li.book", "actions": [{"do": "scroll"}]}, format="fields",
        fields={"titles": {"css": "li.book h3", "all": True}},
    )  # fmt: skip
    assert len(set(result["content"]["titles"])) == 60


def test_an_action_on_a_missing_element_fails_its_page_only(api: Api, site: Site) -> None:
    actions = [{"do": "click", "selector": "#add"}]
    form, plain = render(api, f"{site.url}/form", f"{site.url}/plain", render={"actions": actions}, timeout=15)
    assert form["status"] == "success"
    assert (plain["status"], plain["error"]["kind"]) == ("failed", "action")
    assert "#add" in plain["error"]["message"]


def test_auto_renders_only_what_needs_it(api: Api, site: Site, shop: str) -> None:
    app, plain = render(api, f"{shop}app", f"{site.url}/plain", render="auto", format="text")
    assert (app["rendered"], plain["rendered"]) == (True, False)
    assert "A Field Guide to Clouds" in app["content"]
    assert "needs no browser" in plain["content"]


def test_a_rendered_page_counts_against_the_limits(api: Api, site: Site, tmp_path: Path) -> None:
    (result,) = render(api, f"{site.url}/big", max_bytes=1_000_000)
    assert (result["status"], result["error"]["kind"]) == ("failed", "too large")
    with serving(tmp_path, {**RENDERING, "SHOAL_SERVE__MAX_SESSION_BYTES": "20000"}) as small:
        one, two = render(small, f"{site.url}/sized", f"{site.url}/plain", render={"pdf": True, "screenshot": "full"})
        kinds = {result["error"]["kind"] for result in (one, two) if result["error"]}
        assert kinds == {"limit"}


def test_a_screenshot_that_does_not_fit_into_an_answer_is_left_out(site: Site, tmp_path: Path) -> None:
    with serving(tmp_path, {**RENDERING, "SHOAL_SERVE__MAX_ANSWER_BYTES": "2000"}) as small:
        (result,) = render(small, f"{site.url}/sized", render={"screenshot": "full"})
        assert (result["status"], result["truncated"], result["title"]) == ("success", True, "Sized")
        assert result.get("screenshot") is None


def test_cookies_and_headers_of_the_batch_are_sent(api: Api, site: Site) -> None:
    del site.cookies[:]
    (result,) = render(api, f"{site.url}/loads", cookies={"own": "1"}, headers={"X-Own": "2"})
    assert result["status"] == "success"
    assert ("/loads", "own=1") in site.cookies


# -- callers and private addresses


def test_one_caller_cannot_see_the_cookies_or_the_storage_of_another(api: Api, site: Site) -> None:
    def seen(token: str) -> list[Any]:
        found = render(
            api, f"{site.url}/visits", f"{site.url}/visits2", headers={"Authorization": f"Bearer {token}"},
            format="fields", fields={"seen": "#seen"},
        )  # fmt: skip
        return [json.loads(result["content"]["seen"]) for result in found]

    fresh = {"seen": 0, "cookies": "server=1"}
    for token in (ANN, BOB, ANN):  # the last is another session of the first caller
        del site.cookies[:]
        first, second = seen(token)
        assert first == fresh
        assert second == {"seen": 1, "cookies": "server=1; script=1"}  # pages of one session share them
        assert [cookie for path, cookie in site.cookies if path == "/visits"] == [""]


def test_pages_and_everything_they_load_reach_no_private_address(api: Api, site: Site, trap: Trap) -> None:
    site.trap = trap.url
    port = trap.url.rpartition(":")[2]
    direct = render(
        api, f"{trap.url}/", f"http://2130706434:{port}/", f"http://[::ffff:{FORBIDDEN}]:{port}/",
        "http://169.254.169.254/latest/", f"{site.url}/away",
    )  # fmt: skip
    assert {(each["status"], each["error"]["kind"]) for each in direct} == {("failed", "address")}
    assert all(FORBIDDEN not in each["error"]["message"] for each in direct)
    (nosy,) = render(api, f"{site.url}/nosy", render={"wait_for": "#out.done"}, format="fields", fields={"out": "#out"})
    assert nosy["status"] == "success", nosy
    assert nosy["content"]["out"].split() == ["tried"] * 3
    assert trap.connections == 0


def test_the_same_page_reaches_an_allowed_address(site: Site, trap: Trap, tmp_path: Path) -> None:
    """Proof that the trap works."""
    site.trap = trap.url
    with serving(tmp_path, {**RENDERING, "SHOAL_SERVE__ALLOW": "127.0.0.0/8"}) as open_to_all:
        render(open_to_all, f"{site.url}/nosy", render={"wait_for": "#out.done"}, timeout=10)
    assert trap.connections > 3


# -- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("yes", 'must be true, false, "auto" or an object'),
        (1, 'must be true, false, "auto" or an object'),
        ({"script": "alert(1)"}, "there is no such field"),
        ({"page": True}, "there is no such field"),
        ({"actions": [{"do": "evaluate", "script": "1"}]}, "evaluate"),
        ({"actions": [{"selector": "a"}]}, "do"),
        ({"actions": [{"do": "click", "selector": ""}]}, "at least 1"),
        ({"actions": [{"do": "click", "selector": "a" * 301}]}, "at most 300"),
        ({"actions": [{"do": "click", "selector": "text=Add"}]}, "must be a CSS selector"),
        ({"actions": [{"do": "click", "selector": "//button"}]}, "must be a CSS selector"),
        ({"actions": [{"do": "click", "selector": "a >> internal:control=enter-frame"}]}, "must be a CSS selector"),
        ({"actions": [{"do": "click", "selector": "a", "timeout": 1}]}, "there is no such field"),
        ({"actions": [{"do": "press", "key": "a\\u0000"}]}, "pattern"),
        ({"actions": [{"do": "scroll", "times": 10**9}]}, "less than or equal to 100"),
        ({"actions": [{"do": "scroll"}] * 21}, "21"),
        ({"actions": [0] * 30_000}, "the limit is 20"),
        ({"wait_for": 60_001}, "60000"),
        ({"wait_for": 1.5}, "wait_for"),
        ({"screenshot": "xpath=//a"}, "must be a CSS selector"),
        ({"capture": ["*"] * 11}, "the limit is 10"),
        ({"capture": ["x" * 301]}, "at most 300"),
        ({"mode": "auto", "screenshot": True}, 'need "always"'),
        ({"mode": "never"}, "always"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_hostile_options_are_refused(api: Api, options: object, message: str) -> None:
    body = {"urls": ["http://127.0.0.1:1/"], "options": {"render": options}}
    status, found = api.ask("POST", "/api/crawl/batch", body)
    assert (status, found["error"]["kind"]) == (422, "bad request")
    assert message in json.dumps(found["error"], ensure_ascii=False).replace('\\"', '"')


def test_a_server_without_a_browser_says_so(site: Site, tmp_path: Path) -> None:
    """No session is started, and batches without rendering work."""
    body = {"urls": [f"{site.url}/plain"], "options": {"render": True}}
    (tmp_path / "rendered.py").write_text(
        "from shoal import Spider\n\n\nclass Rendered(Spider):\n    render = True\n\n    def parse(self, response):\n"
        "        return [{'url': response.url}]\n"
    )
    (tmp_path / "shoal.toml").write_text('[spiders.Rendered]\nfile = "rendered.py"\n')
    with serving(
        tmp_path, {"SHOAL_BROWSER__SANDBOX": "false", "SHOAL_BROWSER__EXECUTABLE": "/nowhere/chromium"}
    ) as api:
        status, found = api.ask("POST", "/api/crawl/batch", body)
        assert (status, found["error"]["kind"]) == (503, "no browser")
        assert "browser.executable" in found["error"]["message"]
        assert "/nowhere" not in found["error"]["message"]
        assert api.batch([f"{site.url}/plain"])["stats"]["success"] == 1
        status, found = api.ask("POST", "/api/runs", {"spider": "Rendered", "urls": [f"{site.url}/plain"]})
        assert (status, found["error"]["kind"]) == (503, "no browser")
        assert api.get("/api/runs")[1]["runs"] == []
    with serving(tmp_path, {**RENDERING, "SHOAL_SERVE__RENDER": "false"}) as api:
        status, found = api.ask("POST", "/api/crawl/batch", body)
        assert (status, found["error"]["kind"]) == (422, "bad request")
        assert "serve.render" in found["error"]["message"]


# -- other ways in


def test_celery_workers_render(site: Site, tmp_path: Path) -> None:
    with celery(tmp_path, 1, **RENDERING) as fleet:
        options = {"render": {"screenshot": True}, "format": "fields", "fields": {"x": "#x"}, "robots": False}
        answer = fleet.api.batch([f"{site.url}/loads"], distributed=True, options=options, timeout=90)
        (result,) = answer["results"]
        assert result["status"] == "success", result
        assert result["content"] == {"x": '{"price": 12345678901234567890123}'}
        assert decode_png(base64.b64decode(result["screenshot"]))[:2] == (1280, 720)


def shoal(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = forking.run(
        [*SHOAL, *words], cwd=folder, capture_output=True, text=True, timeout=100, env={**os.environ, **RENDERING}
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_crawl_with_a_browser(shop: str, tmp_path: Path) -> None:
    words = ("crawl", f"{shop}app", "--each", "li.book", "--item", "title=h3", "--delay", "0")
    assert shoal(tmp_path, *words, code=5).stdout == ""  # the HTML is an empty shell
    rows = [json.loads(line) for line in shoal(tmp_path, *words, "--render", "--screenshots", "p").stdout.splitlines()]
    assert len({row["title"] for row in rows}) == 20
    (picture,) = (tmp_path / "p").iterdir()
    assert {row["screenshot"] for row in rows} == {f"p/{picture.name}"}
    assert decode_png(picture.read_bytes())[0] == 1280
    assert len(shoal(tmp_path, *words, "--render-auto").stdout.splitlines()) == 20
    for wrong in (
        ["--render-auto", "--render"],
        ["--render-auto", "--screenshots", "p"],
        ["--no-render", "--screenshots", "p"],
    ):
        assert "contradict" in shoal(tmp_path, *words, *wrong, code=2).stderr


def test_run_and_worker_override_the_spider(shop: str, tmp_path: Path) -> None:
    (tmp_path / "books.py").write_text(
        "from shoal import Spider\n\n\nclass Books(Spider):\n    render = True\n"
        f'    start_urls = ["{shop}app"]\n\n    def parse(self, response):\n'
        '        return [{"n": len(response.css("li.book"))}]\n'
    )
    assert shoal(tmp_path, "run", "books.py", "-o", "-").stdout == '{"n":20}\n'
    assert shoal(tmp_path, "run", "books.py", "-o", "-", "--no-render").stdout == '{"n":0}\n'
    frontier = frontier_url("redis")
    shoal(tmp_path, "start", "books.py", "--frontier", frontier, "--run-id", "one")
    shoal(tmp_path, "worker", "books.py", "--frontier", frontier, "--run-id", "one", "--no-render", "-o", "w.jsonl")
    assert (tmp_path / "w.jsonl").read_text() == '{"n":0}\n'


def test_the_shell_renders(shop: str, tmp_path: Path) -> None:
    code = "len(css('li.book'))"
    assert shoal(tmp_path, "shell", f"{shop}app", "-c", code).stdout == "0\n"
    assert shoal(tmp_path, "shell", f"{shop}app", "--render", "-c", code).stdout == "20\n"
    assert (
        shoal(tmp_path, "shell", f"{shop}app", "-c", f"fetch('{shop}app', render=True); print({code})").stdout == "20\n"
    )


def test_a_browser_that_does_not_start_is_one_line(shop: str, tmp_path: Path) -> None:
    done = shoal(tmp_path, "crawl", f"{shop}app", "--render", "--set", "browser.executable=/nowhere", code=2)
    assert "browser.executable" in done.stderr


def test_a_run_of_the_server_renders_behind_the_guard(site: Site, trap: Trap, tmp_path: Path) -> None:
    site.trap = trap.url
    (tmp_path / "nosy.py").write_text(
        "from shoal import Spider\n\n\nclass Nosy(Spider):\n    render = {'wait_for': '#out.done'}\n"
        f"    start_urls = ['{site.url}/nosy', '{trap.url}/']\n    settings = {{'robots.obey': False}}\n\n"
        "    def parse(self, response):\n        return [{'out': response.css('#out::text').get()}]\n"
    )
    (tmp_path / "shoal.toml").write_text('[spiders.Nosy]\nfile = "nosy.py"\n')
    with serving(tmp_path, {**RENDERING, "SHOAL_SERVE__ALLOW": "127.0.0.1/32"}) as api:
        status, run = api.ask("POST", "/api/runs", {"spider": "Nosy"})
        assert status == 201, run
        path = f"/api/runs/{run['run_id']}"
        until(lambda: api.get(path)[1]["state"] == "finished", what="the run")
        items = api.get(f"{path}/items")[1]["items"]
        failed = api.get(path)[1]["stats"]["failed"]
    assert ([each["item"]["out"].split() for each in items], failed) == ([["tried"] * 3], 1)
    assert trap.connections == 0


def test_the_doctor_starts_the_browser(tmp_path: Path) -> None:
    found = shoal(tmp_path, "doctor").stdout
    assert re.search(r"^ok  Chromium [\d.]+ starts \(.+\)$", found, re.MULTILINE)
    assert re.search(r"^-   the sandbox of Chromium: off", found, re.MULTILINE)
    broken = shoal(tmp_path, "doctor", "--set", "browser.executable=/nowhere", code=1).stdout
    assert re.search(r"^BAD Chromium for rendering: \"browser.executable\"", broken, re.MULTILINE)


def test_the_doctor_connects_to_servers_that_are_configured(tmp_path: Path) -> None:
    redis = frontier_url("redis")
    found = shoal(tmp_path, "doctor", "--set", f"frontier={redis}", "--set", f"cluster.coordinator={redis}").stdout
    assert re.search(r"^ok  frontier redis:", found, re.MULTILINE)
    assert re.search(r"^ok  coordinator redis:", found, re.MULTILINE)
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    (tmp_path / "shoal.toml").write_text(f'frontier = "{nobody}"\n')
    assert f"BAD frontier {nobody}: cannot reach" in shoal(tmp_path, "doctor", code=1).stdout
    (tmp_path / "shoal.toml").write_text("fronteer = 1\n")
    assert "BAD configuration: " in shoal(tmp_path, "doctor", code=1).stdout
