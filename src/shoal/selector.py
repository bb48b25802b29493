"""CSS and XPath over a parsed page, with the manners of parsel.

A query finds nodes and strings. Elements, comments and the like stay nodes of turbohtml; texts, attribute values,
numbers and booleans are plain strings. ``Selector`` wraps one of them, ``SelectorList`` what one query found.

CSS selects elements by turbohtml's own engine; ``::text`` and ``::attr(name)`` then are steps of an XPath from those
elements, which gives each string once and in document order, also when the query is a comma group.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from html import escape
from re import Pattern
from typing import Any, Literal, NamedTuple, TypeAlias, cast, overload

import turbohtml
from turbohtml import Document, Element, Node, XPath

from shoal import parsing
from shoal.errors import SelectorError

__all__ = ["Selector", "SelectorList"]

Root: TypeAlias = Node | str
"""What a query finds: a node, or the string of a text, an attribute or a value."""


class Selector:
    """One node of a page, or one string found in it, to query further and to get out.

    Queries search the node itself and what is below it; only an XPath that begins with ``/`` starts at the top of the
    document. A string has nothing below it: queries find nothing there. Bad queries raise ``SelectorError``.
    """

    __slots__ = ("root",)

    def __init__(
        self, text: str | None = None, type: Literal["html", "xml"] = "html", *, root: Root | None = None
    ) -> None:
        """Parse ``text``, or wrap a ``root`` as it is.

        Any text is HTML. XML must be well-formed, else SelectorError.
        """
        self.root: Root
        if root is not None:
            self.root = root
        elif text is None:
            raise TypeError("Selector needs a text or a root")
        else:
            self.root = _parse_xml(text) if type == "xml" else _parse_html(text)

    def css(self, query: str) -> SelectorList:
        """What matches, in document order: elements, or strings by a final ``::text`` or ``::attr(name)``.

        The whole selector must match at or below this node. ``p::text`` gives the texts right in each ``p``,
        ``p ::text`` those below it too.
        """
        return SelectorList.of(_find_css(self.root, query))

    def xpath(self, query: str, **variables: Any) -> SelectorList:
        """The nodes and strings that an XPath 1.0 expression finds, or its one value.

        ``$name`` in the query is the variable ``name``. Beyond the standard there are ``has-class('a', 'b')`` and
        EXSLT's ``re:test``, ``re:replace`` and ``set:`` functions. A prefixed name is matched as the document writes
        it: ``//media:title`` needs no namespaces declared. True and false are "1" and "0".
        """
        return SelectorList.of(_find_xpath(self.root, query, variables))

    def get(self) -> str:
        """The string, or the markup of the node."""
        return _markup(self.root)

    def getall(self) -> list[str]:
        return [self.get()]

    def re(self, regex: str | Pattern[str]) -> list[str]:
        """All matches in ``get()``: the groups if there are any, else the whole match.

        A group named ``extract`` is the only one given, and only of the first match.
        """
        pattern = re.compile(regex)
        if "extract" in pattern.groupindex:
            match = pattern.search(self.get())
            return [match["extract"]] if match and match["extract"] is not None else []
        found: list[str] = []
        for match in pattern.finditer(self.get()):
            found.extend(match.groups("") if pattern.groups else [match[0]])
        return found

    @overload
    def re_first(self, regex: str | Pattern[str], default: None = None) -> str | None: ...
    @overload
    def re_first(self, regex: str | Pattern[str], default: str) -> str: ...
    def re_first(self, regex: str | Pattern[str], default: str | None = None) -> str | None:
        return next(iter(self.re(regex)), default)

    @property
    def attrib(self) -> dict[str, str]:
        """A copy of the element's attributes; empty for whatever has none."""
        node = _top(self.root)
        if not isinstance(node, Element):
            return {}
        return {name: node.attr(name) or "" for name in node.attrs}

    def text_content(self) -> str:
        """All the text at and below the node, whitespace kept."""
        return self.root if isinstance(self.root, str) else self.root.text

    def __bool__(self) -> bool:
        return self.root != ""

    def __eq__(self, other: object) -> bool:
        """The same node, or an equal string."""
        return isinstance(other, Selector) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return self.get()

    def __repr__(self) -> str:
        text = self.get()
        return f"<Selector {text if len(text) <= 40 else text[:37] + '...'!r}>"


class SelectorList(Sequence[Selector]):
    """What a query found, in document order. Queries on it go to each member, their results in one flat list.

    It holds what was found, and makes a Selector only when a member is asked for: most lists are read by ``get`` or
    ``getall`` and thrown away.
    """

    __slots__ = ("_roots",)

    def __init__(self, selectors: Iterable[Selector] = ()) -> None:
        self._roots = [selector.root for selector in selectors]

    @classmethod
    def of(cls, roots: list[Root]) -> SelectorList:
        """A list of these nodes and strings, which it keeps as its own."""
        made = cls.__new__(cls)
        made._roots = roots
        return made

    def __len__(self) -> int:
        return len(self._roots)

    @overload
    def __getitem__(self, index: int) -> Selector: ...
    @overload
    def __getitem__(self, index: slice) -> SelectorList: ...
    def __getitem__(self, index: int | slice) -> Selector | SelectorList:
        if isinstance(index, slice):
            return SelectorList.of(self._roots[index])
        return Selector(root=self._roots[index])

    def __iter__(self) -> Iterator[Selector]:
        return (Selector(root=root) for root in self._roots)

    def __add__(self, other: SelectorList) -> SelectorList:
        return SelectorList.of(self._roots + other._roots)

    def css(self, query: str) -> SelectorList:
        return SelectorList.of([found for root in self._roots for found in _find_css(root, query)])

    def xpath(self, query: str, **variables: Any) -> SelectorList:
        return SelectorList.of([found for root in self._roots for found in _find_xpath(root, query, variables)])

    @overload
    def get(self, default: None = None) -> str | None: ...
    @overload
    def get(self, default: str) -> str: ...
    def get(self, default: str | None = None) -> str | None:
        """The first one's string or markup, or the default if nothing was found."""
        return _markup(self._roots[0]) if self._roots else default

    def getall(self) -> list[str]:
        return [root if isinstance(root, str) else _markup(root) for root in self._roots]

    def re(self, regex: str | Pattern[str]) -> list[str]:
        return [match for selector in self for match in selector.re(regex)]

    @overload
    def re_first(self, regex: str | Pattern[str], default: None = None) -> str | None: ...
    @overload
    def re_first(self, regex: str | Pattern[str], default: str) -> str: ...
    def re_first(self, regex: str | Pattern[str], default: str | None = None) -> str | None:
        return next((match for selector in self for match in selector.re(regex)), default)

    @property
    def attrib(self) -> dict[str, str]:
        """The attributes of the first one; empty if nothing was found."""
        return self[0].attrib if self._roots else {}

    def __repr__(self) -> str:
        return f"SelectorList({list(self)!r})"


def _parse_html(text: str) -> Document:
    document = parsing.parse(text)
    parsing.AttributeBudget(document, len(text)).check()
    return document


def _parse_xml(text: str) -> Document:
    try:
        return parsing.parse_xml(_without_cdata(text.removeprefix("\ufeff")))
    except turbohtml.HTMLParseError as exc:
        raise SelectorError(f"this is not XML: {exc}") from exc


def _without_cdata(text: str) -> str:
    """A CDATA section is no text() for turbohtml's XPath, so the text in it is written as text before it is parsed.

    Linear: after a section that does not end nothing is searched any more.
    """
    parts: list[str] = []
    position = 0
    while (start := text.find("<![CDATA[", position)) >= 0 and (end := text.find("]]>", start + 9)) >= 0:
        parts += text[position:start], escape(text[start + 9 : end], quote=False)
        position = end + 3
    return "".join((*parts, text[position:])) if parts else text


def _top(root: Root) -> Root:
    """The top element in place of the document, which parsel does not know."""
    if isinstance(root, Document) and root.root is not None:
        return root.root
    return root


_MINIMAL = turbohtml.Html(formatter=turbohtml.Formatter.MINIMAL)


def _markup(root: Root) -> str:
    if isinstance(root, str):
        return root
    node = cast("Node", _top(root))
    markup = node.html
    # A no-break space is a character here, that \s in a regex matches. Asking for that at once is slower.
    return node.serialize(_MINIMAL) if "&nbsp;" in markup else markup


# --- CSS


class _Part(NamedTuple):
    """One selector of a comma group, and the way from its elements to what it asks for."""

    selector: str
    """Empty: the very node that is queried."""
    below: str
    """The selector for what is below an element: with a limit, else its first compound could match further up."""
    step: str
    """The XPath from the elements to strings; empty for the elements themselves."""

    def elements(self, node: Node) -> list[Element]:
        """Those at or below the node."""
        if not self.selector:
            return [cast("Element", node)]
        if type(node) is Document:
            return node.select(self.selector)
        found = node.select(self.below)
        # Only a single compound can match the node itself: more of them begin above or beside what they find.
        if self.below == self.selector and node.matches(self.selector):
            found.insert(0, cast("Element", node))
        return found


class _CssQuery(NamedTuple):
    parts: dict[str, _Part]
    """By the variable that ``steps`` has their elements in."""
    steps: XPath
    plain: _Part | None
    """The one part of a query for elements, which needs no steps."""


def _find_css(root: Root, query: str) -> list[Root]:
    parts, steps, plain = _compile_css(query)
    if isinstance(root, str):
        return []
    if plain is not None:
        return cast("list[Root]", plain.elements(root))
    return cast("list[Root]", steps(root, **{name: part.elements(root) for name, part in parts.items()}))


@lru_cache(maxsize=1024)
def _compile_css(query: str) -> _CssQuery:
    try:
        parts = {f"e{number}": part for number, part in enumerate(_parts(query))}
    except ValueError as exc:
        raise SelectorError(f"bad CSS query {query!r}: {exc}") from exc
    steps = XPath(" | ".join(f"${name}{part.step}" for name, part in parts.items()))
    return _CssQuery(parts, steps, parts["e0"] if len(parts) == 1 and not parts["e0"].step else None)


_NOTHING = turbohtml.parse("", positions=False)
_QUOTED = re.compile(r"""\\. | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' """, re.VERBOSE | re.DOTALL)
_BRACKETS = re.compile(r"\([^()\[\]]*\) | \[[^()\[\]]*\]", re.VERBOSE)
_PSEUDO = re.compile(r"(.*?) (?: ::([\w-]+) (\0*) )? \s*", re.VERBOSE | re.DOTALL)
_ATTRIBUTE = re.compile(r"""\( \s* (["']?) ([^"'()]+?) \1 \s* \)""", re.VERBOSE)
_COMBINATOR = re.compile(r"\s*[>+~]\s*|\s+")


def _parts(query: str) -> Iterator[_Part]:
    """The parts between the commas. Bad ones raise ValueError.

    Only as much is read as it takes to part selectors and pseudo-elements; turbohtml knows what a selector is.
    """
    # What is quoted or in brackets is blotted out, not cut out: places in the bare query are places in the query.
    bare, before = _QUOTED.sub(_blot, query), ""
    while bare != before:
        before, bare = bare, _BRACKETS.sub(_blot, bare)
    for span in re.finditer(r"(?:^|(?<=,))\s*([^,]*)", bare):
        text = query[span.start(1) : span.end()]
        pseudo = cast("re.Match[str]", _PSEUDO.fullmatch(span[1]))
        step = _step(pseudo[2].lower(), text[slice(*pseudo.span(3))]) if pseudo[2] else ""
        yield _part(text[: pseudo.end(1)], pseudo[1], step)


def _blot(token: re.Match[str]) -> str:
    return "\0" * len(token[0])


def _step(pseudo: str, argument: str) -> str:
    if pseudo == "text" and not argument:
        return "/text()"
    if pseudo == "attr" and (match := _ATTRIBUTE.fullmatch(argument)):
        name = match[2]
        return f"/@{name}" if re.fullmatch(r"[^\W\d][\w.-]*", name) else f"/@*[name() = '{name}']"
    raise ValueError(f"there is no ::{pseudo}{argument}, only ::text and ::attr(name)")


def _part(selector: str, bare: str, step: str) -> _Part:
    combinators = [found.span() for found in _COMBINATOR.finditer(bare)]
    start, end = combinators[-1] if combinators else (0, 0)
    # Nothing (or a star) before the pseudo-element is any element. If no more is said of it than that it is below
    # another, parsel takes that other one in.
    if step and selector[end:] in ("", "*"):
        if selector[start:end].strip():
            selector = selector[:end] + "*"
        else:
            selector, step, combinators = selector[:start], "/" + step, combinators[:-1]
            if not selector:
                return _Part("", "", step)
    _NOTHING.select(selector)
    if not combinators:
        return _Part(selector, selector, step)
    head = combinators[0][0]
    return _Part(selector, f"{selector[:head]}:is(:scope, :scope *){selector[head:]}", step)


# --- XPath


def _has_class(context: Any, *names: str) -> bool:
    if not names:
        raise ValueError("has-class() needs the name of a class")
    node = context.context_node
    return isinstance(node, Element) and all(node.has_class(name) for name in names)


_PREFIXED = re.compile(
    r"""
    "[^"]*" | '[^']*'                                                # strings stay as they are,
    | (?<![\w$.-]) ([^\W\d][\w.-]*) : ([^\W\d][\w.-]*|\*) (?![\w.:-]|\s*\()  # and so do variables, axes and functions
    """,
    re.VERBOSE,
)


def _by_name(token: re.Match[str]) -> str:
    # turbohtml keeps "media:title" as the one name of an element, so its name tests can't have a prefix.
    prefix, name = token.groups()
    if prefix is None:
        return token[0]
    return f"*[starts-with(name(), '{prefix}:')]" if name == "*" else f"*[name() = '{prefix}:{name}']"


@lru_cache(maxsize=1024)
def _compile_xpath(query: str) -> XPath:
    return XPath(_PREFIXED.sub(_by_name, query), extensions={(None, "has-class"): _has_class})


def _find_xpath(root: Root, query: str, variables: dict[str, Any]) -> list[Root]:
    try:
        compiled = _compile_xpath(query)
        if isinstance(root, str):
            return [root] if query.strip() == "." else []
        found = compiled(cast("Node", _top(root)), **variables)
    except (ValueError, TypeError, re.error) as exc:
        raise SelectorError(f"bad XPath query {query!r}: {exc}") from exc
    if isinstance(found, list):
        return found
    return [str(int(found)) if isinstance(found, bool) else str(found)]
