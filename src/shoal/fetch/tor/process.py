"""The process of a Tor daemon: its program, its folder, its configuration, its end.

The daemon is killed when the process that started it ends for any reason. The kernel sends the signal, so it also
reaches a daemon that hangs. A folder that a killed worker left behind is deleted by the next one.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path

from shoal.config import TorSettings
from shoal.config.layers import check_trust
from shoal.errors import TorError

log = logging.getLogger("shoal.tor")

_OLDEST = (0, 4, 7)
_START_TIMEOUT = 60.0
"""Seconds that a short command of the program may take, on a very busy machine."""
_PREFIX = "shoal-tor-"
_KEPT_LINES = 5
# Started by this process: asks the kernel for SIGKILL when the parent dies, then becomes the daemon. The parent may
# have died before.
_BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_INSTALL = "Install it (Debian: apt-get install tor, macOS: brew install tor), or set tor.executable or tor.url"


def find_program(settings: TorSettings) -> str:
    """The path of the program. TorError if there is none."""
    name = settings.executable or "tor"
    # A normal user often has no sbin in PATH, and Debian installs it there.
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    path = shutil.which(name, path=places)
    if path is None:
        what = "Tor is not installed" if settings.executable is None else f"tor.executable: there is no program {name}"
        raise TorError(f"{what}. {_INSTALL}")
    return os.path.abspath(path)


async def version_of(program: str) -> str:
    """The version of the program. TorError if it is not Tor, or too old."""
    code, text = await _run(program, "--version")
    match = re.search(r"Tor version (\d+)\.(\d+)\.(\d+)([\w.-]*)", text)
    if match is None:
        raise TorError(f"{program} is not Tor: `{program} --version` ended with code {code}. {_INSTALL}")
    version = f"{match[1]}.{match[2]}.{match[3]}{match[4].rstrip('.')}"
    if tuple(map(int, match.group(1, 2, 3))) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise TorError(f"{program} is Tor {version}, which is too old: Shoal needs {oldest} or later. {_INSTALL}")
    return version


async def _run(program: str, *words: str) -> tuple[int, str]:
    """The exit code and the output of a short command."""
    try:
        process = await _spawn(program, *words)
    except OSError as exc:
        raise TorError(f"cannot run {program}: {exc.strerror}. {_INSTALL}") from exc
    try:
        async with asyncio.timeout(_START_TIMEOUT):
            output, _ = await process.communicate()
    except TimeoutError as exc:
        raise TorError(f"`{program} {words[0]}` did not end within {_START_TIMEOUT:g} s") from exc
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, output.decode("utf-8", "replace")


async def _spawn(*words: str) -> asyncio.subprocess.Process:
    """Start a program in an environment without the passwords of this process."""
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH") if name in os.environ}
    return await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )


class Folder:
    """A folder for the data of one daemon, which only this user can read."""

    def __init__(self) -> None:
        """TorError if it cannot be created."""
        _delete_abandoned()
        folder = None
        try:
            folder = self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            # It is locked before it gets its name, so that nobody finds it without the lock.
            with (self.path / "lock-new").open("w") as file:
                self._lock = os.dup(file.fileno())
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            (self.path / "lock-new").rename(self.path / "owner")
            (self.path / "data").mkdir(mode=0o700)
        except OSError as exc:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            place = tempfile.gettempdir()
            raise TorError(
                f"cannot create a folder for Tor in {place}: {exc.strerror}. Make room there, or set TMPDIR"
            ) from exc

    def clear(self) -> None:
        """Remove what the last daemon wrote about itself."""
        for name in ("control", "cookie"):
            with suppress(OSError):
                (self.path / name).unlink()

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        try:
            path.write_text(text)
        except OSError as exc:
            raise TorError(f"cannot write {path}: {exc.strerror}. Make room there, or set TMPDIR") from exc
        return path

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _delete_abandoned() -> None:
    """Delete folders of workers that were killed. A living worker holds the lock of its folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.lstat().st_uid != os.getuid() or path.is_symlink():
                continue
            with (path / "owner").open("r+") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


class TorProcess:
    """A running daemon."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        """The last warnings and errors that it logged."""
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Negative for a signal. None while it runs."""
        return self._process.returncode

    async def end_of_output(self) -> None:
        """Wait until everything that the daemon logged is read, for a moment at most."""
        await asyncio.wait([self._reading], timeout=1.0)

    @property
    def complaints(self) -> str:
        """The last warnings and errors that it logged, in one line."""
        return " ".join(dict.fromkeys(self._last))

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = (await self._process.stdout.readline()).decode("utf-8", "replace").rstrip()
            except ValueError:  # a line without end
                continue
            if not line:
                if self._process.stdout.at_eof():
                    return
                continue
            log.debug("tor: %s", line)
            match = re.search(r"\[(warn|err)\] (.*)", line)
            if match is not None and not _is_expected(match[2]):
                self._last.append(match[2][:300])


_EXPECTED = (
    "You have used DirAuthority",
    "TestingTorNetwork is set",
    "You are running Tor as root",
    "Reading config failed",
)


def _is_expected(warning: str) -> bool:
    """Whether a warning can be ignored: about a private network, about root, or one that another warning explains."""
    return warning.startswith(_EXPECTED)


def torrc_of(folder: Path) -> str:
    """The settings of every daemon. They override the user's own."""
    return "\n".join(
        [
            f'DataDirectory "{folder / "data"}"',
            f'CookieAuthFile "{folder / "cookie"}"',
            f'ControlPortWriteToFile "{folder / "control"}"',
            "CookieAuthentication 1",
            "ControlPort 127.0.0.1:auto",
            "SocksPort 127.0.0.1:auto IsolateSOCKSAuth",
            "DNSPort 0",
            "TransPort 0",
            "HTTPTunnelPort 0",
            "ClientOnly 1",
            "RunAsDaemon 0",
            "DormantTimeoutEnabled 0",  # a paused run must find it awake
            "AvoidDiskWrites 1",
            "Log notice stdout",
            f"__OwningControllerProcess {os.getpid()}",
            "",
        ]
    )


def _users_torrc(name: str | None) -> str:
    """The lines of ``tor.torrc``. ConfigError if another user could have written it: it can name programs to run."""
    if name is None:
        return ""
    try:
        with Path(name).open("rb") as file:
            check_trust(Path(name), os.fstat(file.fileno()))
            return file.read().decode()
    except OSError as exc:
        raise TorError(f"cannot read tor.torrc ({name}): {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise TorError(f"cannot read tor.torrc ({name}): not UTF-8 at byte {exc.start}") from exc


async def start_process(program: str, settings: TorSettings, folder: Folder, *more_words: str) -> TorProcess:
    """Start a daemon, with extra arguments on its command line. TorError if its configuration is wrong."""
    folder.clear()
    words = [
        "-f", str(folder.write("torrc", torrc_of(folder.path))),
        "--defaults-torrc", str(folder.write("torrc-user", _users_torrc(settings.torrc))), *more_words,
    ]  # fmt: skip
    code, text = await _run(program, *words, "--verify-config")
    if code:
        complaints = re.findall(r"\[(?:warn|err)\] (.*)", text)
        why = " ".join(line for line in complaints if not _is_expected(line)) or text.strip()[-300:]
        where = f"tor.torrc ({settings.torrc}) is wrong" if settings.torrc is not None else "it refuses its settings"
        raise TorError(f"Tor cannot start: {where}: {why}")
    try:
        process = await _spawn(sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), program, *words)
    except OSError as exc:
        raise TorError(f"cannot start Tor: {exc.strerror}") from exc
    return TorProcess(process)


async def try_start(settings: TorSettings) -> str:
    """Start a daemon for a moment, without the network. Return its version and program. TorError if it cannot
    start."""
    program = find_program(settings)
    version = await version_of(program)
    folder = Folder()
    try:
        process = await start_process(program, settings, folder, "--DisableNetwork", "1")
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                while not (folder.path / "control").exists():
                    if process.returncode is not None:
                        await process.end_of_output()
                        raise TorError(f"{program} {describe_exit(process.returncode)}. {process.complaints}")
                    await asyncio.sleep(0.05)
        except TimeoutError as exc:
            raise TorError(f"{program} did not start within {_START_TIMEOUT:g} s") from exc
        finally:
            await process.kill()
    finally:
        folder.delete()
    return f"{version} ({program})"


def describe_exit(code: int) -> str:
    """Describe the exit code of a process: ``ended with code 1``, or ``was killed by SIGKILL``."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
