"""Fixtures for the gateway. Its tests run on both event loops: their transports differ in many small ways."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop

from shoal.fetch.browser.gateway import Listener
from tests.fetch.gateway.client import Client, listening, until
from tests.support.servers import MisbehavingServer


@pytest.hookimpl(optionalhook=True)  # an older pytest-asyncio does not call it: then only one event loop is tested
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def site() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with listening() as made:
        yield made


@pytest.fixture
async def client(listener: Listener) -> AsyncIterator[Client]:
    made = await Client.to(listener)
    yield made
    made.close()


@pytest.fixture(autouse=True)
async def no_socket_is_left() -> AsyncIterator[None]:
    def sockets() -> int:
        return sum("socket:" in os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    before = sockets()
    yield
    await until(lambda: sockets() <= before, seconds=3)


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Event loops log what their callbacks raise. The servers of the tests may fail: they get hostile bytes too."""
    yield
    errors = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert [each for each in errors if "StreamServer" not in each] == []
