"""The expected values are parsel's, unless a test says that Shoal differs."""

from __future__ import annotations

import re

import pytest
import turbohtml

from shoal.errors import SelectorError, ShoalError
from shoal.selector import Selector, SelectorList

PAGE = """<!DOCTYPE html>
<html lang="en"><head><title>T &amp; U</title></head><body class="top">
<div id="one" class="box"><p class="x y">one<b>two</b>three<i>four<b>five</b></i></p><p>para<!-- c -->2</p>
<ul><li>1<ul><li>1.1 <a href="/n?a=1&amp;b=2" title="N">nest</a></li></ul></li><li class="x">2</li></ul></div>
<div id="two" data-x="q,::text"><h1>H1</h1><h2>h2</h2><a href="/1">L1</a> <a href="/2" class="x">L<em>2</em></a>
<a name="top">no href</a><h1>again</h1></div>
</body></html>"""

FEED = """<?xml version="1.0"?>
<rss xmlns="urn:d" xmlns:media="urn:m"><Item id="1" media:k="v"><title>A &amp; B</title><media:title>M</media:title>
<link>http://x/1</link><text>1 <![CDATA[<b>c</b> & d]]> 2</text></Item><Item id="2"><title>C</title><e/></Item></rss>"""


@pytest.fixture(scope="module")
def page() -> Selector:
    return Selector(text=PAGE)


@pytest.fixture(scope="module")
def feed() -> Selector:
    return Selector(text=FEED, type="xml")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("title::text", ["T & U"]),
        ("title", ["<title>T &amp; U</title>"]),
        ("a::attr(href)", ["/n?a=1&b=2", "/1", "/2"]),
        ("a::attr( 'href' )", ["/n?a=1&b=2", "/1", "/2"]),
        ('a::attr("HREF")', []),
        ("a::TEXT", ["nest", "L1", "L", "no href"]),
        ("  em\t", ["<em>2</em>"]),
        ("html::attr(lang)", ["en"]),
        ("nope::text", []),
        # own texts, and those below too
        ("p::text", ["one", "three", "para", "2"]),
        ("p ::text", ["one", "two", "three", "four", "five", "para", "2"]),
        ("p *::text", ["one", "two", "three", "four", "five", "para", "2"]),
        ("p > ::text", ["two", "four"]),
        ("p>*::text", ["two", "four"]),
        ("h1 ~ ::text", ["h2", "L1", "L", "no href", "again"]),
        ("p.x ::attr(class)", ["x y"]),
        ("::attr(href)", ["/n?a=1&b=2", "/1", "/2"]),
        ("*::attr(id)", ["one", "two"]),
        # comma groups come in document order, each thing once
        ("h2::text, h1::text", ["H1", "h2", "again"]),
        ("h2 , title", ["<title>T &amp; U</title>", "<h2>h2</h2>"]),
        ("a.x::attr(href),a::text, h2", ["nest", "<h2>h2</h2>", "L1", "/2", "L", "no href"]),
        ("b::text, p b::text, i ::text", ["two", "four", "five"]),
        ("::attr(href), h2::text", ["/n?a=1&b=2", "h2", "/1", "/2"]),
        # commas, colons and combinators that are none
        ("[data-x='q,::text']::attr(id)", ["two"]),
        ('div[data-x="q,::text"] h2::text', ["h2"]),
        ("a:not(.x, [name])::text", ["nest", "L1"]),
        (":is(h1, h2)::text", ["H1", "h2", "again"]),
        ("div:has(> h1, > h2)::attr(id)", ["two"]),
        ("[class~=y]::text", ["one", "three"]),
        ("li:nth-child(2n + 1) > a::text", ["nest"]),
        ("p:first-of-type b::text", ["two", "five"]),
    ],
)
def test_css(page: Selector, query: str, expected: list[str]) -> None:
    assert page.css(query).getall() == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("//a/@href", ["/n?a=1&b=2", "/1", "/2"]),
        ("//p/text()", ["one", "three", "para", "2"]),
        ("//p[2]/node()", ["para", "<!-- c -->", "2"]),
        ("//h2 | //title", ["<title>T &amp; U</title>", "<h2>h2</h2>"]),
        ("//h1/text() | //a/@name", ["H1", "top", "again"]),
        ("head/title/text()", ["T & U"]),
        ("/html/@lang", ["en"]),
        ("string(//p)", ["onetwothreefourfive"]),
        ("normalize-space(' a  b ')", ["a b"]),
        ("count(//a)", ["4.0"]),
        ("0 div 0", ["nan"]),
        ("count(//a) > 1", ["1"]),
        ("boolean(//nope)", ["0"]),
        ("//nope", []),
        ("//*[has-class('x')]/text()", ["one", "three", "2", "L"]),
        ("//*[has-class('y', 'x')]/text()", ["one", "three"]),
        ("//text()[has-class('x')]", []),
        ("//a[re:test(@href, '[12]$')]/@href", ["/n?a=1&b=2", "/1", "/2"]),
        ("//a[re:test(@title, '^n$', 'i')]/text()", ["nest"]),
        ("set:difference(//a, //a[@href])/text()", ["no href"]),
    ],
)
def test_xpath(page: Selector, query: str, expected: list[str]) -> None:
    assert page.xpath(query).getall() == expected


def test_xpath_variables(page: Selector) -> None:
    assert page.xpath("//a[@href=$url]/text()", url="/1").get() == "L1"
    assert page.xpath("//a[position()=$n]/text()", n=2).get() == "L"
    assert page.css("a").xpath("self::*[@href=$url]/text()", url="/2").getall() == ["L"]


def test_queries_stay_within_the_node(page: Selector) -> None:
    two = page.css("#two")[0]
    assert two.css("a::attr(href)").getall() == ["/1", "/2"]
    assert two.css("body a").getall() == []  # the whole selector must match within
    assert two.css("div a::text").getall() == ["L1", "L", "no href"]  # and the node itself counts
    assert two.css("div, h2::text").getall() == [two.get(), "h2"]
    assert two.css("::attr(id)").get() == "two"
    assert two.css(":scope > h2::text").getall() == ["h2"]
    assert two.xpath("a/@href").getall() == two.xpath(".//a/@href").getall() == ["/1", "/2"]
    assert two.xpath("@id").get() == "two"
    assert two.xpath("../@class").get() == "top"
    assert two.xpath("//title/text()").get() == "T & U"
    assert page.css("li").css("li li::text").getall() == ["1.1 "]


def test_siblings_of_the_node_are_not_within_it(page: Selector) -> None:
    assert page.css("p").css("p + p").getall() == []  # parsel steps out of the node here


def test_strings_hold_nothing(page: Selector) -> None:
    text = page.css("h2::text")
    assert text[0].root == "h2"
    assert text.css("*").getall() == text.css("::text").getall() == text.xpath("text()").getall() == []
    assert text.xpath(".").getall() == ["h2"]
    assert text.attrib == {}


def test_comments_can_be_queried(page: Selector) -> None:
    comment = page.xpath("//comment()")
    assert comment.css("*, ::text").getall() == []
    assert comment.xpath("..").getall() == ["<p>para<!-- c -->2</p>"]


def test_lists(page: Selector) -> None:
    links = page.css("a")
    assert isinstance(links, SelectorList)
    assert (len(links), bool(links), bool(page.css("nope"))) == (4, True, False)
    assert isinstance(links[1:3], SelectorList)
    assert links[1:3].css("::attr(href)").getall() == ["/1", "/2"]
    assert links[-1].attrib == {"name": "top"}
    assert [link.css("::text").get() for link in links] == ["nest", "L1", "L", "no href"]
    assert links.css("em::text").getall() == ["2"]
    assert links.xpath("ancestor::div/@id").getall() == ["one", "two", "two", "two"]
    assert (page.css("h2") + page.css("title")).css("::text").getall() == ["h2", "T & U"]
    assert SelectorList(reversed(links)).css("::attr(href)").getall() == ["/2", "/1", "/n?a=1&b=2"]
    assert page.css("h2")[0] in page.css("#two > *")
    assert len({*page.css("h1"), *page.css("h1, h2")}) == 3
    with pytest.raises(IndexError):
        links[4]


def test_get(page: Selector) -> None:
    assert page.css("nope").get() is None
    assert page.css("nope").get("none") == "none"
    assert page.css("nope").getall() == []
    assert page.css("h1").get("none") == "<h1>H1</h1>"
    assert page.css("h1")[0].getall() == ["<h1>H1</h1>"]
    assert str(page.css("h1")[1]) == "<h1>again</h1>"
    whole = page.get()
    assert whole.startswith('<html lang="en"><head>')
    assert whole == page.xpath(".").get() == page.css("html").get()


def test_attrib(page: Selector) -> None:
    assert page.css("a").attrib == {"href": "/n?a=1&b=2", "title": "N"}
    assert page.css("p").attrib == {"class": "x y"}
    assert page.css("nope").attrib == {}
    assert page.attrib == {"lang": "en"}
    assert Selector("<input disabled>").css("input").attrib == {"disabled": ""}


def test_text_content(page: Selector) -> None:
    assert page.css("p")[0].text_content() == "onetwothreefourfive"
    assert page.css("h2::text")[0].text_content() == "h2"
    assert Selector("<p> a\n<b>b </b>").css("p")[0].text_content() == " a\nb "


def test_regexes(page: Selector) -> None:
    hrefs = page.css("a::attr(href)")
    assert hrefs.re(r"\d") == ["1", "2", "1", "2"]
    assert hrefs.re(r"(\w)=(\d)") == ["a", "1", "b", "2"]
    assert hrefs.re(re.compile(r"/(N)?(\d)?", re.I)) == ["n", "", "", "1", "", "2"]
    assert hrefs.re(r"(?P<extract>\w)=(\d)|zzz") == ["a"]
    assert hrefs[1].re(r"(?P<extract>\w)=|1") == []
    assert hrefs.re_first(r"/(\d)") == "1"
    assert hrefs.re_first(r"z") is None
    assert hrefs.re_first(r"z", "none") == "none"
    assert page.css("h2")[0].re_first(r"<(\w+)>") == "h2"
    assert page.css("h2")[0].re_first(r"z", "none") == "none"


def test_a_no_break_space_is_a_space() -> None:
    price = Selector("<p title='a&nbsp;b'>1&nbsp;299 &lt;</p><script>'&nbsp;'</script>")
    assert price.css("p").get() == '<p title="a\xa0b">1\xa0299 &lt;</p>'
    assert price.css("p").re(r"\d\s\d+") == ["1\xa0299"]
    assert price.css("script").get() == "<script>'&nbsp;'</script>"


def test_odd_html() -> None:
    page = Selector("<ul><li>a<li>b <b>c</ul><table><tr><td>1<td>2</table><p>x<p>y &copy;&unknown; &amp;lt;")
    assert page.css("li").getall() == ["<li>a</li>", "<li>b <b>c</b></li>"]
    assert page.css("table > tbody > tr > td::text").getall() == ["1", "2"]  # the tbody that browsers make
    assert page.css("p ::text").getall() == ["x", "y ©&unknown; &lt;"]
    vue = Selector("<a :href=u @click='f()' xlink:href=x><svg viewBox='0 0'><use xlink:href='#i'/></svg></a>")
    assert vue.css("a::attr(':href'), a::attr('@click')").getall() == ["u", "f()"]
    assert vue.css("use::attr('xlink:href')").getall() == vue.xpath("//use/@xlink:href").getall() == ["#i"]
    assert vue.css("svg::attr(viewBox)").getall() == ["0 0"]


@pytest.mark.parametrize("text", ["", "   ", "plain", "<", "\0"])
def test_any_text_is_a_page(text: str) -> None:
    page = Selector(text=text)
    assert page.css("body, body::text").get("").startswith("<body>")
    assert page.xpath("count(//body)").get() == "1.0"


def test_a_root_is_wrapped_as_it_is() -> None:
    document = turbohtml.parse("<p>a<b>c</b>", positions=False)
    assert Selector(root=document).root is document
    assert Selector(root=document.select("p")[0]).css("p > b::text").getall() == ["c"]
    assert Selector(root="").root == ""
    assert not Selector(root="")
    assert Selector(root=document.select("b")[0])
    with pytest.raises(TypeError, match="text or a root"):
        Selector()


def test_xml(feed: Selector) -> None:
    assert feed.css("Item::attr(id)").getall() == feed.xpath("//Item/@id").getall() == ["1", "2"]
    assert feed.css("item").getall() == []  # names have a case here
    assert feed.css("Item > title::text").getall() == feed.xpath("//title/text()").getall() == ["A & B", "C"]
    assert feed.css("link").get() == "<link>http://x/1</link>"
    assert feed.css("text::text").getall() == ["1 <b>c</b> & d 2"]
    assert Selector("\ufeff<a>x</a>", type="xml").get() == "<a>x</a>"


def test_prefixed_names_are_as_the_document_writes_them(feed: Selector) -> None:
    assert feed.xpath("//media:title/text()").getall() == ["M"]
    assert feed.xpath("/rss/child::Item[1]/media:title[1]").getall() == ["<media:title>M</media:title>"]
    assert feed.xpath("//Item/@media:k").getall() == ["v"]
    assert feed.xpath("//media:*[.='M']/text() | //@media:*").getall() == ["v", "M"]
    assert feed.xpath("concat('media:title', \"x:y\")").getall() == ["media:titlex:y"]
    assert feed.css(r"media\:title::text").getall() == ["M"]


def test_text_that_is_not_xml() -> None:
    with pytest.raises(SelectorError, match="not XML: xml-mismatched-tag at line 1"):
        Selector("<a></b>", type="xml")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("a[", "expected an identifier"),
        ("", "expected a selector"),
        ("a,,b", "expected a selector"),
        ("a::text,", "expected a selector"),
        ("> p", "expected a selector"),
        ("p >", "expected a selector"),
        ("a:foo", "unknown pseudo-class"),
        ("p, a::foo", "no ::foo, only ::text and ::attr"),
        ("a::attr", "no ::attr,"),
        ("a::attr()", r"no ::attr\(\),"),
        ("a::attr(x y')", "no ::attr"),
        ("a::text(x)", r"no ::text\(x\),"),
        ("a::text b", "expected an identifier"),
        ("a:not(::text)", "expected"),
    ],
)
def test_bad_css(page: Selector, query: str, reason: str) -> None:
    with pytest.raises(SelectorError, match=f"bad CSS query {re.escape(repr(query))}: .*{reason}") as caught:
        page.css(query)
    assert isinstance(caught.value, ShoalError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("//a[", "expected a node test"),
        ("", "expected a node test"),
        ("//a[foo()]", "unknown function 'foo'"),
        ("//a[@href=$url]", "unbound variable"),
        ("count(1)", "count"),
        ("//a[has-class()]", "needs the name of a class"),
        ("//a[re:test(@href, '(')]", "unterminated subpattern"),
    ],
)
def test_bad_xpath(page: Selector, query: str, reason: str) -> None:
    with pytest.raises(SelectorError, match=f"bad XPath query {re.escape(repr(query))}: .*{reason}"):
        page.xpath(query)


def test_a_bad_variable(page: Selector) -> None:
    with pytest.raises(SelectorError, match="must be str"):
        page.xpath("//a[@href=$url]", url=None)


def test_repr(page: Selector) -> None:
    assert repr(page.css("h2, #one")) == (
        'SelectorList([<Selector \'<div id="one" class="box"><p class="x...\'>, <Selector \'<h2>h2</h2>\'>])'
    )
