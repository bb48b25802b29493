"""`shoal doctor`: whether this machine can run Shoal."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

from shoal.cli.help import Commands
from shoal.cli.options import resolve
from shoal.errors import ShoalError

_REQUIRED = ("aiohttp", "uvloop", "turbohtml", "msgspec", "protego", "yarl", "typer", "rich")
_OPTIONAL = (
    ("pyarrow", "parquet", "Parquet files"),
    ("brotli", "brotli", "pages in Brotli"),
    ("zstandard", "zstd", "pages in Zstandard"),
)
_MIN_OPEN_FILES = 1024

app = Commands()


class _Check(NamedTuple):
    """The result of one check. None: it is optional, and missing."""

    passed: bool | None
    what: str
    hint: str = ""


@app.add(examples="shoal doctor")
def doctor() -> None:
    """Check Python, libraries, limits, settings and Tor.

    The exit code is 1 if something is missing or wrong.
    """
    has_problems = False
    for check in (*_libraries(), *_limits(), *_settings(), *_tor()):
        mark = {True: "ok  ", False: "BAD ", None: "-   "}[check.passed]
        print(f"{mark}{check.what}{'' if check.passed or not check.hint else ': ' + check.hint}")
        has_problems |= check.passed is False
    sys.exit(1 if has_problems else 0)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libraries() -> Iterator[_Check]:
    yield _Check(sys.version_info >= (3, 11), f"Python {sys.version.split()[0]}", "Shoal needs 3.11 or later")
    for name in _REQUIRED:
        version = _version(name)
        yield _Check(version is not None, f"{name} {version or ''}".rstrip(), f"missing; pip install {name}")
    for name, extra, use in _OPTIONAL:
        version = _version(name)
        if version is not None:
            yield _Check(True, f"{name} {version} ({use})")
        else:
            yield _Check(None, name, f"not installed; pip install 'shoal[{extra}]' for {use}")


def _limits() -> Iterator[_Check]:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _Check(soft >= _MIN_OPEN_FILES, f"{soft} open files allowed", "raise the limit with `ulimit -n 4096`")


def _settings() -> Iterator[_Check]:
    try:
        resolved = resolve(None, {}, [])
    except ShoalError as error:
        yield _Check(False, "configuration", str(error))
        return
    files = {source for source in resolved.sources.values() if source.endswith(".toml")}
    yield _Check(True, f"configuration ({', '.join(sorted(files)) or 'no shoal.toml'})")
    folder = os.path.abspath(".")
    yield _Check(os.access(folder, os.W_OK), f"write access to {folder}", "no; outputs go there by default")


def _tor() -> Iterator[_Check]:
    """Whether Tor can be used. It does not connect to the Tor network."""
    import asyncio

    from shoal.config import TorSettings
    from shoal.tor.process import try_start

    try:
        settings = resolve(None, {}, []).config.tor
    except ShoalError:  # `_settings` has said it
        settings = TorSettings()
    if settings.url is not None:
        yield _Check(True, f"Tor: the daemon at {settings.url} (tor.url)")
        return
    try:
        yield _Check(True, f"Tor {asyncio.run(try_start(settings))} starts")
    except ShoalError as error:
        yield _Check(False if settings.enabled else None, "Tor", str(error))
