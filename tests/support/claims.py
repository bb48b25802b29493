"""The claims of docs/origins.md. A run of all tests, or of these alone (``--claims``), fails unless each one passed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "origins.md"


def claimed_tests() -> dict[str, str]:
    """The test of each row: the row by the test's name, such as ``tests/config/test_x.py::test_y``."""
    found = {}
    for row in DOCUMENT.read_text().splitlines():
        if re.match(r"\| (?!you had|---)", row):
            named = re.search(r"\| `(tests/[\w/]+\.py::test_\w+)` \|$", row)
            assert named, f"a row without a test: {row}"
            found[named[1]] = row
    return found


def plain_name(nodeid: str) -> str:
    """The name of a test without its parameters."""
    return nodeid.partition("[")[0]


class ClaimCheck:
    """Counts the tests of claims by outcome, and fails the session if one of them has not passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.others: set[str] = set()
        """Those of which a case failed or was skipped."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(plain_name(report.nodeid))
        elif not report.passed:
            self.others.add(plain_name(report.nodeid))

    def broken(self) -> list[str]:
        return [name for name in claimed_tests() if name not in self.passed or name in self.others]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.broken() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self.broken():
            terminalreporter.write_line(f"docs/origins.md claims what no test has shown: {name}")


def runs_all(config: pytest.Config) -> bool:
    """Whether all tests run: none is selected by a path, a word or an earlier result."""
    selects = ("keyword", "markexpr", "lf", "deselect", "collectonly")
    everything = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return everything and not any(config.getoption(name, default=None) for name in selects)
