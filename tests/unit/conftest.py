"""Fixtures that several tests share, and settings of random tests."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 (nobody else may be able to read the interpreter's files)
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine must not make a property fail.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing may be written. Root gives up its rights meanwhile."""
    folder = tmp_path / "forbidden"
    folder.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    yield folder
    if root:
        os.setresuid(0, 0, 0)
