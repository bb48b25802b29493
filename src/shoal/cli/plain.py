"""Output for files and pipes as Rich would print it, without importing Rich: that takes 25 ms."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    AnyConsole: TypeAlias = "Console | PlainConsole"

_LEFT, _RIGHT = 4, 2
"""Spaces around the cells of a table."""
_DEFAULT_WIDTH = 80


class PlainConsole:
    """Prints on a stream that is no terminal. It has no styles, so it ignores them.

    The output is that of Rich's `Console` to the byte. Lines that only Rich can lay out are left to it.
    """

    is_terminal = False

    def __init__(self, file: TextIO, width: int | None = None) -> None:
        """``width``: the columns that lines may have; without it, as Rich finds it."""
        self._file = file
        self._width = width or _width()

    def print(self, text: str, *, style: str = "", soft_wrap: bool = False) -> None:
        """Print lines. They are cut into several where they are too long, unless with ``soft_wrap``."""
        if _is_simple(text.replace("\n", "")) and (
            soft_wrap or all(len(line) <= self._width for line in text.split("\n"))
        ):
            self._write(text + "\n")
        else:
            from rich.text import Text

            self._rich().print(Text(text), style=style, soft_wrap=soft_wrap)

    def print_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print a table of names and values."""
        lines = _layout(rows, self._width)
        if lines is None:
            print_rows(self._rich(), rows)
        else:
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()

    def _rich(self) -> Console:
        from rich.console import Console

        return Console(file=self._file, width=self._width, highlight=False, markup=False)


def print_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table of names and values with Rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, _RIGHT, 0, _LEFT))
    table.add_column(style="dim")
    table.add_column()
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def is_plain(file: TextIO) -> bool:
    """Whether Rich would use no styles on this stream, whatever it is told by environment variables."""
    if sys.platform == "win32" or any(name in os.environ for name in ("FORCE_COLOR", "TTY_COMPATIBLE")):
        return False
    try:
        return not file.isatty()
    except ValueError:  # it is closed
        return True


def _layout(rows: Sequence[tuple[str, str]], width: int) -> list[str] | None:
    """The lines of a table, or None if only Rich can lay them out."""
    if not rows or not all(_is_simple(cell) and cell.strip() == cell for row in rows for cell in row):
        return None
    first, second = (max(map(len, column)) for column in zip(*rows, strict=True))
    room = width - first - 2 * (_LEFT + _RIGHT)
    if second > room:  # Rich makes the wider column narrower, and cuts words that are too long for it
        second = room
        if room <= first or any(len(value) > room and " " in value for _, value in rows):
            return None
    lines = []
    for name, value in rows:
        shown = value if len(value) <= second else f"{value[: second - 1]}\u2026"
        lines.append(f"{'':{_LEFT}}{name:<{first + _RIGHT + _LEFT}}{shown:<{second + _RIGHT}}\n")
    return lines


def _is_simple(text: str) -> bool:
    """Whether each character has one column."""
    return text.isascii() and text.isprintable()


def _width() -> int:
    """The columns of the output, as Rich finds them."""
    told = os.environ.get("COLUMNS", "")
    if told.isdigit():
        return int(told) or _DEFAULT_WIDTH
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        try:
            return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_WIDTH  # type: ignore[union-attr]
        except (AttributeError, ValueError, OSError):
            pass
    return _DEFAULT_WIDTH
