"""The border between the program and the terminal."""

from __future__ import annotations

import sys
from typing import Any, TextIO, cast

from shoal.printable import printable


class _SafeStream:
    """A text stream that writes printable text only. Everything else is the stream's own.

    Rich writes its colours as escape sequences, so its consoles use ``raw_stream`` and make text safe themselves.
    """

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream

    def write(self, text: str) -> int:
        self.raw_stream.write(printable(text, lines=True))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def guard_terminal() -> None:
    """From now on nothing that is printed can control the terminal. Binary output of items is not affected."""
    if not isinstance(sys.stdout, _SafeStream):
        sys.stdout = cast(TextIO, _SafeStream(sys.stdout))
        sys.stderr = cast(TextIO, _SafeStream(sys.stderr))


def raw_stderr() -> TextIO:
    """Standard error as it was before ``guard_terminal``."""
    return cast(TextIO, getattr(sys.stderr, "raw_stream", sys.stderr))
