"""Heads and framing of HTTP messages: what the gateway understands, and what it passes on."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.fetch.browser.gateway_http import (
    CHUNKED,
    UNTIL_CLOSE,
    Chunks,
    absolute_target,
    authority,
    forwarded,
    parse_request,
    parse_response,
)


def request(*headers: str, line: str = "GET http://a.example/ HTTP/1.1") -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


def response(*headers: str, line: str = "HTTP/1.1 200 OK") -> bytes:
    return request(*headers, line=line)


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ([], 0),
        (["Content-Length: 0"], 0),
        (["Content-Length: 17"], 17),
        (["Content-Length: 17", "content-length: 17"], 17),
        (["Content-Length: 17, 17"], 17),
        (["Transfer-Encoding: Chunked"], CHUNKED),
    ],
)
def test_the_length_of_a_request(headers: list[str], length: int) -> None:
    assert parse_request(request(*headers)).length == length


@pytest.mark.parametrize(
    "head",
    [
        request("Content-Length: 5", "Transfer-Encoding: chunked"),
        request("Transfer-Encoding: gzip, chunked"),
        request("Transfer-Encoding: chunked", line="GET http://a.example/ HTTP/1.0"),
        request("Content-Length: 5", "Content-Length: 6"),
        request("Content-Length: -5"),
        request("Content-Length: +5"),
        request("Content-Length: 5 5"),
        request("Content-Length: 0x5"),
        request("Content-Length: " + "9" * 40),
        request("Content-Length:"),
        request("X: a\rb"),
        request("X: a\0b"),
        request(line="GET  http://a.example/ HTTP/1.1"),
        request(line="GET http://a.example/ HTTP/2.0"),
        request(line="GET http://a.example/"),
        request(line="GET http://\xe4.example/ HTTP/1.1"),
        request(line="\x16\x03\x01"),
        b"\r\n\r\n",
        b"",
    ],
)
def test_requests_that_are_refused(head: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_request(head)


@pytest.mark.parametrize(
    ("head", "length", "persistent"),
    [
        (response("Content-Length: 5"), 5, True),
        (response("Content-Length: 5", "Connection: Close"), 5, False),
        (response("Content-Length: 5", line="HTTP/1.0 200 OK"), 5, False),
        (response("Content-Length: 5", "Connection: keep-alive", line="HTTP/1.0 200 OK"), 5, True),
        (response(), UNTIL_CLOSE, False),
        (response("Transfer-Encoding: chunked"), CHUNKED, True),
        (response("Transfer-Encoding: chunked", "Content-Length: 5"), CHUNKED, False),
        (response("Content-Length: 5", line="HTTP/1.1 304 Not Modified"), 0, True),
        (response(line="HTTP/1.1 204"), 0, True),
        (b"HTTP/1.1 200 OK\nContent-Length: 5\n\n", 5, True),
        (response("Content-Length :5"), UNTIL_CLOSE, False),
        (response("no header", "Content-Length: 5"), 5, True),
        (response("Content-Length:", " 5"), 5, True),
    ],
)
def test_the_length_of_a_response(head: bytes, length: int, persistent: bool) -> None:
    parsed = parse_response(head)
    assert (parsed.length, parsed.persistent) == (length, persistent)


@pytest.mark.parametrize(
    "head",
    [
        response("Content-Length: 5", "Content-Length: 6"),
        response("Content-Length: -5"),
        response("Transfer-Encoding: gzip"),
        response("Transfer-Encoding: chunked, chunked"),
        response("Transfer-Encoding: chunked", line="HTTP/1.0 200 OK"),
        response("X: a\0b"),
        response(line="HTTP/1.1 20 OK"),
        response(line="HTTP/1.1 200 a\rb"),
        response(line="HTTP/2 200"),
        response(line="ICY 200 OK"),
    ],
)
def test_responses_that_are_refused(head: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_response(head)


def test_headers_of_one_connection_are_dropped() -> None:
    head = parse_request(
        request(
            "Host: a.example",
            "Proxy-Connection: keep-alive",
            "Connection: x-secret, close",
            "X-Secret: 1",
            "TE: trailers",
            "Proxy-Authorization: Basic eA==",
            "Upgrade: websocket",
            "Expect: 100-continue",
            "Accept: */*",
            "Content-Length: 0",
        )
    )
    assert forwarded(head) == [(b"Host", b"a.example"), (b"Accept", b"*/*"), (b"Content-Length", b"0")]
    assert not head.persistent


def test_a_response_keeps_its_declared_length_without_a_body() -> None:
    head = parse_response(response("Content-Length: 5", "Set-Cookie: a", "Set-Cookie: b"), to_head=True)
    assert head.length == 0
    assert forwarded(head) == [(b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Content-Length", b"5")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.example", ("a.example", 80)),
        ("a.example:", ("a.example", 80)),
        ("a_b.example:8080", ("a_b.example", 8080)),
        ("[::1]:1", ("::1", 1)),
        ("127.1", ("127.1", 80)),
    ],
)
def test_the_host_and_port(text: str, found: tuple[str, int]) -> None:
    assert authority(text, 80) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":80",
        "a:0",
        "a:65536",
        "a:-1",
        "a:8 0",
        "user@a",
        "[::1",
        "::1",
        "a/b",
        "a%2e",
        "[fe80::1%25eth0]",
        "a" * 300,
    ],
)
def test_hosts_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        authority(text, 80)


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("http://a.example", ("a.example", "/")),
        ("HTTP://a.example?q", ("a.example", "/?q")),
        ("http://a.example/b//c?d=http://x/#e", ("a.example", "/b//c?d=http://x/")),
        ("http:///etc", ("", "/etc")),
    ],
)
def test_the_parts_of_a_target(target: str, found: tuple[str, str]) -> None:
    assert absolute_target(target) == found


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.binary(max_size=20), st.data())
def test_the_end_of_a_body_in_chunks_is_found(parts: list[bytes], after: bytes, data: st.DataObject) -> None:
    extension = data.draw(st.sampled_from([b"", b";a=b", b" ; a"]))
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in parts) + b"0\r\nX: y\r\n\r\n"
    stream = body + after
    chunks, used = Chunks(), 0
    while not chunks.done:
        piece = stream[used : used + data.draw(st.integers(1, 60))]
        used += chunks.feed(piece)
    assert used == len(body)


@pytest.mark.parametrize(
    "body",
    [
        b"x\r\n", b"-1\r\n", b"0x5\r\nhello\r\n", b"5\nhello\n", b"5\r\nhelloX\n", b"5\r\nhello\n\n", b"\r\n",
        b" 5\r\nhello",
        b"f" * 20 + b"\r\n", b"5;" + b"x" * 5000, b"0\r\n" + b"X: y\r\n" * 5000, b"5_0\r\n", b"0\r\nX\r: y\r\n",
    ],
)  # fmt: skip
def test_chunks_that_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Chunks().feed(body)


@given(st.binary(max_size=200))
def test_random_bytes_never_break_a_parser(data: bytes) -> None:
    for parse in (parse_request, parse_response, Chunks().feed):
        with suppress(ValueError):
            parse(data)
