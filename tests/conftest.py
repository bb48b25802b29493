"""What holds for all tests."""

from __future__ import annotations

from tests.databases import close_shared


def pytest_unconfigure() -> None:
    """Also in each of several processes that the tests are spread over."""
    close_shared()
