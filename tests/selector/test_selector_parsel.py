"""The same queries as parsel. The expected values were recorded with parsel, which the tests do not need."""

from __future__ import annotations

import pytest

from shoal.errors import SelectorError
from shoal.selector import Selector

HTML = """\
<!doctype html><html><head><title>Shop &amp; more</title></head><body>
<div id="a" class="box big"><p class="x">One <b>bold</b> text</p><p>Two</p><!-- note --></div>
<ul><li class="item-0" data-n="1"><a href="l1.html">first</a></li>\
<li class="item-1 active"><a href="l2.html?a=1&amp;b=2">second</a></li>\
<li class="item-inactive" id="z"><a href="">third</a></li></ul>
<table><tbody><tr><td>1</td><td>2</td></tr></tbody></table>
<script type="application/json">{"a": [1, 2], "b": {"c": "d"}}</script>
</body></html>"""
XML = """\
<?xml version="1.0" encoding="UTF-8"?><rss xmlns:media="http://search.yahoo.com/mrss/" \
xmlns="http://default/" version="2.0">\
<channel><title>T</title><item><media:title type="plain">M1</media:title><link>http://a/?x=1&amp;y=2</link></item>\
<item><media:title>M2</media:title><media:content url="u" media:medium="image"/></item>\
<d:x xmlns:d="http://d/">dx</d:x><e/><![CDATA[<raw>]]></channel></rss>"""
SMALL_XML = """<root><a x="1">t1<b/>tail</a><a x="2"/><!-- c --><?pi data?></root>"""
JSON = """{"a": [1, 2.5, "x", null, true], "b": {"c": "<p class=q>hi</p>", "d": []}, "e": "text", \
"list": [{"n": 1, "h": "<a href=1>k</a>"}, {"n": 2}]}"""
DOCUMENTS = {
    "html": Selector(HTML),
    "xml": Selector(XML, "xml"),
    "small": Selector(SMALL_XML, "xml"),
    "json": Selector(JSON, "json"),
}
NAMESPACES = {"m": "http://search.yahoo.com/mrss/", "media": "http://search.yahoo.com/mrss/", "d": "http://default/"}

CASES = [
    ("html", "css", "p", ['<p class="x">One <b>bold</b> text</p>', "<p>Two</p>"]),
    ("html", "css", "p::text", ["One ", " text", "Two"]),
    ("html", "css", "p ::text", ["One ", "bold", " text", "Two"]),
    ("html", "css", "li.active a::attr(href)", ["l2.html?a=1&b=2"]),
    ("html", "css", "#a > p", ['<p class="x">One <b>bold</b> text</p>', "<p>Two</p>"]),
    ("html", "css", "li:nth-child(2)", ['<li class="item-1 active"><a href="l2.html?a=1&amp;b=2">second</a></li>']),
    ("html", "css", "li:first-child", ['<li class="item-0" data-n="1"><a href="l1.html">first</a></li>']),
    ("html", "css", "li:last-of-type a::text", ["third"]),
    ("html", "css", "a[href^=l]::text", ["first", "second"]),
    ("html", "css", "a[href*='2']", ['<a href="l2.html?a=1&amp;b=2">second</a>']),
    ("html", "css", "a[href$=html]::attr(href)", ["l1.html"]),
    ("html", "css", "li:not(.active)::attr(class)", ["item-0", "item-inactive"]),
    ("html", "css", "div p, title::text", ["Shop & more", '<p class="x">One <b>bold</b> text</p>', "<p>Two</p>"]),
    ("html", "css", "ul ::attr(href)", ["l1.html", "l2.html?a=1&b=2", ""]),
    ("html", "css", "::attr(href)", ["l1.html", "l2.html?a=1&b=2", ""]),
    (
        "html",
        "css",
        "li:contains('second')",
        ['<li class="item-1 active"><a href="l2.html?a=1&amp;b=2">second</a></li>'],
    ),
    ("html", "css", "p + p", ["<p>Two</p>"]),
    ("html", "css", "p ~ p::text", ["Two"]),
    ("html", "css", "td:nth-of-type(2)::text", ["2"]),
    ("html", "css", "[data-n]", ['<li class="item-0" data-n="1"><a href="l1.html">first</a></li>']),
    ("html", "css", "li[class~=active]", ['<li class="item-1 active"><a href="l2.html?a=1&amp;b=2">second</a></li>']),
    ("html", "css", "title", ["<title>Shop &amp; more</title>"]),
    ("html", "css", "li:is(.active,#z)::attr(id)", ["z"]),
    ("html", "css", "li:nth-child(odd) a::text", ["first", "third"]),
    ("html", "css", "li:nth-last-child(1) a::text", ["third"]),
    ("html", "css", "a:link::attr(href)", ["l1.html", "l2.html?a=1&b=2", ""]),
    ("html", "css", "script::text", ['{"a": [1, 2], "b": {"c": "d"}}']),
    ("html", "css", "table tr td::text", ["1", "2"]),
    ("html", "css", "a:contains(first)::attr(href)", ["l1.html"]),
    ("html", "css", "p:not(:first-child)", ["<p>Two</p>"]),
    ("html", "css", "li:contains('second') a::attr(href)", ["l2.html?a=1&b=2"]),
    ("html", "css", "li:contains(first)::attr(class)", ["item-0"]),
    ("html", "css", "ul:contains('third') li:contains('first') ::text", ["first"]),
    ("html", "css", "ul > :contains('second')::attr(class)", ["item-1 active"]),
    ("html", "xpath", "//p", ['<p class="x">One <b>bold</b> text</p>', "<p>Two</p>"]),
    ("html", "xpath", "//p/text()", ["One ", " text", "Two"]),
    ("html", "xpath", "//p//text()", ["One ", "bold", " text", "Two"]),
    ("html", "xpath", "string(//p)", ["One bold text"]),
    ("html", "xpath", "count(//li)", ["3.0"]),
    ("html", "xpath", "//li[2]", ['<li class="item-1 active"><a href="l2.html?a=1&amp;b=2">second</a></li>']),
    ("html", "xpath", "//li[last()]/a/text()", ["third"]),
    ("html", "xpath", "//a/@href", ["l1.html", "l2.html?a=1&b=2", ""]),
    ("html", "xpath", "//li/@*", ["item-0", "1", "item-1 active", "item-inactive", "z"]),
    ("html", "xpath", "//comment()", ["<!-- note -->"]),
    ("html", "xpath", "//li[position()<3]/a/text()", ["first", "second"]),
    ("html", "xpath", "boolean(//li)", ["1"]),
    ("html", "xpath", "1+1", ["2.0"]),
    ("html", "xpath", "1 div 3", ["0.3333333333333333"]),
    ("html", "xpath", "1 div 0", ["inf"]),
    ("html", "xpath", "'a'", ["a"]),
    ("html", "xpath", "concat('a','b')", ["ab"]),
    ("html", "xpath", "//a[contains(@href,'l1')]", ['<a href="l1.html">first</a>']),
    ("html", "xpath", "//li[has-class('active')]/a/text()", ["second"]),
    ("html", "xpath", "//*[has-class('box','big')]/@id", ["a"]),
    ("html", "xpath", "//li[re:test(@class, 'item-\\d$')]//@href", ["l1.html"]),
    ("html", "xpath", "//li[re:test(@class, 'ITEM-\\d$', 'i')]/@class", ["item-0"]),
    ("html", "xpath", "re:replace('abc','b','','x')", ["axc"]),
    ("html", "xpath", "//div[set:difference(.//p, .//p[1])]/@id", ["a"]),
    ("html", "xpath", "set:distinct(//li/@class)", ["item-0", "item-1 active", "item-inactive"]),
    ("html", "xpath", "count(set:difference(//li, //li[1]))", ["2.0"]),
    ("html", "xpath", "set:has-same-node(//li, //li[2])", ["1"]),
    ("html", "xpath", "set:intersection(//li, //li[2])/a/text()", ["second"]),
    ("html", "xpath", "set:leading(//li, //li[3])/a/text()", ["first", "second"]),
    ("html", "xpath", "set:trailing(//li, //li[1])/a/text()", ["second", "third"]),
    ("html", "xpath", "normalize-space(//p)", ["One bold text"]),
    ("html", "xpath", "name(//div)", ["div"]),
    ("html", "xpath", "local-name(//div)", ["div"]),
    ("html", "xpath", ".//b", ["<b>bold</b>"]),
    ("html", "xpath", "/html/body/div/@id", ["a"]),
    ("html", "xpath", "//title/text()", ["Shop & more"]),
    ("html", "xpath", "//td[. > 1]/text()", ["2"]),
    ("html", "xpath", "sum(//td)", ["3.0"]),
    ("html", "xpath", "//li/following-sibling::li/@class", ["item-1 active", "item-inactive"]),
    ("html", "xpath", "//a/parent::li/@class", ["item-0", "item-1 active", "item-inactive"]),
    ("html", "xpath", "id('a')/@class", ["box big"]),
    ("html", "xpath", "//@id", ["a", "z"]),
    ("html", "xpath", "//text()[contains(.,'Two')]", ["Two"]),
    ("html", "xpath", "//p[1]/b/text()|//title/text()", ["Shop & more", "bold"]),
    ("html", "xpath", "substring('hello',2,3)", ["ell"]),
    ("html", "xpath", "translate('abc','ab','x')", ["xc"]),
    ("html", "xpath", "not(//zz)", ["1"]),
    ("html", "xpath", "//li[not(@id)]/@class", ["item-0", "item-1 active"]),
    ("html", "xpath", "//script/text()", ['{"a": [1, 2], "b": {"c": "d"}}']),
    ("html", "xpath", "string-length('abc')", ["3.0"]),
    ("html", "xpath", "//li[@class='item-0' or @id]/a/text()", ["first", "third"]),
    ("html", "xpath", "round(2.5)", ["3.0"]),
    ("html", "xpath", "number('x')", ["nan"]),
    ("html", "xpath", "true()", ["1"]),
    ("html", "xpath", "floor(-1.5)", ["-2.0"]),
    ("html", "xpath", "//a[@href='']/text()", ["third"]),
    ("html", "xpath", "lang('en')", ["0"]),
    ("html", "xpath", "//*[local-name()='p'][1]/text()", ["One ", " text"]),
    ("html", "xpath", "//*[name()='title']/text()", ["Shop & more"]),
    ("html", "xpath", "starts-with(//title,'Shop')", ["1"]),
    (
        "html",
        "xpath",
        "//li[starts-with(@class,'item-1')]",
        ['<li class="item-1 active"><a href="l2.html?a=1&amp;b=2">second</a></li>'],
    ),
    ("html", "xpath", "//p[normalize-space()='Two']", ["<p>Two</p>"]),
    ("xml", "xpath", "//media:title/text()", ["M1", "M2"]),
    ("xml", "xpath", "//m:title/text()", ["M1", "M2"]),
    ("xml", "xpath", "//d:title/text()", ["T"]),
    ("xml", "xpath", "//m:*/text()", ["M1", "M2"]),
    ("xml", "xpath", "//@m:medium", ["image"]),
    ("xml", "xpath", "//@media:medium", ["image"]),
    ("xml", "xpath", "local-name(//m:title)", ["title"]),
    ("xml", "xpath", "namespace-uri(//m:title)", ["http://search.yahoo.com/mrss/"]),
    ("xml", "xpath", "name(//m:title)", ["media:title"]),
    ("xml", "xpath", "//d:link/text()", ["http://a/?x=1&y=2"]),
    ("xml", "xpath", "//*[local-name()='title']/text()", ["T", "M1", "M2"]),
    ("xml", "xpath", "/d:rss/@version", ["2.0"]),
    ("xml", "xpath", "//d:channel/text()", ["<raw>"]),
    ("xml", "xpath", "//*[namespace-uri()='http://d/']/text()", ["dx"]),
    ("xml", "xpath", "//d:item[m:content]/m:title/text()", ["M2"]),
    ("small", "xpath", "//a", ['<a x="1">t1<b/>tail</a>', '<a x="2"/>']),
    ("small", "xpath", "//a/@x", ["1", "2"]),
    ("small", "xpath", "//a/text()", ["t1", "tail"]),
    ("small", "xpath", "//a[b]/text()", ["t1", "tail"]),
    ("small", "xpath", "//comment()", ["<!-- c -->"]),
    ("small", "xpath", "//processing-instruction()", ["<?pi data?>"]),
    ("small", "xpath", "/root", ['<root><a x="1">t1<b/>tail</a><a x="2"/><!-- c --><?pi data?></root>']),
    ("small", "xpath", "//a[2]", ['<a x="2"/>']),
    ("small", "xpath", "string(//a)", ["t1tail"]),
    ("json", "jmespath", "a", [1, 2.5, "x", None, True]),
    ("json", "jmespath", "a[0]", [1]),
    ("json", "jmespath", "a[2]", ["x"]),
    ("json", "jmespath", "b", [{"c": "<p class=q>hi</p>", "d": []}]),
    ("json", "jmespath", "b.c", ["<p class=q>hi</p>"]),
    ("json", "jmespath", "e", ["text"]),
    ("json", "jmespath", "list[*].n", [1, 2]),
    ("json", "jmespath", "list[].h", ["<a href=1>k</a>"]),
    ("json", "jmespath", "list[?n==`2`]", [{"n": 2}]),
    ("json", "jmespath", "length(a)", [5]),
    ("json", "jmespath", "a[*]", [1, 2.5, "x", True]),
    ("json", "jmespath", "keys(b)", ["c", "d"]),
    ("json", "jmespath", "b.[c, d]", ["<p class=q>hi</p>", []]),
    ("json", "jmespath", "sort(list[*].n)", [1, 2]),
    ("json", "jmespath", "a[4]", [True]),
    ("json", "jmespath", "list[0].h", ["<a href=1>k</a>"]),
    ("json", "jmespath", "to_string(a)", ['[1,2.5,"x",null,true]']),
    ("json", "jmespath", "{x: e}", [{"x": "text"}]),
]


@pytest.mark.parametrize(("document", "method", "query", "expected"), CASES)
def test_a_query_finds_what_parsel_finds(document: str, method: str, query: str, expected: list[object]) -> None:
    options = {"namespaces": NAMESPACES} if document == "xml" else {}
    found = getattr(DOCUMENTS[document], method)(query, **options)
    assert found.getall() == expected
    assert found.get() == found.extract_first() == expected[0]
    assert found.extract() == expected


def test_namespace_declarations_are_not_attributes_of_xml() -> None:
    assert DOCUMENTS["xml"].attrib == {"version": "2.0"}
    assert Selector('<html xmlns="http://www.w3.org/1999/xhtml">').attrib == {"xmlns": "http://www.w3.org/1999/xhtml"}


@pytest.mark.parametrize("query", ["media|title", "li:contains()", "li:contains('a') + li", "li:contains('a') ~ li"])
def test_queries_that_css_cannot_answer_are_refused(query: str) -> None:
    with pytest.raises(SelectorError, match="bad CSS query"):
        DOCUMENTS["xml"].css(query)


def test_nested_matches_are_found_once_and_in_order() -> None:
    page = Selector("<div>x<div>x<b>1</b></div><b>2</b></div>")
    assert page.css("div:contains('x') b::text").getall() == ["1", "2"]
    assert page.css("div:contains('x') > b").getall() == ["<b>1</b>", "<b>2</b>"]
    assert page.css("div:contains('x')")[1].css("div:contains('x') > b").getall() == ["<b>1</b>"]
