"""A scanner for the XML of sitemaps and feeds: portion by portion, in bounded memory and linear time.

It is not an XML parser, on purpose. Many sitemaps are not well-formed: an ampersand is not escaped, an entity is
unknown, the file is cut off. Search engines read them all the same, and so does this scanner. It replaces references to
single characters only, never the entities that a file defines: a small file cannot grow into a large text.
"""

from __future__ import annotations

import re
from html.entities import html5
from typing import Protocol

from shoal.errors import SitemapError

_ATTRIBUTE = re.compile(r"""(?<![^\s=<>"'/])([^\s=<>"'/]{1,200}+)\s*+=\s*+(?:"([^"<]*+)"|'([^'<]*+)')""")
_CLOSED_QUOTES = re.compile(r"""(?:[^"']++|"[^"]*+"|'[^']*+')*+""")
_REFERENCE = re.compile(r"&(?:#([0-9]{1,7})|#[xX]([0-9a-fA-F]{1,6})|([A-Za-z][A-Za-z0-9]{1,31}));")
_TAG = re.compile("<[A-Za-z_:/!?]")
_COMMENT, _END_OF_COMMENT = "<!--", "-->"
_CDATA, _END_OF_CDATA = "<![CDATA[", "]]>"
_MAX_PIECE = 1 << 17
"""The longest tag, with the text that follows it, in characters. A longer one is handled before it is complete."""
_MAX_MARKS = 20
"""How many ``>`` the attribute values of a tag may contain."""


class MarkupHandler(Protocol):
    """Receives the parts of a file. Names are without their namespace, in lower case."""

    def start(self, name: str, attributes: str) -> None:
        """A start tag. ``read_attributes`` reads its attributes."""

    def end(self, name: str) -> None: ...

    def text(self, text: str) -> None:
        """A text, or a part of one."""


class Scanner:
    """Splits text that arrives in portions into tags and texts."""

    def __init__(self, handler: MarkupHandler, max_tags: int) -> None:
        """SitemapError after ``max_tags`` tags, complete or not."""
        self._handler = handler
        self._max_tags = self._left = max_tags
        self._carry = ""
        """The end of the last portion, if the next one may continue it."""
        self._end_mark = ""
        """The text that ends the open comment or CDATA section. Empty outside of both."""

    def feed(self, text: str) -> None:
        buffer = self._carry + text
        self._carry = ""
        position = 0
        while 0 <= position < len(buffer):
            if self._end_mark:
                position = self._section(buffer, position)
            elif buffer.startswith(_COMMENT, position):
                self._end_mark = _END_OF_COMMENT
                position += len(_COMMENT)
            elif buffer.startswith(_CDATA, position):
                self._end_mark = _END_OF_CDATA
                position += len(_CDATA)
            else:
                position = self._piece(buffer, position)

    def close(self) -> None:
        """Report the end of the file."""
        carry, self._carry = self._carry, ""
        if not self._end_mark:
            self._tag(carry[1:]) if _TAG.match(carry) else self._handler.text(unescape(carry))

    def _section(self, buffer: str, position: int) -> int:
        """Read a comment or a CDATA section up to its end. Return the position there, or -1."""
        mark = self._end_mark
        end = buffer.find(mark, position)
        if end < 0:
            self._carry = buffer[max(position, len(buffer) - len(mark) + 1) :]
        else:
            self._end_mark = ""
        if mark == _END_OF_CDATA:
            self._handler.text(buffer[position : len(buffer) - len(self._carry) if end < 0 else end])
        return end if end < 0 else end + len(mark)

    def _piece(self, buffer: str, position: int) -> int:
        """Read a tag with its text, or a text, up to the next tag. Return the position there, or -1."""
        next_tag = _TAG.search(buffer, position + 1)
        if next_tag is not None:
            end = next_tag.start()
        elif len(buffer) - position <= _MAX_PIECE:
            self._carry = buffer[position:]
            return -1
        else:
            end = len(buffer)
        if _TAG.match(buffer, position):
            self._tag(buffer[position + 1 : end])
        else:
            self._handler.text(unescape(buffer[position:end]))
        return end

    def _tag(self, piece: str) -> None:
        """A tag without its ``<``, with the text after it. Declarations and instructions are ignored."""
        self._left -= 1
        if self._left < 0:
            raise SitemapError(f"the sitemap has more than {self._max_tags} tags")
        inside, mark, text = piece.partition(">")
        if not mark:
            return
        if inside[:1] not in ("!", "?"):
            if '"' in inside or "'" in inside:
                inside, text = _with_marks(inside, text)
            words = inside.strip("/").split(None, 1)
            if words:
                name = words[0].rpartition(":")[2].lower()
                if inside[0] != "/":
                    self._handler.start(name, words[1] if len(words) > 1 else "")
                if inside[0] == "/" or inside[-1] == "/":
                    self._handler.end(name)
        if text:
            self._handler.text(unescape(text))


def _with_marks(inside: str, text: str) -> tuple[str, str]:
    """A tag whose attributes contain ``>``: everything up to the one that ends it, and the text after that."""
    quote = _open_quote(inside)
    for _ in range(_MAX_MARKS):
        if not quote:
            break
        more, mark, rest = text.partition(">")
        if not mark:
            break
        quote = _open_quote(more, quote)
        inside, text = f"{inside}>{more}", rest
    return inside, text


def _open_quote(text: str, quote: str = "") -> str:
    """The quote that is open after this text, or an empty string. ``quote`` is the one that is open before it."""
    start = text.find(quote) + 1 if quote else 0
    if quote and not start:
        return quote
    closed = _CLOSED_QUOTES.match(text, start)
    end = closed.end() if closed else start
    return text[end : end + 1]


def read_attributes(text: str) -> dict[str, str]:
    """The attributes of a tag. Names are without their namespace, in lower case."""
    return {
        match[1].rpartition(":")[2].lower(): unescape(match[2] if match[2] is not None else match[3])
        for match in _ATTRIBUTE.finditer(text)
    }


def unescape(text: str) -> str:
    """Replace character references: those of XML, numeric ones, and those of HTML, which many files use. Each must end
    with a semicolon, because in ``?a=1&copy=2`` the ampersand was not escaped."""
    return _REFERENCE.sub(_character, text) if "&" in text else text


def _character(reference: re.Match[str]) -> str:
    decimal, hexadecimal, name = reference.groups()
    if name is not None:
        return html5.get(f"{name};", reference[0])
    code = int(decimal) if decimal is not None else int(hexadecimal, 16)
    is_character = 0 < code < 0xD800 or 0xDFFF < code <= 0x10FFFF
    return chr(code) if is_character else reference[0]
