"""Parse pages with a limit on memory, so that a malicious page cannot exhaust it.

The rules of HTML let a small page grow into a huge tree: every paragraph repeats all formatting tags that were left
open, and 246 KB become 4 GB. Detecting such a page takes most of the parser's work. So the parser runs with a budget:
during the call the operating system refuses this process more memory, and the parser fails cleanly. It keeps at most
512 elements open, so the limit on memory also limits its time.

A small page cannot grow enough to matter. It is parsed without the limit.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from resource import RLIMIT_DATA, setrlimit
from typing import TypeVar, cast

import turbohtml
from turbohtml import Document, Element, Node

from shoal.errors import TooComplexError
from shoal.system import clock

T = TypeVar("T")
S = TypeVar("S", bound="str | None")

_count_elements = turbohtml.XPath("count(//*)")

_SMALL = 12 * 1024  # bytes: the worst tree of such a page has about 110 MB
_MAX_TREE = (96 << 20, 46)  # bytes, or this multiple of the page's size if that is more
_FEW_ATTRIBUTES = 24 * 1024  # bytes: all attributes of such a page, repeated, have at most 36 million characters
_MAX_ATTRIBUTES = 32 << 20  # characters, or four times the page's size if that is more
_BYTES_PER_CHARACTER = 3  # of memory for such attributes: each is a string, and all together are another one
_FORMATTING = ["a", "b", "big", "code", "em", "font", "i", "nobr", "s", "small", "strike", "strong", "tt", "u"]
_attributes = turbohtml.XPath("$elements/@*")
_hrefs = turbohtml.XPath("$elements/@href")  # faster than a loop, but a deep element takes 5 microseconds
_MANY = 10_000  # elements
_MAX_CELLS = 2_000_000
_MAX_CELLS_IN_LAYOUT = 50_000
_MAX_CELLS_IN_NESTED = 1000
_MAX_PADDED = 32 << 20  # characters of a table after layout
_INDENTING_TAGS = ("ol", "ul", "dl", "blockquote")
_INDENTING = f":is({', '.join(_INDENTING_TAGS)}) "
_MAX_INDENTING = 40_000  # lists and quotes
_MAX_INDENT_DEPTH = 17  # turbohtml indents no further
_MAX_INDENT_WIDTH = 21  # characters: a list may start at any number
_MAX_INDENTED = (64 << 20, 16)  # characters, or this multiple of the page's size if that is more
_MAX_BREAK_STEPS = 50_000_000  # of the search for text after line breaks: about a quarter of a second
_BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "figcaption", "figure", "footer",
     "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "menu", "nav", "ol", "p", "pre", "section",
     "summary", "table", "td", "th", "tr", "ul"}
)  # fmt: skip
_TEXTS = "//body//text()[not(parent::script) and not(parent::style)]"
_FAST_TO_CONVERT = 256 * 1024  # bytes: no tree of such a page is slow to convert
_DEEP = "/*" * 129
_MEASURE_EVERY = 0.25  # seconds


def parse(body: bytes | str, charset: str | None = None) -> Document:
    """Parse a page. TooComplexError if it needs more memory than its size explains.

    ``charset`` is the encoding from a header; an unknown one is ignored. Check an `AttributeBudget` before you read or
    compare many attributes of the tree.
    """
    size = len(body)
    return _parse(body, charset) if size <= _SMALL else _bounded(_parse, (body, charset), size)


class AttributeBudget:
    """Refuses a page whose formatting tags repeat long attributes, before they are read.

    The copies of a tag that was left open share its attributes, so the tree stays small. But reading the attributes
    creates a string for each copy, and searching for a class compares each copy. Other elements are not copied. All
    attributes of a page together have at most a sixteenth of the square of its size.
    """

    __slots__ = ("_document", "_known", "_limit", "_size")

    def __init__(self, document: Document, size: int) -> None:
        self._document = document
        self._size = size if size > _FEW_ATTRIBUTES else 0
        self._limit = max(_MAX_ATTRIBUTES, 4 * size)
        self._known = ""

    @property
    def are_unknown(self) -> bool:
        """Whether the attributes may be huge: the page is not small, and `check` was not called."""
        return self._size > 0

    def values(self, elements: Sequence[Element], name: str) -> list[str | None]:
        """Return one attribute of each of these elements. TooComplexError if the result would be huge."""
        return self.read(elements, lambda part: [element.attr(name) for element in part])

    def hrefs(self, elements: Sequence[Element], key: str = "") -> list[str]:
        """Return the links of those of these elements that are links. TooComplexError if the result would be huge."""
        if len(elements) > _MANY:
            return [href for href in self.values(elements, "href") if href is not None]
        return self.read(elements, lambda part: cast("list[str]", _hrefs(self._document, elements=part)), key)

    def read(self, elements: Sequence[Element], get: Callable[[Sequence[Element]], list[S]], key: str = "") -> list[S]:
        """Return what ``get`` returns for these elements: at most one attribute of each. TooComplexError if the result
        would be huge.

        ``key`` names the elements and the attribute, such as ``a/@href``. What was read last under the same key is not
        measured again: the links of a page are often read by a query, and again to be followed.
        """
        # No attribute is longer than the page.
        if len(elements) * self._size <= _MAX_ATTRIBUTES or (key and key == self._known):
            return get(elements)
        parts = [*self._measured([elements], get)]
        self._known = key
        return parts[0] if len(parts) == 1 else [value for values in parts for value in values]

    def check(self) -> None:
        """Raise TooComplexError if all attributes together would be huge. Otherwise you may read any of them."""
        if self._size:
            # The tags of the page together are no longer than the page. So the limit needs many copies of one of them.
            # Searching for single tags takes turbohtml less time than counting all elements.
            groups = [self._document.find_all(tag) for tag in _FORMATTING]
            if max(map(len, groups)) > _MAX_ATTRIBUTES // self._size:
                # Each group is in document order. turbohtml would take long to sort all of them together.
                for _ in self._measured(
                    filter(None, groups), lambda part: cast("list[str]", _attributes(self._document, elements=part))
                ):
                    pass
        self._size = 0

    def _measured(
        self, groups: Iterable[Sequence[Element]], get: Callable[[Sequence[Element]], list[S]]
    ) -> Iterator[list[S]]:
        """Read attributes of elements. TooComplexError if they have too many characters.

        The system limits the memory meanwhile. Where it cannot, they are read in parts of at most half the limit.
        """
        room = self._limit
        for elements in groups:
            step = len(elements) if _memory.is_limited else self._limit // 2 // self._size
            for begin in range(0, len(elements), step):
                part = elements if step == len(elements) else elements[begin : begin + step]
                try:
                    values, length = _memory.limit(_with_length, (get, part), _BYTES_PER_CHARACTER * self._limit)
                except MemoryError:
                    values, length = [], self._limit + 1
                room -= length
                if room < 0:
                    raise TooComplexError(
                        f"the page is too complex: the repeated attributes of its {self._size} bytes have more than "
                        f"{self._limit} characters"
                    )
                yield values


def _with_length(get: Callable[[Sequence[Element]], list[S]], elements: Sequence[Element]) -> tuple[list[S], int]:
    values = get(elements)
    try:
        return values, len("".join(cast("list[str]", values)))  # takes a quarter of the time of a sum
    except TypeError:
        return values, sum(len(value) for value in values if value is not None)


def _parse(body: bytes | str, charset: str | None) -> Document:
    if isinstance(body, str):
        return turbohtml.parse(body, positions=False)
    try:
        return turbohtml.parse(body, encoding=charset, detect_encoding=True, positions=False)
    except (LookupError, UnicodeError):
        return turbohtml.parse(body, detect_encoding=True, positions=False)


def text_encoding(body: bytes, charset: str | None) -> str:
    """The encoding of a text that is no markup. It is the one that `parse` would find, without the memory of a tree."""
    if charset is not None:
        with suppress(LookupError, UnicodeError):  # an unknown one is ignored
            start = turbohtml.parse(body[:4], encoding=charset, detect_encoding=True, positions=False)
            return start.encoding or "UTF-8"
    from turbohtml.detect import detect

    return (detect(body).encoding or "UTF-8").removesuffix("-SIG")


def limit_trees(most: int) -> None:
    """Limit the memory that this process uses to parse one page, however large the page is."""
    _memory.most = most


def parse_xml(text: str) -> Document:
    """Parse an XML document, with the same limits. HTMLParseError if it is not well-formed."""
    return _bounded(turbohtml.parse_xml, (text,), len(text))


def to_markdown(document: Document, size: int) -> str:
    """Convert a page of ``size`` bytes to Markdown. TooComplexError if its tables or nested lists would be huge.

    There is no limit on memory here: without memory turbohtml's parser fails cleanly, but its writers crash.
    """
    if size > _SMALL and _has_huge_table(document):
        raise TooComplexError(
            f"the page is too complex: a table has more than {_MAX_CELLS} cells after layout, including empty ones"
        )
    if _has_huge_indents(document, size):
        raise TooComplexError("the page is too complex: its nested lists and quotes indent too many lines")
    if size > _SMALL and _has_slow_breaks(document):
        raise TooComplexError("the page is too complex: too many line breaks between empty elements")
    return document.to_markdown()


def main_text(document: Document, size: int) -> str:
    """Return the text of the page's main content; all its text if none is found.

    The search visits whole branches repeatedly, so a large and deeply nested page returns all its text instead. A page
    whose layout would be huge returns its text without layout.
    """
    if _has_costly_layout(document, size):
        return _plain_text(document)
    return ("" if _is_slow_to_search(document, size) else document.main_text()) or document.to_text().strip()


def article(document: Document, size: int) -> turbohtml.Article:
    """Return the main content of a page with its metadata. TooComplexError if finding it would take too long."""
    if _has_costly_layout(document, size) or _is_slow_to_search(document, size):
        raise TooComplexError("the page is too complex: its main content is nested too deeply or has a huge layout")
    return document.article()


def _has_costly_layout(document: Document, size: int) -> bool:
    return size > _SMALL and (_has_costly_tables(document) or _has_huge_indents(document, size))


def _is_slow_to_search(document: Document, size: int) -> bool:
    return size > _FAST_TO_CONVERT and bool(turbohtml.XPath(f"boolean({_DEEP})")(document))


def _plain_text(document: Document) -> str:
    texts = cast("list[str]", turbohtml.XPath(_TEXTS)(document))
    return "\n".join(stripped for text in texts if (stripped := text.strip()))


def _has_costly_tables(document: Document) -> bool:
    """Whether the layout of the tables would be slow or huge.

    Every cell is padded to the widest of its column. A nested table is laid out once for each table around it.
    """
    cells = document.select("td, th")
    if not cells:
        return False
    if len(cells) > _MAX_CELLS_IN_LAYOUT or _has_huge_table(document):
        return True
    if len(cells) > _MAX_CELLS_IN_NESTED and document.select_one("table table table") is not None:
        return True
    rows = document.select("tr")
    room = _MAX_PADDED // max((sum(1 for _ in row.children) for row in rows), default=1) // max(len(rows), 1)
    return any(len(cell.text) > room for cell in cells)


def _has_huge_indents(document: Document, size: int) -> bool:
    """Whether the indentation would be huge. Each list and quote around a line indents it, numbers included."""
    lines, limit = size, max(_MAX_INDENTED[0], _MAX_INDENTED[1] * size)
    if lines * _MAX_INDENT_DEPTH * _MAX_INDENT_WIDTH <= limit:
        return False
    if sum(len(document.select(tag)) for tag in _INDENTING_TAGS) > _MAX_INDENTING:
        return True  # finding out whether they are nested would take too long
    if document.select_one(_INDENTING * 3) is None:
        return False
    lines = document.text.count("\n") + int(cast(float, _count_elements(document)))
    depth = 3
    while depth < _MAX_INDENT_DEPTH and document.select_one(_INDENTING * (depth + 1)) is not None:
        depth += 1
    return lines * depth * _MAX_INDENT_WIDTH > limit


def _has_slow_breaks(document: Document) -> bool:
    """Whether the search for text after each line break would take too long. It visits the elements up to the next
    text or block, so many breaks in a row of elements without text take the square of their number."""
    count = len(document.select("br"))
    if count * (cast(float, _count_elements(document)) - count) <= _MAX_BREAK_STEPS:
        return False
    steps = breaks = elements = 0
    for node in document.descendants:
        if isinstance(node, Element) and node.tag not in _BLOCKS:
            if node.tag == "br":
                breaks += 1
            else:
                elements += 1
        elif isinstance(node, Element) or node.text.strip():
            steps += breaks * elements
            breaks = elements = 0
    return steps + breaks * elements > _MAX_BREAK_STEPS


def _has_huge_table(document: Document) -> bool:
    """Whether the layout of a table is huge. Every row becomes as wide as the widest one."""
    rows = int(cast(float, turbohtml.XPath("count(//tr)")(document)))
    if not rows:
        return False
    wide = cast("list[Element]", turbohtml.XPath(f"//tr[*[{_MAX_CELLS // rows + 1}]]")(document))
    tables: dict[Node | None, int] = {}
    for row in wide:
        table = row.parent
        while isinstance(table, Element) and table.tag != "table":
            table = table.parent
        tables[table] = max(tables.get(table, 0), sum(1 for _ in row.children))
    return any(
        width * cast(float, turbohtml.XPath("count(tr | */tr)")(table if table is not None else document)) > _MAX_CELLS
        for table, width in tables.items()
    )


def _bounded(work: Callable[..., T], arguments: tuple[object, ...], size: int) -> T:
    """Call ``work`` for a page of this size. TooComplexError if it needs more memory than such a page may use."""
    limit = min(_memory.most, max(_MAX_TREE[0], _MAX_TREE[1] * size))
    try:
        return _memory.limit(work, arguments, limit)
    except MemoryError:
        raise TooComplexError(
            f"the page is too complex: parsing its {size} bytes takes more than {limit >> 20} MB of memory"
        ) from None


class _Memory:
    """Limits the memory of this process during a call.

    The operating system enforces the limit, so it applies to all threads. Python code of other threads does not run
    during the call. Their native code can use the memory that the call does not use.
    """

    def __init__(self) -> None:
        self.most = sys.maxsize
        """Bytes for one page, however large it is."""
        self._lock = threading.RLock()
        self._before = resource.getrlimit(RLIMIT_DATA)
        self._ceiling = min((limit for limit in self._before if limit != resource.RLIM_INFINITY), default=sys.maxsize)
        self._open()
        os.register_at_fork(after_in_child=self._open)

    def _open(self) -> None:
        """Open the file with the memory use of this process. After a fork, the child needs its own."""
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC) if sys.platform == "linux" else None
        self._used = 0
        self._stale_at = 0.0

    @property
    def is_limited(self) -> bool:
        return self._statm is not None

    def limit(self, work: Callable[..., T], arguments: tuple[object, ...], limit: int) -> T:
        """Call ``work``. MemoryError if it needs more than ``limit`` bytes. There is no limit except on Linux.

        This runs for every page, so the memory use of the process is measured only a few times a second. The process
        never gets more than ``limit`` bytes above its last measured use.
        """
        if self._statm is None:
            return work(*arguments)
        with self._lock:
            if fresh := clock.monotonic() > self._stale_at:
                self._measure()
            total = self._used + limit
            setrlimit(RLIMIT_DATA, (total if total < self._ceiling else self._ceiling, self._before[1]))
            try:
                return work(*arguments)
            except MemoryError:
                if fresh:
                    raise
            finally:
                setrlimit(RLIMIT_DATA, self._before)
            self._stale_at = 0.0  # other threads may have allocated memory since the last measurement
            return self.limit(work, arguments, limit)

    def _measure(self) -> None:
        assert self._statm is not None
        pages = os.pread(self._statm, 256, 0).split()[5]
        self._used, self._stale_at = int(pages) * resource.getpagesize(), clock.monotonic() + _MEASURE_EVERY


_memory = _Memory()
