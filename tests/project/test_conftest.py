"""The hooks for all tests."""

from __future__ import annotations

import ast
import gc
import sys
import traceback
from collections.abc import Iterator

import pytest


class Unclosed:
    """Garbage whose finalizer fails, as that of a socket which was not closed."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        raise ResourceWarning("not closed")


@pytest.fixture
def collecting_often() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collecting_often")
def test_garbage_does_not_disturb_hypothesis_when_it_parses_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda failed: reports.append(traceback.format_exception(failed.exc_value))
    )
    for _ in range(20):
        Unclosed()
        ast.parse("f(lambda x: (x, x + 1, [x]))\n" * 3)
    assert reports
