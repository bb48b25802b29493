"""Files of cookies on the command line: read with clear errors, written so that only their owner can read them."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.sessions.files import CookieFile
    from shoal.sessions.stored import SessionImport
    from shoal.spider import Spider


def read_file(file: str) -> CookieFile:
    """The cookies of a file, or of standard input (``-``). ConfigError names the file and the line or entry."""
    from shoal.sessions.files import MAX_FILE, read_cookie_file

    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_FILE + 1)
        else:
            with open(file, "rb") as source:
                data = source.read(MAX_FILE + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc
    try:
        return read_cookie_file(data)
    except ConfigError as error:
        raise ConfigError(f"{_name(file)}: {error}") from None


def read_session(file: str, spider: Spider, config: Config) -> SessionImport:
    """The cookies of a file for a crawl with a spider. ConfigError if the crawl would not send them."""
    from shoal.identities.roster import make_roster
    from shoal.sessions.stored import SessionImport

    if config.tor.enabled:
        raise ConfigError("--session does not go with --tor: the site would know the user of the session")
    if not (config.cookies or spider.needs_login):
        raise ConfigError("--session needs cookies, and the setting cookies is false")
    jar = ""
    if config.proxies:
        names = [identity.name for identity in make_roster(config.proxies, config.identities)]
        if len(names) != 1:
            raise ConfigError(
                "--session needs one jar, and each proxy has its own. Use one proxy, or import into the jars of a "
                "stored run with `shoal session RUN --import FILE --jar PROXY`"
            )
        (jar,) = names
    return SessionImport(jar, read_file(file))


def _name(file: str) -> str:
    return "standard input" if file == "-" else file


def write_file(file: str, text: str) -> None:
    """Write secrets to a file with mode 0600, in one step; to standard output with ``-``."""
    if file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = os.path.realpath(file)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot write {file}: it is not a file; write - for standard output")
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".shoal-")  # its mode is 0600
        with open(descriptor, "w", encoding="utf-8") as target:
            target.write(text)
            target.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError as exc:
        with suppress(OSError):
            os.unlink(temporary)
        raise ConfigError(f"cannot write {file}: {exc.strerror}") from exc
