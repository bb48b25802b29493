"""Every route of the API: which role it needs, and that a cookie without its CSRF token changes nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.types import Message

from shoal.api.server.app import create_app
from shoal.api.server.auth import ROLES
from shoal.api.server.logins import COOKIE, SessionCookies
from shoal.config import Config, ServerSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = {role: f"the-token-of-{role}" for role in ROLES}
SAFE = ("GET", "HEAD")


def needed_role(method: str, path: str) -> str:
    """The role that a route needs, as docs/dashboard.md says. Empty: none at all."""
    if path in ("/health", "/ready"):
        return ""
    if path.startswith("/api/crawl"):
        return "batch"
    if path.startswith("/api/settings") or method == "DELETE":
        return "admin"
    return "viewer" if method in SAFE else "operator"


def routes() -> list[tuple[str, str]]:
    """The method and path of every documented route."""
    paths = create_app(Config()).openapi()["paths"]
    return sorted((verb.upper(), path) for path, verbs in paths.items() for verb in verbs)


ROUTES = routes()
UNSAFE = [route for route in ROUTES if route[0] not in SAFE]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app() -> AsyncIterator[FastAPI]:
    made = create_app(Config(serve=ServerSettings(tokens=TOKENS, roles={role: role for role in ROLES})))  # type: ignore[arg-type]
    async with made.router.lifespan_context(made):
        yield made


async def ask(app: FastAPI, method: str, path: str, *headers: tuple[str, str]) -> int:
    """The status of the answer to a request with an empty object as its body."""
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    sent = [("content-type", "application/json"), ("host", "localhost"), *headers]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": re.sub(r"\{[^}]*\}", "none", path), "raw_path": b"", "query_string": b"a=none&b=none", "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in sent], "client": ("127.0.0.1", 1),
        "server": ("localhost", 80), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    return statuses[0]


async def test_an_error_of_the_server_has_the_headers_of_every_answer() -> None:
    made, started = create_app(Config()), []

    @made.get("/broken")
    async def broken() -> None:
        raise ZeroDivisionError

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        started.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/broken", "query_string": b"", "headers": [(b"host", b"localhost")],
        "scheme": "http", "root_path": "",
    }  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        await made(scope, receive, send)
    headers = dict(started[0]["headers"])
    assert started[0]["status"] == 500
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert b"default-src 'none'" in headers[b"content-security-policy"]


async def test_the_routes_are_found() -> None:
    assert len(UNSAFE) >= 20
    assert ("POST", "/api/schedules/{name}/run") in UNSAFE


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_role_may_do_what_it_may_and_nothing_else(app: FastAPI, method: str, path: str) -> None:
    needed = needed_role(method, path)
    may = [role for role in ROLES if not needed or ROLES.index(role) >= ROLES.index(needed)]
    answers = {role: await ask(app, method, path, ("authorization", f"Bearer {TOKENS[role]}")) for role in ROLES}
    assert [role for role, status in answers.items() if status != 403] == may, answers
    assert (await ask(app, method, path) == 401) is bool(needed)


@pytest.mark.parametrize(("method", "path"), UNSAFE)
async def test_a_cookie_alone_changes_nothing(app: FastAPI, method: str, path: str) -> None:
    cookies = SessionCookies(TOKENS)
    value = cookies.make("admin")
    session = cookies.read(value)
    assert session is not None
    cookie = ("cookie", f"{COOKIE}={value}")
    assert await ask(app, method, path, cookie) == 403
    assert await ask(app, method, path, cookie, ("x-csrf-token", "x" * len(session.csrf))) == 403
    foreign = ("sec-fetch-site", "cross-site")
    assert await ask(app, method, path, cookie, ("x-csrf-token", session.csrf), foreign) == 403
    assert await ask(app, method, path, cookie, ("x-csrf-token", session.csrf)) not in (401, 403)
