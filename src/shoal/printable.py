"""Text from strangers, made safe to show to people: in a log, on a terminal.

Pages, URLs, headers and error texts may hold escape sequences that rewrite a terminal, line ends that forge log lines,
and marks that reverse the order of the letters after them. None of them is data that a reader needs as it is.
"""

from __future__ import annotations

import logging
import re
from types import TracebackType
from typing import Any, TypeAlias

_ExcInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

_BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_INVISIBLE = "\u200b-\u200d\u2028\u2029\u2060-\u2065\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
_HIDDEN = rf"\x7f-\x9f{_BIDI}{_INVISIBLE}\ud800-\udfff"
_UNSAFE = re.compile(rf"[\0-\x1f{_HIDDEN}]")
_UNSAFE_IN_LINES = re.compile(rf"[\0-\x08\x0b-\x1f{_HIDDEN}]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with each control character, bidirectional mark and invisible character as an escape (``\x1b``).

    ``lines`` keeps line ends and tabs, for text that is meant to have several lines.
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
    """One line for each message, whatever is in it. Only a traceback has lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExcInfo | Any) -> str:
        return printable(super().formatException(ei), lines=True)

    def formatStack(self, stack_info: str) -> str:
        return printable(super().formatStack(stack_info), lines=True)


class LogFilter(logging.Filter):
    """The same for handlers whose format is somebody else's, such as Celery's."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info), lines=True)
        return True
