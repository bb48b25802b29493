"""CSS queries: turbohtml's CSS engine, with ``::text`` and ``::attr(name)`` as in parsel.

turbohtml selects the elements. ``::text`` and ``::attr(name)`` are steps of an XPath that starts at these elements. So
each string appears once and in document order, also when the query is a comma group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import turbohtml
from turbohtml import Document, Element, Node, XPath

from shoal.errors import SelectorError
from shoal.selector.documents import JsonText, Root, parse_html
from shoal.selector.parsing import AttributeBudget


class _Part(NamedTuple):
    """One selector of a comma group, and the step from its elements to the strings that it asks for."""

    selector: str
    """Empty: the queried node itself."""
    below: str
    """The selector for nodes below an element. ``:scope`` keeps its first part from matching above that element."""
    step: str
    """The XPath from the elements to their strings; empty for the elements themselves."""
    contains: tuple[str, ...] = ()
    """Texts that the elements must contain."""
    outer: _Part | None = None
    """The part that selects the ancestors; ``selector`` is relative to them."""

    def elements(self, node: Node) -> list[Element]:
        """Return the matching elements at or below the node."""
        if self.outer is None:
            elements = self._selected(node)
        else:
            below = [element for outer in self.outer.elements(node) for element in outer.select(self.selector)]
            elements = cast("list[Element]", _in_order(node, found=below))
        if not self.contains:
            return elements
        return [element for element in elements if all(text in element.text for text in self.contains)]

    def _selected(self, node: Node) -> list[Element]:
        if not self.selector:
            return [cast("Element", node)]
        if type(node) is Document:
            return node.select(self.selector)
        elements = node.select(self.below)
        # A selector with combinators cannot match the node itself: it would start above or beside it.
        if self.below == self.selector and node.matches(self.selector):
            elements.insert(0, cast("Element", node))
        return elements


_in_order = XPath("$found | $found")


class _CssQuery(NamedTuple):
    parts: dict[str, _Part]
    """By the name of the XPath variable in ``steps`` that holds their elements."""
    steps: XPath
    plain: _Part | None
    """The only part, if the query selects elements and needs no steps."""
    reads: Literal["", "texts", "attribute"]
    """What the query reads if it names only tags: texts, or one attribute of each element. Empty for other queries."""
    selector: str
    """The selector of the only part, if that is all it has beside its step; or else empty."""


def find_css(root: Root, query: str) -> list[Root]:
    """Return the elements and strings that a CSS query finds, in document order. SelectorError for a bad query."""
    parts, steps, plain, _, selector = _compile_css(query)
    if selector and type(root) is Document:  # the usual case takes a short way
        elements = root.select(selector)
        return cast("list[Root]", elements if plain is not None else steps(root, e0=elements))
    if not isinstance(root, Node):
        if not isinstance(root, str):
            raise SelectorError(f"bad CSS query {query!r}: cannot use CSS on a JSON value: use jmespath()")
        if not isinstance(root, JsonText):
            return []
        root = parse_html(root)
    if plain is not None:
        return cast("list[Root]", plain.elements(root))
    return cast("list[Root]", steps(root, **{name: part.elements(root) for name, part in parts.items()}))


def find_strings(document: Document, query: str, budget: AttributeBudget) -> list[Root] | None:
    """Return the strings that a CSS query finds if it names only tags; None for any other query.

    Such a query compares no attributes, so the attributes of the document need no check before.
    """
    parts, steps, _, reads, selector = _compile_css(query)
    if not reads:
        return None
    if reads == "texts" and selector:
        return cast("list[Root]", steps(document, e0=document.select(selector)))
    if reads == "texts":
        return cast("list[Root]", steps(document, **{name: part.elements(document) for name, part in parts.items()}))
    part = parts["e0"]
    strings = budget.read(
        part.elements(document),
        lambda elements: cast("list[str]", steps(document, e0=elements)),
        part.selector + part.step,
    )
    return cast("list[Root]", strings)


@lru_cache(maxsize=1024)
def _compile_css(query: str) -> _CssQuery:
    try:
        parts = {f"e{number}": part for number, part in enumerate(_parts(query))}
    except ValueError as exc:
        raise SelectorError(f"bad CSS query {query!r}: {exc}") from exc
    steps = XPath(" | ".join(f"${name}{part.step}" for name, part in parts.items()))
    first = parts["e0"]
    is_simple = len(parts) == 1 and first.outer is None and not first.contains
    plain = first if len(parts) == 1 and not first.step else None
    return _CssQuery(parts, steps, plain, _reads(parts), first.selector if is_simple else "")


def _reads(parts: Mapping[str, _Part]) -> Literal["", "texts", "attribute"]:
    if not all(_TAGS.fullmatch(part.selector) for part in parts.values()):
        return ""
    steps = [part.step for part in parts.values()]
    if all(step in ("/text()", "//text()") for step in steps):
        return "texts"
    return "attribute" if len(steps) == 1 and steps[0].startswith("/@") else ""


_NOTHING = turbohtml.parse("", positions=False)
_QUOTED = re.compile(r"""\\. | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' """, re.VERBOSE | re.DOTALL)
_BRACKETS = re.compile(r"\([^()\[\]]*\) | \[[^()\[\]]*\]", re.VERBOSE)
_PSEUDO = re.compile(r"(.*?) (?: ::([\w-]+) (\0*) )? \s*", re.VERBOSE | re.DOTALL)
_ATTRIBUTE = re.compile(r"""\( \s* (["']?) ([^"'()]+?) \1 \s* \)""", re.VERBOSE)
_CONTAINS_CALL = re.compile(r"(?<!:):contains\0+")
_CONTAINS = re.compile(
    r""":contains\( \s* (?: "((?:\\.|[^"\\])*)" | '((?:\\.|[^'\\])*)' | ([\w-]+) ) \s* \)""", re.VERBOSE
)
_TAGS = re.compile(r"[\w\s>+~*-]*", re.ASCII)
_COMBINATOR = re.compile(r"\s*[>+~]\s*|\s+")


def _parts(query: str) -> Iterator[_Part]:
    """Split a query at its commas. ValueError for a bad part.

    This only separates selectors from pseudo-elements. turbohtml parses the selectors.
    """
    # Overwrite quoted and bracketed text instead of removing it, so that positions in the query stay the same.
    bare, before = _QUOTED.sub(_overwrite, query), ""
    while bare != before:
        before, bare = bare, _BRACKETS.sub(_overwrite, bare)
    for span in re.finditer(r"(?:^|(?<=,))\s*([^,]*)", bare):
        text = query[span.start(1) : span.end()]
        pseudo = cast("re.Match[str]", _PSEUDO.fullmatch(span[1]))
        step = _step(pseudo[2].lower(), text[slice(*pseudo.span(3))]) if pseudo[2] else ""
        yield _part(text[: pseudo.end(1)], pseudo[1], step)


def _overwrite(token: re.Match[str]) -> str:
    return "\0" * len(token[0])


def _step(pseudo: str, argument: str) -> str:
    if pseudo == "text" and not argument:
        return "/text()"
    if pseudo == "attr" and (match := _ATTRIBUTE.fullmatch(argument)):
        name = match[2]
        return f"/@{name}" if re.fullmatch(r"[^\W\d][\w.-]*", name) else f"/@*[name() = '{name}']"
    raise ValueError(f"unknown pseudo-element ::{pseudo}{argument}; use ::text or ::attr(name)")


def _part(selector: str, bare: str, step: str) -> _Part:
    if re.search(r"(?<!\*)\|", bare):
        raise ValueError("CSS queries cannot name a namespace; use xpath() with namespaces=")
    call = next(reversed(list(_CONTAINS_CALL.finditer(bare))), None)
    if call is not None:
        return _part_with_contains(selector, bare, step, call)
    combinators = [match.span() for match in _COMBINATOR.finditer(bare)]
    start, end = combinators[-1] if combinators else (0, 0)
    # Nothing (or a star) before the pseudo-element means any element. If it only has to be below another element,
    # parsel includes that other element.
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


def _part_with_contains(selector: str, bare: str, step: str, call: re.Match[str]) -> _Part:
    """A selector whose last ``:contains(...)`` is ``call``. turbohtml lacks it: the texts are compared here."""
    match = _CONTAINS.fullmatch(selector, *call.span())
    if match is None:
        raise ValueError(':contains() needs a text: :contains("text")')
    combinator = _COMBINATOR.search(bare, call.end())
    if combinator is None:
        text = re.sub(r"\\(.)", r"\1", next(group for group in match.groups() if group is not None))
        before, after = slice(call.start()), slice(call.end(), None)
        if not bare[before] or _COMBINATOR.fullmatch(bare[before][-1:]):
            selector, bare = f"{selector[before]}*{selector[after]}", f"{bare[before]}*{bare[after]}"
        else:
            selector, bare = selector[before] + selector[after], bare[before] + bare[after]
        part = _part(selector, bare, "")
        return part._replace(step=step, contains=(*part.contains, text))
    outer = _part(selector[: combinator.start()], bare[: combinator.start()], "")
    sign, rest = combinator[0].strip(), slice(combinator.end(), None)
    if sign in ("+", "~"):
        raise ValueError(f':contains("text") cannot stand before {sign}; use xpath()')
    if bare[rest] in ("", "*") and not sign:
        return outer._replace(step="/" + step)
    inner = _part(selector[rest] or "*", bare[rest] or "*", "")
    return inner._replace(selector=f":scope {sign} {inner.selector}", step=step, outer=outer)
