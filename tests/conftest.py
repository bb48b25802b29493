"""Hooks for all tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import forking
from tests.databases import close_shared
from tests.spreading import Spreading, turn_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run random tests with all their examples")


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether random tests should take their time."""
    return bool(pytestconfig.getoption("--thorough"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return Spreading(config, log)


def pytest_unconfigure() -> None:
    """Stop the shared servers. pytest-xdist calls this in each of its processes."""
    close_shared()
    forking.close()


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
