"""What is sent through a channel."""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from shoal.monitoring.problem import Problem, Severity

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
        label = {"new": self.severity, "changed": f"{self.severity}, changed", "resolved": "resolved", "test": "test"}
        return f"[{self.project}] {label[self.event]}: {self.problem.title}"

    @property
    def severity(self) -> Severity:
        return self.problem.severity

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
    now = time.time()
    problem = Problem(
        key="test", kind="finished", severity="info", title="this is a test",
        text="If you can read this, the channel works. Nothing is wrong.", since=now,
    )  # fmt: skip
    return Message(message_id=message_id, event="test", at=now, project=project, problem=problem)


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
