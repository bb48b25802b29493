"""Notifications: settings and secrets, rules, what is reported, delivery, and the watcher."""

from __future__ import annotations

import asyncio
import re
import time
from email import message_from_bytes
from email.policy import default as default_policy
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Config, load_config
from shoal.errors import ConfigError, StoreAwayError
from shoal.frontier.memory import MemoryStore
from shoal.http import Request
from shoal.operations.notifications.channels import Channel, Mail, open_channels
from shoal.operations.notifications.delivery import (
    Delivery,
    channels_for,
    limits_for,
    read_channel_states,
    read_reports,
)
from shoal.operations.notifications.messages import (
    Message,
    ProblemEnd,
    Report,
    make_test_message,
    next_event,
    updated_report,
)
from shoal.operations.notifications.settings import (
    NotificationSettings,
    Rule,
    Secret,
    SmtpChannel,
    load_notifications,
    without_secrets,
)
from shoal.operations.notifications.watcher import Notifications, Watcher
from shoal.operations.problem import Problem, ProblemKind, ProblemLimits, Severity
from shoal.operations.schedules.schedule import Definition, Schedule, next_step
from shoal.operations.schedules.service import Schedules
from shoal.operations.snapshot import StoreSnapshot
from shoal.ports import Document, FrontierOptions, Run
from shoal.ports.documents import StoredValue
from shoal.runs.reports import ProcessReport, process_key

NOW = 1_700_000_000.0
SECRET = "xoxb-a-very-secret-value"


def problem(
    key: str = "stalled/r1", kind: ProblemKind = "stalled", severity: Severity = "critical", **more: Any
) -> Problem:
    values = {"run_id": "r1", "spider": "books", "title": "books: stalled", "text": "Nothing.", "since": NOW, **more}
    return Problem(key=key, kind=kind, severity=severity, **values)


# -- settings


def written(folder: Path, text: str) -> Path:
    file = folder / "shoal.toml"
    file.write_text(text)
    return file


COMPLETE = """
[notifications]
check_every = 5
[notifications.channels.ops]
type = "webhook"
url = "https://ops.example/hook"
key_env = "OPS_KEY"
[notifications.channels.mail]
type = "smtp"
host = "mail.example"
username = "shoal"
password_file = "password"
from = "shoal@example.org"
to = ["a@example.org", "b@example.org"]
[notifications.rules.all]
events = ["failed", "stalled"]
[notifications.rules.books]
spider = "books"
channels = ["mail"]
stalled_after = 60
"""


def test_channels_and_rules_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{SECRET}\n")
    loaded = load_notifications(written(tmp_path, COMPLETE))
    assert loaded.settings.check_every == 5
    assert list(loaded.settings.channels) == ["ops", "mail"]
    assert loaded.settings.rules["books"] == Rule(spider="books", channels=("mail",), stalled_after=60)
    channels = open_channels(loaded, Config(), {"OPS_KEY": SECRET})
    assert list(channels) == ["ops", "mail"]
    assert SECRET not in repr(channels) + repr(loaded) + repr([vars(channel) for channel in channels.values()])


def test_the_table_is_no_setting_of_a_run(tmp_path: Path) -> None:
    resolved = load_config(file=written(tmp_path, "concurrency = 3\n" + COMPLETE))
    assert resolved.config.concurrency == 3
    assert "notifications" not in repr(resolved)


WEBHOOK = '[notifications.channels.ops]\ntype = "webhook"\n'
SMTP = '[notifications.channels.ops]\ntype = "smtp"\nhost = "h"\nfrom = "a@b"\nto = ["c@d"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMTP + f'password = "{SECRET}"', r'"password" is a secret and must not be in this file.* password_env = '),
        (WEBHOOK + f'key = "{SECRET}"', r'"key" is a secret.* key_file = '),
        (WEBHOOK + f'url = "https://u:{SECRET}@h/"', r'"url" is a secret'),
        (WEBHOOK + f'url = "https://h/?token={SECRET}"', r'"url" is a secret'),
        (WEBHOOK + f'url = "https://[{SECRET}/"', r'"url" is a secret'),
        (f'[notifications.channels.ops]\ntype = "slack"\nurl = "https://h/{SECRET}"', r'"url" is a secret'),
        (f'[notifications.channels.ops]\ntype = "telegram"\nchat = "1"\ntoken = "{SECRET}"', r'"token" is a secret'),
        ('[notifications.channels.ops]\nurl_env = "A"', '"type" is missing; it is one of webhook, smtp'),
        ('[notifications.channels.ops]\ntype = "pigeon"', "pigeon"),
        (WEBHOOK + 'key_evn = "A"', "unknown field `key_evn`; did you mean key_env?"),
        (SMTP.replace("c@d", "c@d\\nBcc: e@f"), r"\$\.to"),
        (SMTP.replace("c@d", "c@d\\n"), r"\$\.to"),
        (SMTP.replace('"a@b"', '"nobody"'), r"\$\.from"),
        ('[notifications.rules.x]\nevents = ["stalld"]', "events are: finished, degraded, failed, stalled"),
        ('[notifications.rules.x]\nchannels = ["op"]\n' + WEBHOOK, "no channel 'op'; did you mean ops?"),
        ("[notifications.rules.x]\nstaled_after = 3", "did you mean stalled_after?"),
        ("[notifications.rules.x]\nfailure_rate = 3", r"failure_rate"),
        ("[notifications]\ncheck_evry = 3", "did you mean check_every?"),
        ("notifications = 3", '"notifications" must be a table'),
        ("[notifications]\nrules = 3", r'"notifications.rules" must be a table'),
        ('[notifications.channels."a/b"]\ntype = "slack"', "no slash"),
    ],
)
def test_what_is_wrong_is_said_without_the_secret(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_notifications(written(tmp_path, text))
    assert str(tmp_path / "shoal.toml") in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        (WEBHOOK + 'url = "https://h/"\nkey_env = "K"', {}, "the environment variable K .key_env. is not set"),
        (WEBHOOK + 'url = "https://h/"', {}, 'set key_env = "VARIABLE" or key_file = "PATH"'),
        (WEBHOOK + 'url = "https://h/"\nkey_env = "SHOAL_K"', {"SHOAL_K": SECRET}, "begin with SHOAL_ are settings"),
        (WEBHOOK + 'url = "https://h/"\nkey_file = "none"', {}, "cannot read .*none .key_file.: No such file"),
        (WEBHOOK + 'url = "https://h/"\nkey_env = "K"\nkey_file = "x"', {}, "contradict each other"),
        (WEBHOOK + 'url = "https://h/"\nkey_env = "K"', {"K": f"{SECRET}\nX: 1"}, "must be one line"),
        (WEBHOOK + 'url_env = "U"\nkey_env = "K"', {"U": f"gopher:{SECRET}", "K": "k"}, "must be http:// or https://"),
        (SMTP + 'password_env = "P"', {"P": SECRET}, "the password has no username"),
        (SMTP + 'username = "u"\npassword_env = "P"\nsecurity = "none"', {"P": SECRET}, "not sent without encryption"),
        ('[notifications.channels.o]\ntype = "apprise"\nurl_env = "U"', {"U": f"what://{SECRET}"}, "does not know"),
    ],
)  # fmt: skip
def test_a_channel_without_its_secret_is_an_error(
    tmp_path: Path, text: str, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_channels(load_notifications(written(tmp_path, text)), Config(), environ)
    assert SECRET not in str(caught.value)


def test_slack_and_telegram_are_services_of_apprise(tmp_path: Path) -> None:
    text = (
        '[notifications.channels.chat]\ntype = "slack"\nurl_env = "SLACK"\n'
        '[notifications.channels.bot]\ntype = "telegram"\ntoken_env = "BOT"\nchat = "-1001234"\n'
    )
    environ = {
        "SLACK": "https://hooks.slack.com/services/T0123456A/B0123456A/abcdefghijklmnopqrstuvwx",
        "BOT": "123456789:abcdefghijklmnopqrstuvwxyzABCDEFGHI",
    }
    channels = open_channels(load_notifications(written(tmp_path, text)), Config(), environ)
    names = [[service.service_name for service in channel._service] for channel in channels.values()]  # type: ignore[attr-defined]
    assert [[str(name) for name in each] for each in names] == [["Slack"], ["Telegram"]]


@given(st.text(min_size=8, max_size=40).filter(lambda text: "*" not in text))
def test_no_text_shows_a_secret(secret: str) -> None:
    assert secret not in without_secrets(f"before {secret} after {secret}", [Secret(secret)])
    assert secret not in f"{Secret(secret)} {Secret(secret)!r}"


def test_parts_of_a_secret_url_are_hidden_and_its_host_is_shown() -> None:
    url = Secret("https://user:password1@hooks.example/services/T000000/abcdefgh?token=ijklmnop")
    shown = without_secrets("hooks.example: no /services/T000000 for user, password1, ijklmnop, abcdefgh", [url])
    assert shown == "hooks.example: no /***/*** for user, ***, ***, ***"


# -- rules


CHANNELS = {"ops": 1, "mail": 2}


def test_the_most_specific_rule_sets_a_limit() -> None:
    rules = [
        Rule(run="r1", stalled_after=1), Rule(spider="books", stalled_after=2, output_lag=20), Rule(stalled_after=3),
        Rule(spider="other", failure_rate=0.5),
    ]  # fmt: skip
    assert limits_for(rules, "r1", "books").stalled_after == 1
    assert limits_for(rules, "r2", "books").stalled_after == 2
    assert limits_for(rules, "r2", "books").output_lag == 20
    assert limits_for(rules, "r2", "none").stalled_after == 3
    assert limits_for(rules, "r1", "books").failure_rate == 0.2
    assert limits_for([], "r1", "books").stalled_after == 600


def test_a_problem_goes_to_the_channels_of_all_its_rules() -> None:
    rules = [
        Rule(events=("stalled",), channels=("mail",)),
        Rule(spider="books", events=("stalled", "finished"), channels=("ops",)),
        Rule(run="r9"),
    ]
    assert channels_for(rules, problem(), CHANNELS) == ["ops", "mail"]
    assert channels_for(rules, problem(spider="other"), CHANNELS) == ["mail"]
    assert channels_for(rules, problem(kind="finished", severity="info"), CHANNELS) == ["ops"]
    assert channels_for(rules, problem(kind="unbalanced"), CHANNELS) == []
    assert channels_for(rules, problem(kind="unbalanced", run_id="r9"), CHANNELS) == ["ops", "mail"]
    assert channels_for(rules, problem(kind="store_away", run_id="", spider=""), CHANNELS) == []


def test_without_rules_all_problems_go_to_all_channels_but_not_what_is_none() -> None:
    assert channels_for([], problem(), CHANNELS) == ["ops", "mail"]
    assert channels_for([], problem(kind="finished", severity="info"), CHANNELS) == []


def test_a_failing_channel_is_reported_through_the_others_whatever_the_rules_say() -> None:
    rules = [Rule(events=("stalled",), channels=("ops",))]
    assert channels_for(rules, problem(kind="channel_failing", about="ops"), CHANNELS) == ["mail"]


# -- what is reported


def reported(at: float = NOW, *, over: bool = False, **more: Any) -> Report:
    return Report(problem=problem(**more), opened_at=at, reported_at=at, closed_at=at if over else None)


@pytest.mark.parametrize(
    ("report", "found", "later", "event"),
    [
        (None, problem(), 0, "new"),
        (None, None, 0, None),
        (reported(), problem(), 1e6, None),
        (reported(), None, 1, "resolved"),
        (reported(over=True), None, 1, None),
        (reported(over=True), problem(), 99, None),
        (reported(over=True), problem(), 100, "new"),
        (reported(), problem(severity="warning"), 99, None),
        (reported(), problem(severity="warning"), 100, "changed"),
        (reported(figure=5.0), problem(figure=9.9), 100, None),
        (reported(figure=5.0), problem(figure=10.0), 100, "changed"),
        (reported(figure=5.0), problem(figure=10.0), 99, None),
        (reported(kind="finished"), None, 1, None),
        (reported(), problem(severity="warning"), -1e6, "changed"),  # the clock was set back
    ],
)
def test_a_problem_is_sent_once_again_if_it_changes_and_when_it_is_over(
    report: Report | None, found: Problem | None, later: float, event: str | None
) -> None:
    assert next_event(report, found, NOW + later, 100) == event


def lost(*, over: bool = False, taken_back: bool = False) -> Report:
    report = reported(kind="worker_lost", key="worker_lost/r1/w1", about="w1", over=over)
    return msgspec.structs.replace(report, taken_back=taken_back, channels=("ops",))


@pytest.mark.parametrize(
    ("report", "end", "event"),
    [
        (lost(), None, None),
        (lost(), ProblemEnd.RUN_ENDED, None),
        (lost(), ProblemEnd.ALIVE, "resolved"),
        (lost(over=True), ProblemEnd.ALIVE, "resolved"),  # it was fenced, and then joined again
        (lost(over=True, taken_back=True), ProblemEnd.ALIVE, None),
        (reported(kind="failure_rate"), ProblemEnd.RUN_ENDED, None),
        (reported(kind="callback_errors"), ProblemEnd.RUN_ENDED, None),
        (reported(kind="failure_rate"), None, "resolved"),
        (reported(kind="stalled"), ProblemEnd.RUN_ENDED, "resolved"),
    ],
)
def test_what_the_end_of_a_problem_means(report: Report, end: ProblemEnd | None, event: str | None) -> None:
    assert next_event(report, None, NOW + 1, 100, end) == event


def test_an_alarm_is_taken_back_where_it_was_sent() -> None:
    report = updated_report(lost(over=True), None, NOW + 1, 100, ["mail"], "shoal", ProblemEnd.ALIVE)
    assert report is not None
    (outgoing,) = report.outbox
    assert (outgoing.channel, outgoing.message.title) == ("ops", "[shoal] resolved: books: worker w1 is back")
    assert (report.taken_back, report.is_open) == (True, False)
    again = updated_report(report, lost().problem, NOW + 200, 100, ["ops"], "shoal")
    assert again is not None
    assert (again.taken_back, again.is_open) == (False, True)


@given(st.lists(st.tuples(st.floats(1, 50), st.sampled_from([None, 1.0, 4.0, 20.0])), max_size=40))
def test_messages_keep_their_distance_and_every_report_is_resolved_once(
    steps: list[tuple[float, float | None]],
) -> None:
    report, now, sent = None, NOW, []
    for pause, figure in [*steps, (1000.0, None)]:
        now += pause
        found = None if figure is None else problem(figure=figure)
        before = report
        report = updated_report(report, found, now, 100, ["ops"], "shoal")
        if report is not None and report is not before and report.reported_at == now:
            sent.append((now, report.outbox[-1].message.event))
    openings = [at for at, event in sent if event != "resolved"]
    assert all(second - first >= 100 for first, second in zip(openings, openings[1:], strict=False))
    events = [event for _, event in sent if event != "changed"]
    assert events == ["new", "resolved"] * (len(events) // 2)
    assert report is None or not report.is_open


def test_what_a_channel_has_not_delivered_is_bounded() -> None:
    report = None
    for number in range(40):
        found = None if number % 2 else problem()
        report = updated_report(report, found, NOW + 1000 * number, 100, ["ops", "mail"], "shoal")
    assert report is not None
    assert len(report.outbox) == 12
    assert report.outbox[-1].message.event == "resolved"


# -- delivery


class Recorded:
    """A channel that keeps what it is sent, and fails with these errors first."""

    def __init__(self, *errors: str) -> None:
        self.messages: list[Message] = []
        self.attempts: list[str] = []
        self.errors = list(errors)
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, message: Message) -> str:
        self.attempts.append(message.message_id)
        await self.gate.wait()
        if self.errors:
            return self.errors.pop(0)
        self.messages.append(message)
        return ""

    async def close(self) -> None:
        pass

    @property
    def events(self) -> list[str]:
        return [f"{message.event} {message.problem.key}" for message in self.messages]


async def yes() -> bool:
    return True


def delivery(store: MemoryStore, sender: str = "s1", in_charge: Any = yes, **channels: Channel) -> Delivery:
    settings = NotificationSettings(min_interval=100, retry_after=10, failing_after=2)
    return Delivery(store, channels, settings, "shoal", sender, in_charge)


async def test_a_message_is_delivered_once_through_each_channel() -> None:
    ops, mail = Recorded(), Recorded()
    made = delivery(MemoryStore(), ops=ops, mail=mail)
    for step in range(3):
        await made.check([problem()], NOW + step)
        await made.deliver(NOW + step)
    await made.check([], NOW + 5)
    await made.deliver(NOW + 5)
    assert ops.events == mail.events == ["new stalled/r1", "resolved stalled/r1"]


async def test_a_channel_that_fails_is_tried_again_later_and_the_other_one_is_not_delayed() -> None:
    store, ops, mail = MemoryStore(), Recorded("HTTP 500", "HTTP 502"), Recorded()
    made = delivery(store, ops=ops, mail=mail)
    await made.check([problem()], NOW)
    attempts = []
    for second in range(40):
        await made.deliver(NOW + second)
        attempts.append(len(ops.attempts))
    assert attempts[0] == attempts[9] == 1
    assert attempts[10] == attempts[29] == 2  # 10 s, then 20 s
    assert attempts[30] == 3
    assert len(set(ops.attempts)) == 1
    assert mail.events == ops.events == ["new stalled/r1"]
    state = (await read_channel_states(store, "shoal", ["ops"]))["ops"]
    assert (state.failures, state.error, state.delivered, state.next_at) == (0, "", 1, 0.0)


async def test_a_failing_channel_is_visible_and_known() -> None:
    store, ops = MemoryStore(), Recorded("HTTP 500", "HTTP 502")
    made = delivery(store, ops=ops)
    await made.check([problem()], NOW)
    await made.deliver(NOW)
    assert made.failing_channels() == []
    await made.deliver(NOW + 10)
    (failing,) = made.failing_channels()
    assert (failing.about, failing.figure, failing.since) == ("ops", 2.0, NOW)
    assert failing.text.endswith("HTTP 502")
    (report,) = (await read_reports(store, "shoal")).values()
    assert (report.outbox[0].attempts, report.outbox[0].error, report.outbox[0].sender) == (2, "HTTP 502", "")
    await made.deliver(NOW + 30)
    assert made.failing_channels() == []


async def test_messages_of_a_channel_keep_their_order() -> None:
    ops = Recorded("down")
    made = delivery(MemoryStore(), ops=ops)
    await made.check([problem("stalled/a")], NOW)
    await made.deliver(NOW)
    await made.check([problem("stalled/b")], NOW + 1)
    await made.deliver(NOW + 20)
    assert ops.events == ["new stalled/a", "resolved stalled/a", "new stalled/b"]


async def test_the_next_server_repeats_a_message_with_the_same_id_if_the_first_one_died_while_it_sent() -> None:
    store, ops = MemoryStore(), Recorded()
    ops.gate.clear()
    first = delivery(store, "s1", ops=ops)
    await first.check([problem()], NOW)
    sending = asyncio.create_task(first.deliver(NOW))
    while not ops.attempts:
        await asyncio.sleep(0)
    sending.cancel()  # killed
    ops.gate.set()
    second = delivery(store, "s2", ops=ops)
    await second.load()
    await second.check([problem()], NOW + 30)
    await second.deliver(NOW + 30)
    await second.deliver(NOW + 31)
    assert len(ops.attempts) == 2
    assert len(set(ops.attempts)) == 1
    assert ops.events == ["new stalled/r1"]


async def test_a_server_that_is_no_longer_in_charge_sends_nothing() -> None:
    store, ops = MemoryStore(), Recorded()

    async def no() -> bool:
        return False

    late, current = delivery(store, "s1", no, ops=ops), delivery(store, "s2", ops=ops)
    await late.check([problem()], NOW)
    await current.load()
    await late.deliver(NOW)
    assert ops.attempts == []
    await current.deliver(NOW)
    await late.deliver(NOW)
    assert ops.events == ["new stalled/r1"]


class FailingStore(MemoryStore):
    """Fails to write while ``away``."""

    away = False

    async def put_document(self, *args: Any, **options: Any) -> bool:
        if self.away:
            raise StoreAwayError("the store is away")
        return await super().put_document(*args, **options)

    async def get_document(self, key: str) -> Document | None:
        if self.away:
            raise StoreAwayError("the store is away")
        return await super().get_document(key)


async def test_a_message_is_not_sent_again_if_only_the_mark_could_not_be_stored() -> None:
    store, ops = FailingStore(), Recorded()

    class LosesItsStore(Recorded):
        async def send(self, message: Message) -> str:
            store.away = True
            return await super().send(message)

    ops = LosesItsStore()
    made = delivery(store, ops=ops)
    await made.check([problem()], NOW)
    with pytest.raises(StoreAwayError):
        await made.deliver(NOW)
    store.away = False
    await made.deliver(NOW + 1)
    await made.deliver(NOW + 2)
    assert ops.events == ["new stalled/r1"]
    assert not any(report.outbox for report in (await read_reports(store, "shoal")).values())


async def test_a_channel_that_raises_an_error_stops_no_other_and_shows_no_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Recorded):
        async def send(self, message: Message) -> str:
            raise RuntimeError(SECRET)

    mail = Recorded()
    made = delivery(MemoryStore(), ops=Broken(), mail=mail)
    await made.check([problem()], NOW)
    await made.deliver(NOW)
    assert mail.events == ["new stalled/r1"]
    assert "an error in the channel: RuntimeError" in caplog.text
    assert SECRET not in caplog.text


async def test_messages_for_a_removed_channel_and_old_ones_are_dropped() -> None:
    store, ops = MemoryStore(), Recorded()
    await delivery(store, gone=Recorded()).check([problem()], NOW)
    made = delivery(store, ops=ops)
    await made.load()
    await made.check([problem("stalled/old")], NOW)
    await made.deliver(NOW + 4 * 86400)
    assert ops.attempts == []
    assert not any(report.outbox for report in made.reports.values())


async def test_reports_of_problems_that_are_over_are_deleted_after_a_week() -> None:
    store = MemoryStore()
    made = delivery(store, ops=Recorded())
    await made.check([problem()], NOW)
    await made.check([], NOW + 1)
    await made.deliver(NOW + 1)
    await made.check([], NOW + 6 * 86400)
    assert len(await read_reports(store, "shoal")) == 1
    await made.check([], NOW + 8 * 86400)
    assert await store.list_documents("problem/") == []


async def test_hostile_names_are_keys_too_and_projects_do_not_see_each_other() -> None:
    store = MemoryStore()
    hostile = [problem("worker_lost/r1/\x1b[2J\n"), problem("worker_lost/r1/" + "x" * 2000)]
    await delivery(store, ops=Recorded()).check(hostile, NOW)
    assert set(await read_reports(store, "shoal")) == {each.key for each in hostile}
    assert await read_reports(store, "shoa") == {}


# -- channels


def mail(message: Message) -> Any:
    """The mail of a message, as a reader parses it."""
    settings = SmtpChannel(host="h", security="none", sender="shoal@example.org", to=("a@example.org", "b@example.org"))
    made = Mail("channel", settings, None, Path())._mail(message)
    return message_from_bytes(made.as_bytes(), policy=default_policy)


def message(title: str = "books: stalled", text: str = "Nothing.") -> Message:
    about = problem(title=title, text=text)
    return Message(message_id="0123456789abcdef", event="new", at=NOW, project="shoal", problem=about)


@given(st.text(max_size=300), st.text(max_size=300))
def test_no_title_and_no_text_adds_a_header_or_a_recipient(title: str, text: str) -> None:
    parsed = mail(message(title, text))
    assert set(parsed.keys()) == {
        "From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "X-Shoal-Message", "Content-Type",
        "Content-Transfer-Encoding", "MIME-Version",
    }  # fmt: skip
    assert [each.addr_spec for each in parsed["To"].addresses] == ["a@example.org", "b@example.org"]
    assert parsed["Subject"].startswith("[shoal] critical: ")
    assert not parsed.is_multipart()
    assert "run: r1" in parsed.get_content()


def test_a_hostile_title_stays_in_the_subject() -> None:
    parsed = mail(message("x\r\nBcc: evil@example.org\r\n\r\n<script>", "first\r\n.\r\nMAIL FROM:<evil@example.org>"))
    assert parsed["Bcc"] is None
    assert parsed["Subject"].strip() == r"[shoal] critical: x\x0d\x0aBcc: evil@example.org\x0d\x0a\x0d\x0a<script>"


def test_a_repeated_mail_has_the_same_id() -> None:
    assert mail(message())["Message-ID"] == mail(message())["Message-ID"] == "<0123456789abcdef@example.org>"


def test_the_body_of_a_webhook() -> None:
    body = msgspec.json.decode(message("\x1b]0;x\x07").as_json())
    assert (body["event"], body["id"], body["project"]) == ("problem.new", "0123456789abcdef", "shoal")
    assert body["problem"]["kind"] == "stalled"
    assert msgspec.json.decode(make_test_message("1", "shoal").as_json())["event"] == "test"


# -- the watcher


class Site:
    """A store with a run, and servers that watch it."""

    def __init__(self, rules: dict[str, Rule] | None = None) -> None:
        self.store = FailingStore()
        self.now = time.time()
        rules = rules or {"patient": Rule(no_worker_after=3600)}  # its run has no process
        self.settings = NotificationSettings(check_every=0.1, min_interval=0, retry_after=10, rules=rules)

    async def start(self) -> None:
        run = Run(run_id="r1", spider="books", state="running", created_at=self.now)
        await self.store.create_run(run)
        frontier = await self.store.frontier("r1", FrontierOptions())
        await frontier.push([Request(f"http://a.example/{i}") for i in range(3)])

    async def report(self, name: str) -> None:
        """A process writes its report."""
        report = ProcessReport(name=name, role="worker", started_at=0.0, at=self.now)
        await StoredValue(self.store, process_key("r1", name), ProcessReport).change(lambda _: report)

    def watcher(self, name: str, **channels: Channel) -> Watcher:
        return Watcher(self.store, Config(), self.settings, channels, name, clock=lambda: self.now)

    async def step(self, watcher: Watcher, seconds: float = 1.0) -> None:
        self.now += seconds
        await watcher.check()
        await watcher.deliver()


async def test_a_stalled_run_is_reported_and_its_end_resolves_that() -> None:
    site, ops = Site(), Recorded()
    await site.start()
    watcher = site.watcher("s1", ops=ops)
    for seconds in (1, 1, 500, 99, 1, 1):
        await site.step(watcher, seconds)
    assert ops.events == ["new stalled/r1"]
    assert ops.messages[0].problem.text.startswith("No page was done or failed for 10 min: no process")
    await site.store.transition("r1", "cancelled")
    await site.step(watcher)
    await site.step(watcher)
    assert ops.events == ["new stalled/r1", "resolved stalled/r1"]


async def test_a_worker_that_reports_again_is_back() -> None:
    site, ops = Site(), Recorded()
    await site.start()
    watcher = site.watcher("s1", ops=ops)
    await site.step(watcher)
    await site.report("w1")
    for _ in range(3):
        await site.step(watcher, 10)
    assert ops.events == []
    for _ in range(4):
        await site.step(watcher, 10)
    assert ops.events == ["new worker_lost/r1/w1"]
    await site.report("w1")
    await site.step(watcher, 5)
    assert ops.events == ["new worker_lost/r1/w1", "resolved worker_lost/r1/w1"]
    assert ops.messages[1].problem.title == "books: worker w1 is back"
    await site.report("w1")
    await site.step(watcher, 5)
    assert len(ops.events) == 2


async def test_nobody_is_lost_because_the_store_was_away() -> None:
    site, ops = Site(), Recorded()
    await site.start()
    watcher = site.watcher("s1", ops=ops)
    await site.step(watcher)
    await site.report("w1")
    await site.report("w2")
    await site.step(watcher)
    site.store.away = True
    for _ in range(12):
        await site.step(watcher, 10)
    site.store.away = False
    await site.step(watcher, 10)
    await site.step(watcher, 10)
    await site.report("w1")
    for _ in range(5):
        await site.step(watcher, 10)
    await site.report("w1")
    await site.step(watcher, 5)
    assert ops.events == ["new store_away", "resolved store_away", "new worker_lost/r1/w2"]


async def test_one_of_two_servers_reports_and_the_other_takes_over() -> None:
    site, ops, other = Site(), Recorded(), Recorded()
    await site.start()
    first, second = site.watcher("s1", ops=ops), site.watcher("s2", ops=other)
    for _ in range(3):
        await site.step(first, 400)
        await site.step(second, 0)
    assert (ops.events, other.events) == (["new stalled/r1"], [])
    await asyncio.sleep(0.4)  # three intervals without a sign of the first one
    for _ in range(3):
        await site.step(second)
    assert other.events == []  # it knows what was reported, and since when nothing happens
    await site.store.transition("r1", "cancelled")
    await site.step(second)
    await site.step(first)
    assert (ops.events, other.events) == (["new stalled/r1"], ["resolved stalled/r1"])


async def test_a_server_that_stops_hands_over_at_once() -> None:
    site, ops = Site(), Recorded()
    await site.start()
    first, second = site.watcher("s1", ops=Recorded()), site.watcher("s2", ops=ops)
    await site.step(first)
    await site.step(second)
    await first.release()
    for seconds in (1, 1, 700):
        await site.step(second, seconds)
    assert ops.events == ["new stalled/r1"]


async def test_a_store_that_is_away_is_reported_by_the_server_in_charge_and_when_it_is_back() -> None:
    site, ops, other = Site(), Recorded(), Recorded()
    first, second = site.watcher("s1", ops=ops), site.watcher("s2", ops=other)
    for watcher in (first, second, first, second):
        await site.step(watcher)
    site.store.away = True
    for _ in range(3):
        await site.step(first)
        await site.step(second)
    assert (ops.events, other.events) == (["new store_away"], [])
    site.store.away = False
    await site.step(first)
    assert ops.events == ["new store_away", "resolved store_away"]


async def test_what_happened_before_the_first_watch_is_not_reported() -> None:
    site, ops = Site({"all": Rule(events=("finished", "failed"))}), Recorded()
    await site.start()
    await site.store.transition("r1", "finished")
    await asyncio.sleep(0.05)
    watcher = site.watcher("s1", ops=ops)

    async def step() -> None:
        site.now = time.time()
        await site.step(watcher, 0)

    for _ in range(3):
        await step()
    assert ops.events == []
    await site.store.create_run(Run(run_id="r2", spider="books", state="running", created_at=site.now))
    await step()
    await asyncio.sleep(0.05)
    await site.store.transition("r2", "finished")
    for _ in range(3):
        await step()
    assert [each.rpartition("/")[0] for each in ops.events] == ["new failed/r2"]  # it had no page


async def test_a_missed_schedule_is_reported_once() -> None:
    site, ops = Site(), Recorded()
    watcher = site.watcher("s1", ops=ops)
    await site.step(watcher)
    schedules = Schedules(site.store, "shoal", lambda: site.now)
    await schedules.add("nightly", Definition(spider="Books", every="1h", missed="none"))
    await site.step(watcher)
    assert ops.events == []
    stored = StoredValue(site.store, schedules.key("nightly"), Schedule)
    await stored.change(lambda found: next_step(found, site.now + 7300, active=False).after if found else None)
    for _ in range(3):
        await site.step(watcher)
    (missed,) = ops.messages
    assert (missed.event, missed.problem.kind, missed.problem.spider) == ("new", "schedule_missed", "Books")
    assert missed.problem.title == "Books: schedule nightly missed a time"


async def test_a_channel_that_fails_is_reported_through_the_other() -> None:
    site, ops, other = Site(), Recorded(*["HTTP 500"] * 4), Recorded()
    await site.start()
    watcher = site.watcher("s1", ops=ops, mail=other)
    for seconds in (1, 1, 600, 10, 20, 1, 1, 40, 1):
        await site.step(watcher, seconds)
    assert other.events == ["new stalled/r1", "new channel_failing/ops"]
    assert "HTTP 500" in other.messages[1].problem.text
    await site.step(watcher, 900)
    await site.step(watcher)
    assert ops.events[0] == "new stalled/r1"
    assert other.events[-1] == "resolved channel_failing/ops"


async def test_an_error_in_a_step_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    site, ops = Site(), Recorded()
    await site.start()
    site.settings = NotificationSettings(check_every=0.1, rules={"all": Rule(stalled_after=1)})
    watcher = site.watcher("s1", ops=ops)
    take, failures = watcher._taker.take, [RuntimeError("a bug")] * 2

    async def fail_first(now: float | None = None) -> StoreSnapshot:
        if failures:
            raise failures.pop()
        return await take(now)

    watcher._taker.take = fail_first  # type: ignore[method-assign]
    task = asyncio.create_task(watcher.run())
    async with asyncio.timeout(30):
        while not ops.events:
            site.now += 1
            await asyncio.sleep(0.05)
    assert ops.events == ["new stalled/r1"]
    assert caplog.text.count("RuntimeError: a bug") == 2
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- the service


async def test_a_test_message_reaches_the_channels_that_are_named(tmp_path: Path) -> None:
    service = Notifications(Config(), load_notifications(written(tmp_path, "")))
    with pytest.raises(ConfigError, match="no channel is configured"):
        await service.test()
    service = Notifications(Config(), load_notifications(written(tmp_path, WEBHOOK_WITH_KEY)), {"K": SECRET})
    with pytest.raises(ConfigError, match=r"no channel 'op'; did you mean ops\?"):
        await service.test("op")
    errors = await service.test("ops")
    assert list(errors) == ["ops"]
    assert "serve.allow" in errors["ops"]  # a private address is not contacted
    assert SECRET not in errors["ops"]
    await service.close()


WEBHOOK_WITH_KEY = WEBHOOK + 'url = "http://127.0.0.1:9/hook"\nkey_env = "K"\n'


def test_the_settings_of_the_guide_are_valid(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "notifications.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    settings = load_notifications(written(tmp_path, text)).settings
    assert list(settings.channels) == ["ops", "mail"]
    assert settings.rules["books"].item_drop == 0.3
    for kind in get_args(ProblemKind):
        assert f"| `{kind}` |" in guide
    defaults = msgspec.structs.asdict(NotificationSettings())
    for name, default in defaults.items():
        assert name in ("channels", "rules") or f"| `{name}` | {default:g} |" in guide
    for name in ProblemLimits.__struct_fields__:
        assert f"`{name}`" in guide
