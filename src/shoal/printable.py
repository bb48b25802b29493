"""Make untrusted text safe to print in a log or on a terminal.

Pages, URLs, headers and error messages may contain escape sequences that rewrite a terminal, line breaks that forge
log lines, and marks that reverse the order of letters. A reader needs none of them unescaped.
"""

from __future__ import annotations

import logging
import re
from types import TracebackType
from typing import TypeAlias

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


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
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
