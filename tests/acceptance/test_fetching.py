"""How pages are fetched: connections, proxies, time limits, TLS, sizes, cookies, redirects, headers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shoal import Request, Response
from tests.acceptance.crawls import Pages, crawl_beside
from tests.support.loops import only_uvloop as event_loop_policy
from tests.support.patience import allowance
from tests.support.servers import HUGE, PLAIN, MisbehavingServer, ProxyServer

__all__ = ["event_loop_policy"]


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with MisbehavingServer() as server:
        yield server


class Echoes(Pages):
    """What the server heard."""

    def handle(self, response: Response) -> Any:
        heard = response.json()
        headers = {name.lower(): value for name, value in heard["headers"]}
        return {**heard, "headers": headers, "redirects": response.redirects}


# -- connections and time


async def test_a_connection_is_used_again(server: MisbehavingServer) -> None:
    items, _ = await crawl_beside(server, *(f"/leaf/{number}" for number in range(20)), concurrency=1)
    assert len(items) == 20
    assert server.connections == 1


async def test_a_connection_is_not_used_again_after_half_an_answer(server: MisbehavingServer) -> None:
    items, summary = await crawl_beside(server, "/huge", "/leaf/1", concurrency=1)
    assert [item["h1"] for item in items] == ["Leaf 1"]
    assert summary.dead_kinds == {"too large": 1}
    assert server.connections == 2


async def test_a_connection_that_the_server_closed_meanwhile_costs_no_page() -> None:
    """Between two crawl steps the server is gone and back: the idle connection is stale, and nobody needs to know."""

    class Twice(Pages):
        async def handle(self, response: Response) -> Any:
            await first.__aexit__()
            await second.__aenter__()
            return Request(second.url + "/leaf/again", callback=self.parse)

    async with MisbehavingServer() as other:
        first = await MisbehavingServer().__aenter__()
        second = MisbehavingServer(port=int(first.url.rpartition(":")[2]))
        items, summary = await crawl_beside(other, first.url + "/leaf/1", spider=Twice)
        await second.__aexit__()
    assert [item["h1"] for item in items] == ["Leaf again"]
    assert summary.counters.errors == {}


async def test_a_request_has_its_own_time_limit(server: MisbehavingServer, caplog: Any) -> None:
    class Impatient(Pages):
        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{server.url}/hang", timeout=0.2)
            yield Request(f"{server.url}/slow-drip", timeout=0.3)

    _, summary = await crawl_beside(server, spider=Impatient)
    assert summary.dead_kinds == {"timeout": 2}
    assert "did not send the whole page within 0.2 s (the request's timeout)" in caplog.text
    assert summary.elapsed < allowance(5)


async def test_another_attempt_may_help(server: MisbehavingServer) -> None:
    class Flaky(Pages):
        def handle(self, response: Response) -> Any:
            return {"attempts": len(flaky.requests)}

    class FlakyServer(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            return super()._answer("status" if len(self.requests) < 3 else "leaf", request)

    async with FlakyServer() as flaky:
        items, summary = await crawl_beside(server, flaky.url + "/x/503", spider=Flaky, **{"retry.max_attempts": 3})
    assert items == [{"attempts": 3}]
    assert summary.counters.retried == 2
    assert summary.counters.errors == {"http 503": 2}
    assert summary.dead_kinds == {}


# -- sizes and codings


@pytest.mark.parametrize("coding", ["gzip", "deflate-raw", "deflate-zlib", "br", "zstd"])
async def test_content_codings_are_undone(server: MisbehavingServer, coding: str) -> None:
    class Bodies(Pages):
        def handle(self, response: Response) -> Any:
            return {"body": response.body}

    items, _ = await crawl_beside(server, f"/{coding}", spider=Bodies)
    assert items == [{"body": PLAIN}]


@pytest.mark.parametrize(("limit", "dead"), [(len(PLAIN), {}), (len(PLAIN) - 1, {"too large": 1})])
@pytest.mark.parametrize("path", ["/plain", "/plain-chunked", "/gzip", "/br", "/zstd"])
async def test_the_size_limit_is_exact(path: str, limit: int, dead: dict[str, int]) -> None:
    async with PlainServer() as server:
        _, summary = await crawl_beside(server, path, **{"http.max_body_bytes": limit})
    assert summary.dead_kinds == dead


class PlainServer(MisbehavingServer):
    """PLAIN with a length, and in chunks that arrive at once."""

    def _answer(self, name: str, request: Any) -> bytes:
        if name == "plain":
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(PLAIN), PLAIN)
        if name == "plain-chunked":
            return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(PLAIN), PLAIN)
        return super()._answer(name, request)


async def test_head_may_declare_what_it_likes(server: MisbehavingServer) -> None:
    class Heads(Pages):
        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{declaring.url}/x", method="HEAD", callback=self.length)

        def length(self, response: Response) -> Any:
            return {"length": response.headers["Content-Length"], "body": len(response.body)}

    class Declaring(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % HUGE

    async with Declaring() as declaring:
        items, _ = await crawl_beside(server, spider=Heads)
    assert items == [{"length": str(HUGE), "body": 0}]


# -- what is sent


async def test_headers_and_bodies_are_sent(server: MisbehavingServer) -> None:
    class Sends(Echoes):
        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{server.url}/echo?plain", headers={"X-Own": "1", "accept": "text/x"}, callback=self.handle)
            yield Request(f"{server.url}/echo?json", json={"a": "ü"}, callback=self.handle)
            yield Request(f"{server.url}/echo?form", form={"a": "ü &"}, callback=self.handle)
            yield Request(f"{server.url}/echo?put", method="put", body=b"\x00\xff", callback=self.handle)

    settings = {"user_agent": "tester/1 (+http://x/)", "http.headers": {"X-All": "2", "X-Own": "0"}}
    items, _ = await crawl_beside(server, spider=Sends, **settings)
    heard = {item["path"].partition("?")[2]: item for item in items}
    for item in items:
        assert item["headers"]["user-agent"] == "tester/1 (+http://x/)"
        assert item["headers"]["x-all"] == "2"
        assert item["headers"]["accept-encoding"] == "gzip, deflate, br, zstd"
        assert item["headers"]["host"] == server.url.removeprefix("http://")
    assert heard["plain"]["method"] == "GET"
    assert heard["plain"]["headers"]["x-own"] == "1"
    assert heard["plain"]["headers"]["accept"] == "text/x"
    assert heard["json"]["method"] == heard["form"]["method"] == "POST"
    assert json.loads(base64.b64decode(heard["json"]["body"])) == {"a": "ü"}
    assert heard["json"]["headers"]["content-type"] == "application/json"
    assert base64.b64decode(heard["form"]["body"]) == b"a=%C3%BC+%26"
    assert heard["put"]["method"] == "PUT"
    assert base64.b64decode(heard["put"]["body"]) == b"\x00\xff"


class Cookies(Pages):
    """One page sets a cookie, the next shows what came back, and a third has one of its own."""

    def handle(self, response: Response) -> Any:
        yield Request(response.urljoin("/show-cookie?jar"), callback=self.show)
        yield Request(response.urljoin("/show-cookie?own"), callback=self.show, cookies={"own": "1"})
        header = {"Cookie": "header=1"}
        yield Request(response.urljoin("/show-cookie?header"), callback=self.show, cookies={"own": "1"}, headers=header)

    def show(self, response: Response) -> Any:
        yield {response.url.partition("?")[2]: set(response.text.split("; ")) - {""}}


async def test_cookies_are_kept_for_their_host(server: MisbehavingServer) -> None:
    async with MisbehavingServer() as other:

        class Elsewhere(Cookies):
            def handle(self, response: Response) -> Any:
                yield from super().handle(response)
                yield Request(other.url.replace("127.0.0.1", "localhost") + "/show-cookie?other", callback=self.show)

        items, _ = await crawl_beside(server, "/set-cookie", spider=Elsewhere)
    shown = {name: set(value) for item in items for name, value in item.items()}
    assert shown == {"jar": {"flavour=oat"}, "own": {"flavour=oat", "own=1"}, "header": {"header=1"}, "other": set()}


async def test_without_a_jar_a_request_still_has_its_own_cookies(server: MisbehavingServer) -> None:
    items, _ = await crawl_beside(server, "/set-cookie", spider=Cookies, cookies=False)
    shown = {name: set(value) for item in items for name, value in item.items()}
    assert shown == {"jar": set(), "own": {"own=1"}, "header": {"header=1"}}


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        ("a=1; Path=/; Partitioned; SameSite=Lax; Priority=High", "a=1"),  # attributes that are younger than the parser
        ("a=1; Nonsense Flag; Path=/", "a=1"),
        ('a={"b":1}; Path=/', 'a={"b":1}'),
        ("a=1; Domain=example.com", ""),
        ("a=1; Max-Age=-1", ""),
        ("a=1; Expires=Foo, 99 Bar 99999 99:99:99 GMT", "a=1"),
        ('a="\\015\\012X-Injected: 1"', 'a="\\015\\012X-Injected: 1"'),  # as it came: nobody reads its escapes
        ("=", ""),
        (";;;", ""),
        ("a b=1", "a b=1"),
        ("\x7f=\x7f", ""),
    ],
)
async def test_odd_cookies(server: MisbehavingServer, line: str, sent: str) -> None:
    class Setting(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            if name == "set":
                return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nSet-Cookie: " + line.encode("latin-1") + b"\r\n\r\n"
            return super()._answer(name, request)

    async with Setting() as setting:
        items, summary = await crawl_beside(server, setting.url + "/set", spider=OneCookie)
    assert items == [{"sent": sent}]
    assert summary.dead_kinds == {}


class OneCookie(Pages):
    def handle(self, response: Response) -> Any:
        return Request(response.urljoin("/show-cookie"), callback=self.show)

    def show(self, response: Response) -> Any:
        return {"sent": response.text}


# -- redirects


async def test_redirects_are_followed_one_by_one(server: MisbehavingServer) -> None:
    class Chains(Pages):
        def handle(self, response: Response) -> Any:
            yield {"h1": response.css("h1::text").get(), "redirects": response.redirects, "meta": response.meta}

        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{server.url}/redirect/3", meta={"kept": True}, callback=self.handle)

    items, summary = await crawl_beside(server, spider=Chains)
    hops = [f"{server.url}/redirect/{number}" for number in (3, 2, 1)]
    assert items == [{"h1": "Arrived", "redirects": hops, "meta": {"kept": True}}]
    assert summary.counters.redirected == 3
    assert summary.stats.done == 5
    assert summary.counters.fetched == 5


@pytest.mark.parametrize(
    ("status", "method", "body"),
    [(301, "GET", b""), (302, "GET", b""), (303, "GET", b""), (307, "POST", b"{}"), (308, "POST", b"{}")],
)
async def test_what_becomes_of_a_post(server: MisbehavingServer, status: int, method: str, body: bytes) -> None:
    class Posts(Echoes):
        def start(self) -> Any:
            yield from super().start()
            yield Request(f"{server.url}/redirect-out?to=/echo&status={status}", json={}, callback=self.handle)

    items, _ = await crawl_beside(server, spider=Posts)
    assert items[0]["method"] == method
    assert base64.b64decode(items[0]["body"]) == body
    assert ("content-type" in items[0]["headers"]) is bool(body)


SECRETS = [
    "Proxy-Authorization", "X-Api-Key", "Api-Key", "ApiKey", "X-Auth-Token", "X-Access-Token", "X-Csrf-Token",
    "X-Xsrf-Token", "X-Amz-Security-Token", "X-Goog-Api-Key", "X-Vault-Token", "Private-Token", "Job-Token",
    "Ocp-Apim-Subscription-Key", "X-Functions-Key", "X-Shopify-Access-Token", "X-Auth", "X-Session", "X-User-Email",
    "Referer", "Origin", "X-Made-Up-Here",
]  # fmt: skip


async def test_credentials_do_not_follow_a_redirect_to_another_host(server: MisbehavingServer) -> None:
    async with MisbehavingServer() as other:

        class Secret(Echoes):
            def start(self) -> Any:
                yield from super().start()
                for place in (server.url, other.url):
                    yield Request(
                        f"{server.url}/redirect-out?to={place}/echo",
                        headers={
                            "Authorization": "Basic c2VjcmV0",
                            "Accept-Language": "fi",
                            **dict.fromkeys(SECRETS, "1"),
                        },
                        cookies={"session": "secret"},
                        callback=self.handle,
                    )

        items, _ = await crawl_beside(server, spider=Secret)
    heard = {item["headers"]["host"]: item["headers"] for item in items}
    home, away = heard[server.url.removeprefix("http://")], heard[other.url.removeprefix("http://")]
    assert home["authorization"] == "Basic c2VjcmV0"
    assert home["cookie"] == "session=secret"
    assert away["accept-language"] == "fi"
    assert "cookie" not in away
    for name in ("Authorization", *SECRETS):
        assert name.lower() in home, name
        assert name.lower() not in away, name


async def test_a_page_may_set_a_cookie_and_send_back_to_itself(server: MisbehavingServer) -> None:
    class Gate(MisbehavingServer):
        def _answer(self, name: str, request: Any) -> bytes:
            if "pass=1" in request.header("cookie"):
                return super()._answer("leaf", request)
            return b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nSet-Cookie: pass=1\r\nLocation: /gate\r\n\r\n"

    async with Gate() as gate:
        items, summary = await crawl_beside(server, gate.url + "/gate")
    assert [item["h1"] for item in items] == ["Leaf gate"]
    assert summary.counters.redirected == 1


# -- proxies and TLS


async def test_a_certificate_that_nobody_vouches_for(
    server: MisbehavingServer, secure: MisbehavingServer, caplog: Any
) -> None:
    items, summary = await crawl_beside(server, secure.url + "/leaf/1", **{"retry.max_attempts": 3})
    assert items == []
    assert summary.dead_kinds == {"tls": 1}
    assert summary.counters.retried == 0
    assert "is not trusted" in caplog.text
    assert "self-signed" in caplog.text
    assert "(http.verify_tls)" in caplog.text
    assert secure.requests == []


async def test_certificates_need_not_be_verified(server: MisbehavingServer, secure: MisbehavingServer) -> None:
    items, _ = await crawl_beside(server, secure.url + "/leaf/1", **{"http.verify_tls": False})
    assert [item["h1"] for item in items] == ["Leaf 1"]


async def test_a_certificate_of_an_authority_that_the_system_trusts(
    secure: MisbehavingServer, certificate: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shoal.cli.main", "crawl", secure.url + "/leaf/1", "-q", "--delay", "0"),
        env={**os.environ, "SSL_CERT_FILE": str(certificate.with_suffix(".crt"))},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    assert json.loads(out)["url"] == secure.url + "/leaf/1"


async def test_no_tls_where_it_is_expected(server: MisbehavingServer, caplog: Any) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1") as plain:
        port = plain.sockets[0].getsockname()[1]
        _, summary = await crawl_beside(server, f"https://127.0.0.1:{port}/")
    assert summary.dead_kinds == {"tls": 1}
    assert f"no secure connection to 127.0.0.1:{port}: " in caplog.text


@pytest.fixture
async def proxy() -> AsyncIterator[ProxyServer]:
    async with ProxyServer() as proxy:
        yield proxy


async def test_a_proxy_for_all(server: MisbehavingServer, proxy: ProxyServer) -> None:
    items, _ = await crawl_beside(server, "/leaf/1", **{"http.proxy": proxy.url})
    assert [item["h1"] for item in items] == ["Leaf 1"]
    assert {visit.path for visit in proxy.requests} == {f"{server.url}/leaf/1", f"{server.url}/leaf/healthy"}


async def test_a_proxy_for_one_request(server: MisbehavingServer) -> None:
    async with ProxyServer(login="user:secret") as proxy:

        class Through(Echoes):
            def start(self) -> Any:
                yield from super().start()
                yield Request(f"{server.url}/echo", proxy=proxy.address, callback=self.handle)

        items, _ = await crawl_beside(server, spider=Through)
        assert [visit.path for visit in proxy.requests] == [f"{server.url}/echo"]
    assert len(items) == 1


async def test_a_tunnel_for_https(server: MisbehavingServer, secure: MisbehavingServer, proxy: ProxyServer) -> None:
    settings = {"http.proxy": proxy.url, "http.verify_tls": False}
    items, _ = await crawl_beside(server, secure.url + "/leaf/1", **settings)
    assert [item["h1"] for item in items] == ["Leaf 1"]
    assert secure.url.removeprefix("https://") in {visit.path for visit in proxy.requests}


@pytest.mark.parametrize(
    ("via", "target", "message"),
    [
        ("http://user:secret@127.0.0.1:1", "http://127.0.0.1/", "no connection to the proxy 127.0.0.1:1: "),
        ("{proxy}", "https://192.0.2.1/", "the proxy did not connect to 192.0.2.1: it answered 403"),
        ("socks4://127.0.0.1:1", "http://127.0.0.1/", "the proxy socks4:// is not supported"),
        ("nonsense", "http://127.0.0.1/", "the proxy nonsense:// is not supported"),
    ],
)  # fmt: skip
async def test_a_proxy_that_is_of_no_use(
    server: MisbehavingServer, proxy: ProxyServer, caplog: Any, via: str, target: str, message: str
) -> None:
    class Through(Pages):
        def start(self) -> Any:
            yield from super().start()
            yield Request(target, proxy=via.replace("{proxy}", proxy.url))

    _, summary = await crawl_beside(server, spider=Through)
    assert summary.dead_kinds == {"proxy": 1}
    assert message in caplog.text
    assert "secret" not in caplog.text
