"""``Selector`` and ``SelectorList``, with the names and behaviour of parsel."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from re import Pattern
from typing import Any, Literal, TypeVar, cast, overload

from turbohtml import Document, Element, Node

from shoal.errors import SelectorError, TooComplexError
from shoal.selector.css import find_css, find_strings
from shoal.selector.documents import (
    JsonText,
    Root,
    attributes_of,
    content,
    drop,
    is_xml,
    load_json,
    parse_text,
    remove_namespaces,
    replace_entities,
    top,
)
from shoal.selector.parsing import AttributeBudget
from shoal.selector.xpath import Namespaces, XPathValue, find_xpath

# Finds queries that matched on no page of a crawl: they usually have a typo.

T = TypeVar("T")

_MAX_QUERIES = 1000
_MAX_LENGTH = 200  # of a query that is tracked


class QueryUsage:
    """The queries of one crawl. A query that has matched once costs only one set lookup."""

    __slots__ = ("_missed", "_page", "matched")

    def __init__(self) -> None:
        self.matched: set[str] = set()
        self._missed: dict[str, tuple[int, int]] = {}
        """By query: the number of pages without a match, and the last of these pages."""
        self._page = 0

    def begin_page(self) -> None:
        """Count the following queries for a new page."""
        self._page += 1

    def count(self, query: str, has_found: bool) -> None:
        if has_found:
            self._missed.pop(query, None)
            if len(self.matched) <= _MAX_QUERIES:
                self.matched.add(query)
            return
        pages, last = self._missed.get(query, (0, -1))
        if last != self._page and (pages or self._has_room(query)):
            self._missed[query] = (pages + 1, self._page)

    def _has_room(self, query: str) -> bool:
        # When the set of matched queries is full, a query that is not in it may have matched before.
        return len(query) <= _MAX_LENGTH and max(len(self._missed), len(self.matched)) < _MAX_QUERIES

    def unmatched(self) -> dict[str, int]:
        """The queries that never matched, with their numbers of pages, most pages first."""
        return {query: pages for query, (pages, _) in sorted(self._missed.items(), key=lambda item: -item[1][0])}


current: ContextVar[QueryUsage | None] = ContextVar("shoal_query_usage", default=None)
"""The usage of the crawl that this task belongs to."""


def counted(query: str, results: list[T]) -> list[T]:
    """Count a query and return what it found."""
    usage = current.get()
    if usage is not None and query not in usage.matched:
        usage.count(query, bool(results))
    return results


def begin_page() -> None:
    """Count the following queries of this task for a new page."""
    usage = current.get()
    if usage is not None:
        usage.begin_page()


@contextmanager
def uncounted() -> Iterator[None]:
    """Do not count the queries in this block: they are not those of the spider, or need not match."""
    counting = current.set(None)
    try:
        yield
    finally:
        current.reset(counting)


# JMESPath queries over JSON.


def find_jmespath(root: Root, query: str, options: dict[str, object]) -> list[Root]:
    """Return the values that a JMESPath query finds. Text and elements are decoded as JSON first."""
    import jmespath  # here, because few spiders need it

    node = top(root)
    if isinstance(node, Node):
        node = node.text
    data = load_json(node) if isinstance(node, str) else node
    try:
        result = jmespath.search(query, data, **options)
    except (ValueError, TypeError) as exc:  # JMESPathError is a ValueError
        raise SelectorError(f"bad JMESPath query {query!r}: {exc}") from exc
    if result is None:
        return []
    values = result if isinstance(result, list) else [result]
    return [JsonText(value) if isinstance(value, str) else value for value in values]


_NOT_SET = cast("Root", object())
_FEW = 16  # results whose content needs no limit
_MAX_CONTENT = 48 << 20  # characters


class _Searchable(ABC):
    """Regular expressions on results of queries."""

    __slots__ = ()

    @abstractmethod
    def _contents(self) -> Sequence[Root]: ...

    def re(self, regex: str | Pattern[str], replace_entities: bool = True) -> list[str]:
        """Return all matches in each result: the groups if there are any, or else the whole match.

        If there is a group named ``extract``, only that group of the first match is returned. ``replace_entities``
        decodes character references, except ``&amp;`` and ``&lt;``.
        """
        return list(self._matches(regex, replace_entities))

    @overload
    def re_first(
        self, regex: str | Pattern[str], default: None = None, replace_entities: bool = True
    ) -> str | None: ...
    @overload
    def re_first(self, regex: str | Pattern[str], default: str, replace_entities: bool = True) -> str: ...
    def re_first(
        self, regex: str | Pattern[str], default: str | None = None, replace_entities: bool = True
    ) -> str | None:
        """Return the first match of ``re``, or the default."""
        return next(self._matches(regex, replace_entities), default)

    def _matches(self, regex: str | Pattern[str], replace: bool) -> Iterator[str]:
        pattern, budget = re.compile(regex), _ContentBudget()
        return (match for root in self._contents() for match in _matches(budget.content(root), pattern, replace))


class Selector(_Searchable):
    """One node of a page, one string found in it, or one JSON value.

    CSS and XPath search the node itself and its descendants. Only an XPath that begins with ``/`` starts at the top
    of the document. They find nothing in a string, except in a string of a JSON document: they parse it as HTML. A bad
    query raises ``SelectorError``.
    """

    __slots__ = ("namespaces", "root")

    def __init__(
        self,
        text: str | None = None,
        type: Literal["html", "xml", "json", "text"] | None = None,
        *,
        root: Root = _NOT_SET,
        namespaces: Mapping[str, str] | None = None,
    ) -> None:
        """Parse ``text``, or wrap a ``root`` as it is.

        Without a ``type``, JSON objects and arrays and XML with a declaration are detected. Everything else is HTML.
        Every text is valid HTML. Malformed XML raises SelectorError. Invalid JSON is None, as in parsel.
        """
        self.root: Root
        if root is not _NOT_SET:
            self.root = root
        elif text is None:
            raise TypeError("Selector needs a text or a root")
        else:
            self.root = parse_text(text, type)
        self.namespaces: dict[str, str] | None = dict(namespaces) if namespaces else None

    def css(self, query: str) -> SelectorList:
        """Return what matches, in document order: elements, or strings with a final ``::text`` or ``::attr(name)``.

        ``:contains("text")`` is available, as in parsel. The whole selector must match at or below this node.
        ``p::text`` returns the texts directly in each ``p``, and
        ``p ::text`` also those below it.
        """
        return SelectorList.of(counted(query, find_css(self.root, query)), self.namespaces)

    def xpath(self, query: str, namespaces: Mapping[str, str] | None = None, **variables: XPathValue) -> SelectorList:
        """Return the nodes and strings that an XPath 1.0 expression finds, or its one value.

        ``$name`` in the query is the variable ``name``. ``has-class('a', 'b')`` and EXSLT's ``re:test``,
        ``re:replace`` and ``set:`` functions are available. True and false are "1" and "0".

        ``namespaces`` maps prefixes to URIs, in addition to those of ``register_namespace``. A prefix without a URI
        matches the name as the document writes it: ``//media:title`` needs no declaration.
        """
        declared = self.namespaces if namespaces is None else _merge(self.namespaces, namespaces)
        return SelectorList.of(counted(query, find_xpath(self.root, query, variables, declared)), self.namespaces)

    def jmespath(self, query: str, **options: object) -> SelectorList:
        """Return the values that a JMESPath query finds. Text and the text of an element are decoded as JSON first.

        ``options`` go to ``jmespath.search``. Invalid JSON contains nothing.
        """
        return SelectorList.of(counted(query, find_jmespath(self.root, query, options)), self.namespaces)

    def get(self) -> Any:
        """Return the markup of a node, the string, or the JSON value."""
        return content(self.root)

    extract = get

    def getall(self) -> list[Any]:
        return [self.get()]

    def _contents(self) -> Sequence[Root]:
        return (self.root,)

    def register_namespace(self, prefix: str, uri: str) -> None:
        """Let ``prefix`` mean this namespace in the XPath queries of this selector and of all it finds afterwards."""
        self.namespaces = {**(self.namespaces or {}), prefix: uri}

    def remove_namespaces(self) -> None:
        """Remove the prefixes and declarations of namespaces from this node and its descendants."""
        remove_namespaces(self.root)

    def drop(self) -> None:
        """Remove the node from its document. SelectorError for the top of a document, a string and a JSON value."""
        drop(self.root)

    @property
    def attrib(self) -> dict[str, str]:
        """A copy of the element's attributes; empty if this is not an element. Namespace declarations of XML are left
        out."""
        node = top(self.root)
        if not isinstance(node, Element):
            return {}
        attributes = attributes_of(node)
        if any(name.startswith("xmlns") for name in attributes) and is_xml(node):
            return {name: value for name, value in attributes.items() if name.partition(":")[0] != "xmlns"}
        return attributes

    def text_content(self) -> str:
        """Return all text at and below the node, with its whitespace."""
        return self.root.text if isinstance(self.root, Node) else str(self.root)

    def __bool__(self) -> bool:
        return isinstance(self.root, Node) or bool(self.root)

    def __eq__(self, other: object) -> bool:
        """Whether both are the same node, equal strings or equal JSON values."""
        return isinstance(other, Selector) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return str(self.get())

    def __repr__(self) -> str:
        text = str(self)
        return f"<Selector {text if len(text) <= 40 else text[:37] + '...'!r}>"


class SelectorList(_Searchable, Sequence[Selector]):
    """All results of a query, in document order. A query on the list queries each member and returns one flat list.

    The list stores the results and creates a Selector only when you ask for a member: most lists are read with ``get``
    or ``getall`` and then discarded.
    """

    __slots__ = ("_namespaces", "_roots")

    def __init__(self, selectors: Iterable[Selector] = ()) -> None:
        members = list(selectors)
        self._roots = [selector.root for selector in members]
        self._namespaces: dict[str, str] | None = members[0].namespaces if members else None

    @classmethod
    def of(cls, roots: list[Root], namespaces: dict[str, str] | None = None) -> SelectorList:
        """Create a list of these results. It keeps ``roots`` itself, not a copy."""
        members = cls.__new__(cls)
        members._roots = roots
        members._namespaces = namespaces
        return members

    def __len__(self) -> int:
        return len(self._roots)

    @overload
    def __getitem__(self, index: int) -> Selector: ...
    @overload
    def __getitem__(self, index: slice) -> SelectorList: ...
    def __getitem__(self, index: int | slice) -> Selector | SelectorList:
        if isinstance(index, slice):
            return SelectorList.of(self._roots[index], self._namespaces)
        return Selector(root=self._roots[index], namespaces=self._namespaces)

    def __iter__(self) -> Iterator[Selector]:
        if self._namespaces is None:
            return (Selector(root=root) for root in self._roots)
        return (Selector(root=root, namespaces=self._namespaces) for root in self._roots)

    def __add__(self, other: SelectorList) -> SelectorList:
        return SelectorList.of(self._roots + other._roots, _merge(self._namespaces, other._namespaces))

    def css(self, query: str) -> SelectorList:
        roots = [result for root in self._roots for result in find_css(root, query)]
        return SelectorList.of(counted(query, roots) if self._roots else roots, self._namespaces)

    def xpath(self, query: str, namespaces: Mapping[str, str] | None = None, **variables: XPathValue) -> SelectorList:
        declared = _merge(self._namespaces, namespaces)
        roots = [result for root in self._roots for result in find_xpath(root, query, variables, declared)]
        return SelectorList.of(counted(query, roots) if self._roots else roots, self._namespaces)

    def jmespath(self, query: str, **options: object) -> SelectorList:
        roots = [result for root in self._roots for result in find_jmespath(root, query, options)]
        return SelectorList.of(counted(query, roots) if self._roots else roots, self._namespaces)

    def get(self, default: Any = None) -> Any:
        """Return the first result (a string, or a JSON value), or the default if there is none."""
        if not self._roots:
            return default
        first = self._roots[0]
        return first if type(first) is str else content(first)

    extract_first = get

    def getall(self) -> list[Any]:
        """Return all results (strings, or JSON values). TooComplexError if elements inside each other repeat a huge
        text."""
        get = content if len(self._roots) <= _FEW else _ContentBudget().content
        return [root if type(root) is str else get(root) for root in self._roots]

    extract = getall

    def _contents(self) -> Sequence[Root]:
        return self._roots

    def drop(self) -> None:
        """Remove each node from its document. SelectorError for a node that cannot be dropped."""
        for root in self._roots:
            drop(root)

    @property
    def attrib(self) -> dict[str, str]:
        """The attributes of the first result; empty if there is none."""
        return self[0].attrib if self._roots else {}

    def __repr__(self) -> str:
        return f"SelectorList({list(self)!r})"


def select_strings(document: Document, query: str, budget: AttributeBudget) -> SelectorList | None:
    """Return what ``css`` finds if that is text, or an attribute of elements with a given tag; None for other queries.

    The budget is not checked before. It limits what is read.
    """
    strings = find_strings(document, query, budget)
    return None if strings is None else SelectorList.of(counted(query, strings))


class _ContentBudget:
    """Limits the content of several results: 500 elements inside each other all contain the same text."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _MAX_CONTENT

    def content(self, root: Root) -> object:
        text = content(root)
        if isinstance(text, str):
            self._left -= len(text)
            if self._left < 0:
                raise TooComplexError(
                    f"the page is too complex: the results of a query have more than {_MAX_CONTENT} characters"
                )
        return text


def _merge(registered: Namespaces | None, more: Namespaces | None) -> dict[str, str] | None:
    if not more:
        return cast("dict[str, str] | None", registered)
    return {**(registered or {}), **more}


def _matches(content: object, pattern: Pattern[str], replace: bool) -> Iterator[str]:
    text = str(content)
    if "extract" in pattern.groupindex:
        first = pattern.search(text)
        texts = iter([first["extract"]] if first and first["extract"] is not None else [])
    elif pattern.groups:
        texts = (group for match in pattern.finditer(text) for group in match.groups(""))
    else:
        texts = (match[0] for match in pattern.finditer(text))
    return map(replace_entities, texts) if replace else texts
