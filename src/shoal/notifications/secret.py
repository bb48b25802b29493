"""Secrets of channels: from the environment or a file, never from ``shoal.toml``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from shoal.errors import ConfigError

_MIN_PART = 6
"""The shortest part of a secret that is hidden in messages, in characters. A shorter one may be a word of the
message."""
_MAX_BYTES = 16 * 1024


class Secret:
    """A text that no ``repr``, log line or message shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__


def read_secret(
    where: str, name: str, variable: str | None, file: str | None, environ: Mapping[str, str], folder: Path
) -> Secret | None:
    """The secret ``name`` of a channel. None if neither a variable nor a file is named. ConfigError if it is missing
    there. ``folder``: where a relative file name begins."""
    if variable is not None and file is not None:
        raise ConfigError(f"{where}: {name}_env and {name}_file contradict each other; set one of them")
    if variable is not None:
        if variable.startswith("SHOAL_"):
            raise ConfigError(
                f'{where}: {name}_env = "{variable}": variables that begin with SHOAL_ are settings; use another name'
            )
        text = environ.get(variable, "").strip()
        if not text:
            raise ConfigError(f"{where}: the environment variable {variable} ({name}_env) is not set")
    elif file is not None:
        text = _read_file(where, name, folder / file)
    else:
        return None
    if not text.isprintable():
        raise ConfigError(f"{where}: the secret {name} must be one line of printable characters")
    return Secret(text)


def _read_file(where: str, name: str, file: Path) -> str:
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_BYTES).decode().strip()
    except OSError as exc:
        raise ConfigError(f"{where}: cannot read {file} ({name}_file): {exc.strerror}") from exc
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: {file} ({name}_file) is not UTF-8 text") from None
    if not text:
        raise ConfigError(f"{where}: {file} ({name}_file) is empty")
    return text


def without_secrets(text: str, secrets: Iterable[Secret]) -> str:
    """The text with ``***`` for each secret, and for each part of a secret that is a URL."""
    parts = {part for secret in secrets for part in _parts(secret.reveal())}
    for part in sorted(parts, key=len, reverse=True):
        text = text.replace(part, "***")
    return text


def _parts(secret: str) -> list[str]:
    found = [secret] if secret else []
    if "://" in secret:
        # The host is no secret: an error without it helps nobody.
        rest = secret.partition("://")[2]
        user, mark, after = rest.rpartition("@")
        path = after.partition("/")[2]
        found += [part for part in re.split(r"[/:@?&=#]", f"{user}/{path}" if mark else path) if len(part) >= _MIN_PART]
    return found
