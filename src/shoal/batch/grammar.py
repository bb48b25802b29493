"""The part of CSS and XPath that a stranger may use: what looks at each node of a page some few times.

Both languages have more, in which one line can take hours: conditions within conditions, axes that look at the whole
page from each of its nodes, regular expressions. A query is compared with what is known to be cheap, and nothing else
is taken.
"""

from __future__ import annotations

import re

LONGEST = 200
_MOST_STEPS = (20, 5)
"""Of a path that begins at the top, and of one that looks everywhere (`//`)."""
_MOST_CONDITIONS = 4
_MOST_PSEUDOS = 5

_CSS = "a CSS query of a batch has up to 6 selectors in a row, without selectors within :has(), :is() and :not()"
_XPATH = (
    "an XPath of a batch is a path such as //div[@class='x']/a/@href, of up to 5 steps (20 without //) without axes, "
    "whose conditions compare attributes, text() and positions; count(), string() and the like may be around it"
)

_QUOTED = """ (?: "[^"]*" | '[^']*' ) """

# -- XPath

_NAME = r" [^\W\d][\w.-]* (?: : (?: [^\W\d][\w.-]* | \* ) (?!:) )? (?! \s* [(:] ) "
_OWN = rf" (?: @ (?: {_NAME} | \* ) | text \( \s* \) ) "
_VALUE = rf"""
    (?: {_OWN} | {_QUOTED} | \d+ (?: \. \d+ )? | (?: position | last ) \( \s* \)
      | normalize-space \( \s* {_OWN} \s* \) )
"""
_TEST = rf"""
    (?: (?: contains | starts-with ) \( \s* {_VALUE} \s* , \s* {_VALUE} \s* \)
      | {_VALUE} (?: \s* (?: [=<>] | != | <= | >= | - ) \s* {_VALUE} ){{0,2}} )
"""
_CONDITION = rf" (?: not \( \s* {_TEST} \s* \) | {_TEST} ) "
_PREDICATE = rf" \[ \s* {_CONDITION} (?: \s+ (?: and | or ) \s+ {_CONDITION} )* \s* \] "
_STEP = rf" (?: {_OWN} | (?: {_NAME} | \* ) (?: \s* {_PREDICATE} )* ) "
_PATH = rf" \.? /{{0,2}} {_STEP} (?: //? {_STEP} )* (?: / \.\. (?: / {_STEP} )* )? "
_UNION = rf" {_PATH} (?: \s* \| \s* {_PATH} ){{0,4}} "
_FUNCTION = r" (?: count | string | normalize-space | number | boolean | sum ) "
_CHEAP_XPATH = re.compile(rf" \s* (?: {_FUNCTION} \( \s* {_UNION} \s* \) | {_UNION} ) \s* ", re.VERBOSE)
_STRINGS = re.compile(_QUOTED, re.VERBOSE)

# -- CSS

_WORD = r" (?: [\w-] | \\. )+ "
_ATTRIBUTE = rf" \[ \s* [\w:|-]+ \s* (?: [~|^$*]? = \s* (?: {_QUOTED} | {_WORD} ) \s* [is]? \s* )? \] "
_PLAIN = rf" (?: {_WORD} | \* )? (?: [#.] {_WORD} | {_ATTRIBUTE} )* "
_NTH = r" (?: odd | even | [+-]? \d* n (?: \s* [+-] \s* \d+ )? | \d+ ) "
_PSEUDO = rf"""
    : (?: (?: first | last | only ) - (?: child | of-type ) | empty | root
        | nth- (?: last- )? (?: child | of-type ) \( \s* {_NTH} \s* \)
        | (?: not | is | where | has ) \( \s* >? \s* {_PLAIN} (?: \s* , \s* {_PLAIN} ){{0,4}} \s* \) )
"""
_COMPOUND = rf" (?: {_WORD} | \* )? (?: [#.] {_WORD} | {_ATTRIBUTE} | {_PSEUDO} )* "
_STRING_OF = rf" :: (?: text | attr \( \s* (?: {_QUOTED} | [\w:.-]+ ) \s* \) ) "
_SELECTOR = rf" {_COMPOUND} (?: (?: \s* [>+~] \s* | \s+ ) {_COMPOUND} ){{0,6}} (?: {_STRING_OF} )? "
_CHEAP_CSS = re.compile(rf" \s* {_SELECTOR} (?: \s* , \s* {_SELECTOR} ){{0,3}} \s* ", re.VERBOSE)


def check_css(query: str) -> None:
    """ValueError for one that may be expensive. One that is no CSS may pass."""
    if len(query) > LONGEST or not _CHEAP_CSS.fullmatch(query):
        raise ValueError(f"{query!r:.80}: {_CSS}")
    bare = _STRINGS.sub("", query)
    if len(re.findall(r"(?<!:):[a-z]", bare)) > _MOST_PSEUDOS or len(re.findall(r":nth-[a-z-]+|-of-type", bare)) > 1:
        raise ValueError(
            f"{query!r:.80}: a CSS query of a batch has up to {_MOST_PSEUDOS} pseudo-classes, and one that counts "
            "elements (:nth-child() and the like)"
        )


def check_xpath(query: str) -> None:
    """ValueError for one that may be expensive. One that is no XPath may pass."""
    bare = _STRINGS.sub("", query)
    steps = len(re.findall("/+", bare))
    conditions = len(re.findall(r"\[|\b(?:and|or)\b", bare))
    allowed = len(query) <= LONGEST and steps <= _MOST_STEPS["//" in bare] and conditions <= _MOST_CONDITIONS
    if not allowed or not _CHEAP_XPATH.fullmatch(query):
        raise ValueError(f"{query!r:.80}: {_XPATH}")
