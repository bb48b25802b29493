"""The gateway of the browser with real sockets: requests, tunnels, and what hostile bytes do to them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from shoal.fetch.browser.gateway import Gateway, Listener
from shoal.fetch.guard import AddressGuard
from tests.fetch.gateway.client import Client, Conversing, Scripted, until
from tests.support.servers import MisbehavingServer, answer, read_head

# -- http:// URLs


async def test_one_connection_serves_many_sites(site: MisbehavingServer, client: Client, listener: Listener) -> None:
    async with MisbehavingServer() as other:
        for number in range(3):
            for server in (site, other):
                reply = await client.get(f"{server.url}/leaf/{number}")
                assert (reply.status, reply.body) == (200, b"<h1>Leaf %d</h1>" % number)
        assert (site.connections, other.connections) == (1, 1)
    assert listener.refused == {}


async def test_what_the_site_sees(site: MisbehavingServer, client: Client) -> None:
    where = site.url.removeprefix("http://")
    reply = await client.get(
        f"{site.url}/echo?a=b#c", "Proxy-Connection: keep-alive", "Proxy-Authorization: Basic eA==", "X-Own: 1"
    )
    seen = json.loads(reply.body)
    assert seen["path"] == "/echo?a=b"
    assert seen["headers"] == [["Host", where], ["X-Own", "1"]]


async def test_the_host_of_the_url_counts(site: MisbehavingServer, client: Client) -> None:
    """A site must not be asked in the name of another one."""
    reply = await client.ask(f"GET {site.url}/echo HTTP/1.1\r\nHost: other.example\r\n\r\n")
    assert ["Host", site.url.removeprefix("http://")] in json.loads(reply.body)["headers"]


@pytest.mark.parametrize(
    "framing", ["Content-Length: 5\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"]
)
async def test_bodies_of_requests(site: MisbehavingServer, client: Client, framing: str) -> None:
    for _ in range(2):
        reply = await client.ask(f"POST {site.url}/echo HTTP/1.1\r\nHost: x\r\n{framing}")
        assert json.loads(reply.body)["body"] == "aGVsbG8="
    assert site.connections == 2  # a connection is kept only for requests that can be repeated


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 200, b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhi\r\n0\r\nA: b\r\n\r\n", 200, b"hi"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", 304, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer(b"hi"), 200, b"hi"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nhi", 200, b"hi"),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
    ],
)
async def test_framing_of_responses(sent: bytes, status: int, body: bytes, client: Client) -> None:
    async with Scripted(sent, sent) as site:
        for _ in range(2):
            reply = await client.get(f"{site.url}/")
            assert (reply.status, reply.body) == (status, body)
            assert reply.headers["connection"] == "keep-alive"
        assert site.connections == 1


async def test_a_response_that_ends_with_its_connection(client: Client) -> None:
    async with Scripted(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhello") as site:
        reply = await client.get(f"{site.url}/")
        assert (reply.body, reply.headers["connection"]) == (b"hello", "close")
        assert await client.ended()


async def test_a_browser_that_is_slow_to_read_the_end_of_a_response(listener: Listener) -> None:
    """The whole response is in the buffers of the gateway when the site has gone."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", int(listener.url.rpartition(":")[2])))
    client = Client(await asyncio.open_connection(sock=made, limit=4096))
    await until(lambda: len(listener._conversations) == 1)
    (conversation,) = listener._conversations
    assert conversation._client.transport is not None
    conversation._client.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with Scripted(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000) as site:
        client.writer.write(f"GET {site.url}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await client.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(1.5)  # longer than the gateway waits for what a browser still sends
        assert len(await client.reader.read()) == 200_000
    client.close()


async def test_head(site: MisbehavingServer, client: Client) -> None:
    reply = await client.get(f"{site.url}/leaf/1", method="HEAD")
    assert reply.headers["content-length"] == "15"
    assert (await client.get(f"{site.url}/leaf/1")).body == b"<h1>Leaf 1</h1>"


async def test_a_kept_connection_that_the_site_closed(client: Client) -> None:
    """The request is sent again on a new connection."""
    async with Scripted(answer(b"one")) as site:
        for _ in range(3):
            assert (await client.get(f"{site.url}/")).body == b"one"


async def test_a_kept_connection_with_more_bytes_than_asked_for(client: Client) -> None:
    """A site can't answer a request that it has not got."""
    async with Scripted(answer(b"one") + answer(b"two"), answer(b"three")) as site:
        assert (await client.get(f"{site.url}/a")).body == b"one"
        assert (await client.get(f"{site.url}/b")).body == b"one"
        assert site.connections == 2


async def test_a_kept_connection_that_gets_an_answer_too_early(client: Client, listener: Listener) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(answer(b"one"))
        await asyncio.sleep(0.05)
        writer.write(answer(b"forged"))
        await reader.read()

    async with Conversing(converse) as site:
        assert (await client.get(f"{site.url}/a")).body == b"one"
        (kept,) = listener._kept
        await until(lambda: kept.pending)
        assert (await client.get(f"{site.url}/b")).body == b"one"


async def test_a_site_that_answers_before_it_reads(client: Client) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(answer(b"enough", status=413))
        await asyncio.sleep(60)

    async with Conversing(converse) as site:
        client.writer.write(f"POST {site.url}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n".encode())
        client.writer.write(b"GET http://127.0.0.1:1/ HTTP/1.1\r\n\r\n" * 100_000)
        reply = await client.reply()
        assert (reply.status, reply.body, reply.headers["connection"]) == (413, b"enough", "close")
        assert await client.ended()  # and what looks like other requests is not served


# -- tunnels


async def test_a_tunnel_with_tls(certificate: Path, client: Client, listener: Listener) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    client_side = ssl.create_default_context(cafile=certificate)
    async with MisbehavingServer(tls=server_side) as site:
        assert (await client.connect(site.url)).status == 200
        await client.writer.start_tls(client_side, server_hostname="127.0.0.1")
        client.writer.write(b"GET /leaf/3 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.reply()).body == b"<h1>Leaf 3</h1>"
    assert listener.received > 500


async def test_a_websocket_through_a_tunnel(listener: Listener) -> None:
    aiohttp = pytest.importorskip("aiohttp")
    web = pytest.importorskip("aiohttp.web")

    async def echo(request: object) -> object:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data.upper())
        return socket

    app = web.Application()
    app.router.add_get("/", echo)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    made = await Client.to(listener)
    assert (await made.connect(f"ws://{host}:{port}")).status == 200
    made.writer.write(
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    assert (await made.reply(to_head=True)).status == 101
    made.writer.write(b"\x81\x82\0\0\0\0hi")
    assert await made.reader.readexactly(4) == b"\x81\x02HI"
    made.close()
    await runner.cleanup()
    assert aiohttp.__version__


async def test_each_direction_of_a_tunnel_ends_by_itself(client: Client) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        everything = await reader.read()
        writer.write(b"heard %d, " % len(everything))
        await writer.drain()
        writer.write(b"bye")

    async with Conversing(converse) as site:
        assert (await client.connect(site.url)).status == 200
        client.writer.write(b"x" * 3_000_000)
        client.writer.write_eof()
        assert await client.reader.read() == b"heard 3000000, bye"


async def test_the_site_ends_first(client: Client) -> None:
    heard = asyncio.get_running_loop().create_future()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.write_eof()
        heard.set_result(await reader.read())

    async with Conversing(converse) as site:
        assert (await client.connect(site.url)).status == 200
        assert await client.reader.read() == b"hello"
        client.writer.write(b"late")
        client.writer.write_eof()
        assert await heard == b"late"


async def test_bytes_that_arrive_with_the_request_for_a_tunnel(client: Client) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))

    async with Conversing(converse) as site:
        where = site.url.removeprefix("http://")
        assert (await client.ask(f"CONNECT {where} HTTP/1.1\r\n\r\nearly", to_head=True)).status == 200
        assert await client.reader.read() == b"early"


async def test_a_slow_reader_stops_the_sender(client: Client, listener: Listener) -> None:
    sent = 0

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(640):
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async with Conversing(converse) as site:
        assert (await client.connect(site.url)).status == 200
        await until(lambda: sent > 0)
        before = -1
        while before != sent:  # until nothing moves any more
            before = sent
            await asyncio.sleep(0.3)
        assert sent < 640 * 65536
        assert listener.received < 24 * 1024 * 1024
        assert len(await client.reader.read(-1)) == 640 * 65536


async def test_a_reset_reaches_the_other_side(client: Client, site: MisbehavingServer) -> None:
    assert (await client.connect(site.url)).status == 200
    client.writer.write(b"GET /reset HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await client.reader.read()


async def test_a_browser_that_leaves_ends_the_request(client: Client, site: MisbehavingServer) -> None:
    client.writer.write(f"GET {site.url}/hang HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await until(lambda: len(site.requests) == 1)
    client.writer.close()
    await until(lambda: site.requests[0].end is not None)


# -- hostile bytes


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/reset", "reset"),
        ("/bad-length", "protocol"),
        ("/endless-headers", "protocol"),
        ("/junk", "protocol"),
    ],
)
async def test_what_a_site_may_send(
    path: str, kind: str, site: MisbehavingServer, client: Client, listener: Listener
) -> None:
    reply = await client.get(site.url + path)
    assert (reply.status, reply.headers["proxy-status"]) == (502, f"shoal; error={kind}")
    assert listener.refused == {kind: 1}
    assert (await client.get(f"{site.url}/leaf/1")).status == 200  # on the same connection


@pytest.mark.parametrize("path", ["/half", "/half-chunked", "/bad-chunk"])
async def test_a_body_that_breaks_off(path: str, site: MisbehavingServer, client: Client, listener: Listener) -> None:
    client.writer.write(f"GET {site.url}{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError, ValueError)):
        await client.reply()
    await until(lambda: listener.refused != {})
    assert set(listener.refused) <= {"half body", "protocol"}


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET https://a.example/ HTTP/1.1\r\n\r\n",
        b"GET ftp://a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://user:password@a.example/ HTTP/1.1\r\n\r\n",
        b"GET http://a.example:99999/ HTTP/1.1\r\n\r\n",
        b"GET http://\xef\xbc\x91.example/ HTTP/1.1\r\n\r\n",
        b"CONNECT a.example HTTP/1.1\r\n\r\n",
        b"CONNECT http://a.example:80 HTTP/1.1\r\n\r\n",
        b"CONNECT a.example:80:80 HTTP/1.1\r\n\r\n",
        b"CONNECT /etc/passwd:80 HTTP/1.1\r\n\r\n",
        b"POST http://a.example/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"x" * 70_000,
        b"\r\n\r\n",
    ],
)
async def test_what_a_browser_may_send(sent: bytes, client: Client, listener: Listener) -> None:
    assert (await client.ask(sent)).status == 400
    assert await client.ended()
    assert listener.refused == {"request": 1}


async def test_a_bad_chunk_of_a_request(site: MisbehavingServer, client: Client) -> None:
    head = f"POST {site.url}/echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = await client.ask(head + "5\r\nhello\r\nnonsense\r\n")
    assert (reply.status, reply.headers["connection"]) == (400, "close")


async def test_a_site_that_wants_a_password_for_the_proxy(client: Client) -> None:
    """The browser must not take it for the gateway's question."""
    async with Scripted(answer(b"", ("Proxy-Authenticate", "Basic realm=x"), status=407)) as site:
        assert (await client.get(f"{site.url}/")).status == 502


async def test_the_mark_of_the_gateway_cannot_be_forged(client: Client) -> None:
    async with Scripted(answer(b"", ("Proxy-Status", "shoal; error=address"), status=403)) as site:
        assert "proxy-status" not in (await client.get(f"{site.url}/")).headers


# -- other users, and the end


async def test_another_user_is_refused(site: MisbehavingServer, listener: Listener) -> None:
    if os.geteuid() != 0:
        why = "this test needs root, to become another user"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    command = ["curl", "--silent", "--show-error", "--max-time", "10", "--proxy", listener.url, f"{site.url}/leaf/1"]
    for user, expected in ((65534, b""), (0, b"<h1>Leaf 1</h1>")):
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, user=user, cwd="/")
        assert done.stdout == expected
    assert listener.refused == {"user": 1}


async def test_close_ends_everything_at_once(site: MisbehavingServer) -> None:
    gateway = Gateway(None)
    listener = await gateway.open(None)
    clients = [await Client.to(listener) for _ in range(4)]
    clients[0].writer.write(f"GET {site.url}/hang HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await clients[1].connect(site.url)
    await clients[2].get(f"{site.url}/leaf/1")
    await until(lambda: len(site.requests) == 2)
    async with asyncio.timeout(1):
        await gateway.close()
        assert [await each.ended() for each in clients] == [True] * 4
    with pytest.raises(OSError):  # noqa: PT011
        await Client.to(listener)
    with pytest.raises(RuntimeError):
        await gateway.open(None)
    await until(lambda: all(each.end is not None for each in site.requests))


async def test_close_right_after_a_connection() -> None:
    """Before its task has begun."""
    for _ in range(20):
        gateway = Gateway(None)
        listener = await gateway.open(None)
        client = await Client.to(listener)
        await gateway.close()
        assert await client.ended()


async def test_close_while_a_listener_opens() -> None:
    gateway = Gateway(None)
    opening = asyncio.create_task(gateway.open(None))
    await asyncio.sleep(0)
    await gateway.close()
    await asyncio.gather(opening, return_exceptions=True)
    with pytest.raises(RuntimeError):
        await opening


async def test_a_closed_listener_leaves_the_others_alone(site: MisbehavingServer) -> None:
    gateway = Gateway(AddressGuard(["127.0.0.0/8"]))
    first, second = await gateway.open(None), await gateway.open(None)
    client = await Client.to(second)
    await client.get(f"{site.url}/leaf/1")
    await first.close()
    assert (await client.get(f"{site.url}/leaf/2")).status == 200
    assert (first.received, second.received > 0) == (0, True)
    client.close()
    await gateway.close()
