"""What `shoal doctor` checks. A check of something that is configured is one function: add it to `CHECKS`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shoal.cli.help import Commands
from shoal.cli.options import Setting, resolve
from shoal.config import Resolved, find_short_tokens, mask
from shoal.errors import ConfigError, ShoalError
from shoal.messages import pip_install
from shoal.system import threads

if TYPE_CHECKING:
    from shoal.ports import Coordinator, Store

_REQUIRED = ("aiohttp", "uvloop", "turbohtml", "msgspec", "protego", "pycares", "yarl", "typer", "rich")
_OPTIONAL = {
    "pyarrow": ("parquet", "Parquet files"),
    "obstore": ("objects", "object storage"),
    "pillow": ("images", "thumbnails of images"),
    "brotli": ("brotli", "pages in Brotli"),
    "zstandard": ("zstd", "pages in Zstandard"),
    "redis": ("redis", "Redis"),
    "asyncpg": ("postgres", "PostgreSQL"),
    "pymysql": ("mysql", "MySQL and MariaDB"),
    "kazoo": ("zookeeper", "ZooKeeper"),
    "fastapi": ("api", "`shoal serve`"),
    "celery": ("celery", "Celery workers"),
    "playwright": ("browser", "rendering"),
}
_MIN_OPEN_FILES = 1024
_SERVER_TIMEOUT = 10.0
_MIN_TEMPORARY = 256 << 20
"""Bytes. Chromium does not use /dev/shm, which is small in containers, but files for its shared memory."""


class CheckResult(NamedTuple):
    """The result of one check. ``passed`` is None for something optional that is missing or does not work."""

    passed: bool | None
    what: str
    hint: str = ""


Check: TypeAlias = Callable[[Resolved], Iterator[CheckResult]]


def examine(read: Callable[[], Resolved]) -> Iterator[CheckResult]:
    """Do all checks, and yield each result. ``read`` reads the configuration."""
    yield from _check_libraries()
    yield from _check_limits()
    try:
        resolved = read()
    except ShoalError as error:
        yield CheckResult(False, "configuration", str(error))
        return
    for check in CHECKS:
        yield from check(resolved)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_libraries() -> Iterator[CheckResult]:
    yield CheckResult(sys.version_info >= (3, 11), f"Python {sys.version.split()[0]}", "Shoal needs 3.11 or later")
    for name in _REQUIRED:
        version = _version(name)
        yield CheckResult(version is not None, f"{name} {version or ''}".rstrip(), f"missing; pip install {name}")
    for name, (extra, use) in _OPTIONAL.items():
        version = _version(name)
        shown = name if version is None else f"{name} {version} ({use})"
        yield CheckResult(version is not None or None, shown, f"not installed; {pip_install(extra)} for {use}")


def _check_limits() -> Iterator[CheckResult]:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield CheckResult(soft >= _MIN_OPEN_FILES, f"{soft} open files allowed", "raise the limit with `ulimit -n 4096`")


def check_configuration(resolved: Resolved) -> Iterator[CheckResult]:
    places = {source.rpartition(": ")[0] or source for source in resolved.sources.values()}
    files = {place for place in places if place.endswith(".toml")}
    yield CheckResult(True, f"configuration ({', '.join(sorted(files)) or 'no shoal.toml'})")
    hint = 'not set; give site owners a way to reach you: contact = "https://..." in shoal.toml'
    shown = f"user agent {resolved.config.sent_user_agent}" if resolved.config.contact else "contact in the user agent"
    yield CheckResult(True if resolved.config.contact else None, shown, hint)
    folder = os.path.abspath(".")
    yield CheckResult(os.access(folder, os.W_OK), f"write access to {folder}", "denied; outputs go there by default")


def check_tokens(resolved: Resolved) -> Iterator[CheckResult]:
    """Whether the tokens of the API are hard to guess."""
    serve = resolved.config.serve
    if serve.token or serve.tokens:
        problem = find_short_tokens(serve.token, serve.tokens)
        yield CheckResult(problem is None, "tokens of the API", problem or "")


# -- servers


def check_servers(resolved: Resolved) -> Iterator[CheckResult]:
    """The servers that the configuration names. None is needed for a crawl on one machine."""
    config = resolved.config
    if not config.frontier.startswith(("memory:", "sqlite:", "local:")):
        from shoal.frontier import join_store

        yield _server(f"frontier {mask(config.frontier)}", join_store(config.frontier, readonly=True))
    if config.cluster.coordinator is not None:
        from shoal.runs.cluster import open_coordinator

        url = config.cluster.coordinator
        yield _server(f"coordinator {mask(url)}", open_coordinator(url, config.project_name))
    broker = os.environ.get("CELERY_BROKER_URL")
    if broker:
        yield _server(f"Celery broker {mask(broker)}", threads.call(_open_broker, broker))


def _server(what: str, opening: Awaitable[Store | Coordinator | None]) -> CheckResult:
    async def within() -> None:
        async with asyncio.timeout(_SERVER_TIMEOUT):
            opened = await opening
            if opened is not None:
                await opened.close()

    try:
        asyncio.run(within())
    except TimeoutError:
        return CheckResult(False, what, f"no answer within {_SERVER_TIMEOUT:g} s")
    except ShoalError as exc:
        return CheckResult(False, what, str(exc))
    return CheckResult(True, what)


def _open_broker(url: str) -> None:
    try:
        from kombu.connection import Connection
    except ModuleNotFoundError as exc:
        raise ConfigError(f"Celery is not installed; {pip_install('celery')}") from exc
    try:
        connect: Callable[..., Any] = Connection  # without types
        with connect(url, connect_timeout=_SERVER_TIMEOUT / 2) as connection:
            connection.ensure_connection(max_retries=1, timeout=_SERVER_TIMEOUT / 2)
    except Exception as exc:  # transports have no common base error
        raise ConfigError(str(exc) or type(exc).__name__) from exc


# -- rendering


def check_browser(resolved: Resolved) -> Iterator[CheckResult]:
    """Start Chromium. If no setting of the browser is changed, it is optional."""
    if _version("playwright") is None:
        return
    from shoal.fetch.browser.process import find_executable

    settings = resolved.config.browser
    is_configured = any(key.startswith("browser.") and source != "default" for key, source in resolved.sources.items())
    failed = False if is_configured else None
    try:
        where = find_executable(settings) or "the Chromium of Playwright"
        version = asyncio.run(_start_browser(resolved))
    except ShoalError as exc:
        yield CheckResult(failed, "Chromium for rendering", str(exc))
        return
    yield CheckResult(True, f"Chromium {version} starts ({where})")
    hint = "off (browser.sandbox); render only pages that you trust"
    yield CheckResult(settings.sandbox or None, "the sandbox of Chromium", hint)
    yield from _check_temporary_folder()


async def _start_browser(resolved: Resolved) -> str:
    """Start it, and return its version."""
    from shoal.fetch.browser.process import BrowserProcess

    process = BrowserProcess(resolved.config.browser)
    try:
        await process.launch()
        return process.browser.version
    finally:
        await process.close()


def _check_temporary_folder() -> Iterator[CheckResult]:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    yield CheckResult(
        free >= _MIN_TEMPORARY or None,
        f"{free >> 20} MB free in {folder} for the profile and the shared memory of Chromium",
        "large pages may crash; set TMPDIR to another folder",
    )


# -- Tor


def check_tor(resolved: Resolved) -> Iterator[CheckResult]:
    """Whether Tor starts. It does not connect to the Tor network."""
    from shoal.fetch.tor.process import try_start

    settings = resolved.config.tor
    if settings.url is not None:
        yield CheckResult(True, f"Tor: the daemon at {settings.url} (tor.url)")
        return
    try:
        yield CheckResult(True, f"Tor {asyncio.run(try_start(settings))} starts")
    except ShoalError as error:
        yield CheckResult(False if settings.enabled else None, "Tor", str(error))


# -- plugins


def check_plugins(resolved: Resolved) -> Iterator[CheckResult]:
    """Every installed plugin, and whether it can be imported."""
    from shoal.config import plugins

    kinds: tuple[plugins.Kind, ...] = ("sinks", "fetchers", "frontiers")
    every = {kind: plugins.installed(kind) for kind in kinds}
    if not any(every.values()):
        yield CheckResult(None, "plugins", "none installed")
    for plugins_of_kind in every.values():
        for plugin in plugins_of_kind:
            what = f"plugin: {plugin.shown} ({plugin.package})"
            problem = plugins.problem_of(plugin, plugins_of_kind)
            if plugin.name in plugins.BUILT_IN[plugin.kind]:
                yield CheckResult(None, what, problem or "")
                continue
            try:
                plugin.load()
                yield CheckResult(problem is None, what, problem or "")
            except ShoalError as error:
                yield CheckResult(False, what, str(error))


CHECKS: tuple[Check, ...] = (
    check_configuration, check_tokens, check_servers, check_browser, check_tor, check_plugins,
)  # fmt: skip


# `shoal doctor`: whether this machine can run Shoal.


app = Commands()

_MARKS = {True: "ok  ", False: "BAD ", None: "-   "}


@app.add(
    examples="""
    shoal doctor
    shoal doctor --set browser.executable=/opt/chromium/chrome
    """
)
def doctor(setting: Setting = []) -> None:
    """Check libraries, settings, servers, the browser and Tor.

    It connects to the servers that the configuration names, and starts Chromium and Tor. The exit code is 1 if
    something that is required or configured does not work. A dash marks optional parts that are missing.
    """

    has_problems = False
    for result in examine(lambda: resolve(None, {}, setting)):
        hint = "" if result.passed or not result.hint else f": {result.hint}"
        print(f"{_MARKS[result.passed]}{result.what}{hint}", flush=True)
        has_problems |= result.passed is False
    sys.exit(1 if has_problems else 0)
