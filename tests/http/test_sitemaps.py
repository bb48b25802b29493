"""The reader of sitemaps: formats, encodings, damaged files, and what a hostile file may cost."""

from __future__ import annotations

import gzip
import random
import time
import tracemalloc
from contextlib import suppress
from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SitemapError
from shoal.http.sitemaps import (
    Alternate,
    SitemapEntry,
    SitemapLimits,
    SitemapReader,
    read_period,
    read_since,
    sitemaps_in_robots,
)

URLSET = """<?xml version="1.0" encoding="UTF-8"?>
<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9" xmlns:image="http://www.google.com/schemas/sitemap-image/1.1"
        xmlns:xhtml="http://www.w3.org/1999/xhtml">
  <!-- <url><loc>http://ex.com/commented-out</loc></url> -->
  <url>
    <loc> http://ex.com/a?x=1&amp;y=2 </loc>
    <lastmod>2026-05-01</lastmod><changefreq>daily</changefreq><priority>0.8</priority>
    <image:image><image:loc>http://ex.com/a.png</image:loc><image:title>A</image:title></image:image>
    <xhtml:link rel="alternate" hreflang="de" href="http://ex.com/de/a?x=1&amp;y=2"/>
    <xhtml:link rel="alternate" hreflang="fr" href='http://ex.com/fr/a'></xhtml:link>
  </url>
  <url><loc><![CDATA[http://ex.com/b?x=1&y=2]]></loc></url>
</urlset>"""
INDEX = """<sm:sitemapindex xmlns:sm="http://www.sitemaps.org/schemas/sitemap/0.9">
<sm:sitemap><sm:loc>http://ex.com/one.xml.gz</sm:loc><sm:lastmod>2026-01-02T03:04:05+02:00</sm:lastmod></sm:sitemap>
<sm:sitemap><sm:loc>http://ex.com/two.xml</sm:loc></sm:sitemap></sm:sitemapindex>"""
RSS = """<rss version="2.0"><channel><link>http://ex.com/</link><image><url>http://ex.com/i.png</url></image>
<item><title>One</title><link>http://ex.com/1</link><pubDate>Mon, 06 Sep 2021 00:01:00 +0000</pubDate></item>
<item><guid>http://ex.com/2</guid></item></channel></rss>"""
ATOM = """<feed xmlns="http://www.w3.org/2005/Atom"><link href="http://ex.com/"/><entry>
<link rel="edit" href="http://ex.com/edit"/><link href="http://ex.com/first"/><updated>2026-01-01T00:00:00Z</updated>
</entry></feed>"""


def read(body: str | bytes, charset: str | None = None, **limits: int) -> list[SitemapEntry]:
    data = body.encode() if isinstance(body, str) else body
    return list(SitemapReader(data, charset, SitemapLimits(**limits)))


def locs(body: str | bytes, charset: str | None = None) -> list[str]:
    return [entry.loc for entry in read(body, charset)]


def urlset(*urls: str) -> str:
    return "<urlset>" + "".join(f"<url><loc>{url}</loc></url>" for url in urls) + "</urlset>"


# -- formats


def test_a_sitemap() -> None:
    first, second = read(URLSET)
    assert first.loc == "http://ex.com/a?x=1&y=2"
    assert first.lastmod == datetime(2026, 5, 1, tzinfo=UTC)
    assert first.fields == {"lastmod": "2026-05-01", "changefreq": "daily", "priority": "0.8"}
    assert first.alternates == (Alternate("de", "http://ex.com/de/a?x=1&y=2"), Alternate("fr", "http://ex.com/fr/a"))
    assert second == SitemapEntry("http://ex.com/b?x=1&y=2")


def test_an_index_with_a_prefix_for_its_namespace() -> None:
    reader = SitemapReader(INDEX.encode())
    one, two = reader
    assert reader.format == "sitemapindex"
    assert (one.loc, one.is_sitemap) == ("http://ex.com/one.xml.gz", True)
    assert one.lastmod == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert (two.loc, two.is_sitemap, two.lastmod) == ("http://ex.com/two.xml", True, None)


def test_feeds() -> None:
    assert locs(RSS) == ["http://ex.com/1", "http://ex.com/2"]
    assert read(RSS)[0].lastmod == datetime(2021, 9, 6, 0, 1, tzinfo=UTC)
    (entry,) = read(ATOM)
    assert (entry.loc, entry.lastmod) == ("http://ex.com/first", datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_text_file(end: str) -> None:
    reader = SitemapReader(end.join(["\ufeffhttp://ex.com/a ", "", "nonsense", "https://ex.com/ü"]).encode())
    assert [entry.loc for entry in reader] == ["http://ex.com/a", "https://ex.com/ü"]
    assert (reader.format, reader.skipped) == ("text", 1)


def test_the_sitemaps_of_a_robots_txt() -> None:
    text = "User-agent: *\nSITEMAP : http://ex.com/a.xml\r\nsitemap:/b.xml # ours\n#Sitemap: /no\nSitemap: /b.xml\n"
    assert sitemaps_in_robots(text) == ["http://ex.com/a.xml", "/b.xml"]
    assert sitemaps_in_robots("Sitemap: /late".rjust(1 << 20, "\n")) == []


# -- encodings and compression


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_unicode(encoding: str) -> None:
    assert locs(urlset("http://ex.com/café").encode(encoding)) == ["http://ex.com/café"]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("windows-1251", "цена"), ("iso-8859-1", "café"), ("shift_jis", "本"), ("gbk", "书"), ("big5", "書")],
)
def test_old_encodings(encoding: str, text: str) -> None:
    short = f'<?xml version="1.0" encoding="{encoding}"?>' + urlset(*[f"http://ex.com/{text}"] * 9000)
    assert locs(short.encode(encoding)) == [f"http://ex.com/{text}"] * 9000
    assert locs(urlset(f"http://ex.com/{text}").encode(encoding), encoding) == [f"http://ex.com/{text}"]


def test_a_wrong_encoding_costs_no_url() -> None:
    from shoal.http import Request

    body = b'<?xml version="1.0" encoding="utf-8"?>' + urlset("http://ex.com/café", "/b").encode("latin-1")
    first, second = locs(body)
    assert Request(first).url == "http://ex.com/caf%E9"
    assert second == "/b"
    assert locs(urlset("/a"), "no-such-encoding") == ["/a"]


@pytest.mark.parametrize("times", [1, 2])
def test_gzip_is_recognized_by_its_first_bytes(times: int) -> None:
    body = URLSET.encode()
    for _ in range(times):
        body = gzip.compress(body)
    assert len(read(body)) == 2


def test_the_begin_of_a_truncated_file_is_read() -> None:
    urls = [f"http://ex.com/{random.Random(n).random()}" for n in range(5000)]
    body = gzip.compress(urlset(*urls).encode())
    reader, found = SitemapReader(body[: len(body) // 2]), []
    with pytest.raises(SitemapError, match="not valid gzip: it is truncated"):
        found.extend(entry.loc for entry in reader)
    assert 1000 < len(found) < 5000
    assert found == urls[: len(found)]
    assert locs(urlset("/a", "/b")[:-15]) == ["/a", "/b"]
    assert locs(urlset("/a", "/bcd")[:-23]) == ["/a"]  # not "/b", which is not a URL of the site


# -- files that are not well-formed


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (urlset("/a?x=1&y=2&copy=3"), ["/a?x=1&y=2&copy=3"]),
        (urlset("/caf&eacute;&#233;&#xe9;&unknown;&#0;"), ["/cafééé&unknown;&#0;"]),
        ("Warning: something\n<?xml version='1.0'?>" + urlset("/a"), ["/a"]),
        ("<URLSET><URL><LOC>/a</LOC></URL></URLSET>", ["/a"]),
        ("<url><loc>/a</loc></url><url><loc>/b</loc></url>", ["/a", "/b"]),
        ("<urlset><url><loc>/a</loc><url><loc>/b</loc></url></urlset>", ["/a", "/b"]),
        ("<urlset><url><loc\n a='1'>/a</loc\n></url ></urlset>", ["/a"]),
        ("<urlset><url><x a='>'/><loc>/a</loc></url></urlset>", ["/a"]),
        ("<urlset><url><loc>/a<!-- b -->c</loc></url></urlset>", ["/ac"]),
        ("<urlset><url/><url><loc/></url><url><lastmod>2026</lastmod></url></urlset>", []),
        ("<urlset></urlset>", []),
        ("<urlset><url><loc>/a < b</loc></url></urlset>", ["/a < b"]),
    ],
)
def test_lenient(body: str, expected: list[str]) -> None:
    assert locs(body) == expected


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "it is empty"),
        (b" \n\t", "it is empty"),
        (b"<!doctype html><html><body>404</body></html>", "first element is <html>"),
        (b"Not found", "begins with 'Not found'"),
        (b'{"error": 404}', "begins with"),
        (b"<!-- nothing -->", "no elements"),
        (b"\x1f\x8b nonsense", "not valid gzip"),
        (b"\x89PNG\r\n\x1a\n\0\0", "begins with"),
    ],
)
def test_what_is_no_sitemap(body: bytes, says: str) -> None:
    with pytest.raises(SitemapError, match=says):
        read(body)


@given(
    st.lists(
        st.sampled_from(
            [
                "<",
                ">",
                "url",
                "loc",
                "/",
                "!--",
                "-->",
                "![CDATA[",
                "]]>",
                "&amp;",
                "'",
                '"',
                " ",
                "é",
                "<url>",
                "<loc>",
                "</url>",
            ]
        )
    )
)
def test_portions_do_not_matter(words: list[str]) -> None:
    """A file is read in the same way wherever its portions end."""
    from shoal.http import sitemaps

    class Log(list[tuple[str, ...]]):
        def start(self, name: str, attributes: str) -> None:
            self.append(("start", name, attributes))

        def end(self, name: str) -> None:
            self.append(("end", name))

        def text(self, text: str) -> None:
            if text and self and self[-1][0] == "text":
                text = self.pop()[1] + text
            if text:
                self.append(("text", text))

    whole, single = Log(), Log()
    for log, portions in ((whole, ["".join(words)]), (single, list("".join(words)))):
        scanner = sitemaps.Scanner(log, 10_000)
        for portion in portions:
            scanner.feed(portion)
        scanner.close()
    assert whole == single


@given(st.binary(max_size=300) | st.binary(max_size=300).map(gzip.compress))
def test_any_body_can_be_read(body: bytes) -> None:
    for start in (b"", b"<urlset><url>", b"<rss>", b"\x1f\x8b", b"\xff\xfe"):
        with suppress(SitemapError):
            list(SitemapReader(start + body))


@given(st.text(max_size=40))
def test_any_text_may_be_a_date(text: str) -> None:
    read_period(text)


# -- dates


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("2024", "2024-01-01T00:00:00", "2025-01-01T00:00:00"),
        ("2026-02", "2026-02-01T00:00:00", "2026-03-01T00:00:00"),
        ("2026-05-01", "2026-05-01T00:00:00", "2026-05-02T00:00:00"),
        (" 2026-05-01T12:30Z ", "2026-05-01T12:30:00", "2026-05-01T12:31:00"),
        ("2026-05-01 12:30:15", "2026-05-01T12:30:15", "2026-05-01T12:30:16"),
        ("2026-05-01T12:30:15.25-0130", "2026-05-01T14:00:15.250000", "2026-05-01T14:00:16.250000"),
        ("Fri, 01 May 2026 12:30:15 +0200", "2026-05-01T10:30:15", "2026-05-01T10:30:16"),
    ],
)
def test_dates(text: str, begin: str, end: str) -> None:
    period = read_period(text)
    assert period is not None
    assert [each.isoformat() for each in period] == [begin + "+00:00", end + "+00:00"]


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-13-01", "2026-02-30", "9999", "99999", "2026-05-01T99:99", "1" * 10**6]
)
def test_texts_that_are_no_dates(text: str) -> None:
    period = read_period(text)
    assert period is None or text in ("9999", "2026-05-01T99:99")
    assert SitemapEntry("/", False, {"lastmod": text}).may_be_newer_than(datetime(2026, 1, 1, tzinfo=UTC)) or period


def test_since() -> None:
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    entries = {
        text: SitemapEntry("/", False, {"lastmod": text}) for text in ("2026-05-01", "2026-04-30", "2026-05", "?")
    }
    newer = [text for text, entry in entries.items() if entry.may_be_newer_than(noon)]
    assert newer == ["2026-05-01", "2026-05", "?"]
    assert read_since("2026-05-01") == read_since(date(2026, 5, 1)) == read_since(datetime(2026, 5, 1))
    with pytest.raises(ValueError, match="is not a date"):
        read_since("soon")


# -- hostile files


def measured(body: bytes, **limits: int) -> tuple[int, float, str]:
    """How many entries it has, its peak of memory in megabytes besides the body, and its error."""
    error = ""
    count = 0
    tracemalloc.start()
    try:
        for _ in SitemapReader(body, None, SitemapLimits(**limits)):
            count += 1
    except SitemapError as exc:
        error = str(exc)
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return count, peak, error


def test_billion_laughs() -> None:
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    body = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY l0 "lol">{entities}]>' + urlset("/a&l9;", "/b")
    assert locs(body) == ["/a&l9;", "/b"]


def test_external_entities_are_not_read() -> None:
    body = '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]>' + urlset("/&f;")
    assert locs(body) == ["/&f;"]


@pytest.mark.parametrize(
    "filler", [b" ", b"a", b"<", b"<a", b"<a>", b"<!-- -->", b"<![CDATA[", b"<a b='", b"&amp;", b"\n"]
)
def test_bombs(filler: bytes) -> None:
    """Megabytes of anything in a small file need little memory, and have an end."""
    inner = b"<urlset><url><loc>/a</loc></url><url><loc>" + filler * ((4 << 20) // len(filler))
    body = gzip.compress(inner, 9)
    assert len(body) < 40_000
    count, peak, error = measured(body, max_bytes=2 << 20, max_tags=50_000)
    assert count <= 2
    assert peak < 3
    assert error in (
        "the sitemap is larger than 2097152 bytes after decompression", "the sitemap has more than 50000 tags"
    )  # fmt: skip


def test_a_bomb_in_a_bomb() -> None:
    body = gzip.compress(gzip.compress(bytes(64 << 20), 9), 9)
    assert len(body) < 2000
    count, peak, error = measured(body)
    assert (count, error) == (0, f"the sitemap is larger than {16 << 20} bytes after decompression")
    assert peak < 8


def test_a_large_plain_file_has_a_limit_too() -> None:
    assert (
        measured(urlset("/a").encode().ljust(1000), max_bytes=999)[2]
        == "the sitemap is larger than 999 bytes after decompression"
    )


def test_too_many_tags() -> None:
    count, _, error = measured(urlset(*["/a"] * 1000).encode(), max_tags=2001)
    assert count == 500
    assert error == "the sitemap has more than 2001 tags"


def test_a_url_of_a_megabyte_is_skipped() -> None:
    reader = SitemapReader(urlset("/a", "x" * (1 << 20), "/b").encode())
    assert [entry.loc for entry in reader] == ["/a", "/b"]
    assert reader.skipped == 1
    text = SitemapReader(f"http://ex.com/a\nhttp://ex.com/{'x' * (1 << 20)}\nhttp://ex.com/b".encode())
    assert [entry.loc for entry in text] == ["http://ex.com/a", "http://ex.com/b"]
    assert text.skipped == 1


def test_an_entry_with_endless_alternates_and_fields() -> None:
    links = '<link rel="alternate" hreflang="de" href="/{}"/>'
    body = "<urlset><url><loc>/a</loc>" + links.format("x" * 60_000) * 50 + links.format("y") * 5000
    body += "".join(f"<f{n}>{'z' * 2000}</f{n}>" for n in range(1000)) + "".join(f"<g{n}>1</g{n}>" for n in range(1000))
    (entry,) = read(body)
    assert len(entry.alternates) <= 1000
    assert sum(len(each.url) for each in entry.alternates) <= 1 << 18
    assert len(entry.fields) <= 50


@pytest.mark.parametrize(
    "tag",
    [
        f"<link {'a' * 120_000}/>",
        f"<link {('a' * 200 + ' ' * 100) * 400}/>",
        f"<link {'a' * 200 + ' ' * 120_000}b/>",
        "<link " + '"' * 100_001 + ('"">' * 20) + ">" * 20,
        "<link " + "\"'" * 60_000 + ">" * 20,
    ],
)
def test_a_tag_of_odd_attributes_takes_linear_time(tag: str) -> None:
    body = ("<urlset><url><loc>/a</loc>" + tag * (2_000_000 // len(tag)) + "</url><url><loc>/b</loc></url>").encode()
    began = time.process_time()
    assert [entry.loc for entry in SitemapReader(body)][:1] == ["/a"]
    assert time.process_time() - began < 1


def test_fifty_thousand_urls() -> None:
    """The largest sitemap that the standard allows."""
    entry = "<url><loc>http://ex.com/{}</loc><lastmod>2026-05-01</lastmod><priority>0.5</priority></url>\n"
    body = ("<urlset>" + "".join(entry.format("p" * 800 + str(n)) for n in range(50_000)) + "</urlset>").encode()
    assert 40 << 20 < len(body) < 50 << 20
    assert sum(1 for _ in SitemapReader(body)) == 50_000
    count, peak, _ = measured(body[: 4 << 20])
    assert count > 4000
    assert peak < 4
