"""A MongoDB for the tests: the server in MONGODB_URL, or the small one of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from mongo_server import MongoServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[MongoServer]:
    async with MongoServer() as server:
        server.url = os.environ.get("MONGODB_URL", server.url).rstrip("/")
        yield server
