"""Hooks for all tests."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - later, nobody may be able to read the interpreter's files
import gc
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import execnet
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support import claims, forked_pytest, forking
from tests.support.databases import close_shared, run_folder
from tests.support.spreading import Spreading, turn_of

# A busy machine must not make a property fail.
settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run random tests with all their examples")
    parser.addoption("--claims", action="store_true", help="run only the tests that docs/origins.md names")


def pytest_configure(config: pytest.Config) -> None:
    run_folder()  # before other processes start
    if not hasattr(config, "workerinput") and (config.getoption("--claims") or claims.runs_all(config)):
        config.pluginmanager.register(claims.ClaimCheck())
    if sys.version_info < (3, 12):
        # To mark a part of a line, a traceback parses it. The garbage collector may log one while hypothesis parses a
        # file, and then that raises SystemError (python/cpython#106905).
        traceback._extract_caret_anchors_from_line_segment = lambda segment: None  # type: ignore[attr-defined]
    # Its replacement, a hook, adds a parameter to every asynchronous test.
    config.addinivalue_line("filterwarnings", "ignore:Overriding the .event_loop_policy. fixture is deprecated")


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether random tests should take their time."""
    return bool(pytestconfig.getoption("--thorough"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--claims"):
        named = claims.claimed_tests()
        items[:] = [item for item in items if claims.plain_name(item.nodeid) in named]
    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of collected tests stay until the end: the garbage collector need not look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return Spreading(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[execnet.XSpec]) -> None:
    forking.share()
    forked_pytest.fork_all(config, specs)


def pytest_unconfigure() -> None:
    """Stop the shared servers. pytest-xdist calls this in each of its processes."""
    close_shared()
    forking.close()
    forked_pytest.close()


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_are() -> Iterator[None]:
    """A command that runs in the process of a test sets up loggers. Other tests read what they log."""
    before = {logger: (logger.level, logger.propagate, logger.handlers[:]) for logger in _own_loggers()}
    root_level = logging.root.level
    yield
    logging.root.setLevel(root_level)
    for logger in _own_loggers():
        level, logger.propagate, logger.handlers[:] = before.get(logger, (logging.NOTSET, True, []))
        if logger.level != level:
            logger.setLevel(level)


def _own_loggers() -> list[logging.Logger]:
    found = [each for name, each in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "shoal"]
    return [each for each in found if isinstance(each, logging.Logger)]


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
