"""Real Python processes that start at once: each is forked from a process that has imported what commands need.

A new interpreter takes half a second of CPU time for its imports, a server a whole one. `Popen` and `run` are those of
`subprocess`, for Python commands: ``-m MODULE``, ``-c CODE``, or a file. The process has its own pid, folder,
environment, files and exit code, and dies of signals like any other. But its command line and its environment in
``/proc`` are not its own, options of the interpreter are missing, and variables that act at the start of a program
(``LD_PRELOAD``, ``PYTHONPATH``) do nothing. Tests that need these, or that look at what is imported, use `subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

SHOAL = [sys.executable, "-m", "shoal.cli.main"]
_SIZE = struct.Struct("!I")
_STATUS = struct.Struct("!i")
_FILES = 4
"""Standard input, output and error of the process, and where its end is reported."""
_IMPORTED = (
    *("shoal.cli.main", "shoal.cli.commands.worker", "shoal.cli.commands.cluster", "shoal.cli.commands.crawl"),
    *("shoal.cli.commands.runs", "shoal.cli.commands.start", "shoal.cli.commands.audit", "shoal.cli.commands.outputs"),
    *("shoal.cli.progress", "shoal.cli.summary", "shoal.runs.crawl", "shoal.runs.worker", "shoal.runs.orchestrator"),
    *(
        "shoal.fetch.layers.cache",
        "shoal.fetch.sessions.session",
        "shoal.fetch.layers.robots",
    ),
    *("shoal.frontier.sqlite", "shoal.frontier.redis", "shoal.frontier.postgres"),
    *(
        "shoal.runs.cluster.node",
        "shoal.runs.cluster.redis",
        "shoal.runs.cluster.postgres",
        "shoal.runs.cluster.zookeeper",
    ),
    *("shoal.sinks.files", "shoal.sinks.sqlite", "shoal.sinks.postgres", "shoal.sinks.mysql"),
    *("shoal.api.server.app", "uvicorn", "uvicorn.protocols.http.h11_impl", "shoal.cli.commands.serve"),
    *("uvloop", "encodings.idna", "importlib.readers", "typer._adapters", "turbohtml.detect"),
    *(
        "shoal.fetch.http_fetcher",
        "shoal.fetch.layers.identity_facts",
        "shoal.fetch.layers.throttle",
        "shoal.selector.documents",
    ),
    *("shoal.runs.process_fork", "shoal.runs.process_crawl", "shoal.runs.command_spiders", "shoal.sinks.csvfile"),
)
_IMPORTED_LATER = {
    "celery": (
        *("celery.bin.celery", "celery.bin.worker", "celery.bin.control", "celery.app.base", "celery.app.amqp"),
        *("celery.app.control", "celery.app.events", "celery.app.log", "celery.app.task", "celery.apps.worker"),
        *("celery.backends.redis", "celery.concurrency.prefork", "celery.fixups.django", "celery.loaders.app"),
        *("celery.worker", "celery.worker.components", "celery.worker.consumer", "celery.worker.autoscale"),
        *(
            "kombu.transport.redis",
            "shoal.api.celery.page_worker",
            "shoal.api.celery.broker",
            "shoal.api.celery.messages",
        ),
    ),
}
"""What the commands of a module need, and no others. The module ``shoal.api.celery.app`` reads the environment, so
it must not be imported earlier."""


class Popen(subprocess.Popen[str]):
    """A command: the interpreter, ``-m MODULE``, ``-c CODE`` or a file, and arguments."""

    def __init__(self, words: Sequence[str | os.PathLike[str]], **options: Any) -> None:
        assert words[0] == sys.executable, words
        self._ended: int | None = None
        super().__init__([os.fspath(word) for word in words], **options)

    def _execute_child(self, args: list[str], *others: Any) -> None:
        # The signature of the standard library, in which these are the only ones that commands use.
        cwd, env, p2cread, c2pwrite, errwrite = others[4], others[5], others[9], others[12], others[14]
        start_new_session = others[20]
        report, theirs = os.pipe()
        self._ended = report
        files = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        order = {
            "words": args[1:], "folder": os.fspath(cwd or os.getcwd()), "session": bool(start_new_session),
            "environ": dict(os.environ if env is None else env),
        }  # fmt: skip
        try:
            self.pid = _nursery().fork(order, [*files, theirs])
        finally:
            os.close(theirs)
        self._child_created = True
        self._close_pipe_fds(*others[9:15])

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None:
            self._read_end(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._read_end(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _read_end(self, timeout: float | None) -> None:
        if self._ended is None or not select.select([self._ended], [], [], timeout)[0]:
            return
        said = os.read(self._ended, _STATUS.size)
        os.close(self._ended)
        self._ended = None
        self._handle_exitstatus(_STATUS.unpack(said)[0] if said else signal.SIGKILL)


def run(
    words: Sequence[str | os.PathLike[str]],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float = 120.0,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with Popen(words, **{"stdin": subprocess.DEVNULL, "text": True} | options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


_SHARED = "TESTS_FORKING"


class _Nursery:
    """The process from which commands are forked. It is started, unless another process shares its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.path = os.environ.get(_SHARED, "")
        if self.path:
            return
        self._folder = TemporaryDirectory(prefix="shoal-forking-")
        self.path = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self.path)
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(listening.fileno())], pass_fds=[listening.fileno()],
                cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip

    def fork(self, order: dict[str, Any], files: list[int]) -> int:
        data = json.dumps(order).encode()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.path)
            socket.send_fds(client, [_SIZE.pack(len(data))], files)
            client.sendall(data)
            return int(_SIZE.unpack(_receive(client, _SIZE.size))[0])

    def close(self) -> None:
        if self._process is not None:
            os.environ.pop(_SHARED, None)
            self._process.kill()
            self._process.communicate()
            self._folder.cleanup()


@cache
def _nursery() -> _Nursery:
    return _Nursery()


def share() -> None:
    """Let all processes that this one starts later use one process that forks."""
    os.environ[_SHARED] = _nursery().path


def close() -> None:
    """End the process that forks, if there is one. Processes of pytest-xdist run no functions of `atexit`."""
    if _nursery.cache_info().currsize:
        _nursery().close()
        _nursery.cache_clear()


atexit.register(close)  # for programs that are not tests


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the process that forks commands has ended")
        data += part
    return data


# -- the process that forks


def _serve(listening: socket.socket) -> dict[str, Any]:
    """Fork for each order. Returns the order in the new process, and never in this one."""
    reports: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([listening, woken, 0], [], [])[0]
        if 0 in ready:  # the tests have ended
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _report(reports)
        if listening not in ready:
            continue
        connection = listening.accept()[0]
        head, files, _, _ = socket.recv_fds(connection, _SIZE.size, _FILES)
        order: dict[str, Any] = json.loads(_receive(connection, _SIZE.unpack(head)[0]))
        _import_for(order["words"])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for place, file in enumerate(files[:3]):
                os.dup2(file, place)
            for file in (*files, *reports.values(), woken, wake, connection.detach(), listening.detach()):
                os.close(file)
            return order
        reports[pid] = files[3]
        for file in files[:3]:
            os.close(file)
        connection.sendall(_SIZE.pack(pid))
        connection.close()


def _report(reports: dict[int, int]) -> None:
    """Tell the tests which processes have ended, and how."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with suppress(OSError):  # nobody waits for it
                os.write(reports[pid], _STATUS.pack(status))
            os.close(reports.pop(pid))


def _import_for(words: list[str]) -> None:
    """Import what a module needs, for this process and all like it."""
    if words[0] != "-m":
        return
    needed = _IMPORTED_LATER.get(words[1], (words[1],) if words[1].startswith("tests.") else ())
    missing = [name for name in needed if name not in sys.modules]
    for name in missing:
        with suppress(Exception):  # the new process fails with the same error
            importlib.import_module(name)
    if missing:
        gc.freeze()


def _main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for name in _IMPORTED:
        with suppress(Exception):  # environments of benchmarks do not have all extras
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    if order["session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environ"])
    tempfile.tempdir = None  # TMPDIR may be another one
    sys.path[0] = order["folder"]
    try:
        _run(order["words"])
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    else:
        _end(0)


def _end(code: int) -> None:
    """Do what the interpreter does at its end, but keep the imported modules. To delete all their objects takes ten
    times as long as all else: the system copies each page of memory first."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    gc.collect()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
    sys.exit(code)  # the interpreter reports what cannot be written


def _run(words: list[str]) -> None:
    """Do what the interpreter does with these arguments."""
    match words:
        case ["-m", "shoal.cli.main", *arguments]:
            from shoal.cli.main import main

            sys.argv = ["shoal", *arguments]
            main()
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            sys.modules.pop(module, None)  # otherwise runpy warns that it runs for the second time
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            program = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(program))
        case [file, *arguments]:
            sys.argv = [file, *arguments]
            sys.path[0] = os.path.dirname(os.path.abspath(file))
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    _main()
