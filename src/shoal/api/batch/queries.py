"""Checks that a caller's CSS or XPath query is cheap: one that visits each node of a page a few times.

In both languages one line can take hours: nested conditions, axes that visit the whole page from each of its nodes,
regular expressions. The grammars here accept only a subset that is known to be cheap.

The grammars are regular expressions that never backtrack: every repetition is possessive (``*+``), and alternatives
begin differently. So their time is linear in the length of the query, which is limited too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

MAX_LENGTH = 200
_MAX_STEPS = (20, 5)
"""Maximum steps of a path without `//`, and of one with it."""
_MAX_CONDITIONS = 4
_MAX_PSEUDOS = 5

_CSS = (
    "a CSS query of a batch must be valid CSS, with at most 6 combinators, and only simple selectors within :has(), "
    ":is() and :not()"
)
_PSEUDOS = (
    f"a CSS query of a batch may have at most {_MAX_PSEUDOS} pseudo-classes, and only one that counts elements, "
    "such as :nth-child()"
)
_HAS = "a CSS query of a batch may have :has() only in its last compound selector"
_XPATH = (
    "an XPath of a batch must be a path such as //div[@class='x']/a/@href, with at most 5 steps (20 without //), "
    "no axes, and conditions on attributes, text() and positions; functions such as count() and string() may enclose it"
)

_S = r"\s*+"
_STRING = r"""(?:"[^"]*+"|'[^']*+')"""


def check_css(query: str) -> None:
    """ValueError if the query may be expensive. It may accept invalid CSS."""
    problem = _CSS if len(query) > MAX_LENGTH or not _CSS_GRAMMAR.fullmatch(query) else _find_costly_pseudos(query)
    if problem:
        raise ValueError(f"{query!r:.80}: {problem}")


def check_xpath(query: str) -> None:
    """ValueError if the query may be expensive. It may accept invalid XPath."""
    is_path = len(query) <= MAX_LENGTH and _PATHS.fullmatch(_PREDICATE.sub("[]", query)) is not None
    if is_path and all(map(_CONDITIONS.fullmatch, _PREDICATE.findall(query))):
        shape = _shape_of(query)
        if shape.steps <= _MAX_STEPS[shape.has_descendants] and shape.conditions <= _MAX_CONDITIONS:
            return
    raise ValueError(f"{query!r:.80}: {_XPATH}")


# -- XPath: a union of up to 5 paths, optionally within one function

_NAME = r"[^\W\d][\w.-]*+"
_QUALIFIED = rf"{_NAME}(?::(?:{_NAME}|\*))?+(?![:(])"  # not an axis (::) or a function
_ATTRIBUTE = rf"@(?:{_QUALIFIED}|\*(?![:(]))"
_TEXT = rf"text\({_S}\)"
_VALUE = (
    rf"(?:(?:position|last)\({_S}\)|normalize-space\({_S}(?:{_TEXT}|{_ATTRIBUTE}){_S}\)|{_STRING}"
    rf"|\d++(?:\.\d++)?+|{_TEXT}|{_ATTRIBUTE})"
)
_TEST = (
    rf"(?:(?:contains|starts-with)\({_S}{_VALUE}{_S},{_S}{_VALUE}{_S}\)"
    rf"|{_VALUE}(?:{_S}(?:[!<>]=|[=<>-]){_S}{_VALUE}){{0,2}}+)"
)
_CONDITION = rf"{_S}(?:not\({_S}{_TEST}{_S}\)|{_TEST}){_S}"
_CONDITIONS = re.compile(rf"{_CONDITION}(?:(?:and|or)(?![\w.-]){_CONDITION})*+")
_PREDICATE = re.compile(rf"\[((?:{_STRING}|[^]'\"])*+)\]")
_STEP = rf"(?:{_ATTRIBUTE}|{_TEXT}|(?:{_QUALIFIED}|\*){_S}(?:\[\]{_S})*+)"  # with the predicates emptied
_PATH = rf"\.?+(?://?+)?+{_STEP}(?:/(?!\.\.)/?+{_STEP})*+(?:/\.\.(?:/{_STEP})*+)?+"
_UNION = rf"{_PATH}(?:{_S}\|{_S}{_PATH}){{0,4}}+"
_FUNCTION = r"(?:count|string|normalize-space|number|boolean|sum)\("
_PATHS = re.compile(rf"{_S}(?:{_FUNCTION}{_S}{_UNION}{_S}\)|{_UNION}){_S}")


class Effort(NamedTuple):
    """What an XPath costs beyond one visit of each node."""

    repeated: int
    """Conditions on nodes that are visited once per ancestor: a second ``//`` visits everything below each match of the
    first."""
    sorted: int
    """Steps that find nodes out of order. Sorting them counts siblings."""


@lru_cache(maxsize=1024)
def effort_of(xpath: str) -> Effort:
    """The effort of a query that `check_xpath` accepts."""
    shape = _shape_of(xpath)
    return Effort(max(1, shape.conditions) if shape.repeats else 0, shape.sorts)


class _Shape(NamedTuple):
    """What an XPath has."""

    steps: int
    conditions: int
    has_descendants: bool
    repeats: bool
    """Whether a path has ``//`` more than once."""
    sorts: int
    """Steps after a ``//`` or a ``..``, and unions."""


def _shape_of(query: str) -> _Shape:
    """The shape of a query that the grammar accepts."""
    predicates = _PREDICATE.findall(query)
    words = re.findall(rf"[@:]?{_NAME}", re.sub(_STRING, "", " ".join(predicates)))
    conditions = len(predicates) + words.count("and") + words.count("or")
    paths = re.sub(rf"^\s*{_FUNCTION}", "", _PREDICATE.sub("", query)).split("|")
    steps, sorts, repeats = 0, len(paths) - 1, False
    for path in paths:
        slashes = re.findall(r"/(?:/|\.\.)?", path)
        steps += len(slashes)
        begins_with_slash = re.match(r"\s*\.?/", path) is not None
        for number, slash in enumerate(slashes):
            before = slashes[:number]
            if "/.." in before or ("//" in (*before, slash) and (before or not begins_with_slash)):
                sorts += 1
        repeats |= slashes.count("//") > 1
    return _Shape(steps, conditions, "//" in "".join(paths), repeats, sorts)


# -- CSS: up to 4 selectors, each optionally with ``::text`` or ``::attr()``

_COUNTING = {"first-of-type", "last-of-type", "only-of-type"}
_NTHS = {"nth-child", "nth-last-child", "nth-of-type", "nth-last-of-type"}
_SIMPLE = {"first-child", "last-child", "only-child", "empty", "root", *_COUNTING}
_WORD = r"(?:[\w-]|\\.)++"
_WORD_END = r"(?![\w-]|\\.)"
_HAS_ATTRIBUTE = rf"\[{_S}[\w:|-]++{_S}(?:[~^$*|]?={_S}(?:{_STRING}|{_WORD}){_S}[is]?+{_S})?+\]"
_NTH = r"(?:odd|even|[+-]?+\d*+n(?:\s*+[+-]\s*+\d++)?+|\d++)"
_ELEMENT = rf"(?:{_WORD}|\*)?+"  # it may be empty, as before ``::text``
_INNER = rf"{_ELEMENT}(?:[#.]{_WORD}|{_HAS_ATTRIBUTE})*+{_S}"
_PSEUDO = (
    rf":(?:(?:{'|'.join(_SIMPLE)}){_WORD_END}|(?:{'|'.join(_NTHS)})\({_S}{_NTH}{_S}\)"
    rf"|(?:not|is|where|has)\({_S}(?:>{_S})?+{_INNER}(?:,{_S}{_INNER}){{0,4}}+\))"
)
_COMPOUND = rf"{_ELEMENT}(?:[#.]{_WORD}|{_HAS_ATTRIBUTE}|{_PSEUDO})*+"
_COMBINATOR = rf"(?:{_S}[>+~]{_S}|\s++(?!,|\Z))"
_CONTENT = rf"::(?:text{_WORD_END}|attr\({_S}(?:{_STRING}|[\w:.-]++){_S}\))"
_SELECTOR = rf"{_S}{_COMPOUND}(?:{_COMBINATOR}{_COMPOUND}){{0,6}}+(?:{_CONTENT})?+{_S}"
_CSS_GRAMMAR = re.compile(rf"{_SELECTOR}(?:,{_SELECTOR}){{0,3}}+")


def _find_costly_pseudos(query: str) -> str:
    """What is wrong with the pseudo-classes of a query that the grammar accepts. Empty: nothing."""
    plain = re.sub(rf"{_HAS_ATTRIBUTE}|\\.", "#", query)
    plain = re.sub(r"\([^)]*\)", "", re.sub(_CONTENT, "#", plain))
    for selector in plain.split(","):
        after = selector.partition(":has")[2]
        if re.search(r"[\s>+~]", after.rstrip()):  # it would visit everything below each ancestor of each element
            return _HAS
    names = re.findall(r":([\w-]+)", plain)
    is_costly = len(names) > _MAX_PSEUDOS or sum(name in _COUNTING | _NTHS for name in names) > 1
    return _PSEUDOS if is_costly else ""
