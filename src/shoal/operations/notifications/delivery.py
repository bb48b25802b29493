"""Stores what was reported, and delivers each message once, with retries, even if servers die."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal.errors import DECODING_ERRORS
from shoal.operations.notifications.channels import Channel
from shoal.operations.notifications.messages import Message, Outgoing, ProblemEnd, Report, updated_report
from shoal.operations.notifications.settings import NotificationSettings, Rule
from shoal.operations.problem import Problem, ProblemLimits
from shoal.operations.problems import channel_failing
from shoal.ports import Documents
from shoal.ports.documents import StoredValue, all_documents

# Which rules apply to a run and a problem. Pure.


QUIET = frozenset({"finished"})
"""Events that are sent only if a rule names them: they are not problems."""
EVERYTHING = Rule()
"""The rule of settings without rules: all problems through all channels."""


def limits_for(rules: Collection[Rule], run_id: str, spider: str) -> ProblemLimits:
    """The limits for a run. A rule for the run takes precedence over one for its spider, and that over one for all
    runs."""
    limits = ProblemLimits()
    matching = [rule for rule in rules if _matches(rule, run_id, spider)]
    for rule in sorted(matching, key=lambda rule: (rule.run is not None, rule.spider is not None)):
        limits = replace(limits, **rule.limits)
    return limits


def channels_for(rules: Collection[Rule], problem: Problem, channels: Mapping[str, object]) -> list[str]:
    """The channels through which a problem is sent, in the order of the settings. A failing channel is reported through
    all other channels, whatever the rules say."""
    if problem.kind == "channel_failing":
        return [name for name in channels if name != problem.about]
    chosen: set[str] = set()
    for rule in rules or (EVERYTHING,):
        is_sent = problem.kind in rule.events if rule.events is not None else problem.kind not in QUIET
        if is_sent and _matches(rule, problem.run_id, problem.spider):
            chosen.update(rule.channels or channels)
    return [name for name in channels if name in chosen]


def _matches(rule: Rule, run_id: str, spider: str) -> bool:
    return rule.run in (None, run_id) and rule.spider in (None, spider)


log = logging.getLogger("shoal.notifications")

_MAX_RETRY = 900.0
_KEEP_CLOSED = 7 * 86400.0
_KEEP_UNDELIVERED = 3 * 86400.0
_MAX_KEY = 300


class ChannelState(Struct, frozen=True, kw_only=True):
    """The state of a channel."""

    delivered: int = 0
    delivered_at: float = 0.0
    failures: int = 0
    """Failures in a row."""
    failing_since: float = 0.0
    next_at: float = 0.0
    """The channel is not used before this time."""
    error: str = ""
    """The reason of the last failure."""


async def read_reports(documents: Documents, project: str) -> dict[str, Report]:
    """All reports of a project, by the key of the problem."""
    reports: dict[str, Report] = {}
    for document in await all_documents(documents, f"problem/{project}/"):
        try:
            report = msgspec.msgpack.decode(document.value, type=Report)
            reports[report.problem.key] = report
        except DECODING_ERRORS as exc:
            log.warning("ignoring the document %s: %s", document.key, exc)
    return reports


async def read_channel_states(documents: Documents, project: str, names: Collection[str]) -> dict[str, ChannelState]:
    """The state of each channel, including those that were never used."""
    return {name: await _state(documents, project, name).read() or ChannelState() for name in names}


def _state(documents: Documents, project: str, name: str) -> StoredValue[ChannelState]:
    return StoredValue(documents, f"channel/{project}/{name}", ChannelState)


def _document_key(project: str, key: str) -> str:
    """The key of the document for a problem. The problem's key may have names that no store accepts; then it is
    hashed."""
    if not key.isprintable() or len(key) > _MAX_KEY:
        key = f"{key.partition('/')[0]}/{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return f"problem/{project}/{key}"


class Delivery:
    """The reports of a project. One server at a time is in charge of them. `check` and `deliver` may run at the same
    time."""

    def __init__(
        self,
        documents: Documents,
        channels: Mapping[str, Channel],
        settings: NotificationSettings,
        project: str,
        sender: str,
        in_charge: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """``sender``: the name of this server. ``in_charge``: whether it is still in charge; called before each
        message. None: it always is."""
        self._documents = documents
        self._channels = channels
        self._settings = settings
        self._project = project
        self._sender = sender
        self._in_charge = in_charge
        self._reports: dict[str, Report] = {}
        self._states: dict[str, ChannelState] = {}
        self._sent: set[tuple[str, str]] = set()
        """Messages that were delivered, but not marked yet, because the store was unavailable."""
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Read everything again, because another server was in charge before."""
        self._reports = await read_reports(self._documents, self._project)
        self._states = await read_channel_states(self._documents, self._project, self._channels)

    @property
    def reports(self) -> Mapping[str, Report]:
        return self._reports

    def failing_channels(self) -> list[Problem]:
        """Channels that failed so often that other channels report it."""
        return [
            channel_failing(name, state.failures, state.failing_since, state.error)
            for name, state in self._states.items()
            if state.failures >= self._settings.failing_after
        ]

    async def check(
        self, problems: Collection[Problem], now: float, *, active: Collection[str] = (), alive: Collection[str] = ()
    ) -> None:
        """Queue the messages on problems that are new, have changed, or are over. ``active``: the runs that have not
        ended. ``alive``: the keys of alarms that are wrong, because their worker is alive."""
        current = {problem.key: problem for problem in problems}
        for key in dict.fromkeys((*current, *self._reports)):
            problem, report = current.get(key), self._reports.get(key)
            end = None
            if report is not None and problem is None:
                run_id = report.problem.run_id
                end = ProblemEnd.ALIVE if key in alive else None if run_id in active else ProblemEnd.RUN_ENDED
            if problem is None and report is not None and _is_old(report, now):
                await self._change(key, lambda _: None)
            elif self._updated(report, problem, now, end) is not report:
                await self._change(key, partial(self._updated, problem=problem, now=now, end=end))

    def _updated(
        self, report: Report | None, problem: Problem | None, now: float, end: ProblemEnd | None
    ) -> Report | None:
        about = problem if problem is not None else report.problem if report is not None else None
        rules = self._settings.rules.values()
        channels = channels_for(rules, about, self._channels) if about is not None else []
        return updated_report(report, problem, now, self._settings.min_interval, channels, self._project, end)

    async def deliver(self, now: float) -> None:
        """Send what is due, through all channels at the same time. A slow channel delays only itself."""
        waiting: dict[str, list[tuple[str, Outgoing]]] = {}
        for key, report in self._reports.items():
            for outgoing in report.outbox:
                waiting.setdefault(outgoing.channel, []).append((key, outgoing))
        for messages in waiting.values():
            messages.sort(key=lambda entry: entry[1].message.at)
        drains = (self._drain(name, messages, now) for name, messages in waiting.items())
        for error in await asyncio.gather(*drains, return_exceptions=True):  # none goes on after the end
            if error is not None:
                raise error

    async def _drain(self, name: str, waiting: list[tuple[str, Outgoing]], now: float) -> None:
        """Send the messages of one channel in their order, until one fails."""
        for key, outgoing in waiting:
            channel = self._channels.get(name)
            if channel is None or now - outgoing.message.at > _KEEP_UNDELIVERED:
                log.warning("dropping a message for channel %s: %s", name, outgoing.message.title)
                await self._change_outgoing(key, outgoing, lambda _: None)
                continue
            if 0 < self._states.get(name, ChannelState()).next_at - now <= _MAX_RETRY:
                return
            mark = (outgoing.message.message_id, name)
            if mark not in self._sent:
                if not await self._change_outgoing(key, outgoing, self._claimed):
                    return  # another server has removed it
                if self._in_charge is not None and not await self._in_charge():
                    return
                error = await _send(channel, outgoing.message)
                if error:
                    await self._note_failure(name, key, outgoing, error, now)
                    return
                self._sent.add(mark)
            await self._change_outgoing(key, outgoing, lambda _: None)
            self._sent.discard(mark)
            await self._change_state(
                name, lambda state: ChannelState(delivered=state.delivered + 1 if state else 1, delivered_at=now)
            )

    def _claimed(self, message: Outgoing) -> Outgoing:
        return replace(message, sender=self._sender, attempts=message.attempts + 1)

    async def _change_outgoing(
        self, key: str, outgoing: Outgoing, change: Callable[[Outgoing], Outgoing | None]
    ) -> bool:
        is_found = False

        def update(report: Report | None) -> Report | None:
            nonlocal is_found
            is_found = report is not None and any(_is_same(message, outgoing) for message in report.outbox)
            if report is None or not is_found:
                return report
            changed = (change(message) if _is_same(message, outgoing) else message for message in report.outbox)
            return replace(report, outbox=tuple(message for message in changed if message is not None))

        await self._change(key, update)
        return is_found

    async def _change(self, key: str, update: Callable[[Report | None], Report | None]) -> None:
        async with self._writing:
            stored = StoredValue(self._documents, _document_key(self._project, key), Report)
            changed = await stored.change(update)
            if changed is None:
                self._reports.pop(key, None)
            else:
                self._reports[key] = changed

    async def _note_failure(self, name: str, key: str, outgoing: Outgoing, error: str, now: float) -> None:
        log.warning("channel %s did not deliver %r: %s", name, outgoing.message.title, error)

        def failed(state: ChannelState | None) -> ChannelState:
            state = state or ChannelState()
            delay = min(_MAX_RETRY, self._settings.retry_after * 2 ** min(state.failures, 20))
            return replace(
                state, failures=state.failures + 1, failing_since=state.failing_since or now, next_at=now + delay,
                error=error,
            )  # fmt: skip

        await self._change_state(name, failed)
        await self._change_outgoing(key, outgoing, lambda message: replace(message, sender="", error=error))

    async def _change_state(self, name: str, update: Callable[[ChannelState | None], ChannelState]) -> None:
        changed = await _state(self._documents, self._project, name).change(update)
        self._states[name] = changed or ChannelState()


def _is_same(one: Outgoing, other: Outgoing) -> bool:
    return (one.message.message_id, one.channel) == (other.message.message_id, other.channel)


def _is_old(report: Report, now: float) -> bool:
    return report.closed_at is not None and not report.outbox and now - report.closed_at > _KEEP_CLOSED


async def _send(channel: Channel, message: Message) -> str:
    """Why a channel did not deliver a message, or an empty string."""
    try:
        return await channel.send(message)
    except Exception as exc:  # a channel must not end the delivery of others
        return f"an error in the channel: {type(exc).__name__}"  # its text may have secrets in it
