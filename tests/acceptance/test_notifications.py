"""Notifications with real servers: SMTP, webhooks that are down and up again, servers killed while they send."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.config import Config
from shoal.operations.notifications.channels import Channel, open_channels
from shoal.operations.notifications.messages import Message
from shoal.operations.notifications.settings import load_notifications
from shoal.operations.problem import Problem
from tests.acceptance.fleets import SHOAL, frontier_url
from tests.acceptance.serving import FAST, PATIENCE, Api, Process, beside, is_genuine, serving, until
from tests.acceptance.target import Target, target
from tests.support.databases import RedisServer, free_port
from tests.support.servers import StreamServer, read_body, read_head
from tests.support.servers import answer as page_of
from tests.support.smtp_server import SmtpServer

KEY = "a-signing-key-that-nobody-sees"
PASSWORD = "a-password-that-nobody-sees"
PATH_SECRET = "T0SECRET/B0SECRET/a-path-that-nobody-sees"
SECRETS = (KEY, PASSWORD, "T0SECRET", "a-path-that-nobody-sees")
ENVIRON = {"OPS_KEY": KEY, "MAIL_PASSWORD": PASSWORD}
HOSTILE = "\x1b]0;x\x07 <!channel> \r\nBcc: evil@example.org\r\n\r\n.\r\n\u202e@everyone"


class Receiver(StreamServer):
    """Takes webhooks. While ``holds`` is set, it answers none of them."""

    def __init__(self, port: int = 0, status: int = 200) -> None:
        super().__init__(port)
        self.messages: list[tuple[dict[str, str], bytes]] = []
        self.status = status
        self.holds = False

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            body = await read_body(reader, request)
            self.messages.append(({name.lower(): value for name, value in request.headers}, body))
            while self.holds:
                await asyncio.sleep(0.02)
            writer.write(page_of(status=self.status))
            await writer.drain()

    def events(self) -> list[str]:
        """The event and the kind of each message."""
        found = [json.loads(body) for _, body in self.messages]
        return [f"{each['event']} {each['problem']['kind']}" for each in found]


def message(title: str = "books: stalled", text: str = "Nothing was done.") -> Message:
    about = Problem(
        key="stalled/r1", kind="stalled", severity="critical", run_id="r1", title=title, text=text, since=0.0
    )
    return Message(message_id="0123456789ab", event="new", at=time.time(), project="shoal", problem=about)


def channel(folder: Path, lines: str, environ: dict[str, str] | None = None) -> Channel:
    (folder / "shoal.toml").write_text(f"[notifications.channels.c]\n{lines}")
    loaded = load_notifications(folder / "shoal.toml")
    return open_channels(loaded, Config(), environ if environ is not None else ENVIRON)["c"]


def smtp(port: int, *lines: str) -> str:
    common = (
        'type = "smtp"',
        'host = "127.0.0.1"',
        'from = "shoal@example.org"',
        'to = ["a@example.org", "b@example.org"]',
    )
    return "\n".join((*common, f"port = {port}", *lines))


LOGIN = 'username = "shoal"\npassword_env = "MAIL_PASSWORD"'


# -- mail


@pytest.mark.parametrize("security", ["starttls", "tls"])
async def test_a_mail_is_sent_encrypted_and_with_a_password(
    tmp_path: Path, certificate: Path, tls: ssl.SSLContext, security: str
) -> None:
    how = {"starttls": tls} if security == "starttls" else {"tls": tls}
    async with SmtpServer(password=PASSWORD, **how) as server:  # type: ignore[arg-type]
        lines = smtp(server.port, LOGIN, f'security = "{security}"', f'ca_file = "{certificate}"')
        assert await channel(tmp_path, lines).send(message("Bücher: steht", "Nichts geht.\n.\n..")) == ""
    (received,) = server.mails
    assert (received.sender, received.recipients) == ("shoal@example.org", ["a@example.org", "b@example.org"])
    assert (received.encrypted, received.user) == (True, "shoal")
    assert received.mail["Subject"] == "[shoal] critical: Bücher: steht"
    assert received.mail.get_content().splitlines()[:3] == ["Nichts geht.", ".", ".."]
    assert received.mail["X-Shoal-Message"] == "0123456789ab"


async def test_hostile_texts_add_nothing_to_a_mail(tmp_path: Path) -> None:
    async with SmtpServer() as server:
        sent = channel(tmp_path, smtp(server.port, 'security = "none"'))
        assert await sent.send(message(HOSTILE, HOSTILE)) == ""
        assert await sent.send(message()) == ""
    first, second = server.mails
    assert first.recipients == second.recipients == ["a@example.org", "b@example.org"]
    assert first.mail.keys() == second.mail.keys()
    assert "\x1b" not in first.mail["Subject"] + first.mail.get_content()
    assert "\u202e" not in first.mail["Subject"] + first.mail.get_content()


async def test_why_a_mail_was_not_sent(tmp_path: Path, tls: ssl.SSLContext, certificate: Path) -> None:
    trusted = f'ca_file = "{certificate}"'
    async with SmtpServer(password="another", starttls=tls) as server:
        error = await channel(tmp_path, smtp(server.port, LOGIN, trusted)).send(message())
        assert "it responded 535" in error
        assert PASSWORD not in error  # although the server repeats it
        assert "certificate" in await channel(tmp_path, smtp(server.port, LOGIN)).send(message())
    async with SmtpServer() as server:
        assert "STARTTLS" in await channel(tmp_path, smtp(server.port)).send(message())
        server.refuses = "550 no such user"
        plain = channel(tmp_path, smtp(server.port, 'security = "none"'))
        assert "it refuses a@example.org, b@example.org" in await plain.send(message())
        assert server.mails == []
    assert "Connection refused" in await plain.send(message())


async def test_a_mail_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lines = smtp(silent.getsockname()[1], 'security = "none"', "timeout = 0.2")
        started = time.monotonic()
        assert "timed out" in await channel(tmp_path, lines).send(message())
        assert time.monotonic() - started < PATIENCE


# -- webhooks and apprise


def webhook(url: str) -> str:
    return f'type = "webhook"\nurl = "{url}"\nkey_env = "OPS_KEY"\nallow = ["127.0.0.1"]\ntimeout = 5'


async def test_a_webhook_is_signed_and_says_which_message_it_is(tmp_path: Path) -> None:
    async with Receiver() as receiver:
        sent = channel(tmp_path, webhook(f"{receiver.url}/hook"))
        assert await sent.send(message(HOSTILE)) == ""
        receiver.status = 500
        assert await sent.send(message()) == "the receiver responded with HTTP 500"
        await sent.close()
    headers, body = receiver.messages[0]
    assert is_genuine(KEY, headers["x-shoal-signature"], body)
    assert not is_genuine("another", headers["x-shoal-signature"], body)
    assert (headers["x-shoal-message"], json.loads(body)["id"]) == ("0123456789ab", "0123456789ab")
    assert json.loads(body)["problem"]["title"] == HOSTILE  # JSON carries it as data; `find_problems` escapes it


async def test_a_webhook_contacts_no_private_address_that_is_not_listed(tmp_path: Path) -> None:
    async with Receiver() as receiver:
        sent = channel(tmp_path, webhook(receiver.url).replace('allow = ["127.0.0.1"]', ""))
        assert "a loopback address, which may not be contacted" in await sent.send(message())
        await sent.close()
    assert receiver.connections == 0


async def test_a_service_of_apprise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Receiver() as receiver:
        environ = {"URL": f"json://user:{PASSWORD}@127.0.0.1:{receiver.url.rpartition(':')[2]}/{PATH_SECRET}"}
        sent = channel(tmp_path, 'type = "apprise"\nurl_env = "URL"', environ)
        assert await sent.send(message(HOSTILE)) == ""
        receiver.status = 500
        error = await sent.send(message())
    assert "500" in error
    body = json.loads(receiver.messages[0][1])
    assert body["title"].startswith("[shoal] critical: ")
    assert not {"\x1b", "\r", "\n", "\u202e"} & set(body["title"])
    for secret in SECRETS:
        assert secret not in error + caplog.text


# -- a server


SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"robots.obey": False, "throttle.enabled": False, "retry.max_attempts": 1}

    def parse(self, response):
        yield {"url": response.url, **({"title": "t"} if "full" in response.url else {})}

class Broken(Pages):
    name = "broken"

    def opened(self):
        raise RuntimeError("no database")
"""
SETTINGS = """
[spiders.Here]
file = "pages.py:Pages"

[spiders.Broken]
file = "pages.py:Broken"

[notifications]
check_every = 0.2
min_interval = 0
retry_after = 0.3
failing_after = 2

[notifications.rules.everything]
events = ["finished", "failed", "stalled", "few_items", "low_coverage", "store_away", "worker_lost"]
"""


def project(folder: Path, **channels: str) -> Path:
    (folder / "pages.py").write_text(SPIDER)
    tables = "".join(f"\n[notifications.channels.{name}]\n{lines}\n" for name, lines in channels.items())
    (folder / "shoal.toml").write_text(SETTINGS + tables)
    return folder


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


def start(api: Api, *urls: str, spider: str = "Here") -> str:
    status, answer = api.ask("POST", "/api/runs", {"spider": spider, "urls": list(urls), "new_run": True})
    assert status == 201, answer
    run_id: str = answer["run_id"]
    return run_id


def page_of_notifications(api: Api) -> Any:
    status, answer = api.get("/api/notifications")
    assert status == 200, answer
    return answer


def state_of(api: Api, name: str) -> Any:
    return next(each for each in page_of_notifications(api)["channels"] if each["name"] == name)


def shoal(folder: Path, environ: dict[str, str], *words: str) -> tuple[int, str]:
    """The exit code and the output of a command, which runs in this process: that is faster."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        patch.setattr(sys, "argv", ["shoal", *words])
        patch.setattr(sys, "path", [*sys.path])
        patch.chdir(folder)
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()
    return 0, out.getvalue()


def test_a_receiver_that_is_down_gets_its_messages_later_and_the_other_channel_says_so(
    tmp_path: Path, site: Target
) -> None:
    port = free_port()
    with beside(SmtpServer()) as mail:
        project(
            tmp_path,
            ops=webhook("x").replace('url = "x"', 'url_env = "OPS_URL"'),
            mail=smtp(mail.port, 'security = "none"'),
        )
        url = f"http://127.0.0.1:{port}/{PATH_SECRET}"
        environ = {**ENVIRON, "OPS_URL": url, "SHOAL_LOG_LEVEL": "DEBUG", "SHOAL_FRONTIER": "sqlite:///runs.db"}
        with serving(tmp_path, environ) as api:
            until_watched(api)
            run_id = start(api, f"{site.url}/a")
            failing = until(lambda: (found := state_of(api, "ops"))["failing"] and found, what="a failing channel")
            assert "refused" in failing["error"].lower()
            until(lambda: len(mail.mails) >= 2, what="mails on the run and the channel")
            subjects = [each.mail["Subject"] for each in mail.mails]
            assert subjects[:2] == [
                "[shoal] info: pages: finished", "[shoal] warning: notification channel ops fails"
            ]  # fmt: skip
            assert run_id in mail.mails[0].mail.get_content()

            with beside(Receiver(port)) as receiver:
                until(lambda: receiver.events() == ["problem.new finished"], what="the message")
                headers, body = receiver.messages[0]
                assert is_genuine(KEY, headers["x-shoal-signature"], body)
                assert json.loads(body)["problem"]["run_id"] == run_id
                until(lambda: len(mail.mails) == 3, what="the channel works again")
                assert "resolved" in mail.mails[2].mail["Subject"]
                assert not state_of(api, "ops")["failing"]
                time.sleep(1.0)
                assert len(receiver.messages) == 1
                assert_no_secret(tmp_path, environ, api)


def until_watched(api: Api) -> None:
    """What happens before the first check is not reported."""
    until(lambda: page_of_notifications(api)["watched_since"], what="a watch")
    time.sleep(0.05)


def assert_no_secret(folder: Path, environ: dict[str, str], api: Api) -> None:
    shown = [api.process.said(), json.dumps(page_of_notifications(api)), json.dumps(api.get("/api/actions")[1])]
    shown += [shoal(folder, environ, *words)[1] for words in (("config",), ("notify", "list", "--all", "--json"))]
    for text in shown:
        assert text
        for secret in SECRETS:
            assert secret not in text


def test_two_servers_report_once_and_the_other_one_repeats_what_a_killed_one_was_sending(
    tmp_path: Path, site: Target
) -> None:
    with beside(Receiver()) as receiver:
        project(tmp_path, ops=webhook(receiver.url).replace("timeout = 5", "timeout = 60"))
        environ = {**ENVIRON, "SHOAL_FRONTIER": frontier_url("redis")}
        with (
            serving(tmp_path, {**environ, "SHOAL_USER_AGENT": "one"}) as one,
            serving(tmp_path, {**environ, "SHOAL_USER_AGENT": "two"}) as two,
        ):
            until_watched(one)
            start(one, f"{site.url}/a")
            until(lambda: receiver.events() == ["problem.new finished"], what="the first message")
            time.sleep(1.0)  # several checks of both servers
            assert len(receiver.messages) == 1

            receiver.holds = True
            start(two, f"{site.url}/b")
            until(lambda: len(receiver.messages) == 2, what="the second message")
            sender = {"one": one, "two": two}[receiver.messages[1][0]["user-agent"]]
            sender.process.kill()
            receiver.holds = False
            until(lambda: len(receiver.messages) == 3, what="the repeat")
            (before, first), (after, repeated) = receiver.messages[1:]
            assert first == repeated
            assert before["x-shoal-message"] == after["x-shoal-message"]
            assert before["user-agent"] != after["user-agent"]

            left = two if sender is one else one
            until(
                lambda: not any(each["undelivered"] for each in page_of_notifications(left)["problems"]), what="a mark"
            )
            time.sleep(1.0)
            assert len(receiver.messages) == 3


def test_a_run_with_fewer_items_and_fields_than_before(tmp_path: Path, site: Target) -> None:
    with beside(Receiver()) as receiver:
        project(tmp_path, ops=webhook(receiver.url))
        with serving(tmp_path, {**ENVIRON, "SHOAL_FRONTIER": "sqlite:///runs.db"}) as api:
            until_watched(api)
            good = start(api, *(f"{site.url}/full{i}" for i in range(6)))
            until(lambda: receiver.events() == ["problem.new finished"], what="the good run")
            bad = start(api, *(f"{site.url}/empty{i}" for i in range(2)))
            until(lambda: len(receiver.messages) == 4, what="the bad run")
            bodies = {
                (each := json.loads(body))["problem"]["kind"]: each["problem"] for _, body in receiver.messages[1:]
            }
            assert bodies["few_items"]["text"] == f"2 items; run {good} had 6."
            assert bodies["low_coverage"]["text"] == f"Compared with run {good}: title 100% -> 0%."
            assert {each["run_id"] for each in bodies.values()} == {bad}
            again = start(api, *(f"{site.url}/empty{i}" for i in range(2)))
            until(lambda: len(receiver.messages) == 7, what="the next bad run")
            texts = [json.loads(body)["problem"] for _, body in receiver.messages[4:]]
            assert {each["run_id"] for each in texts} == {again}
            assert any(good in each["text"] for each in texts)  # a bad run is no measure


def test_a_run_that_fails_a_worker_that_is_killed_and_a_store_that_dies(tmp_path: Path, site: Target) -> None:
    redis = RedisServer()
    with beside(Receiver()) as receiver, ExitStack() as stack:
        stack.callback(redis.close)
        project(tmp_path, ops=webhook(receiver.url))
        environ = {**ENVIRON, "SHOAL_FRONTIER": redis.url, "SHOAL_WORKER__SESSION": "2"}
        api = stack.enter_context(serving(tmp_path, environ))
        until_watched(api)
        failed = start(api, f"{site.url}/a", spider="Broken")
        until(lambda: len(receiver.messages) == 1, what="the failed run")
        problem = json.loads(receiver.messages[0][1])["problem"]
        assert (problem["kind"], problem["run_id"]) == ("failed", failed)
        assert "no database" in problem["text"]

        (tmp_path / "urls.txt").write_text(f"{site.url}/b?gate=1\n")
        command = ["start", "pages.py:Pages", "--run-id", "r1", "--urls-file", "urls.txt"]
        code, out = shoal(tmp_path, {**FAST, **environ}, *command)
        assert code == 0, out
        command = [*SHOAL, "worker", "pages.py:Pages", "--run-id", "r1"]
        worker = Process(command, tmp_path, "worker", {**FAST, **environ})
        stack.callback(worker.kill)
        site.wait_until(lambda visits: any("gate" in visit.path for visit in visits))
        worker.kill()
        until(lambda: "problem.new worker_lost" in receiver.events(), what="the lost worker")
        assert json.loads(receiver.messages[1][1])["problem"]["run_id"] == "r1"

        redis.kill()
        until(lambda: "problem.new store_away" in receiver.events(), what="the dead store")
        redis.start()
        until(lambda: "problem.resolved store_away" in receiver.events(), what="the store that is back")
        assert len(receiver.messages) == 4


TROUBLES = """
[notifications.rules.troubles]
events = ["stalled", "failure_rate", "schedule_missed"]
stalled_after = 3
failure_rate = 0.3
failure_pages = 3

[notifications.rules.patient]
spider = "calm"
events = []
stalled_after = 3600
failure_pages = 1000

[spiders.Calm]
file = "pages.py:Calm"

[schedules.yearly]
spider = "Broken"
every = "52w"
"""


def test_troubles_of_runs_and_schedules(tmp_path: Path, site: Target) -> None:
    """A run that stands still and whose pages fail, in a server, until it ends; a schedule whose run cannot start. The
    limits of a spider win over those for all."""
    with beside(Receiver()) as receiver:
        project(tmp_path, ops=webhook(receiver.url))
        (tmp_path / "pages.py").write_text(SPIDER + "\nclass Calm(Pages):\n    name = 'calm'\n")
        text = (tmp_path / "shoal.toml").read_text()
        before, _, rest = text.partition("[notifications.rules.everything]")
        channels = rest[rest.index("[notifications.channels") :]
        (tmp_path / "shoal.toml").write_text(f"{before}{channels}{TROUBLES}")
        urls = [*(f"{site.url}/{number}?status=404" for number in range(3)), f"{site.url}/hang?gate=1"]
        with serving(tmp_path, {**ENVIRON, "SHOAL_FRONTIER": "sqlite:///runs.db"}) as api:
            until_watched(api)
            calm, run_id = start(api, *urls, spider="Calm"), start(api, *urls)
            until(lambda: {"problem.new stalled", "problem.new failure_rate"} <= {*receiver.events()}, what="troubles")
            bodies = {(each := json.loads(body)["problem"])["kind"]: each for _, body in receiver.messages}
            assert "3 of 3 pages failed; the limit is 30%" in bodies["failure_rate"]["text"]
            assert "1 in flight. 1 process works on it." in bodies["stalled"]["text"]
            assert api.ask("POST", "/api/schedules/yearly/run")[0] == 201
            until(lambda: "problem.new schedule_missed" in receiver.events(), what="the schedule")
            site.open_gate()
            until(lambda: "problem.resolved stalled" in receiver.events(), what="the end of the run")
            assert api.get(f"/api/runs/{calm}")[0] == 200
            found = {json.loads(body)["problem"]["run_id"] for _, body in receiver.messages}
            assert calm not in found
            assert run_id in found


def test_commands_routes_and_the_action_log(tmp_path: Path, site: Target) -> None:
    with beside(Receiver()) as receiver:
        project(tmp_path, ops=webhook(receiver.url), gone=webhook("http://127.0.0.1:9/"))
        environ = {**ENVIRON, "SHOAL_FRONTIER": "sqlite:///runs.db"}
        code, out = shoal(tmp_path, environ, "notify", "test", "ops")
        assert (code, out) == (0, "ops: delivered\n")
        assert [json.loads(body)["event"] for _, body in receiver.messages] == ["test"]
        code, out = shoal(tmp_path, environ, "notify", "test")
        assert code == 1
        assert "gone: not delivered: " in out
        code, out = shoal(tmp_path, environ, "notify", "test", "opps")
        assert (code, "did you mean ops?" in out) == (2, True)
        code, out = shoal(tmp_path, {**environ, "OPS_KEY": ""}, "serve")
        assert (code, "OPS_KEY (key_env) is not set" in out) == (2, True)

        with serving(tmp_path, environ) as api:
            status, answer = api.ask("POST", "/api/notifications/test", {"channel": "ops"})
            assert (status, answer) == (200, {"results": [{"channel": "ops", "delivered": True, "error": ""}]})
            assert api.ask("POST", "/api/notifications/test", {"channel": "opps"})[0] == 422
            run_id = start(api, f"{site.url}/a?gate=1")
            host = site.url.removeprefix("http://")
            for method, path, body in (
                ("POST", f"/api/runs/{run_id}/pause", None), ("POST", f"/api/runs/{run_id}/resume", None),
                ("PUT", f"/api/hosts/{host}", {"delay": 2}),
                ("POST", f"/api/hosts/{host}/block", {"reason": "why not"}),
                ("POST", f"/api/hosts/{host}/unblock", None), ("POST", f"/api/runs/{run_id}/retry-failed", {}),
                ("POST", f"/api/runs/{run_id}/cancel", None), ("DELETE", f"/api/runs/{run_id}", None),
            ):  # fmt: skip
                assert api.ask(method, path, body)[0] == 200, path
            assert api.ask("POST", f"/api/runs/{run_id}/pause")[0] == 404
            status, answer = api.get("/api/actions?limit=9")
            assert [each["what"] for each in reversed(answer["actions"])] == [
                "start", "pause", "resume", "set host", "block host", "unblock host", "retry", "cancel", "delete"
            ]  # fmt: skip
            assert {each["who"] for each in answer["actions"]} == {"admin (127.0.0.1)"}
            assert answer["actions"][4]["target"] == host
            assert "why not" in answer["actions"][4]["detail"]
        code, out = shoal(tmp_path, environ, "actions", "--limit", "2")
        assert code == 0
        assert out.splitlines()[0].endswith(f"admin (127.0.0.1)  delete {run_id}  (of pages, cancelled)")
        code, out = shoal(tmp_path, {"SHOAL_FRONTIER": "sqlite:///runs.db"}, "notify", "list", "--all")
        assert code == 0
        assert "channel ops (webhook): " in out


def test_commands_are_in_the_action_log(tmp_path: Path, site: Target) -> None:
    project(tmp_path)
    environ = {"SHOAL_FRONTIER": frontier_url("redis")}
    code, out = shoal(tmp_path, environ, "start", "pages.py:Pages", "--run-id", "r1")
    assert code == 0, out
    for words in (
        ("pause", "r1"), ("resume", "r1"), ("retry-failed", "r1"), ("hosts", "set", "a.example", "--delay", "2"),
        ("cancel", "r1"), ("rm", "r1"),
    ):  # fmt: skip
        code, out = shoal(tmp_path, environ, *words)
        assert code == 0, out
    code, out = shoal(tmp_path, environ, "actions", "--json")
    found = [json.loads(line) for line in reversed(out.splitlines())]
    assert [each["what"] for each in found] == ["start", "pause", "resume", "retry", "set host", "cancel", "delete"]
    assert {each["who"].rpartition("@")[2] for each in found} == {socket.gethostname()}
    assert (found[4]["target"], found[4]["detail"]) == ("a.example", "delay 2.0")
