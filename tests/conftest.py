"""Hooks for all tests."""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.databases import close_shared
from tests.spreading import Spreading, turn_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return Spreading(config, log)


def pytest_unconfigure() -> None:
    """Stop the shared servers. pytest-xdist calls this in each of its processes."""
    close_shared()
