"""Processes of pytest-xdist that start with all tests imported: they are forked from one process that has done it.

Collecting all tests takes 12 s of CPU time, most of it for imports. pytest-xdist starts this file instead of a Python
interpreter. It hands its input and output to the process that forks, and lives as long as the new process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import execnet
    import pytest

_END_SECONDS = 10.0


class Mother:
    """The process that imports all tests and forks."""

    def __init__(self, config: pytest.Config) -> None:
        import subprocess
        from tempfile import TemporaryDirectory

        self._folder = TemporaryDirectory(prefix="shoal-tests-")
        self.path = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.path)
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked_pytest", "--mother", str(listening.fileno()),
                 *config.args],
                pass_fds=[listening.fileno()], cwd=config.invocation_params.dir, stdin=subprocess.PIPE,
            )  # fmt: skip

    def close(self) -> None:
        self._process.communicate()  # it ends with its input
        self._folder.cleanup()


_mothers: list[Mother] = []


def fork_all(config: pytest.Config, specs: Sequence[execnet.XSpec]) -> None:
    """Let the processes of pytest-xdist be forked."""
    _mothers.append(Mother(config))
    for spec in specs:
        spec.python = f"{sys.executable} -S {__file__} {_mothers[-1].path}"


def close() -> None:
    while _mothers:
        _mothers.pop().close()


# -- what pytest-xdist starts


def _hand_over(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        os.close(0)
        os.close(1)
        connection.recv(1)  # when the new process ends


# -- the process that forks


class _ImportOnly:
    """A plugin for pytest that imports modules of tests, and makes no tests of what they contain."""

    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def _import_all(words: list[str]) -> None:
    import gc

    import pytest

    output = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # errors are reported by the new processes, which meet them again
    pytest.main(["--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", *words], plugins=[_ImportOnly()])
    sys.stdout.flush()
    os.dup2(output, 1)
    os.close(output)
    os.close(nothing)
    gc.collect()
    gc.freeze()


def _fork_each(listening: socket.socket) -> socket.socket:
    """Fork for each connection. Returns the connection in the new process, and never in this one."""
    while True:
        ready = select.select([listening, 0], [], [], 1.0)[0]
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if 0 in ready:
            _end()
        if listening not in ready:
            continue
        connection = listening.accept()[0]
        files = socket.recv_fds(connection, 1, 3)[1]
        if os.fork() == 0:
            listening.close()
            for place, file in enumerate(files):
                os.dup2(file, place)
                os.close(file)
            return connection
        for file in files:
            os.close(file)
        connection.close()


def _end() -> None:
    """Wait for the processes, which end too."""
    until = time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)
    os._exit(0)


def _main(words: list[str]) -> None:
    if words[0] != "--mother":
        return _hand_over(words[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the others stop, and then this one
    _import_all(words[2:])
    connection = _fork_each(socket.socket(fileno=int(words[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run_worker()
    connection.close()
    return None


def _run_worker() -> None:
    """Do what the interpreter does that pytest-xdist would have started."""
    import random
    from types import ModuleType

    random.seed()
    sys.argv = ["-c"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    program = sys.modules["__main__"] = ModuleType("__main__")
    exec("import sys;exec(eval(sys.stdin.readline()))", vars(program))


if __name__ == "__main__":
    _main(sys.argv[1:])
