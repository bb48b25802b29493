"""Feeds, sitemaps and other XML pages: how they are recognized, decoded, queried, and what they may cost."""

from __future__ import annotations

import logging
import time

import pytest
import turbohtml

from shoal.errors import TooComplexError
from shoal.http import Response

RSS = """<?xml version="1.0" encoding="utf-8"?>
<!-- made by hand -->
<rss version="2.0" xmlns:media="http://search.yahoo.com/mrss/">
<channel><title>News</title><link>http://ex.com/</link>
<item><title>One &amp; only</title><link>http://ex.com/1</link><pubDate>Mon, 06 Sep 2021 00:01:00 +0000</pubDate>
<description><![CDATA[<b>Hi</b>&nbsp;there]]></description><media:title>Shot</media:title></item>
<item><title>Caf&eacute;&nbsp;Two</title><link>http://ex.com/2</link></item>
</channel></rss>"""
ATOM = """<feed xmlns="http://www.w3.org/2005/Atom"><title>Log</title>
<entry><title>First</title><link href="http://ex.com/first"/><id>1</id><updated>2026-01-01T00:00:00Z</updated></entry>
</feed>"""
SITEMAP = """<?xml version="1.0"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">
<url><loc>http://ex.com/a</loc></url><url><loc>http://ex.com/b</loc></url></urlset>"""
XHTML = """<?xml version="1.0"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Strict//EN" "x.dtd">
<html xmlns="http://www.w3.org/1999/xhtml"><body><p>one<p>two</body></html>"""


def page(body: str | bytes, content_type: str = "application/rss+xml") -> Response:
    data = body.encode() if isinstance(body, str) else body
    return Response("http://ex.com/feed", headers={"Content-Type": content_type}, body=data)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (RSS, "application/rss+xml"),
        (RSS, "text/xml; charset=utf-8"),
        (RSS, "text/html"),
        (RSS, ""),
        ("\ufeff\n" + RSS.partition("-->")[2].strip(), "text/html; charset=utf-8"),
    ],
)
def test_a_feed_is_xml_whatever_the_server_calls_it(body: str, content_type: str) -> None:
    response = page(body, content_type)
    assert response.css("item > link::text").getall() == ["http://ex.com/1", "http://ex.com/2"]
    assert response.xpath("//item/title/text()").getall() == ["One & only", "Café\xa0Two"]
    assert response.css("description::text").get() == "<b>Hi</b>&nbsp;there"
    assert response.feed is not None
    assert [entry.link for entry in response.feed.entries] == ["http://ex.com/1", "http://ex.com/2"]
    assert response.feed.entries[0].published == "Mon, 06 Sep 2021 00:01:00 +0000"


def test_names_are_case_sensitive_and_have_namespaces() -> None:
    response = page(RSS)
    assert response.css("pubDate::text").get() is not None
    assert response.css("pubdate").getall() == []
    assert response.xpath("//media:title/text()").get() == "Shot"
    namespaces = {"m": "http://search.yahoo.com/mrss/"}
    assert response.xpath("//m:title/text()", namespaces).getall() == ["Shot"]
    assert response.xpath("//m:title", {"m": "http://other/"}).getall() == []


def test_atom_and_sitemaps() -> None:
    feed = page(ATOM, "application/atom+xml").feed
    assert feed is not None
    assert (feed.type, feed.title, feed.entries[0].link) == ("atom", "Log", "http://ex.com/first")
    sitemap = page(SITEMAP, "application/xml")
    assert sitemap.feed is None
    assert sitemap.css("loc::text").getall() == ["http://ex.com/a", "http://ex.com/b"]
    assert [request.url for request in sitemap.follow_all(sitemap.css("loc::text"))] == [
        "http://ex.com/a", "http://ex.com/b",
    ]  # fmt: skip


@pytest.mark.parametrize("content_type", ["text/html", "application/xhtml+xml", "application/xml", ""])
def test_xhtml_is_html(content_type: str) -> None:
    assert page(XHTML, content_type).css("p::text").getall() == ["one", "two"]


def test_html_is_no_feed() -> None:
    response = page("<html><body><Item>x</Item></body></html>", "text/html")
    assert response.feed is None
    assert response.css("item::text").get() == "x"


@pytest.mark.parametrize(
    ("body", "content_type", "encoding"),
    [
        ("<a>é</a>".encode("latin-1"), "text/xml; charset=iso-8859-1", "iso-8859-1"),
        ("<?xml version='1.0' encoding='ISO-8859-1'?><a>é</a>".encode("latin-1"), "text/xml", "iso-8859-1"),
        ("<?xml version='1.0' encoding='nonsense'?><a>é</a>".encode(), "text/xml", "utf-8"),
        ("\ufeff<a>é</a>".encode("utf-16-le"), "text/xml", "utf-16le"),
        ("<a>é</a>".encode(), "text/xml", "utf-8"),
    ],
)
def test_encodings(body: bytes, content_type: str, encoding: str) -> None:
    response = page(body, content_type)
    assert response.css("a::text").get() == "é"
    assert response.encoding == encoding
    assert "é" in response.text


@pytest.mark.parametrize(
    "body",
    [
        "<rss><channel><title>T</title><item><b>x</channel></rss>",
        "<rss><item>&unknown;</item><title>T</title></rss>",
        "<rss><media:title>no such prefix</media:title><title>T</title></rss>",
        "<?xml version='1.0'?><!DOCTYPE rss [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]><rss><title>T</title>&b;</rss>",
    ],
)
def test_malformed_xml_is_parsed_as_html(body: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert page(body).css("title::text").get() == "T"
    assert "parsed as HTML: not well-formed XML" in caplog.text


def test_deeply_nested_xml_is_refused() -> None:
    with pytest.raises(TooComplexError, match="nested more than 512 levels"):
        page("<a>" * 100_000 + "</a>" * 100_000, "text/xml").css("a")
    assert len(page("<a>" * 512 + "</a>" * 512, "text/xml").css("a")) == 512


@pytest.mark.parametrize("start", ["<!-- -->", "<?x ?>", "<!DOCTYPE x>", "<!--", "<?", " "])
def test_the_first_bytes_are_read_in_linear_time(start: str) -> None:
    began = time.process_time()
    page(start * 100_000 + "<p>x", "text/plain").css("p")
    assert time.process_time() - began < 2


def test_a_feed_whose_entries_repeat_their_text_is_refused() -> None:
    with pytest.raises(TooComplexError, match="characters"):
        page("<rss><channel>" + "<item>" * 400 + "x" * 100_000 + "</item>" * 400 + "</channel></rss>").feed  # noqa: B018


# -- feeds of old formats

ATOM_03 = """<?xml version="1.0"?><feed version="0.3" xmlns="http://purl.org/atom/ns#">
<title>News</title><tagline>of the harbour</tagline><modified>2004-01-03T00:00:00Z</modified>
<link rel="service.feed" href="http://ex.com/feed"/><link rel="alternate" type="text/html" href="http://ex.com/"/>
<entry><title>Tide</title><link rel="alternate" href="http://ex.com/1"/><id>tag:1</id><author><name>Ann</name></author>
<issued>2004-01-01T00:00:00Z</issued><modified>2004-01-02T00:00:00Z</modified><created>2003-12-31T00:00:00Z</created>
<summary>High.</summary><content type="text/html" mode="escaped">&lt;b&gt;High&lt;/b&gt; water</content></entry>
<entry><title>Wind</title><created>2003-12-30T00:00:00Z</created>
<content mode="xml"><div>Low <i>wind</i></div></content></entry></feed>"""
RSS_090 = """<?xml version="1.0"?><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"
xmlns="http://my.netscape.com/rdf/simple/0.9/"><channel><title>News</title><link>http://ex.com/</link>
<description>of the harbour</description></channel><image><title>Logo</title></image>
<item><title>Tide</title><link>http://ex.com/1</link></item><item><title>Wind</title><link>http://ex.com/2</link></item>
</rdf:RDF>"""
TERMS = "<t:created>2003</t:created><t:issued>2004</t:issued><t:modified>2005</t:modified>"
RSS_WITH_TERMS = f"""<rss version="2.0" xmlns:t="http://purl.org/dc/terms/"><channel><title>News</title>
<item><title>Tide</title>{TERMS}</item><item><title>Wind</title><pubDate>today</pubDate>{TERMS}</item>
<item><title>Rain</title></item></channel></rss>"""
RDF_WITH_TERMS = f"""<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns="http://purl.org/rss/1.0/"
xmlns:t="http://purl.org/dc/terms/"><channel rdf:about="c"><title>News</title><items><rdf:Seq><rdf:li rdf:resource="2"/>
<rdf:li rdf:resource="1"/></rdf:Seq></items></channel><item rdf:about="1"><title>Tide</title>{TERMS}</item>
<item rdf:about="2"><title>Wind</title></item></rdf:RDF>"""


def feed_of(text: str) -> turbohtml.Feed:
    feed = Response("http://ex.com/feed", headers={"Content-Type": "text/xml"}, body=text.encode()).feed
    assert feed is not None
    return feed


def test_atom_03() -> None:
    feed = feed_of(ATOM_03)
    assert feed[:5] == ("atom", "News", "http://ex.com/", "of the harbour", "2004-01-03T00:00:00Z")
    assert feed.entries[0] == turbohtml.Entry(
        title="Tide", link="http://ex.com/1", id="tag:1", updated="2004-01-02T00:00:00Z",
        published="2004-01-01T00:00:00Z", summary="High.", content="<b>High</b> water", author="Ann",
    )  # fmt: skip
    wind = feed.entries[1]
    assert (wind.title, wind.link, wind.published, wind.updated) == ("Wind", None, "2003-12-30T00:00:00Z", None)
    assert isinstance(wind.content, str)
    assert "Low <i>wind</i>" in wind.content


def test_rss_090() -> None:
    feed = feed_of(RSS_090)
    assert feed[:5] == ("rdf", "News", "http://ex.com/", "of the harbour", None)
    assert [(entry.title, entry.link) for entry in feed.entries] == [
        ("Tide", "http://ex.com/1"), ("Wind", "http://ex.com/2"),
    ]  # fmt: skip


def test_dates_of_dublin_core_terms() -> None:
    """They count only where an entry has no other date. An RDF feed says in which order its entries are."""
    dates = [(entry.title, entry.published, entry.updated) for entry in feed_of(RSS_WITH_TERMS).entries]
    assert dates == [("Tide", "2004", "2005"), ("Wind", "today", "2005"), ("Rain", None, None)]
    dates = [(entry.title, entry.published, entry.updated) for entry in feed_of(RDF_WITH_TERMS).entries]
    assert dates == [("Wind", None, None), ("Tide", "2004", "2005")]
