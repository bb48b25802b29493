"""Fixtures that several acceptance tests share."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.servers import MisbehavingServer


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, signed by itself, with its key."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", path,
         "-out", path.with_suffix(".crt")],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    """For servers of the tests."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
async def secure(tls: ssl.SSLContext) -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer(tls=tls) as server:
        yield server
