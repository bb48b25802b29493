"""Fixtures that several acceptance tests share."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.servers import MisbehavingServer


@pytest.fixture
async def secure(certificate: Path) -> AsyncIterator[MisbehavingServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with MisbehavingServer(tls=context) as server:
        yield server
