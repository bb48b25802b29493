"""Pages of up to 2 MB, built from repeated groups of tags: parsed, queried and converted in every way Shoal has."""

from __future__ import annotations

import random
from typing import Any

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.spider import content_of, fields_of, title_of
from shoal.errors import ShoalError
from shoal.http import Response
from shoal.runs.command_spiders import PageSpider

SECONDS, MEGABYTES = 2.0, 256.0

_LARGEST = 2_000_000
_FORMATTING = ["a", "b", "big", "code", "em", "font", "i", "nobr", "s", "small", "strike", "strong", "tt", "u"]
_OTHERS = [
    "p", "div", "span", "li", "ul", "ol", "dl", "dd", "dt", "h1", "h2", "table", "tr", "td", "th", "tbody",
    "caption", "colgroup", "col", "form", "button", "select", "option", "optgroup", "input", "textarea", "title",
    "script", "style", "svg", "math", "mi", "g", "foreignObject", "desc", "annotation-xml", "template", "frameset",
    "body", "html", "head", "applet", "object", "marquee", "ruby", "rt", "rp", "br", "hr", "img", "pre", "article",
    "section", "main", "nav", "address", "center", "details", "fieldset", "blockquote", "plaintext", "noscript",
    "iframe", "base", "meta", "link", "x-y", "image", "listing",
]  # fmt: skip
_TEXTS = [
    "x", " ", "\n", "&amp;", "&", "<", ">", "&notit;", "&#x10FFFF;", "<!--", "-->", "<!-- -->", "<![CDATA[", "]]>",
    "<?", "<!DOCTYPE html>", "</", "\0", "é", "<a href=//x>", "<a href=/#>x</a>", "|", "*", "`", "[", "](", "_ ",
    "# ",
]  # fmt: skip
_MODES = ["html", "text", "markdown", "links", "fields", "spider", "spider markdown"]


def make(rng: random.Random) -> Any:
    size = rng.choice([20_000, 100_000, 100_000, 300_000, _LARGEST])
    groups = [_group(rng) for _ in range(rng.randint(1, 4))]
    return {"mode": rng.choice(_MODES), "size": size, "groups": groups}


def _group(rng: random.Random) -> list[Any]:
    """A group of tokens that is repeated, and its share of the page."""
    return [[_token(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))], rng.choice([1, 1, 1, 5, 20, 0.02, 0.005])]


def _token(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(_TEXTS)
    name = rng.choice(_FORMATTING if rng.random() < 0.4 else _OTHERS)
    if kind < 0.45:
        return f"</{name}>"
    # "%d" becomes a number that is used once.
    return f"<{name}{rng.choice(['', '', '', ' a', ' %d', ' a%d=b', ' a b c d e f g h', '/', ' class=x id=%d'])}>"


def mutate(rng: random.Random, case: Any) -> Any:
    groups = [[[*tokens], share] for tokens, share in case["groups"]]
    chosen = rng.choice(groups)
    match rng.randrange(6):
        case 0:
            chosen[0].insert(rng.randint(0, len(chosen[0])), _token(rng))
        case 1 if len(chosen[0]) > 1:
            chosen[0].pop(rng.randrange(len(chosen[0])))
        case 2:
            chosen[0][rng.randrange(len(chosen[0]))] = _token(rng)
        case 3:
            chosen[1] *= rng.choice([0.1, 0.3, 3, 10])
        case 4:
            groups.insert(rng.randint(0, len(groups)), _group(rng))
        case 5:
            rng.shuffle(groups)
    mode = rng.choice(_MODES) if rng.random() < 0.2 else case["mode"]
    return {
        "mode": mode,
        "size": rng.choice([case["size"], case["size"], case["size"], _LARGEST]),
        "groups": groups[:6],
    }


def page(case: Any) -> bytes:
    whole = sum(share for _, share in case["groups"])
    parts, number = [], 0
    for tokens, share in case["groups"]:
        room = int(case["size"] * share / whole)
        unit = "".join(tokens)
        holes = unit.count("%d")
        if not holes:
            parts.append(unit * max(1, room // len(unit.encode())))
            continue
        while room > 0:
            made = unit.replace("%d", "{}").format(*range(number, number + holes)) if "{" not in unit else unit
            number += holes
            room -= len(made)
            parts.append(made)
    return "".join(parts).encode()[: case["size"]]


def run(case: Any) -> str:
    response = Response("http://example.com/", headers={"Content-Type": "text/html"}, body=page(case))
    mode = case["mode"]
    try:
        if mode.startswith("spider"):
            list(PageSpider(markdown=mode.endswith("markdown")).parse(response))
            response.xpath("//a/@href").getall()
            return f"{mode}: parsed {len(response.links()) > 0}"
        fields = {"a": "p b::text", "b": {"xpath": "//div//a/@href", "all": True}} if mode == "fields" else {}
        options = BatchOptions.model_validate({"format": mode, "fields": fields})
        title_of(response)
        if mode == "fields":
            fields_of(response, options.fields)
        else:
            content_of(response, options)
    except ShoalError as error:
        return f"{mode}: {type(error).__name__} {' '.join(str(error).split()[:4])}"
    return f"{mode}: parsed"
