"""What is sent through a channel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal.operations.problem import ONCE, UNTIL_END, Problem
from shoal.operations.problems import taken_back
from shoal.system import chance, clock

MessageEvent: TypeAlias = Literal["new", "changed", "resolved", "test"]


class Message(Struct, frozen=True, kw_only=True):
    """One message. A repeat has the same ``message_id``. Its texts are printable, and the title is one line."""

    message_id: str
    event: MessageEvent
    at: float
    project: str
    problem: Problem

    @property
    def title(self) -> str:
        """One line, such as ``[shoal] critical: books: stalled``."""
        severity = self.problem.severity
        label = {"new": severity, "changed": f"{severity}, changed", "resolved": "resolved", "test": "test"}
        return f"[{self.project}] {label[self.event]}: {self.problem.title}"

    @property
    def text(self) -> str:
        """A few lines for people."""
        problem = self.problem
        lines = [problem.text, ""]
        if problem.run_id:
            lines.append(f"run: {problem.run_id}")
        lines.append(f"since: {_moment(problem.since)}")
        if self.event == "resolved":
            lines.append(f"resolved: {_moment(self.at)}")
        return "\n".join(lines)

    def as_json(self) -> bytes:
        """The body of a webhook."""
        problem = {name: value for name, value in msgspec.structs.asdict(self.problem).items() if name != "figure"}
        event = f"problem.{self.event}" if self.event != "test" else "test"
        return msgspec.json.encode(
            {"event": event, "id": self.message_id, "at": self.at, "project": self.project, "problem": problem}
        )


def make_test_message(message_id: str, project: str) -> Message:
    """A message that shows that a channel works."""
    now = clock.time()
    problem = Problem(
        key="test", kind="finished", severity="info", title="this is a test",
        text="If you can read this, the channel works. Nothing is wrong.", since=now,
    )  # fmt: skip
    return Message(message_id=message_id, event="test", at=now, project=project, problem=problem)


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


# What was reported of a problem, and what should be reported next. Pure.


_MAX_OUTGOING = 6
"""How many messages of one problem may wait for one channel. If a channel is down, the oldest ones are dropped."""


class Outgoing(Struct, frozen=True, kw_only=True):
    """A message that a channel has not delivered yet."""

    message: Message
    channel: str
    attempts: int = 0
    sender: str = ""
    """The server that sends it now, or died while it did."""
    error: str = ""


class Report(Struct, frozen=True, kw_only=True):
    """A problem as it was last reported, and the messages that are not delivered yet."""

    problem: Problem
    opened_at: float
    reported_at: float
    closed_at: float | None = None
    """None while the problem lasts."""
    channels: tuple[str, ...] = ()
    """Those through which it was reported."""
    taken_back: bool = False
    """Whether a message said that it was wrong."""
    outbox: tuple[Outgoing, ...] = ()

    @property
    def is_open(self) -> bool:
        return self.closed_at is None


class ProblemEnd(Enum):
    """Why a problem is not there any more, if that is more than its disappearance."""

    RUN_ENDED = "its run has ended"
    ALIVE = "the worker that was lost is alive"


def next_event(
    report: Report | None, problem: Problem | None, now: float, min_interval: float, end: ProblemEnd | None = None
) -> MessageEvent | None:
    """What should be sent now, if anything. ``problem``: None if it is over.

    A problem is sent once, again if it changes (another severity, a figure that doubled), and when it is resolved. A
    change or a return within ``min_interval`` of the last message waits until then. An alarm that turned out to be
    wrong is taken back once, also if it was closed before.
    """
    if problem is None:
        return "resolved" if report is not None and _is_resolved(report, end) else None
    if report is None:
        return "new"
    is_early = 0 <= now - report.reported_at < min_interval
    if is_early:
        return None
    if not report.is_open:
        return "new"
    before = report.problem
    has_doubled = problem.figure >= 2 * before.figure > 0
    return "changed" if problem.severity != before.severity or has_doubled else None


def _is_resolved(report: Report, end: ProblemEnd | None) -> bool:
    kind = report.problem.kind
    if kind == "worker_lost":
        return end is ProblemEnd.ALIVE and not report.taken_back
    return report.is_open and kind not in ONCE and not (end is ProblemEnd.RUN_ENDED and kind in UNTIL_END)


def updated_report(
    report: Report | None, problem: Problem | None, now: float, min_interval: float, channels: Sequence[str],
    project: str, end: ProblemEnd | None = None,
) -> Report | None:  # fmt: skip
    """The report after a check; the same object if nothing changed. ``channels``: those of the problem's rules. The
    end of a problem is sent to those that its report names."""
    event = next_event(report, problem, now, min_interval, end)
    if event is None:
        if report is not None and problem is None and report.is_open:
            return replace(report, closed_at=now)
        return report
    about = problem if problem is not None else report.problem if report is not None else None
    if about is None or (report is None and not channels and about.severity == "info"):
        return report
    is_back = event == "resolved" and about.kind == "worker_lost"
    subject = taken_back(about) if is_back else about
    if event == "resolved" and report is not None:
        channels = report.channels or channels
    message = Message(message_id=chance.token_bytes(12).hex(), event=event, at=now, project=project, problem=subject)
    outbox = report.outbox if report is not None else ()
    for channel in channels:
        outbox = _queued(outbox, Outgoing(message=message, channel=channel))
    is_new = report is None or not report.is_open
    return Report(
        problem=about, opened_at=now if is_new or report is None else report.opened_at, reported_at=now,
        closed_at=now if event == "resolved" else None, channels=tuple(channels), taken_back=is_back, outbox=outbox,
    )  # fmt: skip


def _queued(outbox: tuple[Outgoing, ...], added: Outgoing) -> tuple[Outgoing, ...]:
    """The outbox with one more message. It replaces older changes that were not delivered: the newest one includes
    them."""
    remaining = [
        outgoing
        for outgoing in outbox
        if outgoing.channel != added.channel
        or outgoing.message.event != "changed"
        or outgoing.sender
        or outgoing.attempts
    ]
    own = [outgoing for outgoing in remaining if outgoing.channel == added.channel]
    surplus = own[: max(0, len(own) + 1 - _MAX_OUTGOING)]
    return (*(outgoing for outgoing in remaining if outgoing not in surplus), added)
