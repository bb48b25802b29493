"""HTTP servers for the tests on the loopback: one that misbehaves, a fast one, and a proxy.

Each is an async context manager, closes its connections at the end, and has a `url` without a trailing slash.
`python -m tests.support.servers --pages 3000` runs the fast one as a process.
"""

import argparse
import asyncio
import base64
import gzip
import html
import itertools
import json
import signal
import socket
import ssl
import struct
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Self, cast
from urllib.parse import parse_qs, urlsplit

import brotli
import zstandard

HTML = "text/html; charset=utf-8"
PLAIN = b"<!doctype html><title>Plain</title><h1>Plain</h1>" + b"<p>The same words, packed in many ways.</p>" * 20
HUGE = 10 * 2**30
# The checksum of HUGE zeros. Computing it takes seconds.
HUGE_CRC = 0xF41D912F

BROKEN_HTML = b"""<head><title>Broken</title><body><h1>Broken</h2><table><tr><td><p>cell<a href=/leaf/0>unquoted</a>
<div><a href='/leaf/1'>never closed<b><i>crossed</b></i></td></p></span><a href="/leaf/2>lost quote</a>
<p class="a" class="b" =x <a href="/leaf/3">in a tag</a>\x00&nosuch;&#xFFFFFFF;<!-- open comment <a href="/leaf/4">"""


@dataclass
class Visit:
    """One request, in seconds of `time.monotonic`. `end` is None until the response is complete."""

    host: str
    path: str
    start: float
    end: float | None = None


@dataclass
class Request:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def last(self) -> str:
        """The last segment of the path: the argument of some routes."""
        return self.path.rpartition("/")[2]

    def query(self, name: str) -> str | None:
        return parse_qs(self.target.partition("?")[2]).get(name, [None])[0]

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def wants_close(self) -> bool:
        return self.header("connection").lower() == "close"


async def read_head(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head[:-4].split("\r\n")
    method, target, _version = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return Request(method, target, headers)


async def read_body(reader: asyncio.StreamReader, request: Request) -> bytes:
    if request.header("transfer-encoding").lower() != "chunked":
        return await reader.readexactly(int(request.header("content-length") or 0))
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return body


def answer(body: bytes | str = b"", *headers: tuple[str, str], status: int = 200, content_type: str = HTML) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    return head(("Content-Type", content_type), ("Content-Length", str(len(body))), *headers, status=status) + body


def head(*headers: tuple[str, str], status: int = 200) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # tests also use status codes that do not exist
        phrase = "Unknown"
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1")


class StreamServer:
    """Runs `converse` as one task per connection. `connections` counts them."""

    def __init__(self, port: int = 0, *, tls: ssl.SSLContext | None = None) -> None:
        self.url = ""
        self.requests: list[Visit] = []
        self.connections = 0
        self._port = port
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, which is closed afterwards. May raise ConnectionError if the client leaves."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, backlog=1024, ssl=self._tls)
        scheme = "https" if self._tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._run(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self.converse(reader, writer)
                writer.close()
                await writer.wait_closed()
        finally:
            # Otherwise a client that stopped reading would keep the server open forever.
            writer.transport.abort()

    def _log(self, request: Request) -> Visit:
        visit = Visit(request.header("host"), request.target, monotonic())
        self.requests.append(visit)
        return visit


@dataclass
class Exchange:
    """A request and its connection, for a fault."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sent: Counter[str]

    async def send(self, data: bytes) -> None:
        """Send data. Raises ConnectionError when the client is gone, so that an endless response ends."""
        self.writer.write(data)
        self.sent[self.request.path] += len(data)
        await self.writer.drain()

    async def until_client_leaves(self) -> None:
        while await self.reader.read(65536):
            pass


# Faults. The connection is closed when they return.


async def hang(exchange: Exchange) -> None:
    await exchange.until_client_leaves()


async def hang_body(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Content-Length", "1000")))
    await exchange.until_client_leaves()


async def reset(exchange: Exchange) -> None:
    sock = exchange.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.writer.transport.abort()


async def half(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Content-Length", "1000")) + b"x" * 500)


async def half_chunked(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Transfer-Encoding", "chunked")))
    await exchange.send(b"3e8\r\n" + b"x" * 500)


async def bad_chunk(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Transfer-Encoding", "chunked")) + b"not a number\r\nx\r\n")


async def bad_length(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Content-Length", "-5")) + b"x")


async def endless_headers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\n")
    for start in itertools.count(step=100):
        lines = (f"X-Filler-{number}: {'x' * 100}\r\n" for number in range(start, start + 100))
        await exchange.send("".join(lines).encode())


async def huge(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Transfer-Encoding", "chunked")))
    for _ in range(HUGE // 65536):
        await exchange.send(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    await exchange.send(b"0\r\n\r\n")


async def huge_declared(exchange: Exchange) -> None:
    await exchange.send(head(("Content-Type", HTML), ("Content-Length", str(HUGE))))
    for _ in range(HUGE // 65536):
        await exchange.send(b"x" * 65536)


async def gzip_bomb(exchange: Exchange) -> None:
    """HUGE zeros in about 10 MB: one deflate block, repeated. A full flush makes it repeatable."""
    unit = 2**20
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    block = packer.compress(bytes(unit)) + packer.flush(zlib.Z_FULL_FLUSH)
    start = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\xff"
    end = b"\x03\x00" + struct.pack("<II", HUGE_CRC, HUGE % 2**32)
    length = len(start) + len(block) * (HUGE // unit) + len(end)
    headers = (("Content-Type", HTML), ("Content-Encoding", "gzip"), ("Content-Length", str(length)))
    await exchange.send(head(*headers) + start)
    for _ in range(HUGE // unit // 64):
        await exchange.send(block * 64)
    await exchange.send(end)


async def junk(exchange: Exchange) -> None:
    await exchange.send(b"\x00\xff\x16\x03 this is not HTTP\n\n" + bytes(range(256)))


async def slow_drip(exchange: Exchange) -> None:
    """Takes a minute, but sends a byte at least every 100 ms."""
    await exchange.send(head(("Content-Type", HTML), ("Content-Length", "600")))
    for _ in range(600):
        await exchange.send(b"x")
        await asyncio.sleep(0.1)


FAULTS: dict[str, Callable[[Exchange], Awaitable[None]]] = {
    "hang": hang,
    "hang-body": hang_body,
    "reset": reset,
    "half": half,
    "half-chunked": half_chunked,
    "bad-chunk": bad_chunk,
    "bad-length": bad_length,
    "endless-headers": endless_headers,
    "huge": huge,
    "huge-declared": huge_declared,
    "gzip-bomb": gzip_bomb,
    "junk": junk,
    "slow-drip": slow_drip,
}

# Responses: functions of the request. The connection stays open.


def packed(encoding: str, body: bytes) -> Callable[[Request], bytes]:
    return lambda request: answer(body, ("Content-Encoding", encoding))


def brotli_bomb(request: Request) -> bytes:
    """256 MB of zeros in a few hundred bytes."""
    packer = brotli.Compressor(quality=5, lgwin=24)
    body = b"".join([packer.process(bytes(2**24)) for _ in range(16)]) + packer.finish()
    return answer(body, ("Content-Encoding", "br"))


def zstd_bomb(request: Request) -> bytes:
    """256 MB of zeros in 8 KB: a frame of blocks, each of which means 128 KB of one byte."""
    size = 2**17
    block = struct.pack("<I", size << 3 | 1 << 1)[:3] + b"\0"
    last = struct.pack("<I", size << 3 | 1 << 1 | 1)[:3] + b"\0"
    return answer(b"\x28\xb5\x2f\xfd\x00\x58" + block * 2047 + last, ("Content-Encoding", "zstd"))


def deflate(data: bytes, wbits: int) -> bytes:
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(data) + packer.flush()


@dataclass(frozen=True)
class Charset:
    """A page in some encoding. `text` is its h1 when it is decoded correctly."""

    text: str
    encoding: str
    content_type: str = "text/html"
    head: str = ""

    def body(self) -> bytes:
        return f"<!doctype html><html><head>{self.head}</head><h1>{self.text}</h1></html>".encode(self.encoding)


CHARSETS = {
    "utf-8-bom": Charset("Ünïcödé ✓", "utf-8-sig"),
    "windows-1251": Charset("Привет, мир", "windows-1251", "text/html; charset=windows-1251"),
    "shift_jis": Charset("日本語の頁", "shift_jis", head='<meta charset="shift_jis">'),
    "wrong": Charset("naïve café", "utf-8", "text/html; charset=ascii"),
    "unknown": Charset("naïve café", "utf-8", "text/html; charset=x-no-such"),
    "none": Charset("naïve café", "utf-8"),
}


def charset(request: Request) -> bytes:
    page = CHARSETS.get(request.last)
    return answer(page.body(), content_type=page.content_type) if page else answer(status=404)


def redirect(request: Request) -> bytes:
    hops = int(request.last)
    return to(f"/redirect/{hops - 1}") if hops else answer("<h1>Arrived</h1>")


def to(location: str, status: int = 302) -> bytes:
    return answer(b"", ("Location", location), status=status)


def status(request: Request) -> bytes:
    retry_after = request.query("retry_after")
    headers = [("Retry-After", retry_after)] if retry_after is not None else []
    code = int(request.last)
    if code in (204, 304):  # these have neither a body nor a length
        return head(*headers, status=code)
    return answer(f"<h1>{code}</h1>", *headers, status=code)


def echo(request: Request) -> bytes:
    heard = {
        "method": request.method,
        "path": request.target,
        "headers": request.headers,
        "body": base64.b64encode(request.body).decode(),
    }
    return answer(json.dumps(heard), content_type="application/json")


ODD_HREFS = [
    "http://[::g]/", "http://[bad", "http://a b/", "http://exa\0mple/", "http://%00/", "http://127.0.0.1:99999/",
    "http://127.0.0.1:-1/", "http://user@:80/", "http://:/", "http://", "http:", "//", "", "#", "   ",
    "mailto:a@b.c", "javascript:void(0)", "data:text/html,<h1>x</h1>", "ftp://127.0.0.1/", "file:///etc/passwd",
    "?" * 3000,
]  # fmt: skip


def odd_links(request: Request) -> bytes:
    """Unusable hrefs, and one that leads to a leaf."""
    links = "".join(f'<a href="{html.escape(href)}">odd</a>\n' for href in ODD_HREFS)
    return answer(f"<h1>Odd</h1>{links}<a href='/leaf/good'>good</a>")


def links(request: Request) -> bytes:
    return answer("<h1>Links</h1>" + "".join(f'<a href="/leaf/{i}">{i}</a>\n' for i in range(int(request.last))))


ANSWERS: dict[str, Callable[[Request], bytes]] = {
    "huge-header": lambda request: answer(PLAIN, ("X-Huge", "x" * 2**20)),
    "bad-gzip": packed("gzip", b"this was never gzip" * 20),
    "truncated-gzip": packed("gzip", gzip.compress(PLAIN)[:-20]),
    "gzip": packed("gzip", gzip.compress(PLAIN)),
    "deflate-raw": packed("deflate", deflate(PLAIN, -zlib.MAX_WBITS)),
    "deflate-zlib": packed("deflate", deflate(PLAIN, zlib.MAX_WBITS)),
    "br": packed("br", brotli.compress(PLAIN)),
    "zstd": packed("zstd", zstandard.compress(PLAIN)),
    "unknown-encoding": packed("x-no-such", PLAIN),
    "brotli-bomb": brotli_bomb,
    "zstd-bomb": zstd_bomb,
    "charset": charset,
    "broken-html": lambda request: answer(BROKEN_HTML),
    "redirect-loop": lambda request: to("/redirect-loop"),
    "redirect": redirect,
    "redirect-out": lambda request: to(request.query("to") or "/", int(request.query("status") or 302)),
    "redirect-bad": lambda request: to("http://[bad"),
    "redirect-no-location": lambda request: answer(status=302),
    "status": status,
    "set-cookie": lambda request: answer("<h1>Set</h1>", ("Set-Cookie", "flavour=oat; Path=/")),
    "show-cookie": lambda request: answer(request.header("cookie"), content_type="text/plain"),
    "echo": echo,
    "empty": lambda request: answer(),
    "links": links,
    "odd-links": odd_links,
    "leaf": lambda request: answer(f"<h1>Leaf {request.last}</h1>"),
}


class MisbehavingServer(StreamServer):
    """Has one path per misbehaviour: the keys of FAULTS and ANSWERS, some with an argument (`/status/503`).

    `requests` has every visit in order of arrival. The `end` of a request that hangs is when its client left. `sent`
    counts the bytes that a fault has sent, by path. `robots` is the path whose response is served as robots.txt.
    """

    def __init__(self, port: int = 0, *, tls: ssl.SSLContext | None = None, robots: str | None = None) -> None:
        super().__init__(port, tls=tls)
        self.sent: Counter[str] = Counter()
        self._robots = robots

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep = True
        while keep:
            request = await read_head(reader)
            visit = self._log(request)
            try:
                request.body = await read_body(reader, request)
                if request.path == "/robots.txt" and self._robots:
                    request.target = self._robots
                name = request.path.split("/")[1]
                if fault := FAULTS.get(name):
                    await fault(Exchange(request, reader, writer, self.sent))
                    return
                keep = not request.wants_close
                writer.write(self._answer(name, request))
                await writer.drain()
            finally:
                visit.end = monotonic()

    def _answer(self, name: str, request: Request) -> bytes:
        try:
            data = ANSWERS[name](request)
        except KeyError:
            data = answer("<h1>No such path</h1>", status=404)
        except ValueError:
            data = answer("<h1>Not a number</h1>", status=400)
        first, rest = data.split(b"\r\n", 1)
        if request.wants_close:
            rest = b"Connection: close\r\n" + rest
        if request.method == "HEAD":
            rest = rest.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
        return first + b"\r\n" + rest


class ProxyServer(StreamServer):
    """Forwards absolute-form requests and CONNECT tunnels to the loopback, and refuses all other hosts.

    `requests` has one visit per request. Its path is the absolute URL, or `host:port` for a tunnel. Connections come
    from the address `source`. With a `login` (`user:password`), it answers 407 to requests without it.
    """

    def __init__(self, source: str = "127.0.0.1", login: str = "", *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls=tls)
        self.source = source
        self._login = login

    @property
    def address(self) -> str:
        """The URL of this proxy, with its user and password."""
        return self.url.replace("://", f"://{self._login}@") if self._login else self.url

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_head(reader)
        visit = self._log(request)
        try:
            wanted = f"Basic {base64.b64encode(self._login.encode()).decode()}"
            if self._login and request.header("proxy-authorization") != wanted:
                writer.write(answer(b"", ("Proxy-Authenticate", "Basic"), ("Connection", "close"), status=407))
            else:
                await self._forward(request, reader, writer)
        finally:
            visit.end = monotonic()

    async def _forward(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tunnel = request.method == "CONNECT"
        url = urlsplit(f"//{request.target}" if tunnel else request.target)
        host = url.hostname or ""
        if host != "localhost" and not host.startswith("127."):
            writer.write(answer(b"", ("Connection", "close"), status=403))
            return
        try:
            upstream_reader, upstream = await asyncio.open_connection(host, url.port or 80, local_addr=(self.source, 0))
        except OSError:
            writer.write(answer(b"", ("Connection", "close"), status=502))
            return
        try:
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream.write(origin_form(request))
            up = asyncio.create_task(pump(reader, upstream))
            try:
                await pump(upstream_reader, writer)
            finally:
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)
        finally:
            upstream.transport.abort()


def origin_form(request: Request) -> bytes:
    """The request in origin form, with one exchange per connection: the end of the connection ends the response."""
    url = urlsplit(request.target)
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    hop = ("connection", "proxy-connection", "proxy-authorization")
    kept = [(n, v) for n, v in request.headers if n.lower() not in hop]
    lines = [f"{request.method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in kept), "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # includes "not connected", which write_eof raises after a reset
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class SiteServer:
    """A fast site, for GET only, the same each time: `/`, and `/p/<i>` for i < pages, all reachable from `/`.

    `hits` counts responses by path. `log` has every visit, including robots.txt. For a server in another process, both
    are served as JSON at `/-/hits` and `/-/log`, which are not counted. `paths` are all pages of a complete crawl.
    """

    def __init__(
        self, pages: int = 3000, links: int = 10, *, port: int = 0, latency: float = 0.0, robots: str | None = None
    ) -> None:
        self.url = ""
        self.hits: Counter[str] = Counter()
        self.log: list[Visit] = []
        self.latency = latency
        self.paths = ["/", *(f"/p/{i}" for i in range(pages))]
        self.open: set[SiteConnection] = set()
        self._port = port
        self._answers = {path: answer(site_page(node, pages, links)) for node, path in enumerate(self.paths)}
        if robots is not None:
            self._answers["/robots.txt"] = answer(robots, content_type="text/plain")
        self._missing = answer("<h1>No such page</h1>", status=404)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: SiteConnection(self), "127.0.0.1", self._port, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        connections = list(self.open)
        for connection in connections:
            connection.transport.abort()
        await asyncio.gather(*(connection.lost for connection in connections))
        await self._server.wait_closed()

    def answer(self, path: str) -> bytes:
        if path == "/-/hits":
            return answer(json.dumps(self.hits), content_type="application/json")
        if path == "/-/log":
            visits = [[visit.host, visit.path, visit.start, visit.end] for visit in self.log]
            return answer(json.dumps(visits), content_type="application/json")
        self.hits[path] += 1
        return self._answers.get(path, self._missing)


def site_page(node: int, pages: int, links: int) -> str:
    """A page of a tree: `/` is node 0, `/p/<i>` is node i + 1. Cross links give the leaves as many links."""
    children = range(node * links, min((node + 1) * links, pages))
    across = ((node * 31 + k * 17 + 1) % pages for k in range(links - len(children)))
    title = f"Page {node - 1}" if node else "Site"
    items = "".join(f'<li><a href="/p/{i}">Page {i}</a></li>\n' for i in (*children, *across))
    return f"<!doctype html><title>{title}</title><h1>{title}</h1>\n<ul>\n{items}</ul>\n"


@dataclass(eq=False)
class SiteConnection(asyncio.Protocol):
    """One connection. Handles one request at a time, so that pipelined responses keep their order."""

    site: SiteServer
    transport: asyncio.Transport = field(init=False)
    lost: asyncio.Future[None] = field(init=False)
    _buffer: bytes = b""
    _visit: Visit | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transports are not a subclass.
        self.transport = cast(asyncio.Transport, transport)
        self.lost = asyncio.get_running_loop().create_future()
        self.site.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.site.open.discard(self)
        if self._visit is not None:
            self._visit.end = monotonic()
        self.lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def _next(self) -> None:
        while self._visit is None and not self.transport.is_closing():
            head, end, rest = self._buffer.partition(b"\r\n\r\n")
            if not end:
                return
            self._buffer = rest
            self._begin(head.decode("latin-1"))

    def _begin(self, head: str) -> None:
        path = head.split(" ", 2)[1]
        lines = head.lower().split("\r\n")
        host = next((line[5:].strip() for line in lines if line.startswith("host:")), "")
        close = "connection: close" in lines
        self._visit = Visit(host, path, monotonic())
        if not path.startswith("/-/"):
            self.site.log.append(self._visit)
        if self.site.latency:
            asyncio.get_running_loop().call_later(self.site.latency, self._late, close)
        else:
            self._finish(close)

    def _late(self, close: bool) -> None:
        if not self.transport.is_closing():
            self._finish(close)
            self._next()

    def _finish(self, close: bool) -> None:
        assert self._visit is not None
        data = self.site.answer(self._visit.path)
        if close:
            data = data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        self._visit.end = monotonic()  # before the response: a delay here must not shorten the measured pause
        self.transport.write(data)
        self._visit = None
        if close:
            self.transport.close()


async def serve(site: SiteServer) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    async with site:
        print(site.url, flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.servers", description="Run a SiteServer, and print its URL."
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--pages", type=int, default=3000)
    parser.add_argument("--links", type=int, default=10)
    parser.add_argument("--latency", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--robots", type=Path, metavar="FILE", help="the robots.txt (default: 404)")
    args = parser.parse_args()
    robots = args.robots.read_text() if args.robots else None
    asyncio.run(serve(SiteServer(args.pages, args.links, port=args.port, latency=args.latency, robots=robots)))


if __name__ == "__main__":
    main()
