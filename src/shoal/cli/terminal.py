"""Makes sure that only printable text reaches the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO, cast

from shoal.printable import printable


class OutputClosed(BrokenPipeError):
    """The reader of standard output has gone, such as ``head``. It has no errno: Typer would end with code 1."""


class _SafeStream:
    """A text stream that writes printable text only. Everything else is passed on to the stream.

    Colours are escape sequences: code that prints them writes to ``raw_stream`` and makes the text safe itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self.raw_stream = stream

    def write(self, text: str) -> int:
        try:
            self.raw_stream.write(printable(text, lines=True))
        except BrokenPipeError:
            raise OutputClosed from None
        return len(text)

    def flush(self) -> None:
        try:
            self.raw_stream.flush()
        except BrokenPipeError:
            raise OutputClosed from None

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.raw_stream, name)


def guard_terminal() -> None:
    """Make sure that printed text cannot control the terminal. Binary output of items is not affected. A process that
    was started without one of the two streams (``2>&-``) writes its text nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it stays open
    if not isinstance(sys.stdout, _SafeStream):
        sys.stdout = cast(TextIO, _SafeStream(sys.stdout))
        sys.stderr = cast(TextIO, _SafeStream(sys.stderr))


def flush_output() -> None:
    """Write what is left. If the reader has gone, write it nowhere: Python would complain at the end."""
    try:
        sys.stdout.flush()
    except OutputClosed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def raw_stderr() -> TextIO:
    """Standard error as it was before ``guard_terminal``."""
    return cast(TextIO, getattr(sys.stderr, "raw_stream", sys.stderr))


def raw_stdout() -> TextIO:
    """Standard output as it was before ``guard_terminal``."""
    return cast(TextIO, getattr(sys.stdout, "raw_stream", sys.stdout))
