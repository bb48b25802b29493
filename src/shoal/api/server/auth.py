"""Authentication, protection against requests from web pages of other sites, and the size limit of bodies."""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import cast
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.api.server.bodies import MAX_PUBLIC_BYTES, content_length, drain, too_large
from shoal.api.server.errors import ProblemError, problem, public_message
from shoal.api.server.logins import COOKIE, LIFETIME, DashboardSession, Logins, SessionCookies
from shoal.config import ServerSettings, find_short_tokens
from shoal.errors import ConfigError, StoreAwayError
from shoal.system import clock

# -- the caller of a token, and those who guess
#
# An address may try `BURST` wrong tokens at once and then one each second; beyond that, its tokens are not checked.
# Users behind one proxy share an address, so a token that worked from there lately always works, and so does
# whoever waits a second after the guessing ended. A wrong token that is repeated is no guess: it is a client with
# an old token.


log = logging.getLogger("shoal.server")

BURST = 20
"""Wrong tokens that an address may try at once."""
_PER_SECOND = 1.0
_MAX_ADDRESSES = 10_000  # that are remembered; about 15 MB
_OLD_TOKENS = 8  # wrong tokens that an address may repeat
_WARN_EVERY = 60.0  # seconds between two warnings about an address


@dataclass(slots=True)
class _Visitor:
    """What is known of an address."""

    seen_at: float
    callers: set[str] = field(default_factory=set)
    """Whose tokens worked from there."""
    wrong: deque[int] = field(default_factory=lambda: deque(maxlen=_OLD_TOKENS))
    """Hashes of wrong tokens."""
    credit: float = BURST
    warned_at: float = -_WARN_EVERY


class CallerTokens:
    """The tokens of the callers."""

    def __init__(self, config: ServerSettings, now: Callable[[], float] = clock.now) -> None:
        """``now``: a clock that never goes back."""
        self.by_name: Mapping[str, str] = {**config.tokens, **({"": config.token} if config.token else {})}
        """The tokens by the name of their callers; the main token's name is empty."""
        self._encoded = {name: token.encode() for name, token in self.by_name.items()}
        self._visitors: OrderedDict[str, _Visitor] = OrderedDict()
        self._now = now

    def find(self, sent: bytes, address: str) -> str | None:
        """The name of the caller with this token; None: nobody. A ProblemError (429) if the address must wait."""
        visitor = self._visit(address)
        caller = None
        for name, token in self._encoded.items():  # compare with all, so that the time reveals nothing
            if hmac.compare_digest(sent, token):
                caller = name
        guess = hash(sent)
        if visitor.credit < 1 and caller not in visitor.callers and guess not in visitor.wrong:
            self._warn(visitor, address)
            message = "too many wrong tokens came from your address; try again in a second"
            raise ProblemError(429, "too many guesses", message)
        if caller is not None:
            visitor.callers.add(caller)
        elif guess not in visitor.wrong:
            visitor.wrong.append(guess)
            visitor.credit -= 1
        return caller

    def _visit(self, address: str) -> _Visitor:
        key, now = _network(address), self._now()
        visitor = self._visitors.get(key)
        if visitor is None:
            visitor = self._visitors[key] = _Visitor(now)
            if len(self._visitors) > _MAX_ADDRESSES:
                self._visitors.popitem(last=False)
        self._visitors.move_to_end(key)
        visitor.credit = min(BURST, visitor.credit + (now - visitor.seen_at) * _PER_SECOND)
        visitor.seen_at = now
        return visitor

    def _warn(self, visitor: _Visitor, address: str) -> None:
        if self._now() - visitor.warned_at >= _WARN_EVERY:
            visitor.warned_at = self._now()
            log.warning("%s tries many wrong tokens; it may try one each second", address or "a client")


def _network(address: str) -> str:
    """What counts as one address: one IPv4 address, or the 2**64 IPv6 addresses that anybody gets."""
    parsed = _parsed(address)
    if parsed is None:
        return address
    return parsed.exploded[:19] if isinstance(parsed, IPv6Address) else str(parsed)


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    """An IP address, or an IPv4 address that an IPv6 address stands for. None for a Unix socket."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


# -- what trusted proxies in front of the server say about its clients


def client_address(scope: Scope) -> str:
    """The address of the client, or an empty string if it has none."""
    return scope["client"][0] if scope.get("client") else ""


class TrustedProxies:
    """Proxies whose headers ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ip_network(network) for network in networks]

    def apply(self, scope: Scope, headers: Headers) -> None:
        """Replace the address and the scheme of a request by those of the proxy's client. Each proxy adds the address
        of its own client at the end, so the last one that is no trusted proxy is the client's."""
        if not self._networks or not self._trusts(client_address(scope)):
            return
        chain = [_without_port(part.strip()) for part in ",".join(headers.getlist("x-forwarded-for")).split(",")]
        for address in reversed(chain):
            if not address:  # a word that is no address: what is before it may be invented
                break
            scope["client"] = (address, 0)
            if not self._trusts(address):
                break
        if schemes := headers.getlist("x-forwarded-proto"):
            scope["scheme"] = "https" if schemes[-1].partition(",")[0].strip().lower() == "https" else "http"

    def _trusts(self, address: str) -> bool:
        parsed = _parsed(address)
        return parsed is not None and any(parsed in network for network in self._networks)


def _without_port(text: str) -> str:
    """The address in ``1.2.3.4``, ``1.2.3.4:80``, ``::1`` or ``[::1]:80``; empty if there is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return ""


ROLES = ("batch", "viewer", "operator", "admin")
"""What a caller may do. Each role includes those before it. ``batch``: use batches. ``viewer``: see runs, hosts and
clusters. ``operator``: also steer them. ``admin``: also delete runs and see settings."""
_PUBLIC_PATHS = ("/health", "/ready", "/ui/login")
"""Paths that need no token."""
_SETTING = " (serve.max_request_bytes)"
_PUBLIC_FILES = "/ui/static/"
LOGIN = "/ui/login"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def check_binding(config: ServerSettings) -> None:
    """ConfigError if the server would accept anyone on the network, or a token that is easy to guess."""
    if problem_of_tokens := find_short_tokens(config.token, config.tokens):
        raise ConfigError(problem_of_tokens)
    if config.host not in _LOOPBACK and not (config.token or config.tokens):
        raise ConfigError(
            f"other machines can reach {config.host}, so the server needs a token: set SHOAL_SERVE__TOKEN, or "
            "serve.token in shoal.toml; `openssl rand -hex 32` makes one. Clients send it as "
            "`Authorization: Bearer TOKEN`"
        )


def has_role(role: str, needed: str) -> bool:
    """Whether a role is the one that is needed, or includes it."""
    return ROLES.index(role) >= ROLES.index(needed)


def allows(request: Request, role: str) -> bool:
    """Whether the caller has this role."""
    return has_role(request.state.role, role)


def check_role(request: Request) -> None:
    """Refuse callers whose role does not allow this: viewers may read, operators may change, admins may delete."""
    reads = request.method in _SAFE_METHODS
    _require(request, "viewer" if reads else "admin" if request.method == "DELETE" else "operator")


def check_admin(request: Request) -> None:
    """Refuse callers who are not admins."""
    _require(request, "admin")


def _require(request: Request, needed: str) -> None:
    if not allows(request, needed):
        raise _forbidden(
            f"this needs the role {needed}; your token has the role {request.state.role} (serve.roles, by the name of "
            "the token in serve.tokens)"
        )


def _forbidden(message: str) -> ProblemError:
    return ProblemError(403, "forbidden", message)


class AuthMiddleware:
    """Rejects requests without a valid token, requests from web pages of other sites, and bodies that are too large.

    A web page can make its visitor's browser send requests. Those that may change something are always refused. On a
    server without tokens, reads are refused too: a browser on this machine could reach the server for the page.

    A browser that logged in sends a session cookie instead of a token. It must repeat the session's CSRF token in the
    header ``X-CSRF-Token`` of each request that may change something.

    It sets these values in the scope's state: ``caller``, the name of the token (empty for the main token), ``role``,
    ``address``, ``session`` (None without one) and ``csrf``, its CSRF token (empty without one).
    """

    def __init__(self, app: ASGIApp, config: ServerSettings, callers: CallerTokens) -> None:
        self._app = app
        self._callers = callers
        self._tokens = callers.by_name
        self._roles = config.roles
        self._proxies = TrustedProxies(config.trusted_proxies)
        self._cookies = SessionCookies(self._tokens)
        self._hosts = {*_LOOPBACK, config.host}
        self._max_bytes = config.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        self._proxies.apply(scope, headers)
        try:
            caller, session = await self._identify(scope, headers)
        except StoreAwayError as exc:
            await problem(503, "store away", public_message(exc))(scope, receive, send)
            return
        except ProblemError as exc:
            retry = {"Retry-After": "1"} if exc.status == 429 else {}
            await problem(exc.status, exc.kind, str(exc), headers=retry)(scope, receive, send)
            return
        if caller is None:
            await _ask_for_token(scope, headers)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(
            caller=caller,
            role=self._roles.get(caller, "batch") if caller else "admin",
            address=client_address(scope),
            csrf="" if session is None else session.csrf,
            session=session,
        )
        if session is not None:
            send = _until_logout(send, session, _logins(scope))
            if session.is_due and _logins(scope).is_current:
                send = _renewed(send, self._cookies.renew(session), scope)
        max_bytes, name = (MAX_PUBLIC_BYTES, "") if _is_public(scope) else (self._max_bytes, _SETTING)
        if content_length(headers) > max_bytes:
            await drain(receive)
            refused = too_large(max_bytes, name)
            await problem(413, "too large", refused.detail, headers=refused.headers)(scope, receive, send)
            return
        await self._call_with_limit(scope, receive, send, max_bytes, name)

    async def _identify(self, scope: Scope, headers: Headers) -> tuple[str | None, DashboardSession | None]:
        """The name of the caller, and its session. None: nobody. ProblemError if the request is refused."""
        is_safe = scope["method"] in _SAFE_METHODS
        if not is_safe:
            _check_origin(headers)
        if not self._tokens:
            self._check_host(headers)
        session = self._find_session(headers)
        if session is None or (await _logins(scope).ended()).has(session):
            return self._find_caller(scope, headers), None
        sent = headers.get("x-csrf-token", "").encode("latin-1")
        if not is_safe and not hmac.compare_digest(sent, session.csrf.encode()):
            raise _forbidden("the header X-CSRF-Token is missing or wrong; reload the page")
        return session.name, session

    def _find_session(self, headers: Headers) -> DashboardSession | None:
        """The session of the request's cookie, if it has no token."""
        if not self._tokens or "authorization" in headers or "x-api-key" in headers:
            return None
        value = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        session = self._cookies.read(value) if value else None
        return session if session is not None and session.name in self._tokens else None

    def _check_host(self, headers: Headers) -> None:
        """Refuse a request that a page of another site may have sent to a server without tokens.

        A page of another site can let its own host name resolve to this machine (DNS rebinding). Its requests then
        carry that name in the Host header.
        """
        if headers.get("sec-fetch-site") == "cross-site":
            raise _forbidden("web pages of other sites cannot use a server without a token")
        host = headers.get("host", "")
        name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if host and name.lower() not in self._hosts:
            raise _forbidden(
                f"unknown host name {name!r:.80}: without a token, the server answers only to localhost and to the "
                "address it listens on"
            )

    def _find_caller(self, scope: Scope, headers: Headers) -> str | None:
        """The name of the caller's token, or None if the token is missing or unknown."""
        if not self._tokens or _is_public(scope):
            return ""
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            sent = headers.get("x-api-key", "")
        sent = sent.strip()
        return self._callers.find(sent.encode("latin-1"), client_address(scope)) if sent else None

    async def _call_with_limit(self, scope: Scope, receive: Receive, send: Send, max_bytes: int, name: str) -> None:
        """Count the bytes of the body as they arrive: a chunked body declares no length."""
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > max_bytes:
                await drain(receive)
                raise too_large(max_bytes, name)  # where the body is read
            return message

        await self._app(scope, counted, send)


def _is_public(scope: Scope) -> bool:
    return scope["path"] in _PUBLIC_PATHS or scope["path"].startswith(_PUBLIC_FILES)


def _ask_for_token(scope: Scope, headers: Headers) -> Response:
    """The answer to a request without a token: people get the login page, programs an error."""
    path = scope["path"]
    if path == "/" or path.startswith("/ui"):
        query = scope["query_string"].decode("latin-1")
        next_path = quote(f"{path}?{query}" if query else path, safe="")
        if "text/html" in headers.get("accept", ""):
            return RedirectResponse(f"{LOGIN}?next={next_path}", 303)
    message = "missing or unknown token: send it as `Authorization: Bearer TOKEN`"
    return problem(401, "no token", message, headers={"WWW-Authenticate": "Bearer"})


def session_cookie(value: str, scope: Scope) -> str:
    """The header that sets a session cookie. An empty value deletes it."""
    age = int(LIFETIME) if value else 0
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return f"{COOKIE}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}"


def _renewed(send: Send, value: str, scope: Scope) -> Send:
    """``send`` that also renews the session cookie."""

    async def send_renewed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if "set-cookie" not in headers:
                headers.append("set-cookie", session_cookie(value, scope))
        await send(message)

    return send_renewed


def _logins(scope: Scope) -> Logins:
    return cast(Logins, scope["app"].state.server.logins)


def _until_logout(send: Send, session: DashboardSession, logins: Logins) -> Send:
    """``send`` that ends an event stream when its session has ended."""
    is_stream = is_over = False

    async def send_until_logout(message: Message) -> None:
        nonlocal is_stream, is_over
        if message["type"] == "http.response.start":
            is_stream = MutableHeaders(scope=message).get("content-type", "").startswith("text/event-stream")
        elif is_stream and not is_over and (await logins.ended()).has(session):
            is_over = True
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        elif is_over:
            return  # the stream is cancelled soon: for it, the client has disconnected
        await send(message)

    return send_until_logout


def _check_origin(headers: Headers) -> None:
    """Refuse a request that may change something and comes from another origin.

    Browsers always send one of the two headers, and a page cannot forge them. Other clients send neither.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        is_own = site in ("same-origin", "none")
    else:
        is_own = origin is None or _authority(origin) == headers.get("host", "").lower()
    if not is_own:
        raise _forbidden(
            "web pages of another origin cannot send this request (see the headers Origin and Sec-Fetch-Site)"
        )


def _authority(origin: str) -> str | None:
    """``host:port`` of an origin. The scheme is ignored: a proxy may terminate TLS."""
    scheme, mark, authority = origin.lower().partition("://")
    return authority if mark and scheme in ("http", "https") else None
