"""The text and the markup of site c: pages as a content management system writes them."""

from __future__ import annotations

import random
from functools import cache
from html import escape

WORDS = {
    "en": "shoal water current drift net harbour tide reef anchor lantern salt rope keel mast wind chart sound depth",
    "fr": "marée récif café forêt été où déjà façade île bœuf garçon naïve hôtel après là élève côte œuvre mer sable",
    "ru": "море берег волна ветер лодка сеть рыба гавань якорь прилив звезда карта глубина парус соль канат утро вечер",  # noqa: RUF001
    "ja": "海 港 船 波 風 魚 網 星 地図 深さ 帆 塩 綱 朝 夕方 灯台 潮 浜",
}
LIST = {language: words.split() for language, words in WORDS.items()}
ENTITIES = {"é": "&eacute;", "è": "&egrave;", "ç": "&#231;", "ê": "&#xEA;", "œ": "&oelig;"}
RULE = (
    ".c{n} > li:nth-child({n}) a::before {{ content: '\\2014'; margin: 0 {n}px; color: #{n:06x}; "
    "background: url(/i/{n}.png) }}"
)
CODE = (
    "window.q{n}=window.q{n}||[];(function(d,s){{var e=d.createElement(s);e.async=1;"
    "e.src='/js/{n}.js?v=1&t='+Date.now();"
    "if({n}<d.links.length&&!window.x)e.innerHTML='<a href=\"/never/{n}\">no link<\\/a>';"
    "d.head.appendChild(e)}})(document,'script');"
)
FURNITURE = (
    '<figure class="media media--wide"><img src="/i/{n}.jpg" srcset="/i/{n}-2x.jpg 2x, /i/{n}-3x.jpg 3x" alt="{text}" '
    "width=640 height=360 loading=lazy><figcaption>{text}&nbsp;&copy; 20{d}</figcaption></figure>",
    '<table class="data" border=0><thead><tr><th scope=col>{text}<th>{d}&deg;</thead><tr><td>{n}<td>&minus;{d}'
    "<tr><td>{text}<td>&frac12;</table>",
    '<form action="/search" method=get role="search"><label for="f{n}">{text}</label><input id="f{n}" name=q '
    'type="search" placeholder="{text}&hellip;" required><select name=s><option selected>{d}<option>{n}</select>'
    "<button>&rarr;</button></form>",
    '<svg viewBox="0 0 24 24" aria-hidden="true">'
    '<path d="M12 {d}c-{d}.1 0-4-1.{n} 2-4s4 1.8 4 4zm0 2z" fill="none"/></svg>',
    '<!-- block {n}: {text} --><ul class="tags tags--{d}"><li>{text}<li><b>{text}</b> <i>{d}</i></ul>',
)


def word(rng: random.Random, language: str) -> str:
    words = LIST[language]
    return words[int(rng.random() * len(words))]


def phrase(rng: random.Random, language: str, count: int) -> str:
    return " ".join(word(rng, language) for _ in range(count))


@cache
def blocks(language: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Paragraphs, furniture, styles and scripts. Pages draw from these, as the pages of a real site look alike."""
    rng = random.Random(f"blocks/{language}")
    paragraphs, furniture = [], []
    for number in range(300):
        text = escape(phrase(rng, language, 6 + int(rng.random() * 30)))
        if number % 2:
            for character, entity in ENTITIES.items():
                text = text.replace(character, entity)
        middle = text.find(" ", len(text) // 2)
        text = f"{text[:middle]}&nbsp;<em>&mdash;</em>{text[middle:]}&hellip;"
        paragraphs.append(f'<p class="t-{number % 7}" id=p{number}>{text}</p>\n')
        form = FURNITURE[number % len(FURNITURE)]
        furniture.append(form.format(n=number, d=10 + number % 89, text=escape(phrase(rng, language, 3))) + "\n")
    styles = [RULE.format(n=number) + "\n" for number in range(400)]
    scripts = [CODE.format(n=number) + "\n" for number in range(200)]
    return tuple(paragraphs), tuple(furniture), tuple(styles), tuple(scripts)


def some(blocks: tuple[str, ...], size: int, rng: random.Random) -> str:
    """Successive blocks with about this many characters."""
    chosen: list[str] = []
    at = int(rng.random() * len(blocks))
    while size > 0:
        block = blocks[at % len(blocks)]
        size -= len(block)
        at += 1
        if size > -len(block) // 2:
            chosen.append(block)
    return "".join(chosen)


def document(
    language: str, title: str, h1: str, links: list[str], size: int, rng: random.Random, declaration: str
) -> str:
    """A page of about `size` characters: a fifth style, a quarter scripts, the rest text around the links."""
    paragraphs, furniture, styles, scripts = blocks(language)
    size = max(0, size - 700 - sum(map(len, links)))
    data = f'"headline":"{word(rng, language)}","id":{int(rng.random() * 1e6)}'
    parts = [
        f'<!DOCTYPE html>\n<html lang="{language}" class="no-js">\n<head>\n{declaration}\n'
        f"<title>\n  {escape(title)}\n</title>\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="stylesheet" href="/css/site.css?v=3">\n'
        f"<style>\n{some(styles, size // 5, rng)}</style>\n"
        f'<script type="application/ld+json">{{"@context":"https://schema.org","@type":"Article",{data}}}</script>\n'
        f"<script>\n{some(scripts, size // 4, rng)}</script>\n</head>\n"
        f'<body class="page page--{language}" data-page=\'{{"v":1}}\'>\n<header><a name="top"></a>'
        f'<h1 class="title title--main">{escape(h1)}</h1></header>\n<main>\n<nav><ul>\n'
    ]
    menu = len(links) // 3
    parts += [f'<li class="menu__item">{link}\n' for link in links[:menu]]
    parts.append("</ul></nav>\n<article>\n")
    room = int(size * 0.55) // max(1, len(links) - menu)
    for index, link in enumerate(links[menu:]):
        blocks_ = furniture if index % 4 == 3 else paragraphs
        parts.append(f"<div class=row><p>{link} {word(rng, language)}</p>\n{some(blocks_, room - 40, rng)}</div>\n")
    parts.append(f"</article></main>\n<footer><p>&copy; {word(rng, language)}<br>&nbsp;</footer>\n</body>\n</html>\n")
    return "".join(parts)
