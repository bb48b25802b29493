"""XPath queries: turbohtml's XPath 1.0, with ``has-class`` and XML namespaces.

turbohtml keeps ``media:title`` as the plain name of an element and does not resolve namespaces. So a prefixed name in a
query becomes a condition: on the namespace if the query declares the prefix, or else on the name as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol, TypeAlias, cast

from turbohtml import Element, Node, XPath

from shoal.errors import SelectorError
from shoal.selector.documents import JsonText, Root, parse_html, top

Namespaces = Mapping[str, str]
XPathValue: TypeAlias = str | float | bool | Element | Iterable[Element]
"""The value of a variable in a query."""

_PREFIXED = re.compile(
    r"""
    "[^"]*" | '[^']*'                                         # strings do not change
    | (?<![\w$.:-]) (local-name|namespace-uri) \s* \( (\s*\))?
    | (?<![\w$.-]) ((?:@|attribute\s*::)\s*)?                 # nor do variables, axes and functions
      ([^\W\d][\w.-]*) : ([^\W\d][\w.-]*|\*) (?![\w.:-]|\s*\()
    """,
    re.VERBOSE,
)
_LOCAL_NAME = "substring(name(), 1 + string-length(substring-before(name(), ':')) + contains(name(), ':'))"
_BUILT_IN = {
    "xml": "http://www.w3.org/XML/1998/namespace",
    "re": "http://exslt.org/regular-expressions",
    "set": "http://exslt.org/sets",
}


def find_xpath(
    root: Root, query: str, variables: Mapping[str, XPathValue], namespaces: Namespaces | None = None
) -> list[Root]:
    """Return the nodes and strings that an XPath finds, or its one value as a string. SelectorError for a bad query."""
    try:
        compiled = _compile(query, tuple(sorted(namespaces.items())) if namespaces else ())
        if not isinstance(root, Node):
            if not isinstance(root, str):
                raise TypeError("cannot use XPath on a JSON value: use jmespath()")
            if not isinstance(root, JsonText):
                return [root] if query.strip() == "." else []
            root = parse_html(root)
        result = compiled(cast("Node", top(root)), **variables)
    except (ValueError, TypeError, re.error) as exc:
        raise SelectorError(f"bad XPath query {query!r}: {exc}") from exc
    if isinstance(result, list):
        return cast("list[Root]", result)
    return [str(int(result)) if isinstance(result, bool) else str(result)]


@lru_cache(maxsize=1024)
def _compile(query: str, namespaces: tuple[tuple[str, str], ...]) -> XPath:
    uris = dict(namespaces)
    functions: dict[tuple[str | None, str], Callable[..., str | bool]] = {
        (None, "has-class"): _has_class,
        (None, "shoal-namespace"): lambda context, name: _namespace(context.context_node, name),
        (None, "shoal-local-name"): lambda context, nodes: _first_tag(nodes).rpartition(":")[2],
        (None, "shoal-namespace-uri"): lambda context, nodes: _namespace(
            nodes[0] if nodes else None, _first_tag(nodes)
        ),
        (None, "shoal-is"): lambda context, *names: _is(context.context_node, uris, *names),
    }
    return XPath(_PREFIXED.sub(lambda token: _rewrite(token, uris), query), extensions=functions)


def _rewrite(token: re.Match[str], uris: Namespaces) -> str:
    function, is_bare, axis, prefix, name = token.groups()
    if function is not None:
        if is_bare:
            return _LOCAL_NAME if function == "local-name" else "shoal-namespace(name())"
        return f"shoal-{function}("
    if prefix is None:
        return token[0]
    if prefix in uris:
        return f"{'@' if axis else ''}*[shoal-is('{prefix}', '{name}', name(), '{'@' if axis else ''}')]"
    test = f"starts-with(name(), '{prefix}:')" if name == "*" else f"name() = '{prefix}:{name}'"
    return f"{'@' if axis else ''}*[{test}]"


class _Context(Protocol):
    """What turbohtml passes to a function of a query."""

    context_node: Node


def _has_class(context: _Context, *names: str) -> bool:
    if not names:
        raise ValueError("has-class() needs at least one class name")
    node = context.context_node
    return isinstance(node, Element) and all(node.has_class(name) for name in names)


def _first_tag(nodes: Sequence[Node]) -> str:
    return nodes[0].tag if nodes and isinstance(nodes[0], Element) else ""


def _is(element: Node, uris: Namespaces, prefix: str, name: str, name_test: str, axis: str) -> bool:
    """Whether a name as written in the document is the one that the query declares."""
    own_prefix, _, local = name_test.rpartition(":")
    if name not in ("*", local) or (axis and not own_prefix):  # an attribute without a prefix has no namespace
        return False
    return _namespace(element, name_test) == uris[prefix]


def _namespace(element: Node | None, name_test: str) -> str:
    """Return the URI of a name at this element: the nearest declaration at or above it."""
    prefix = name_test.rpartition(":")[0]
    declaration = f"xmlns:{prefix}" if prefix else "xmlns"
    while isinstance(element, Element):
        uri = element.attr(declaration)
        if uri is not None:
            return uri
        element = element.parent
    return _BUILT_IN.get(prefix, "")
