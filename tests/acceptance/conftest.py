"""Fixtures that several acceptance tests share."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.servers import MisbehavingServer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    """The URL of the demo shop."""
    command = [sys.executable, "-m", "examples.bookshop", "--port", "0"]
    with forking.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("bookshop: ").strip()
        server.terminate()


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
