"""Parsing within a budget: no page takes more than its share of memory, however it is built.

HTML's rules let a small page grow into a huge tree: every paragraph repeats all formatting tags that were left open,
and 246 KB become 4 GB. Which pages do so can't be seen without doing most of the parser's work, so the parser is
stopped when it has used its budget: for the time of the call the system refuses this process more memory than that, and
the parser gives up cleanly. It keeps at most 512 elements open, so its time is bounded together with the memory.

A page of a few kilobytes can't become large enough to matter, and skips even that.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from resource import RLIMIT_DATA, setrlimit
from typing import Any, TypeVar, cast

import turbohtml
from turbohtml import Document, Element, Node

from shoal.errors import TooComplexError

T = TypeVar("T")

_count_elements = turbohtml.XPath("count(//*)")

_SMALL = 12 * 1024  # bytes: the worst tree of such a page has about 110 MB
_TREE = (96 << 20, 46)  # bytes, or so many times the size of the page if that is more
_LARGEST_MODEST = _TREE[0] // _TREE[1]
_NOT_LARGE = 24 * 1024  # bytes: all attributes of such a page, repeated, have at most 36 million characters
_ATTRIBUTES = (32 << 20, 4)  # characters, or so many times the size of the page if that is more
_FORMATTING = ["a", "b", "big", "code", "em", "font", "i", "nobr", "s", "small", "strike", "strong", "tt", "u"]
_attributes = turbohtml.XPath("$elements/@*")
_MOST_CELLS = 2_000_000
_MOST_CELLS_IN_LAYOUT = 50_000
_MOST_CELLS_IN_NESTED = 1000
_MOST_PADDED = 32 << 20  # characters of a table that is laid out
_INDENTING = ":is(ol, ul, dl, blockquote) "
_DEEPEST_INDENT = 17  # turbohtml indents no further
_WIDEST_INDENT = 21  # characters: a list may begin at any number
_MOST_INDENTED, _INDENTED_TIMES = 64 << 20, 16  # characters, or so many times the size of the page
_TEXTS = "//body//text()[not(parent::script) and not(parent::style)]"
_LARGE = 256 * 1024  # bytes: up to here no tree is slow to convert
_DEEPEST = "/*" * 129
_STALE = 0.25  # seconds


def parse(body: bytes | str, charset: str | None = None) -> Document:
    """The tree of a page. TooComplexError for a page that needs more memory than its size can explain.

    ``charset`` is what a header says of the bytes; one that does not exist is ignored. Ask an `AttributeBudget` before
    many attributes of the tree are read or compared.
    """
    if len(body) <= _SMALL:
        return _parse(body, charset)
    return _bounded(_parse, (body, charset), len(body))


class AttributeBudget:
    """Refuses a page whose formatting tags repeat long attributes, before they are read.

    The copies of a tag that was left open share its attributes, so the tree stays small. But who reads the attributes
    makes a string for each copy, and who looks for a class compares each. No other element is copied. The attributes
    of a page have at most a sixteenth of the square of its size together.
    """

    __slots__ = ("_document", "_size")

    def __init__(self, document: Document, size: int) -> None:
        self._document = document
        self._size = size if size > _NOT_LARGE else 0

    def values(self, elements: Sequence[Element], name: str) -> list[str | None]:
        """One attribute of each of these elements. TooComplexError if that would be huge."""
        if len(elements) * self._size <= _ATTRIBUTES[0]:
            return [element.attr(name) for element in elements]
        found: list[str | None] = []
        left = most = _most_attributes(self._size)
        for chunk in _chunks(elements, most // self._size):
            found += [element.attr(name) for element in chunk]
            left -= sum(map(len, filter(None, found[-len(chunk) :])))
            if left < 0:
                raise _repeated(self._size, most)
        return found

    def check(self) -> None:
        """All attributes may be read. TooComplexError if they would be huge."""
        if not self._size:
            return
        most = _most_attributes(self._size)
        if cast(float, _count_elements(self._document)) * self._size > most:
            elements = [element for tag in _FORMATTING for element in self._document.select(tag)]
            if len(elements) * self._size > most:
                self._add_up(elements, most)
        self._size = 0

    def _add_up(self, elements: Sequence[Element], most: int) -> None:
        left = most
        for chunk in _chunks(elements, most // self._size):
            left -= sum(map(len, cast("list[str]", _attributes(self._document, elements=chunk))))
            if left < 0:
                raise _repeated(self._size, most)


def _most_attributes(size: int) -> int:
    least, times = _ATTRIBUTES
    return max(least, times * size)


def _chunks(elements: Sequence[Element], length: int) -> Iterator[Sequence[Element]]:
    for begin in range(0, len(elements), max(1, length)):
        yield elements[begin : begin + max(1, length)]


def _repeated(size: int, most: int) -> TooComplexError:
    return TooComplexError(
        f"the page is too complex: the attributes of its {size} bytes repeat to more than {most} characters"
    )


def _parse(body: bytes | str, charset: str | None) -> Document:
    if isinstance(body, str):
        return turbohtml.parse(body, positions=False)
    try:
        return turbohtml.parse(body, encoding=charset, detect_encoding=True, positions=False)
    except (LookupError, UnicodeError):
        return turbohtml.parse(body, detect_encoding=True, positions=False)


def parse_xml(text: str) -> Document:
    """The tree of an XML document, with the same limits. HTMLParseError for what is not well-formed."""
    return _bounded(turbohtml.parse_xml, (text,), len(text))


def to_markdown(document: Document, size: int) -> str:
    """``size`` is that of the page. TooComplexError for tables and nested lists that would be huge.

    The limit on memory is not used here: where none is left, turbohtml's parser gives up, but its writers crash.
    """
    if size > _SMALL and _has_huge_table(document):
        raise TooComplexError(
            f"the page is too complex: laid out, a table of it has more than {_MOST_CELLS} cells, empty ones included"
        )
    if _has_huge_indents(document, size):
        raise TooComplexError("the page is too complex: its lists and quotes are nested, and indent too many lines")
    return document.to_markdown()


def main_text(document: Document, size: int) -> str:
    """The text of the page's main content; all its text if none is found.

    Finding it looks at whole branches again and again, so a large page that is nested deeply has all its text instead.
    A page whose layout would be huge has its text without one.
    """
    if size > _SMALL and (_has_costly_tables(document) or _has_huge_indents(document, size)):
        return _plain_text(document)
    deep = size > _LARGE and turbohtml.XPath(f"boolean({_DEEPEST})")(document)
    return ("" if deep else document.main_text()) or document.to_text().strip()


def _plain_text(document: Document) -> str:
    texts = cast("list[str]", turbohtml.XPath(_TEXTS)(document))
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def _has_costly_tables(document: Document) -> bool:
    """Laid out, every cell is as wide as the widest of its column, and a table in a cell is laid out once for each of
    the tables around it."""
    cells = document.select("td, th")
    if not cells:
        return False
    if len(cells) > _MOST_CELLS_IN_LAYOUT or _has_huge_table(document):
        return True
    if len(cells) > _MOST_CELLS_IN_NESTED and document.select_one("table table table") is not None:
        return True
    rows = document.select("tr")
    room = _MOST_PADDED // max((sum(1 for _ in row.children) for row in rows), default=1) // max(len(rows), 1)
    return any(len(cell.text) > room for cell in cells)


def _has_huge_indents(document: Document, size: int) -> bool:
    """Each line is indented by all lists and quotes around it, the number of a list included."""
    lines, most = size, max(_MOST_INDENTED, _INDENTED_TIMES * size)
    if lines * _DEEPEST_INDENT * _WIDEST_INDENT <= most or document.select_one(_INDENTING * 3) is None:
        return False
    lines = document.text.count("\n") + int(cast(float, _count_elements(document)))
    depth = 3
    while depth < _DEEPEST_INDENT and document.select_one(_INDENTING * (depth + 1)) is not None:
        depth += 1
    return lines * depth * _WIDEST_INDENT > most


def _has_huge_table(document: Document) -> bool:
    """Laid out, every row is as wide as the widest one: 1,000 rows, of which one has 1,000 cells, are a million."""
    rows = int(cast(float, turbohtml.XPath("count(//tr)")(document)))
    if not rows:
        return False
    wide = cast("list[Element]", turbohtml.XPath(f"//tr[*[{_MOST_CELLS // rows + 1}]]")(document))
    tables: dict[Node | None, int] = {}
    for row in wide:
        table = row.parent
        while isinstance(table, Element) and table.tag != "table":
            table = table.parent
        tables[table] = max(tables.get(table, 0), sum(1 for _ in row.children))
    return any(
        width * cast(float, turbohtml.XPath("count(tr | */tr)")(table if table is not None else document)) > _MOST_CELLS
        for table, width in tables.items()
    )


def _bounded(work: Callable[..., T], arguments: tuple[Any, ...], size: int) -> T:
    """The work on a page of this size. TooComplexError if it needs more memory than the page may take."""
    most = size * _TREE[1] if size > _LARGEST_MODEST else _TREE[0]
    try:
        return _memory.limit(work, arguments, most)
    except MemoryError:
        raise TooComplexError(
            f"the page is too complex: parsing of its {size} bytes takes more than {most >> 20} MB of memory"
        ) from None


class _Memory:
    """Limits the memory of this process while something is done.

    The limit is the system's, so it holds for all threads. Python code of other threads does not run meanwhile; their
    native code has the room that the work does not use.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._before = resource.getrlimit(RLIMIT_DATA)
        self._ceiling = min((each for each in self._before if each != resource.RLIM_INFINITY), default=sys.maxsize)
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        """A file of /proc/self is that of the process that opened it: a fork needs its own."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if sys.platform == "linux" else None
        self._used = 0
        self._stale_at = 0.0

    def limit(self, work: Callable[..., T], arguments: tuple[Any, ...], most: int) -> T:
        """MemoryError when the work needs more than ``most`` bytes. Where the system can't tell, there is no limit.

        Every page passes here, so what the process uses is measured only a few times a second. The process never gets
        more than ``most`` bytes above what it used within that time.
        """
        if self._statm is None:
            return work(*arguments)
        with self._lock:
            if fresh := time.monotonic() > self._stale_at:
                self._measure()
            limit = self._used + most
            setrlimit(RLIMIT_DATA, (limit if limit < self._ceiling else self._ceiling, self._before[1]))
            try:
                return work(*arguments)
            except MemoryError:
                if fresh:
                    raise
            finally:
                setrlimit(RLIMIT_DATA, self._before)
            self._stale_at = 0.0  # others may have taken memory since it was measured
            return self.limit(work, arguments, most)

    def _measure(self) -> None:
        assert self._statm is not None
        pages = os.pread(self._statm, 256, 0).split()[5]
        self._used, self._stale_at = int(pages) * resource.getpagesize(), time.monotonic() + _STALE


_memory = _Memory()
