"""Selectors. The expected values are those of parsel 1.12, unless a test says that Shoal differs."""

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
    assert feed.css("link").get() == '<link xmlns="urn:d">http://x/1</link>'
    assert feed.css("text::text").getall() == ["1 <b>c</b> & d 2"]
    assert Selector("\ufeff<a>x</a>", type="xml").get() == "<a>x</a>"


def test_prefixed_names_are_as_the_document_writes_them(feed: Selector) -> None:
    assert feed.xpath("//media:title/text()").getall() == ["M"]
    assert feed.xpath("/rss/child::Item[1]/media:title[1]").getall() == [
        '<media:title xmlns:media="urn:m">M</media:title>'
    ]
    assert feed.xpath("//Item/@media:k").getall() == ["v"]
    assert feed.xpath("//media:*[.='M']/text() | //@media:*").getall() == ["v", "M"]
    assert feed.xpath("concat('media:title', \"x:y\")").getall() == ["media:titlex:y"]
    assert feed.css(r"media\:title::text").getall() == ["M"]


NAMESPACED = """<?xml version="1.0"?><feed xmlns="http://a/" xmlns:m="http://m/"><entry id="1" m:k="v">
<title>T</title><m:title>MT</m:title><x:o xmlns:x="http://m/" x:k="w">O</x:o></entry>
<entry id="2" k="plain"><m:c>C<m:d>D</m:d></m:c> tail</entry></feed>"""
NAMESPACES = {"a": "http://a/", "q": "http://m/"}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("//a:entry/@id", ["1", "2"]),
        ("//q:title/text()", ["MT"]),
        ("//a:title/text()", ["T"]),
        ("//q:*/text()", ["MT", "O", "C", "D"]),
        ("//@q:k", ["v", "w"]),
        ("//a:entry/@q:k", ["v"]),
        ("//a:entry/@a:id", []),  # an attribute without a prefix has no namespace
        ("//q:o/attribute::q:k", ["w"]),
        ("//a:entry/child::q:title/text()", ["MT"]),
        ("//a:entry[2]/q:c/q:d/text()", ["D"]),
        ("count(//a:entry)", ["2.0"]),
        ("//a:entry[re:test(@id, '^1$')]/@id", ["1"]),
        ("//*[local-name()='title']/text()", ["T", "MT"]),
        ("//*[namespace-uri()='http://m/']/text()", ["MT", "O", "C", "D"]),
        ("local-name(//*[2])", ["title"]),
        ("namespace-uri(//*[2])", ["http://m/"]),
        ("local-name(//nope)", [""]),
        ("namespace-uri(//nope)", [""]),
        ("namespace-uri(//@*)", [""]),
        ("'local-name() a:entry'", ["local-name() a:entry"]),
    ],
)
def test_namespaces(query: str, expected: list[str]) -> None:
    feed = Selector(NAMESPACED, type="xml")
    assert feed.xpath(query, namespaces=NAMESPACES).getall() == expected
    assert feed.xpath(query, NAMESPACES).getall() == expected
    assert Selector(NAMESPACED, namespaces=NAMESPACES).xpath(query).getall() == expected


def test_register_namespace() -> None:
    feed = Selector(NAMESPACED, type="xml")
    assert feed.xpath("//g:title").getall() == []
    feed.register_namespace("g", "http://m/")
    assert feed.xpath("//g:title/text()").get() == "MT"
    entries = feed.xpath("//entry")
    assert entries.xpath("g:title/text()").getall() == entries[0].xpath("g:title/text()").getall() == ["MT"]
    assert [entry.xpath("g:c/g:d/text()").get() for entry in entries] == [None, "D"]
    assert SelectorList(entries[1:]).xpath("g:c/text()").getall() == ["C"]
    assert (feed.css("nope") + entries).xpath("g:title/text()").get() == "MT"
    assert entries.xpath("g:title | h:title", {"g": "http://a/"}).css("::text").getall() == ["T"]  # for this query


def test_remove_namespaces() -> None:
    feed = Selector(NAMESPACED, type="xml")
    feed.remove_namespaces()
    assert feed.xpath("//entry/@id").getall() == ["1", "2"]
    assert feed.css("entry title::text").getall() == ["T", "MT"]
    assert feed.xpath("//entry/@k").getall() == ["v", "plain"]
    assert feed.css("o").getall() == ['<o k="w">O</o>']
    assert feed.get().startswith("<feed><entry")
    part = Selector(NAMESPACED, type="xml")
    part.css("entry")[1].remove_namespaces()
    assert part.css("c > d::text").getall() == ["D"]
    assert part.css("title::text").getall() == ["T"]


LIST = "<ul><li>1<b>x</b></li> tail1 <li>2</li> tail2</ul><p>A<!-- c --></p>"


@pytest.mark.parametrize(
    ("query", "left"),
    [
        ("li", "<ul> tail1  tail2</ul>"),
        ("li, b", "<ul> tail1  tail2</ul>"),
        ("b", "<ul><li>1</li> tail1 <li>2</li> tail2</ul>"),
        ("nope", "<ul><li>1<b>x</b></li> tail1 <li>2</li> tail2</ul>"),
    ],
)
def test_drop(query: str, left: str) -> None:
    page = Selector(LIST)
    page.css(query).drop()
    assert page.css("ul").get() == left


def test_drop_one() -> None:
    page = Selector(LIST)
    page.css("li")[0].drop()
    page.xpath("//comment()").drop()
    assert page.css("ul, p").getall() == ["<ul> tail1 <li>2</li> tail2</ul>", "<p>A</p>"]
    feed = Selector(NAMESPACED, type="xml")
    feed.xpath("//m:c").drop()
    assert feed.xpath("//entry[2]").get() == '<entry xmlns="http://a/" id="2" k="plain"> tail</entry>'


def test_what_cannot_be_dropped() -> None:
    page = Selector(LIST)
    for found in (page.css("li::text"), page.css("html::attr(lang)") + page.xpath("count(//li)")):
        with pytest.raises(SelectorError, match="such as 'li' instead of 'li::text'"):
            found.drop()
    with pytest.raises(SelectorError, match="cannot drop the top element"):
        page.css("html").drop()
    with pytest.raises(SelectorError, match="cannot drop the top element"):
        page.drop()
    item = page.css("li")[0]
    item.drop()
    with pytest.raises(SelectorError, match="dropped before"):
        item.drop()


JSON = """{"user": [{"name": "A", "age": 18, "tags": ["x", "y"]}, {"name": "B", "age": 32, "html": "<p>hi</p>"}],
"total": 2, "ok": true, "none": null, "f": 1.5, "s": "[1, 2]"}"""


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("user[*].name", ["A", "B"]),
        ("user[0].tags", ["x", "y"]),
        ("user[].tags", [["x", "y"]]),
        ("user[].tags[]", ["x", "y"]),
        ("user[?age > `20`].name", ["B"]),
        ("user[1]", [{"name": "B", "age": 32, "html": "<p>hi</p>"}]),
        ("user[0].age", [18]),
        ("length(user)", [2]),
        ("ok", [True]),
        ("f", [1.5]),
        ("s", ["[1, 2]"]),
        ("none", []),
        ("nope", []),
    ],
)
def test_jmespath(query: str, expected: list[object]) -> None:
    for data in (Selector(JSON, type="json"), Selector(text=JSON)):
        found = data.jmespath(query)
        assert found.getall() == found.extract() == [each.get() for each in found] == expected
        assert found.get() == found.extract_first() == (expected[0] if expected else None)
        assert [type(each) for each in found.getall()] == [type(each) for each in expected]


def test_json_values() -> None:
    data = Selector(JSON, type="json")
    assert data.jmespath("user").jmespath("name").getall() == ["A", "B"]
    assert data.jmespath("s").jmespath("[1]").getall() == [2]
    assert data.jmespath("user[*].name").re("[AB]") == ["A", "B"]
    assert data.jmespath("user[*].age").re_first(r"\d") == "1"
    assert [str(age) for age in data.jmespath("user[*].age")] == ["18", "32"]
    assert data.jmespath("total")[0].text_content() == "2"
    assert data.attrib == {}
    assert data.get()["f"] == 1.5
    data.remove_namespaces()
    with pytest.raises(SelectorError, match="cannot drop"):
        data.jmespath("user").drop()
    assert [bool(Selector(text, type="json")) for text in ("[1]", "{}", "nope")] == [True, False, False]
    assert Selector("nope", type="json").jmespath("a").getall() == []
    assert Selector("[" * 100_000, type="json").root is None
    assert [Selector(text, type="json").root for text in ('"s"', "3", "null", "nope")] == ["s", 3, None, None]
    assert Selector(root=None).get() is None


def test_html_in_json() -> None:
    markup = Selector(JSON, type="json").jmespath("user[1].html")
    assert markup.css("p::text").getall() == markup.xpath("//p/text()").getall() == ["hi"]
    assert Selector("<b>x</b>", type="text").get() == "<b>x</b>"
    assert Selector("<b>x</b>", type="text").css("b::text").get() == "x"


def test_json_in_html() -> None:
    page = Selector('<p>no</p><script id="d" type="application/json">{"k": [1, {"z": "<i>q</i>"}]}</script>')
    assert page.css("script").jmespath("k[1].z").getall() == ["<i>q</i>"]
    assert page.css("#d::text").jmespath("k[0]").getall() == [1]
    assert page.css("#d").jmespath("k[1].z").css("i::text").getall() == ["q"]
    assert page.jmespath("k").getall() == page.css("p").jmespath("k").getall() == []


def test_queries_of_another_kind() -> None:
    data = Selector(JSON, type="json")
    with pytest.raises(SelectorError, match=r"bad CSS query 'p': cannot use CSS on a JSON value: use jmespath\(\)"):
        data.css("p")
    with pytest.raises(SelectorError, match=r"bad XPath query .*: cannot use XPath on a JSON value: use jmespath"):
        data.jmespath("user").xpath("//p")
    for query in ("[", "", "nope(@)", "length(total)"):
        with pytest.raises(SelectorError, match=f"bad JMESPath query {re.escape(repr(query))}: "):
            data.jmespath(query)


def test_the_type_is_detected() -> None:
    assert Selector("  [1, 2]").jmespath("[1]").get() == 2
    assert Selector('<?xml version="1.0"?><Aa><Bb>x</Bb></Aa>').xpath("//Bb").get() == "<Bb>x</Bb>"
    assert Selector('<?xml version="1.0"?><P>not <b>XML').css("p").get() == "<p>not <b>XML</b></p>"
    assert Selector("[not json] <P>x").css("p::text").get() == "x"
    assert Selector("3").css("body").get() == "<body>3</body>"
    assert Selector("[1]", type="html").css("body").get() == "<body>[1]</body>"
    with pytest.raises(SelectorError, match="unknown type 'pdf': use"):
        Selector("x", type="pdf")  # type: ignore[arg-type]


def test_extract(page: Selector) -> None:
    assert page.css("h1::text").extract() == ["H1", "again"]
    assert page.css("h1::text").extract_first() == "H1"
    assert page.css("nope").extract() == []
    assert page.css("nope").extract_first() is None
    assert page.css("nope").extract_first("D") == page.css("nope").extract_first(default="D") == "D"
    assert page.css("h1")[0].extract() == "<h1>H1</h1>"


def test_entities_in_matches() -> None:
    item = Selector("<li>2 &gt; &quot;q&quot; &amp; &lt; &copy;</li>").css("li")
    assert item.re(r"2.*;") == ['2 > "q" &amp; &lt;']
    assert item.re(r"2.*;", replace_entities=False) == ['2 &gt; "q" &amp; &lt;']
    assert item.re_first(r"&\w+;") == item[0].re_first(r"&\w+;") == ">"
    assert item.re_first(r"&\w+;", "D", False) == item[0].re_first(r"&\w+;", replace_entities=False) == "&gt;"
    assert item.css("::text").re(r".*©") == ['2 > "q" & < ©']
    assert Selector("[&eacute;&#233;&#xe9;&nope;]", "text").re(r"\[.*") == ["[ééé&nope;]"]


def test_sets(page: Selector) -> None:
    assert page.xpath("set:intersection(//h1 | //h2, //h2)/text()").getall() == ["h2"]
    assert page.xpath("set:leading(//h1 | //h2, //h1[2])/text()").getall() == ["H1", "h2"]
    assert page.xpath("set:trailing(//h1 | //h2, //h1[1])/text()").getall() == ["h2", "again"]
    assert page.xpath("set:has-same-node(//h1, //h2)").get() == "0"
    assert page.xpath("set:has-same-node(//h1, //h1)").get() == "1"
    assert page.xpath("re:replace('abcb', 'b', 'g', 'X')").get() == "aXcX"


def test_text_that_is_not_xml() -> None:
    with pytest.raises(SelectorError, match="not well-formed XML: xml-mismatched-tag at line 1"):
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
        ("p, a::foo", "unknown pseudo-element ::foo; use ::text or ::attr"),
        ("a::attr", "pseudo-element ::attr;"),
        ("a::attr()", r"pseudo-element ::attr\(\);"),
        ("a::attr(x y')", "pseudo-element ::attr"),
        ("a::text(x)", r"pseudo-element ::text\(x\);"),
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
        ("//a[has-class()]", "needs at least one class name"),
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
