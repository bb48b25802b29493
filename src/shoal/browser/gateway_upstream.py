"""How the gateway reaches a site: directly, or through a proxy that resolves the names."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from ipaddress import ip_address
from typing import NoReturn, Protocol
from urllib.parse import unquote, urlsplit

from shoal.browser.gateway_http import parse_response
from shoal.browser.gateway_pipe import Meter, Pipe
from shoal.errors import ConfigError, FetchError, ProxyError
from shoal.fetch.connecting import Connector, one_line, system_text, unresolved
from shoal.fetch.guard import PageReach

_MAX_PROXY_HEAD = 16384
_DEFAULT_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
# RFC 1928: the replies that say something about the site. Others say something about the proxy.
_SOCKS_REPLIES = {3: "network unreachable", 4: "host unreachable", 5: "connection refused", 6: "TTL expired"}
_SOCKS_NOT_ALLOWED = 2


class Upstream(Protocol):
    """How to reach sites. Its errors are FetchErrors."""

    absolute: bool
    """Whether requests for http:// URLs are sent to this upstream with the whole URL."""
    headers: list[tuple[bytes, bytes]]
    """Additional headers of such requests."""

    def refuses(self, host: str) -> str | None:
        """Why the host may not be requested; None if it may, as far as its name tells."""
        ...

    async def connect(self, host: str, port: int, *, tunnel: bool) -> Pipe:
        """Connect to the site. Without ``tunnel``, an ``absolute`` upstream connects to the upstream only."""
        ...


class Direct:
    """Connects to the site. The guard and the reach of the page decide about the address that is connected to."""

    absolute = False
    headers: list[tuple[bytes, bytes]] = []

    def __init__(self, connector: Connector, meter: Meter, reach: PageReach) -> None:
        self._connector = connector
        self._meter = meter
        self._reach = reach
        self._caller = connector.names.new_caller()

    def refuses(self, host: str) -> str | None:
        return None

    async def connect(self, host: str, port: int, *, tunnel: bool) -> Pipe:
        try:
            addresses = await self._connector.resolve(host, self._caller)
            selected, reason = self._reach.select(host, [address.host for address in addresses])
            if not selected:
                raise refusal(host, reason)
            allowed = [address for address in addresses if address.host in selected]
            sock = await self._connector.connect_to(allowed, port)
            return await _piped(sock, self._meter)
        except socket.gaierror as exc:
            raise unresolved(host, exc) from exc
        except OSError as exc:
            message = f"no connection to {host}: {system_text(exc)}"
            raise FetchError(message, kind="connect", retryable=True) from exc


class Proxied:
    """Connects through a proxy: ``http://``, ``https://`` or ``socks5://``, with a user and a password if needed."""

    def __init__(
        self, url: str, connector: Connector, meter: Meter, reach: PageReach, tls: ssl.SSLContext | None
    ) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]
            valid = bool(self._host) and parts.scheme in _DEFAULT_PORTS
        except (ValueError, KeyError):
            valid = False
        if not valid:
            raise ConfigError("a proxy must be a URL such as socks5://user:password@host:1080; http and https work too")
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        self._scheme = parts.scheme
        self._connector = connector
        self._meter = meter
        self._reach = reach
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self.absolute = parts.scheme in ("http", "https")
        self.headers = []
        if self.absolute and parts.username is not None:
            login = base64.b64encode(f"{self._user}:{self._password}".encode())
            self.headers = [(b"Proxy-Authorization", b"Basic " + login)]
        elif max(len(self._user.encode()), len(self._password.encode())) > 255:
            raise ConfigError("the user and the password of a SOCKS5 proxy have at most 255 bytes each")

    def refuses(self, host: str) -> str | None:
        """The proxy resolves the name, so only the name can be checked here."""
        return self._reach.refuses_host(host)

    async def connect(self, host: str, port: int, *, tunnel: bool) -> Pipe:
        pipe = await self._connect_to_proxy(host)
        if self.absolute and not tunnel:
            return pipe
        try:
            await (self._connect_http if self.absolute else self._connect_socks)(pipe, host, port)
        except (EOFError, ValueError, ConnectionError) as exc:
            pipe.abort()
            reason = str(exc) or "it closed the connection"
            broken = isinstance(exc, (EOFError, OSError))
            self._fail(host, f"the proxy did not connect: {reason}", retryable=broken, own=not broken)
        except BaseException:
            pipe.abort()
            raise
        return pipe

    async def _connect_to_proxy(self, host: str) -> Pipe:
        try:
            sock = await self._connector.connect(self._host, self._port)
            return await _piped(sock, self._meter, self._tls, self._host)
        except ssl.SSLError as exc:
            self._fail(host, f"no secure connection to the proxy: {one_line(exc)}", retryable=False, own=True)
        except socket.gaierror:
            self._fail(host, "can't resolve the host of the proxy", retryable=True, own=True)
        except OSError as exc:
            self._fail(host, f"no connection to the proxy: {system_text(exc)}", retryable=True, own=True)

    async def _connect_http(self, pipe: Pipe, host: str, port: int) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n".encode()]
        lines += [b"%b: %b\r\n" % each for each in self.headers]
        await pipe.write(b"".join([*lines, b"\r\n"]))
        answer = parse_response(await pipe.read_head(_MAX_PROXY_HEAD), to_head=True)
        while answer.status < 200:
            answer = parse_response(await pipe.read_head(_MAX_PROXY_HEAD), to_head=True)
        if answer.status >= 300:
            reason = answer.reason.decode("latin-1")[:100]
            refused = answer.status in (401, 403, 407)
            own = answer.status == 407
            self._fail(host, f"the proxy answered {answer.status} {reason}", retryable=not refused, own=own)

    async def _connect_socks(self, pipe: Pipe, host: str, port: int) -> None:
        """Do the SOCKS5 handshake (RFC 1928 and RFC 1929)."""
        named = bool(self._user or self._password)
        await pipe.write(b"\x05\x02\x02\x00" if named else b"\x05\x01\x00")
        version, chosen = await pipe.read_exactly(2)
        if version != 5:
            raise ValueError("it does not speak SOCKS5")
        if chosen != 0 and not (named and chosen == 2):
            raise ValueError(
                "it supports neither anonymous access nor user and password" if named else "it wants a password"
            )
        if chosen:
            user, password = self._user.encode(), self._password.encode()
            await pipe.write(bytes([1, len(user), *user, len(password), *password]))
            if (await pipe.read_exactly(2))[1] != 0:
                raise ValueError("wrong user or password")
        await pipe.write(bytes([5, 1, 0, *_socks_address(host), port >> 8, port & 255]))
        version, reply, _, kind = await pipe.read_exactly(4)
        if version != 5:
            raise ValueError("it does not speak SOCKS5")
        if reply in _SOCKS_REPLIES:
            reason = f"the host did not answer the proxy: {_SOCKS_REPLIES[reply]}"
            self._fail(host, reason, retryable=True, socks_reply=reply)
        if reply:
            retryable = reply != _SOCKS_NOT_ALLOWED
            self._fail(host, f"the proxy refused: reply {reply}", retryable=retryable, socks_reply=reply)
        size = {1: 4, 4: 16}.get(kind)
        if size is None:
            size = (await pipe.read_exactly(1))[0]
        await pipe.read_exactly(size + 2)

    def _fail(self, host: str, reason: str, *, retryable: bool, own: bool = False, socks_reply: int = 0) -> NoReturn:
        """``own``: the proxy itself failed, whatever the host is."""
        message = f"no connection to {host} through the proxy: {reason}"
        if own:
            raise ProxyError(message, retryable=retryable)
        error = FetchError(message, kind="proxy", retryable=retryable, contacted=False)
        error.socks_reply = socks_reply
        raise error


def refusal(host: str, reason: str) -> FetchError:
    """The error for a refused host. It does not show the address: callers must not explore private networks."""
    return FetchError(f"{host} {reason}", kind="address", retryable=False, contacted=False)


def _socks_address(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        if not 0 < len(name) < 256:
            raise ValueError("invalid host") from None
        return bytes([3, len(name), *name])
    return bytes([1 if address.version == 4 else 4]) + address.packed


async def _piped(
    sock: socket.socket, meter: Meter, tls: ssl.SSLContext | None = None, server_hostname: str | None = None
) -> Pipe:
    loop = asyncio.get_running_loop()
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _, pipe = await loop.create_connection(
            lambda: Pipe(meter), sock=sock, ssl=tls, server_hostname=server_hostname if tls else None
        )
    except BaseException:
        sock.close()
        raise
    return pipe
