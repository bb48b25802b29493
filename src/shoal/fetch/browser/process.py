"""One Chromium with its own profile, and the driver that controls it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import BrowserSettings
from shoal.errors import BrowserError
from shoal.fetch.browser import guardian
from shoal.messages import pip_install
from shoal.system import chance, clock, threads

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

# Processes of a browser whose parent died: this process adopts them and reaps them.
#
# Otherwise they stay as zombies in a container whose first process is not an init.

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE = 0.02


def children() -> set[int]:
    """The child processes of this process, zombies included."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            pids.update(map(int, (task / "children").read_text().split()))
    return pids


def adopt() -> None:
    """From now on, descendants whose parent dies become children of this process."""
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def group_of(pid: int) -> int:
    """The process group of a process, also of a zombie; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, IndexError, ValueError):
        return 0


def reap(groups: Collection[int], patience: float) -> None:
    """Reap the children in these process groups, which are being killed. It blocks until none is left."""
    end = clock.monotonic() + patience
    while groups and clock.monotonic() < end:
        own = [pid for pid in children() if group_of(pid) in groups]
        for pid in own:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not own and not any(group_of(int(name)) in groups for name in os.listdir("/proc") if name.isdigit()):
            return
        time.sleep(_PAUSE)


log = logging.getLogger("shoal.browser")

_LAUNCH_TIMEOUT = 60.0
_CLOSE_TIMEOUT = 5.0
_SYSTEM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "FONTCONFIG_PATH", "FONTCONFIG_FILE", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that Chromium gets. All others may hold secrets."""
_SWITCHES = (
    "--block-new-web-contents",
    "--disable-quic",
    "--disable-domain-reliability",
    "--disable-background-networking",
    "--dns-prefetch-disable",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--no-pings",
    "--js-flags=--max-old-space-size=512",
    # All traffic goes through the proxy of a context. A context without a proxy cannot connect.
    "--proxy-server=http://127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
_UNWANTED = ("--disable-ipc-flooding-protection", "--disable-popup-blocking")
"""Switches of Playwright that let a page flood the browser."""
_MIN_FREE = 32 << 20
"""Bytes. With less room in the temporary folder, Chromium crashes without saying why."""
_MAX_SOCKET_FOLDER = 60
"""Characters. Chromium creates a socket in its temporary folder, and paths of sockets must be short."""
_NO_SANDBOX = ("sandbox", "namespace", "zygote_host", "sys_chroot")
"""What Chromium prints if the system does not allow its sandbox: a part of one of its messages."""
_BLOCKING = {"image": "--blink-settings=imagesEnabled=false", "font": "--disable-remote-fonts"}


def find_executable(settings: BrowserSettings) -> str | None:
    """The path of Chromium: from the settings, or of the system. None: use the one that Playwright installed."""
    if settings.executable is not None:
        if not os.access(settings.executable, os.X_OK):
            raise BrowserError(
                f'"browser.executable" is {settings.executable!r}, which is not an executable file. Set it to the path '
                "of Chromium, or remove it"
            )
        return settings.executable
    return next(filter(None, map(shutil.which, _SYSTEM_NAMES)), None)


def shortage() -> str:
    """A sentence that says that the temporary folder is full. Empty if it is not."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free >= _MIN_FREE:
        return ""
    return (
        f"The disk is full: {folder}, where Chromium keeps its profile and its shared memory, has {free >> 20} MB "
        "left. Make room there, or set TMPDIR to another folder"
    )


@asynccontextmanager
async def tolerated(step: str, timeout: float | None = None) -> AsyncIterator[None]:
    """Log an error in this block at debug level, instead of raising it. The library has no common base error.
    ``timeout``: seconds after which the block ends."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except Exception as exc:
        log.debug("%s failed: %s: %s", step, type(exc).__name__, exc)


class BrowserProcess:
    """A running Chromium. If this worker ends, however it ends, a guardian ends Chromium too."""

    def __init__(self, settings: BrowserSettings) -> None:
        self.pages = 0
        """How many pages it has rendered."""
        self.started = clock.monotonic()
        self.ended = False
        self.killed = False
        self._settings = settings
        self._token = chance.token_hex(16)
        self._folder: str | None = None
        self._profile: str | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._guardian: asyncio.subprocess.Process | None = None
        self._drivers: list[int] = []
        self._groups: set[int] = set()
        """The process groups of Chromium."""

    @property
    def browser(self) -> Browser:
        assert self._browser is not None
        return self._browser

    @property
    def is_connected(self) -> bool:
        """Whether Chromium and its driver still work, as far as is known."""
        return not self.ended and self._browser is not None and self._browser.is_connected()

    async def launch(self) -> None:
        """Start it. BrowserError says what to install or change."""
        executable = find_executable(self._settings)
        if self._settings.sandbox and os.geteuid() == 0:
            raise BrowserError(
                "Chromium's sandbox cannot start as root. Run shoal as another user, or set browser.sandbox = false "
                "(--set browser.sandbox=false) if all pages are trusted"
            )
        try:
            async with asyncio.timeout(_LAUNCH_TIMEOUT):
                await self._launch(executable)
        except TimeoutError:
            await self.kill()
            raise BrowserError(f"Chromium did not start within {_LAUNCH_TIMEOUT:g} s") from None
        except Exception as exc:
            await self.kill()
            if isinstance(exc, BrowserError):
                raise
            # If the driver is killed, Playwright raises an error without a class of its own.
            raise BrowserError(f"the browser or its driver ended while it started: {exc}") from exc
        except BaseException:
            await self.kill()
            raise

        def end(*_: object) -> None:
            self.ended = True

        self.browser.on("disconnected", end)
        log.info("started Chromium %s", self.browser.version)

    async def _launch(self, executable: str | None) -> None:
        try:
            from playwright.async_api import Error, async_playwright
        except ImportError:
            raise BrowserError(f"rendering needs Playwright: {pip_install('browser')}") from None
        try:
            self._folder = tempfile.mkdtemp(prefix="shoal-browser-")
        except OSError as exc:
            raise BrowserError(f"cannot create a folder for the profile of the browser: {exc.strerror}") from exc
        adopt()
        before = children()
        self._playwright = await async_playwright().start()
        self._drivers = sorted(children() - before)
        self._guardian = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", guardian.__file__, self._token, *map(str, self._drivers),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self._browser = await self._playwright.chromium.launch(
                executable_path=executable,
                chromium_sandbox=self._settings.sandbox,
                args=[*_SWITCHES, *(_BLOCKING[kind] for kind in self._settings.block if kind in _BLOCKING)],
                ignore_default_args=list(_UNWANTED),
                env=self._environment(self._folder),
                downloads_path=self._folder,
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
                timeout=_LAUNCH_TIMEOUT * 1000,
            )
        except Error as exc:
            raise BrowserError(_explain(str(exc), executable, sandbox=self._settings.sandbox)) from exc
        pids = guardian.find(self._token)
        self._profile = next(filter(None, map(_profile_of, pids)), None)
        self._groups = {group_of(pid) for pid in pids} - {0}

    def _environment(self, folder: str) -> dict[str, str | float | bool]:
        """Chromium gets a home of its own, and no secrets."""
        passed: dict[str, str | float | bool] = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        short = [path for path in (folder, passed.pop("TMPDIR", "")) if path and len(str(path)) <= _MAX_SOCKET_FOLDER]
        if short:
            passed["TMPDIR"] = short[0]
        return {**passed, "HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder,
                guardian.VARIABLE: self._token}  # fmt: skip

    def memory(self) -> int:
        """Bytes of memory that all its processes use. Shared memory is divided among them where the system says how."""
        return sum(map(_memory_of, guardian.find(self._token)))

    def kill_largest(self) -> None:
        """End the renderer that uses most memory. Its page crashes; the browser and the other pages live on."""
        renderers = [pid for pid in guardian.find(self._token) if b"--type=renderer" in _command(pid)]
        if renderers:
            with suppress(ProcessLookupError):
                os.kill(max(renderers, key=_memory_of), signal.SIGKILL)

    async def close(self) -> None:
        """Close it. After a deadline, kill it."""
        self.ended = True
        async with tolerated("closing the browser", _CLOSE_TIMEOUT):  # the kill below ends it anyway
            if self._browser is not None:
                await self._browser.close()
            if self._playwright is not None:
                await self._playwright.stop()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL all its processes, and remove the profile."""
        self.ended = self.killed = True
        watch, self._guardian = self._guardian, None
        await threads.call(guardian.kill, self._token)
        if self._playwright is not None:
            async with tolerated("stopping the driver", _CLOSE_TIMEOUT):
                await self._playwright.stop()
            self._playwright = None
        for pid in self._drivers:
            with suppress(ProcessLookupError):
                if pid in children():
                    os.kill(pid, signal.SIGKILL)
        if watch is not None:
            assert watch.stdin is not None
            watch.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await watch.wait()
        await threads.call(reap, self._groups, _CLOSE_TIMEOUT)
        for folder in (self._folder, self._profile):  # the driver removes the profile, unless it was killed
            if folder is not None:
                await threads.call(shutil.rmtree, folder, ignore_errors=True)
        self._folder = self._profile = None


def _explain(message: str, executable: str | None, *, sandbox: bool) -> str:
    """What to do about a Chromium that does not start."""
    where = executable or "the Chromium of Playwright"
    if "Executable doesn't exist" in message:
        return (
            "no Chromium found. Install it (Debian: apt install chromium; elsewhere: playwright install chromium), or "
            "set browser.executable to its path"
        )
    if sandbox and any(sign in message.lower() for sign in _NO_SANDBOX):
        return (
            f"the sandbox of {where} cannot start here. Allow unprivileged user namespaces; a container needs the "
            "seccomp profile deploy/chromium-seccomp.json. Or set browser.sandbox = false, if all pages are trusted"
        )
    if short := shortage():
        return f"{where} does not start. {short}"
    if "No space left" in message or "ENOSPC" in message:
        return f"{where} does not start: the disk is full"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{where} does not start: {'; '.join(lines[:3])[:400]}"


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _profile_of(pid: int) -> str | None:
    """The folder that the driver made for the profile, if this is Chromium's main process."""
    words = _command(pid).decode(errors="replace").split("\0")
    if any(word.startswith("--type=") for word in words):
        return None
    profile = next((word.partition("=")[2] for word in words if word.startswith("--user-data-dir=")), "")
    return profile if os.path.basename(profile).startswith("playwright_") else None


def _memory_of(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # ended, or not readable: sandboxed
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
