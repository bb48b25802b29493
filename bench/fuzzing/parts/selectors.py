"""Untrusted queries: checked and, if they are accepted, run on hostile pages."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from shoal.api.batch.options import FieldQuery
from shoal.api.batch.queries import MAX_LENGTH
from shoal.api.batch.spider import fields_of
from shoal.errors import SelectorError
from shoal.http import Response

SECONDS, MEGABYTES = 2.0, 256.0

_MANY = 2400
_PAGES = {
    "flat": f"<section>{('<p class=a id=c>' + 'x' * 32) * _MANY}</section>" * 40,
    "deep": "<div>" * 120 + f"<section>{('<b>' + 'x' * 40 + '</b>') * _MANY}</section>" * 20,
    "combs": ("<div>" * 120 + "x" * 12_000 + "</div>" * 120) * 400,
    "twigs": f"<section>{'<div><b></b></div>' * _MANY}</section>" * 10,
    "names": f"<section>{''.join(f'<t{n}></t{n}>' for n in range(_MANY))}</section>" * 20,
    "attributes": "<section><p a b c d e f g=h><i class='a b c d e f'></section>" * 20_000,
}
_PIECES = {
    "css": [
        "a", "p", "div", "b", "i", "*", ".a", "#c", "[a]", "[g=h]", "[class~=a]", "[class*=a]", " ", " ", " > ",
        " + ", " ~ ", ", ", ":not(.a)", ":not(", ":is(", ":is(p, b)", ":has(b)", ":has(> i)", ":has(",
        ":nth-child(2n)", ":nth-last-child(odd)", ":nth-of-type(", ":only-of-type", ":empty", ":first-child", ")",
        "::text", "::attr(a)", "'", '"', "\\", "!", "\t", "(", "[", "]", "é", "\0",
    ],
    "xpath": [
        "//", "/", "//", "*", "p", "div", "b", "..", "/..", ".", "@a", "@*", "text()", "[@a]", "[1]", "[last()]",
        "[position()=last()-1]", "[contains(text(), 'x')]", "[not(@a)]", "[@a='1' or @b='2']",
        "[normalize-space(text())]", "|", " | ", "count(", "string(", "sum(", "normalize-space(", ")", "[", "]",
        "(", "'", '"', " and ", " or ", "-", "=", " ", "!", "ancestor::", "preceding::*", "re:test(", "$a", ":",
        "::", ",", "1", "é", "\0",
    ],
}  # fmt: skip


def make(rng: random.Random) -> Any:
    kind = rng.choice(["css", "xpath"])
    text = "".join(rng.choice(_PIECES[kind]) for _ in range(rng.randint(1, 12)))
    if rng.random() < 0.3:
        text = (text * MAX_LENGTH)[: MAX_LENGTH - 1] + rng.choice(_PIECES[kind])
    return {"kind": kind, "query": text[:MAX_LENGTH], "page": rng.choice([*_PAGES]), "all": rng.random() < 0.5}


def mutate(rng: random.Random, case: Any) -> Any:
    text, pieces = case["query"], _PIECES[case["kind"]]
    place = rng.randint(0, len(text))
    changed = (
        text[:place] + rng.choice(["", rng.choice(pieces), rng.choice(pieces)]) + text[place + rng.randint(0, 3) :]
    )
    page = rng.choice([*_PAGES]) if rng.random() < 0.3 else case["page"]
    return {**case, "query": changed[:MAX_LENGTH], "page": page}


@lru_cache(maxsize=len(_PAGES))
def _page(name: str) -> Response:
    """A page that is parsed in the parent process, so that only the query is measured."""
    response = Response("http://example.com/", body=_PAGES[name].encode())
    assert response.document is not None
    return response


for _name in _PAGES:
    _page(_name)


def run(case: Any) -> str:
    try:
        query = FieldQuery.model_validate({case["kind"]: case["query"], "all": case["all"]})
    except ValidationError:
        return f"{case['kind']}: refused"
    try:
        fields_of(_page(case["page"]), {"a": query})
    except SelectorError as error:
        return f"{case['kind']}: {' '.join(str(error).split()[-5:])}"
    return f"{case['kind']}: taken"
