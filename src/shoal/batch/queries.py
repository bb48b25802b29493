"""The part of CSS and XPath that a stranger may use: what looks at each node of a page some few times.

Both languages have more, in which one line can take hours: conditions within conditions, axes that look at the whole
page from each of its nodes, regular expressions. A query is read here by a parser for what is known to be cheap, and
nothing else is taken.

The parser looks one token ahead and never goes back, and no token can be read in two ways. So its time is linear in the
length of the query, which is limited too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import Pattern
from typing import NamedTuple

LONGEST = 200
_MOST_STEPS = (20, 5)
"""Of a path that begins at the top, and of one that looks everywhere (`//`)."""
_MOST_CONDITIONS = 4
_MOST_PATHS = 5
_MOST_PSEUDOS = 5
_MOST_SELECTORS = 4
_MOST_COMBINATORS = 6
_MOST_ALTERNATIVES = 5

_CSS = "a CSS query of a batch has up to 6 selectors in a row, without selectors within :has(), :is() and :not()"
_PSEUDOS = (
    f"a CSS query of a batch has up to {_MOST_PSEUDOS} pseudo-classes, and one that counts elements (:nth-child() and "
    "the like)"
)
_HAS = "a CSS query of a batch has :has() only in the last of its selectors in a row"
_XPATH = (
    "an XPath of a batch is a path such as //div[@class='x']/a/@href, of up to 5 steps (20 without //) without axes, "
    "whose conditions compare attributes, text() and positions; count(), string() and the like may be around it"
)


def check_css(query: str) -> None:
    """ValueError for one that may be expensive. One that is no CSS may pass."""
    _check(_Css(query), query, _CSS)


def check_xpath(query: str) -> None:
    """ValueError for one that may be expensive. One that is no XPath may pass."""
    _check(_XPath(query), query, _XPATH)


class Effort(NamedTuple):
    """What an XPath does with the nodes of a page beyond a look at each."""

    repeated: int
    """Conditions on nodes that are looked at once for each of their ancestors: from each element that ``//div`` finds,
    a second ``//`` looks at all that is below it."""
    sorted: int
    """Steps that find nodes out of order, so that they have to be sorted: siblings are counted for that."""


@lru_cache(maxsize=1024)
def effort_of(xpath: str) -> Effort:
    """Of one that was taken."""
    parser = _XPath(xpath)
    parser.read()
    return Effort(max(1, parser.conditions) if parser.repeats else 0, parser.sorts)


def _check(parser: _Css | _XPath, query: str, allowed: str) -> None:
    try:
        if len(query) > LONGEST:
            raise _RefusedError
        parser.read()
    except _RefusedError as exc:
        raise ValueError(f"{query!r:.80}: {exc if exc.args else allowed}") from None


class _RefusedError(Exception):
    """The query has something that is not taken."""


_SPACE = re.compile(r"\s+")
_STRING = re.compile(r""" "[^"]*" | '[^']*' """, re.VERBOSE)


class _Scanner:
    """Takes tokens from the front of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def take(self, token: Pattern[str]) -> str:
        """The token if it comes next, else the empty string."""
        found = token.match(self._text, self._place)
        if found is None:
            return ""
        self._place = found.end()
        return found[0]

    def sign(self, *signs: str) -> str:
        """The first of these signs that comes next, else the empty string."""
        for sign in signs:
            if self._text.startswith(sign, self._place):
                self._place += len(sign)
                return sign
        return ""

    def need(self, taken: str) -> str:
        if not taken:
            raise _RefusedError
        return taken

    def space(self) -> bool:
        return bool(self.take(_SPACE))

    def at_end(self) -> bool:
        return self._place == len(self._text)


# -- XPath

_NAME = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FUNCTIONS = frozenset({"count", "string", "normalize-space", "number", "boolean", "sum"})


class _XPath(_Scanner):
    """A union of paths, in one function or in none."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._steps = self.conditions = 0
        self._everywhere = False
        self.repeats = False
        """Whether a path has ``//`` more than once."""
        self.sorts = 0
        """Steps behind a ``//``, and unions."""
        self._word = ""
        """A name that was taken to see what it is."""

    def read(self) -> None:
        self.space()
        self._word = self.take(_NAME)
        function = self._word in _FUNCTIONS and bool(self.sign("("))
        if function:
            self._word = ""
            self.space()
        self._union()
        if function:
            self._close()
        self.space()
        if not self.at_end() or self._steps > _MOST_STEPS[self._everywhere] or self.conditions > _MOST_CONDITIONS:
            raise _RefusedError

    def _union(self) -> None:
        for _ in range(_MOST_PATHS):
            self._path()
            self.space()
            if not self.sign("|"):
                return
            self.sorts += 1
            self.space()
        raise _RefusedError

    def _path(self) -> None:
        everywhere = 0
        if not self._word:
            self.sign(".")
            everywhere += self._slash() == "//"
        self._step()
        while slash := self._slash():
            everywhere += slash == "//"
            self.repeats |= everywhere > 1
            self.sorts += everywhere > 0
            if self.sign(".."):
                if slash == "//":
                    raise _RefusedError
                while self.sign("/"):
                    self._steps += 1
                    self.sorts += 1
                    self._step()
                return
            self._step()

    def _slash(self) -> str:
        slash = self.sign("//", "/")
        self._steps += bool(slash)
        self._everywhere |= slash == "//"
        return slash

    def _step(self) -> None:
        """An attribute, ``text()``, or an element with its conditions."""
        word, self._word = self._word or self.take(_NAME), ""
        if not word:
            if self.sign("@"):
                self._qualified(self.take(_NAME) or self.need(self.sign("*")))
                return
            self.need(self.sign("*"))
        elif word == "text" and self.sign("("):
            self._close()
            return
        else:
            self._qualified(word)
        self.space()
        while self.sign("["):
            self._predicate()
            self.space()

    def _qualified(self, name: str) -> None:
        """The rest of a name: ``:title`` of ``media:title``. ``::`` is an axis, and ``(`` a function."""
        if name != "*" and self.sign(":"):
            self.need(self.take(_NAME) or self.sign("*"))
        if self.sign(":", "("):
            raise _RefusedError

    def _predicate(self) -> None:
        while True:
            self.conditions += 1
            self.space()
            word = self.take(_NAME)
            if word == "not" and self.sign("("):
                self.space()
                self._test(self.take(_NAME))
                self._close()
            else:
                self._test(word)
            self.space()
            if self.sign("]"):
                return
            if self.need(self.take(_NAME)) not in ("and", "or"):
                raise _RefusedError

    def _test(self, word: str) -> None:
        """``word``: the name that begins it, if one does."""
        if word in ("contains", "starts-with"):
            self.need(self.sign("("))
            self._spaced_value()
            self.need(self.sign(","))
            self._spaced_value()
            self.need(self.sign(")"))
            return
        self._value(word)
        for _ in range(2):
            self.space()
            if not self.sign("!=", "<=", ">=", "=", "<", ">", "-"):
                return
            self.space()
            self._value(self.take(_NAME))

    def _spaced_value(self) -> None:
        self.space()
        self._value(self.take(_NAME))
        self.space()

    def _value(self, word: str) -> None:
        if word in ("position", "last"):
            self.need(self.sign("("))
            self._close()
        elif word == "normalize-space":
            self.need(self.sign("("))
            self.space()
            self._own(self.take(_NAME))
            self._close()
        elif word or not (self.take(_STRING) or self.take(_NUMBER)):
            self._own(word)

    def _own(self, word: str) -> None:
        """What a node has itself: an attribute, or ``text()``."""
        if word == "text":
            self.need(self.sign("("))
            self._close()
            return
        if word:
            raise _RefusedError
        self.need(self.sign("@"))
        self._qualified(self.take(_NAME) or self.need(self.sign("*")))

    def _close(self) -> None:
        self.space()
        self.need(self.sign(")"))


# -- CSS

_WORD = re.compile(r"(?:[\w-]|\\.)+")
_ATTRIBUTE = re.compile(r"[\w:|-]+")
_ATTRIBUTE_OF = re.compile(r"[\w:.-]+")
_NTH = re.compile(r"odd|even|[+-]?\d*n(?:\s*[+-]\s*\d+)?|\d+")
_SIMPLE = frozenset({"first-child", "last-child", "only-child", "empty", "root"})
_COUNTING = frozenset({"first-of-type", "last-of-type", "only-of-type"})
_NTHS = frozenset({"nth-child", "nth-last-child", "nth-of-type", "nth-last-of-type"})
_GROUPS = frozenset({"not", "is", "where", "has"})


class _Css(_Scanner):
    """A group of selectors, each with ``::text`` or ``::attr()`` or without."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._pseudos = self._counting = 0
        self._has = False

    def read(self) -> None:
        for _ in range(_MOST_SELECTORS):
            self.space()
            self._selector()
            if self.at_end():
                break
            self.need(self.sign(","))
        else:
            raise _RefusedError
        if self._pseudos > _MOST_PSEUDOS or self._counting > 1:
            raise _RefusedError(_PSEUDOS)

    def _selector(self) -> None:
        self._has = False
        for _ in range(_MOST_COMBINATORS + 1):
            if self._has:  # it would look below each ancestor of each element
                raise _RefusedError(_HAS)
            self._compound(pseudos=True)
            if self.sign("::"):
                self._string_of()
                self.space()
                return
            spaced = self.space()
            if self.sign(">", "+", "~"):
                self.space()
            elif not spaced or self.at_end() or self._text[self._place] == ",":
                return
        raise _RefusedError

    def _compound(self, *, pseudos: bool) -> None:
        """May be empty: ``::text`` has none before it."""
        if not self.take(_WORD):
            self.sign("*")
        while True:
            if self.sign("#", "."):
                self.need(self.take(_WORD))
            elif self.sign("["):
                self._attribute()
            elif pseudos and not self._text.startswith("::", self._place) and self.sign(":"):
                self._pseudo()
            else:
                return

    def _attribute(self) -> None:
        self.space()
        self.need(self.take(_ATTRIBUTE))
        self.space()
        if self.sign("=", "~=", "^=", "$=", "*=", "|="):
            self.space()
            self.need(self.take(_STRING) or self.take(_WORD))
            self.space()
            self.sign("i", "s")
            self.space()
        self.need(self.sign("]"))

    def _pseudo(self) -> None:
        name = self.need(self.take(_WORD))
        self._pseudos += 1
        self._counting += name in _COUNTING or name in _NTHS
        self._has |= name == "has"
        if name in _SIMPLE or name in _COUNTING:
            return
        self.need(self.sign("("))
        self.space()
        if name in _NTHS:
            self.need(self.take(_NTH))
            self.space()
        elif name in _GROUPS:
            self._alternatives()
        else:
            raise _RefusedError
        self.need(self.sign(")"))

    def _alternatives(self) -> None:
        if self.sign(">"):
            self.space()
        for _ in range(_MOST_ALTERNATIVES):
            self._compound(pseudos=False)
            self.space()
            if not self.sign(","):
                return
            self.space()
        raise _RefusedError

    def _string_of(self) -> None:
        name = self.need(self.take(_WORD))
        if name == "text":
            return
        if name != "attr":
            raise _RefusedError
        self.need(self.sign("("))
        self.space()
        self.need(self.take(_STRING) or self.take(_ATTRIBUTE_OF))
        self.space()
        self.need(self.sign(")"))
