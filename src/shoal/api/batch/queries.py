"""Checks that a caller's CSS or XPath query is cheap: one that visits each node of a page a few times.

In both languages one line can take hours: nested conditions, axes that visit the whole page from each of its nodes,
regular expressions. The parsers here accept only a subset that is known to be cheap.

They look one token ahead and never backtrack, and no token is ambiguous. So their time is linear in the length of the
query, which is limited too.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import Pattern
from typing import NamedTuple

MAX_LENGTH = 200
_MAX_STEPS = (20, 5)
"""Maximum steps of a path without `//`, and of one with it."""
_MAX_CONDITIONS = 4
_MAX_PATHS = 5
_MAX_PSEUDOS = 5
_MAX_SELECTORS = 4
_MAX_COMBINATORS = 6
_MAX_ALTERNATIVES = 5

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


def check_css(query: str) -> None:
    """ValueError if the query may be expensive. It may accept invalid CSS."""
    _check(_Css(query), query, _CSS)


def check_xpath(query: str) -> None:
    """ValueError if the query may be expensive. It may accept invalid XPath."""
    _check(_XPath(query), query, _XPATH)


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
    parser = _XPath(xpath)
    parser.parse()
    return Effort(max(1, parser.conditions) if parser.repeats else 0, parser.sorts)


def _check(parser: _Css | _XPath, query: str, allowed: str) -> None:
    try:
        if len(query) > MAX_LENGTH:
            raise _RefusedError
        parser.parse()
    except _RefusedError as exc:
        raise ValueError(f"{query!r:.80}: {exc if exc.args else allowed}") from None


class _RefusedError(Exception):
    """The query contains something that is not allowed."""


_SPACE = re.compile(r"\s+")
_STRING = re.compile(r""" "[^"]*" | '[^']*' """, re.VERBOSE)


class _Scanner:
    """Reads tokens from a string, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0

    def read_token(self, token: Pattern[str]) -> str:
        """Read the token if it is next; else return an empty string."""
        match = token.match(self._text, self._position)
        if match is None:
            return ""
        self._position = match.end()
        return match[0]

    def read_sign(self, *signs: str) -> str:
        """Read the first of these signs that is next; else return an empty string."""
        for sign in signs:
            if self._text.startswith(sign, self._position):
                self._position += len(sign)
                return sign
        return ""

    def need(self, token: str) -> str:
        """Refuse the query if a token that must follow is missing."""
        if not token:
            raise _RefusedError
        return token

    def skip_space(self) -> bool:
        return bool(self.read_token(_SPACE))

    def at_end(self) -> bool:
        return self._position == len(self._text)


# -- XPath

_NAME = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_FUNCTIONS = frozenset({"count", "string", "normalize-space", "number", "boolean", "sum"})


class _XPath(_Scanner):
    """Parses a union of paths, optionally within one function."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._steps = self.conditions = 0
        self._has_descendants = False
        self.repeats = False
        """Whether a path has ``//`` more than once."""
        self.sorts = 0
        """Steps after a ``//``, and unions."""
        self._word = ""
        """A name that was read ahead."""

    def parse(self) -> None:
        self.skip_space()
        self._word = self.read_token(_NAME)
        function = self._word in _FUNCTIONS and bool(self.read_sign("("))
        if function:
            self._word = ""
            self.skip_space()
        self._union()
        if function:
            self._close()
        self.skip_space()
        if not self.at_end() or self._steps > _MAX_STEPS[self._has_descendants] or self.conditions > _MAX_CONDITIONS:
            raise _RefusedError

    def _union(self) -> None:
        for _ in range(_MAX_PATHS):
            self._path()
            self.skip_space()
            if not self.read_sign("|"):
                return
            self.sorts += 1
            self.skip_space()
        raise _RefusedError

    def _path(self) -> None:
        descendants = 0
        if not self._word:
            self.read_sign(".")
            descendants += self._slash() == "//"
        self._step()
        while slash := self._slash():
            descendants += slash == "//"
            self.repeats |= descendants > 1
            self.sorts += descendants > 0
            if self.read_sign(".."):
                if slash == "//":
                    raise _RefusedError
                while self.read_sign("/"):
                    self._steps += 1
                    self.sorts += 1
                    self._step()
                return
            self._step()

    def _slash(self) -> str:
        slash = self.read_sign("//", "/")
        self._steps += bool(slash)
        self._has_descendants |= slash == "//"
        return slash

    def _step(self) -> None:
        """An attribute, ``text()``, or an element with its conditions."""
        word, self._word = self._word or self.read_token(_NAME), ""
        if not word:
            if self.read_sign("@"):
                self._qualified(self.read_token(_NAME) or self.need(self.read_sign("*")))
                return
            self.need(self.read_sign("*"))
        elif word == "text" and self.read_sign("("):
            self._close()
            return
        else:
            self._qualified(word)
        self.skip_space()
        while self.read_sign("["):
            self._predicate()
            self.skip_space()

    def _qualified(self, name: str) -> None:
        """Read the rest of a name: ``:title`` of ``media:title``. Refuse an axis (``::``) and a function (``(``)."""
        if name != "*" and self.read_sign(":"):
            self.need(self.read_token(_NAME) or self.read_sign("*"))
        if self.read_sign(":", "("):
            raise _RefusedError

    def _predicate(self) -> None:
        while True:
            self.conditions += 1
            self.skip_space()
            word = self.read_token(_NAME)
            if word == "not" and self.read_sign("("):
                self.skip_space()
                self._test(self.read_token(_NAME))
                self._close()
            else:
                self._test(word)
            self.skip_space()
            if self.read_sign("]"):
                return
            if self.need(self.read_token(_NAME)) not in ("and", "or"):
                raise _RefusedError

    def _test(self, word: str) -> None:
        """Parse a condition. ``word``: the name that it begins with, or empty."""
        if word in ("contains", "starts-with"):
            self.need(self.read_sign("("))
            self._spaced_value()
            self.need(self.read_sign(","))
            self._spaced_value()
            self.need(self.read_sign(")"))
            return
        self._value(word)
        for _ in range(2):
            self.skip_space()
            if not self.read_sign("!=", "<=", ">=", "=", "<", ">", "-"):
                return
            self.skip_space()
            self._value(self.read_token(_NAME))

    def _spaced_value(self) -> None:
        self.skip_space()
        self._value(self.read_token(_NAME))
        self.skip_space()

    def _value(self, word: str) -> None:
        if word in ("position", "last"):
            self.need(self.read_sign("("))
            self._close()
        elif word == "normalize-space":
            self.need(self.read_sign("("))
            self.skip_space()
            self._attribute_or_text(self.read_token(_NAME))
            self._close()
        elif word or not (self.read_token(_STRING) or self.read_token(_NUMBER)):
            self._attribute_or_text(word)

    def _attribute_or_text(self, word: str) -> None:
        """An attribute of the node, or its ``text()``."""
        if word == "text":
            self.need(self.read_sign("("))
            self._close()
            return
        if word:
            raise _RefusedError
        self.need(self.read_sign("@"))
        self._qualified(self.read_token(_NAME) or self.need(self.read_sign("*")))

    def _close(self) -> None:
        self.skip_space()
        self.need(self.read_sign(")"))


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
    """Parses a list of selectors, each optionally with ``::text`` or ``::attr()``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._pseudos = self._counting = 0
        self._has = False

    def parse(self) -> None:
        for _ in range(_MAX_SELECTORS):
            self.skip_space()
            self._selector()
            if self.at_end():
                break
            self.need(self.read_sign(","))
        else:
            raise _RefusedError
        if self._pseudos > _MAX_PSEUDOS or self._counting > 1:
            raise _RefusedError(_PSEUDOS)

    def _selector(self) -> None:
        self._has = False
        for _ in range(_MAX_COMBINATORS + 1):
            if self._has:  # it would visit everything below each ancestor of each element
                raise _RefusedError(_HAS)
            self._compound(pseudos=True)
            if self.read_sign("::"):
                self._string_of()
                self.skip_space()
                return
            spaced = self.skip_space()
            if self.read_sign(">", "+", "~"):
                self.skip_space()
            elif not spaced or self.at_end() or self._text[self._position] == ",":
                return
        raise _RefusedError

    def _compound(self, *, pseudos: bool) -> None:
        """Parse a compound selector. It may be empty, as before ``::text``."""
        if not self.read_token(_WORD):
            self.read_sign("*")
        while True:
            if self.read_sign("#", "."):
                self.need(self.read_token(_WORD))
            elif self.read_sign("["):
                self._attribute()
            elif pseudos and not self._text.startswith("::", self._position) and self.read_sign(":"):
                self._pseudo()
            else:
                return

    def _attribute(self) -> None:
        self.skip_space()
        self.need(self.read_token(_ATTRIBUTE))
        self.skip_space()
        if self.read_sign("=", "~=", "^=", "$=", "*=", "|="):
            self.skip_space()
            self.need(self.read_token(_STRING) or self.read_token(_WORD))
            self.skip_space()
            self.read_sign("i", "s")
            self.skip_space()
        self.need(self.read_sign("]"))

    def _pseudo(self) -> None:
        name = self.need(self.read_token(_WORD))
        self._pseudos += 1
        self._counting += name in _COUNTING or name in _NTHS
        self._has |= name == "has"
        if name in _SIMPLE or name in _COUNTING:
            return
        self.need(self.read_sign("("))
        self.skip_space()
        if name in _NTHS:
            self.need(self.read_token(_NTH))
            self.skip_space()
        elif name in _GROUPS:
            self._alternatives()
        else:
            raise _RefusedError
        self.need(self.read_sign(")"))

    def _alternatives(self) -> None:
        if self.read_sign(">"):
            self.skip_space()
        for _ in range(_MAX_ALTERNATIVES):
            self._compound(pseudos=False)
            self.skip_space()
            if not self.read_sign(","):
                return
            self.skip_space()
        raise _RefusedError

    def _string_of(self) -> None:
        name = self.need(self.read_token(_WORD))
        if name == "text":
            return
        if name != "attr":
            raise _RefusedError
        self.need(self.read_sign("("))
        self.skip_space()
        self.need(self.read_token(_STRING) or self.read_token(_ATTRIBUTE_OF))
        self.skip_space()
        self.need(self.read_sign(")"))
