"""The event loops that users have: uvloop where it exists, otherwise that of asyncio."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

POLICIES = {"asyncio": asyncio.DefaultEventLoopPolicy, "uvloop": uvloop.EventLoopPolicy}


@pytest.fixture(scope="session", params=POLICIES)
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """A module that imports this fixture runs its tests on both loops."""
    return POLICIES[request.param]()


@pytest.fixture(scope="session")
def only_uvloop() -> asyncio.AbstractEventLoopPolicy:
    """For modules whose tests take long. Import it as `event_loop_policy`."""
    return uvloop.EventLoopPolicy()
