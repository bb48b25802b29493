"""The gateway: all traffic of the browser goes through it.

It is an HTTP proxy inside the worker. Each browser context has a listener of its own on the loopback: the listener
decides the way out, and counts the bytes. It needs no password, because Chromium does not cache responses
of a proxy that asks for one.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from shoal.config import DnsSettings
from shoal.errors import FetchError
from shoal.fetch.browser.gateway_conversation import Conversation, GatewayLimits, Site, Upstream
from shoal.fetch.connecting import Connector
from shoal.fetch.guard import AddressGuard, PageReach
from shoal.fetch.pipe import Pipe
from shoal.fetch.proxy import Proxy
from shoal.fetch.resolving import Names
from shoal.system import clock

# Who is at the other end of a loopback connection: the user that owns the other socket.
#
# A port on the loopback is open to all users of the machine, and the browser can't send a password. On Linux the
# kernel says which user a socket belongs to. Another process of the same user can still connect, and on other
# systems everybody.

_SOCK_DIAG = 4  # a protocol of netlink; see sock_diag(7)
_BY_FAMILY = 20
_REQUEST = 1
_ERROR = 2
_QUESTION = struct.Struct("=IHHII BBBxI")
_ADDRESSES = struct.Struct("!HH4s12x4s12x")
_ANY_INTERFACE_AND_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_TABLE = Path("/proc/net/tcp")

Address = tuple[str, int]


def is_own(peer: Address, local: Address) -> bool:
    """Whether the socket at ``peer`` that is connected to ``local`` belongs to the user of this process.

    It does not if its process has closed it. IPv4 only.
    """
    if sys.platform != "linux":
        return True
    try:
        owner = _ask_kernel(peer, local)
    except OSError:  # a kernel or a container without this protocol
        try:
            owner = _search_table(_TABLE.read_text(), peer, local)
        except OSError:
            return True
    return owner == os.geteuid()


def _ask_kernel(peer: Address, local: Address) -> int | None:
    """The user of the socket; None if there is none. OSError if the kernel does not say."""
    addresses = _ADDRESSES.pack(peer[1], local[1], socket.inet_aton(peer[0]), socket.inet_aton(local[0]))
    body = addresses + _ANY_INTERFACE_AND_COOKIE
    size = _QUESTION.size + len(body)
    head = _QUESTION.pack(size, _BY_FAMILY, _REQUEST, 1, 0, socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _SOCK_DIAG) as asking:
        asking.send(head + body)
        answer = asking.recv(4096)  # the kernel has answered within `send`
    kind = struct.unpack_from("=H", answer, 4)[0]
    if kind == _ERROR:
        code = -struct.unpack_from("=i", answer, 16)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    if answer[20 : 20 + len(addresses)] != addresses:
        return None  # a server that listens at the other port
    user, inode = struct.unpack_from("=II", answer, 16 + 64)
    return int(user) if inode else None  # a socket that its process has closed belongs to nobody


def _search_table(table: str, peer: Address, local: Address) -> int | None:
    """The same from the text of /proc/net/tcp."""
    addresses = [_hex(peer), _hex(local)]
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == addresses:
            return int(fields[7]) if fields[9] != "0" else None
    return None


def _hex(address: Address) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"


log = logging.getLogger("shoal.browser")

_MAX_KEPT = 32  # connections without a request, of one listener
_MAX_KEPT_PER_SITE = 6
_KEEP_SECONDS = 15.0
_MAX_FAILURES = 256


class Gateway:
    """Makes listeners. One for each worker process, used by its event loop.

    With a guard, no listener connects to a refused address. With or without one, pages from public addresses reach no
    private ones (`PageReach`); addresses in ``public_networks`` count as public. Behind an upstream, which resolves the
    names, addresses and local names are refused by their text. The address of an upstream itself is not checked: the
    operator chose it. ``tls`` is for upstreams with ``https://``. Each listener has its own limit of lookups.
    """

    def __init__(
        self,
        guard: AddressGuard | None,
        limits: GatewayLimits = GatewayLimits(),
        tls: ssl.SSLContext | None = None,
        public_networks: Sequence[str] = (),
        dns: DnsSettings = DnsSettings(),
    ) -> None:
        self.limits = limits
        self._guard = guard
        self._public = AddressGuard(public_networks)
        self._tls = tls
        self._to_sites = Connector(guard, Names(dns, limits.dns_cache_seconds))
        self._to_proxies = Connector(None, Names(dns, limits.dns_cache_seconds))
        self._listeners: set[Listener] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def open(self, upstream: str | None) -> Listener:
        """Start a listener. ``upstream`` is the URL of a proxy with ``http://``, ``https://`` or ``socks5://``; None:
        it connects directly. ConfigError if the URL is invalid."""
        if self._closed:
            raise RuntimeError("the gateway is closed")
        proxy = None if upstream is None else Proxy(upstream, self._to_proxies)
        reach = PageReach(self._guard, self._public)
        listener = Listener(Upstream(self._to_sites, reach, proxy, self._tls), self.limits)
        await listener._start()
        if self._closed:
            await listener.close()
            raise RuntimeError("the gateway is closed")
        self._listeners.add(listener)
        if self._timer is None:
            self._check()
        return listener

    def _check(self) -> None:
        self._listeners = {listener for listener in self._listeners if not listener.closed}
        for listener in self._listeners:
            listener._check()
        often = min(1.0, self.limits.header_timeout / 4, self.limits.idle_timeout / 4)
        self._timer = asyncio.get_running_loop().call_later(often, self._check) if self._listeners else None

    async def close(self) -> None:
        """End all connections and listeners at once."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(listener.close() for listener in self._listeners))
        self._to_sites.close()
        self._to_proxies.close()


class Listener:
    """The way out of one browser context. Use it as the context's proxy, also for loopback addresses.

    It serves only processes of this user, as far as the system tells (`is_own`). What it can't serve it answers
    with the status 400, 403, 502 or 504 and a header ``Proxy-Status``, which no site can send through it.
    """

    def __init__(self, upstream: Upstream, limits: GatewayLimits) -> None:
        self.url = ""
        """``http://127.0.0.1:PORT``"""
        self.closed = False
        self.refused: Counter[str] = Counter()
        """How many requests were not served, by kind of error."""
        self.upstream = upstream
        self.limits = limits
        self._failures: dict[Site, FetchError] = {}
        self._conversations: set[Conversation] = set()
        self._kept: dict[Pipe, tuple[Site, float]] = {}
        self._warned = False
        self._server: asyncio.Server | None = None

    @property
    def received(self) -> int:
        """Bytes from the network, since the start."""
        return self.upstream.meter.received

    def failure(self, host: str, port: int) -> FetchError | None:
        """Why the gateway did not serve the last request for this site; None if it did.

        The host is as in the URL, without brackets.
        """
        return self._failures.get(Site(host, port))

    async def _start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Client(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """End all connections at once."""
        self.closed = True
        if self._server is not None:
            self._server.close()
        for pipe in [*self._kept]:
            pipe.abort()
        self._kept.clear()
        tasks = [conversation.task for conversation in self._conversations]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def accept(self, client: Pipe) -> None:
        if self.closed or not self._trusts(client):
            client.abort()
        elif len(self._conversations) >= self.limits.max_connections:
            self.refused["connections"] += 1
            client.abort()
        else:
            conversation = Conversation(client, self)
            self._conversations.add(conversation)
            conversation.task.add_done_callback(lambda _: self._conversations.discard(conversation))

    def _trusts(self, client: Pipe) -> bool:
        transport = client.transport
        if transport is not None and is_own(transport.get_extra_info("peername"), transport.get_extra_info("sockname")):
            return True
        self.refused["user"] += 1
        return False

    # -- for the conversations

    def report(self, failure: FetchError | None, site: Site | None) -> None:
        """Report whether a site was reached (no failure) or not."""
        if failure is not None:
            if (
                failure.kind == "address"
                and not self._warned
                and site is not None
                and not self.upstream.reach.is_page(site.host)
            ):
                self._warned = True  # the page itself gets its error, but what it loads is missing without a word
                log.warning("a rendered page may not load everything it asks for: %s", failure)
            self.refused[failure.kind] += 1
        if site is not None:
            self._failures.pop(site, None)
            if failure is not None:
                self._failures[site] = failure
                if len(self._failures) > _MAX_FAILURES:
                    del self._failures[next(iter(self._failures))]

    def take(self, site: Site) -> Pipe | None:
        """Return an open connection that is not in use."""
        for pipe, (pipe_site, _) in [*reversed(self._kept.items())]:
            if pipe_site == site:
                if pipe.pending:  # an answer that nobody asked for
                    self._drop(pipe)
                    continue
                del self._kept[pipe]
                pipe.on_end = None
                return pipe
        return None

    def keep(self, site: Site, pipe: Pipe) -> None:
        """Keep a connection for the next request."""
        same = sum(pipe_site == site for pipe_site, _ in self._kept.values())
        if self.closed or not pipe.open or same >= _MAX_KEPT_PER_SITE or len(self._kept) >= _MAX_KEPT:
            pipe.abort()
            return
        self._kept[pipe] = (site, clock.monotonic() + _KEEP_SECONDS)
        pipe.on_end = lambda: self._drop(pipe)

    def _drop(self, pipe: Pipe) -> None:
        self._kept.pop(pipe, None)
        pipe.abort()

    def _check(self) -> None:
        now = clock.monotonic()
        for conversation in [*self._conversations]:
            conversation.check(now)
        for pipe, (_, until) in [*self._kept.items()]:
            if now > until:
                self._drop(pipe)


class _Client(Pipe):
    """A connection of the browser."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.accept(self)
