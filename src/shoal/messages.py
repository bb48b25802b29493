"""Make untrusted text safe to print in a log or on a terminal.

Pages, URLs, headers and error messages may contain escape sequences that rewrite a terminal, line breaks that forge
log lines, and marks that reverse the order of letters. A reader needs none of them unescaped.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from types import TracebackType
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_INVISIBLE = "\u200b-\u200d\u2028\u2029\u2060-\u2065\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_HIDDEN = rf"\x7f-\x9f{_BIDI}{_INVISIBLE}\ud800-\udfff"
_UNSAFE = re.compile(rf"[\0-\x1f{_HIDDEN}]")
_UNSAFE_IN_LINES = re.compile(rf"[\0-\x08\x0b-\x1f{_HIDDEN}]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escape each control character, bidirectional mark and invisible character (``\x1b``).

    ``lines`` keeps line breaks and tabs, for text with several lines.
    """
    if text.isprintable():
        return text
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class LogFormatter(logging.Formatter):
    """Prints each message on one line. Only a traceback has several lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExcInfo) -> str:
        return printable(super().formatException(ei), lines=True)

    def formatStack(self, stack_info: str) -> str:
        return printable(super().formatStack(stack_info), lines=True)


class LogFilter(logging.Filter):
    """Does the same for handlers that have another formatter, such as Celery's."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info), lines=True)
        return True


# Suggestions in messages: the nearest known name for an unknown one, and how to install a missing package.

_LONGER = 2.4
"""Times the length of a known name: nothing that is longer is near it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the nearest known name, or nothing. A mapping has the spelling of each name."""
    from difflib import get_close_matches  # here, because it is only needed after an error

    names = list(known)
    if len(name) > _LONGER * max(map(len, names), default=0):
        return ""  # difflib would need 30 times its memory to find nothing: strangers send names of megabytes
    near = get_close_matches(name, names, 1)
    if not near:
        return ""
    return f"; did you mean {known[near[0]] if isinstance(known, Mapping) else near[0]}?"


def did_you_mean_scheme(url: str, schemes: Iterable[str]) -> str:
    """The same for the scheme of a URL. Nothing if the scheme is known."""
    spelled = {scheme: f"{scheme}://" for scheme in schemes}
    scheme = url.partition(":")[0].lower()
    return "" if scheme in spelled else did_you_mean(scheme, spelled)


def pip_install(extra: str) -> str:
    """The command that installs an extra of Shoal: from the folder that this Shoal was installed from, if it was."""
    return f"pip install {shlex.quote(f'{_origin()}[{extra}]')}"


@cache
def _origin() -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("shoal").read_text("direct_url.json") or "{}")
        url = urlsplit(origin.get("url", ""))
        return unquote(url.path) if url.scheme == "file" and "dir_info" in origin else "shoal"
    except (PackageNotFoundError, ValueError, OSError):
        return "shoal"
