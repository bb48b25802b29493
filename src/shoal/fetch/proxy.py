"""Connects through a proxy, which resolves the names of sites: no name leaves this machine by another way."""

from __future__ import annotations

import base64
import re
import socket
import ssl
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from shoal.errors import ConfigError, FetchError, ProxyError
from shoal.fetch.connecting import Connector, one_line, system_text, unresolved
from shoal.fetch.pipe import Meter, Pipe, open_pipe

_MAX_HEAD = 16384
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r?\n")
_DEFAULT_PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
_HOST_REPLIES = {3: "network unreachable", 4: "host unreachable", 5: "connection refused", 6: "TTL expired"}
"""The replies of RFC 1928 that say something about the host. Others say something about the proxy."""
_NOT_ALLOWED = 2


class Proxy:
    """A proxy: ``http://``, ``https://`` or ``socks5://``, with a user and a password if it needs them.

    Its errors are FetchErrors: `ProxyError` if the proxy itself failed, whatever the host is.
    """

    def __init__(self, url: str, connector: Connector) -> None:
        """ConfigError if the URL is invalid."""
        scheme = url.partition(":")[0].lower()
        if scheme not in _DEFAULT_PORTS:
            raise ConfigError(f"the proxy {scheme}:// is not supported; use http://, https:// or socks5://")
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or _DEFAULT_PORTS[scheme]
        except ValueError:  # invalid port or IPv6 address
            self._host = ""
        if not self._host:
            raise ConfigError("a proxy must be a URL such as socks5://user:password@host:1080; http and https work too")
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        self._connector = connector
        self.url = url
        self.forwards = not scheme.startswith("socks")
        """Whether requests for http:// URLs are sent to it with the whole URL and ``headers``. The others need a
        tunnel."""
        self.is_secure = scheme == "https"
        self.headers: dict[str, str] = {}
        if self.forwards and parts.username is not None:
            login = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
            self.headers["Proxy-Authorization"] = f"Basic {login}"
        elif max(len(self._user.encode()), len(self._password.encode())) > 255:
            raise ConfigError("the user and the password of a SOCKS5 proxy have at most 255 bytes each")

    async def connect(self, tls: ssl.SSLContext | None, meter: Meter | None = None) -> Pipe:
        """Connect to the proxy. ``tls`` is for ``https://``; None: the default."""
        context = (tls or ssl.create_default_context()) if self.is_secure else None
        place = f"the proxy {self._host}:{self._port}"
        try:
            sock = await self._connector.connect_to(await self._connector.resolve(self._host), self._port)
            return await open_pipe(sock, meter, context, self._host)
        except ssl.SSLError as exc:
            raise ProxyError(f"no secure connection to {place}: {one_line(exc)}", retryable=False) from exc
        except socket.gaierror as exc:
            raise ProxyError(str(unresolved("of the proxy", exc)), retryable=True) from exc
        except OSError as exc:
            raise ProxyError(f"no connection to {place}: {system_text(exc)}", retryable=True) from exc

    async def tunnel(self, pipe: Pipe, host: str, port: int) -> None:
        """Let the proxy connect the pipe to a host."""
        try:
            await (self._tunnel_http if self.forwards else self._tunnel_socks)(pipe, host, port)
        except BaseException as exc:
            pipe.abort()
            failed = f"no connection to {self.shown(host)}: "
            if isinstance(exc, ValueError):
                raise ProxyError(f"{failed}the proxy did not connect: {exc}", retryable=False) from exc
            if isinstance(exc, (EOFError, ConnectionError)):
                message = f"{failed}the proxy closed the connection"
                raise FetchError(message, kind="proxy", retryable=True, contacted=False) from exc
            raise

    async def _tunnel_http(self, pipe: Pipe, host: str, port: int) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        await pipe.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{lines}\r\n".encode())
        while True:
            answer = _STATUS_LINE.match(await pipe.read_head(_MAX_HEAD))
            if answer is None:
                raise ValueError("it does not speak HTTP")
            if (status := int(answer[1])) >= 200:
                break
        if status >= 300:
            raise self.refusal(host, status, (answer[2] or b"").decode("latin-1"))

    async def _tunnel_socks(self, pipe: Pipe, host: str, port: int) -> None:
        """Do the SOCKS5 handshake (RFC 1928 and RFC 1929)."""
        has_login = bool(self._user or self._password)
        await pipe.write(b"\x05\x02\x02\x00" if has_login else b"\x05\x01\x00")
        version, chosen = await pipe.read_exactly(2)
        if version != 5:
            raise ValueError("it does not speak SOCKS5")
        if chosen != 0 and not (has_login and chosen == 2):
            raise ValueError(
                "it supports neither anonymous access nor user and password" if has_login else "it wants a password"
            )
        if chosen:
            user, password = self._user.encode(), self._password.encode()
            await pipe.write(bytes([1, len(user), *user, len(password), *password]))
            if (await pipe.read_exactly(2))[1] != 0:
                raise ValueError("authentication failure: wrong user or password")
        await pipe.write(bytes([5, 1, 0, *_socks_address(host), port >> 8, port & 255]))
        version, reply, _, kind = await pipe.read_exactly(4)
        if version != 5:
            raise ValueError("it does not speak SOCKS5")
        if reply:
            raise self._refusal_of_socks(host, reply)
        size = {1: 4, 4: 16}.get(kind)
        if size is None:
            size = (await pipe.read_exactly(1))[0]
        await pipe.read_exactly(size + 2)

    def refusal(self, host: str, status: int, reason: str) -> FetchError:
        """The error of a page to whose host an HTTP proxy did not connect."""
        message = f"the proxy did not connect to {host}: it answered {status} {reason:.160}"
        if status == 407:
            return ProxyError(f"{message}. Check its user and password", retryable=False)
        return FetchError(message, kind="proxy", retryable=True, contacted=False)

    def _refusal_of_socks(self, host: str, reply: int) -> FetchError:
        who = "the host did not answer the proxy" if reply in _HOST_REPLIES else "the proxy refused"
        message = f"no connection to {self.shown(host)}: {who}: {_HOST_REPLIES.get(reply, f'reply {reply}')}"
        error = FetchError(message, kind="proxy", retryable=reply != _NOT_ALLOWED, contacted=False)
        error.socks_reply = reply
        return error

    def shown(self, host: str) -> str:
        """How messages name a host that is reached through this proxy."""
        return f"{host} (through the proxy)"


def _socks_address(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        name = host.encode("ascii")
        if not 0 < len(name) < 256:
            raise ValueError("invalid host") from None
        return bytes([3, len(name), *name])
    return bytes([1 if address.version == 4 else 4]) + address.packed
