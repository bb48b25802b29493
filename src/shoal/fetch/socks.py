"""SOCKS5 proxies. The proxy resolves the host names, so no name leaves this machine by another way."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType

import aiohttp
from yarl import URL

from shoal.errors import FetchError, ProxyError
from shoal.fetch.connecting import unresolved
from shoal.fetch.resolving import ResolvedAddress
from shoal.suggestions import pip_install

SCHEMES = ("socks5://", "socks5h://")
"""They mean the same here: the proxy resolves the names."""
Connect = Callable[..., aiohttp.TCPConnector]
"""Makes a connector whose connections go through a proxy. It takes the arguments of `aiohttp.TCPConnector`."""
_MAX_SESSIONS = 256
_NOT_ALLOWED = 2  # reply codes of RFC 1928
_HOST_REPLIES = (3, 4, 5, 6)  # network or host unreachable, connection refused, TTL expired


class SocksSessions:
    """Keeps connections open through any number of proxies.

    Each proxy URL, with its user and password, has connections of its own. So requests with different credentials never
    share one. The sessions that were not used for longest are closed when there are too many.
    """

    def __init__(
        self,
        open_session: Callable[[Connect], aiohttp.ClientSession],
        resolve: Callable[[str], Awaitable[Sequence[ResolvedAddress]]],
    ) -> None:
        self._open_session = open_session
        self._resolve = resolve
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._in_use: Counter[str] = Counter()

    @asynccontextmanager
    async def use(self, proxy: str, host: str) -> AsyncIterator[aiohttp.ClientSession]:
        """The session of this proxy. FetchError if the proxy does not connect to the host."""
        library = _library()
        proxy = await self._with_address(proxy, host)
        connect = partial(library.ProxyConnector.from_url, proxy.replace("socks5h:", "socks5:", 1), rdns=True)
        session = self._sessions.pop(proxy, None) or self._open_session(connect)
        self._sessions[proxy] = session  # the one that was used last is the last one
        self._in_use[proxy] += 1
        try:
            yield session
        except library.ProxyConnectionError as exc:
            raise ProxyError(_message(host, f"no connection to the proxy: {exc}"), retryable=True) from exc
        except library.ProxyTimeoutError as exc:
            raise ProxyError(_message(host, f"the proxy did not answer in time: {exc}"), retryable=True) from exc
        except library.ProxyError as exc:
            if exc.error_code is None:  # it refused the password, or does not speak SOCKS5
                raise ProxyError(_message(host, f"the proxy refused: {exc}"), retryable=False) from exc
            who = "the host did not answer the proxy" if exc.error_code in _HOST_REPLIES else "the proxy refused"
            error = FetchError(
                _message(host, f"{who}: {exc}"),
                kind="proxy", retryable=exc.error_code != _NOT_ALLOWED, contacted=False,
            )  # fmt: skip
            error.socks_reply = int(exc.error_code)
            raise error from exc
        except EOFError as exc:  # the library does not wrap it
            raise ProxyError(_message(host, "the proxy closed the connection"), retryable=True) from exc
        finally:
            self._in_use[proxy] -= 1
            if len(self._sessions) > _MAX_SESSIONS:
                await self._close_oldest()

    async def _with_address(self, proxy: str, host: str) -> str:
        """The URL with an address instead of a name, which the library would look up in a thread without a deadline.
        IPv4 comes first, as in the library."""
        url = URL(proxy, encoded=True)
        try:
            addresses = await self._resolve(url.host or "")
        except socket.gaierror as exc:
            raise ProxyError(_message(host, str(unresolved("of the proxy", exc))), retryable=True) from exc
        return str(url.with_host(min(addresses, key=lambda address: address.family).host))

    async def _close_oldest(self) -> None:
        unused = [proxy for proxy in self._sessions if not self._in_use[proxy]]
        closing = []
        for proxy in unused[: len(self._sessions) - _MAX_SESSIONS]:
            del self._in_use[proxy]
            closing.append(self._sessions.pop(proxy))
        for session in closing:  # other requests may change the sessions meanwhile
            await session.close()

    async def close(self) -> None:
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.close()


def _message(host: str, reason: str) -> str:
    return f"no connection to {host} through the proxy: {reason}"


def _library() -> ModuleType:
    try:
        import aiohttp_socks
    except ImportError:
        raise FetchError(
            f"SOCKS proxies need aiohttp-socks: {pip_install('socks')}",
            kind="proxy", retryable=False, contacted=False,
        ) from None  # fmt: skip
    return aiohttp_socks
