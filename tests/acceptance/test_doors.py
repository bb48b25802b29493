"""The doors of a real server: tokens, guesses, sessions of the dashboard, headers of answers."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from tests.acceptance.fleets import SHOAL
from tests.acceptance.serving import PATIENCE, Api, serving, until
from tests.support import forking
from tests.support.databases import RedisServer, free_port

ADMIN, ANN, BOB = "the-token-of-the-admin", "the-token-of-ann", "the-token-of-bob"
TOKENS = {
    "SHOAL_SERVE__TOKEN": ADMIN,
    "SHOAL_SERVE__TOKENS": json.dumps({"ann": ANN, "bob": BOB}),
    "SHOAL_SERVE__ROLES": json.dumps({"ann": "viewer"}),
    "SHOAL_SERVE__HOST": "0.0.0.0",
}


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(
    api: Api, method: str, path: str, *, address: str = "127.0.0.1", form: dict[str, str] | None = None, **headers: str
) -> Answer:
    """An answer with its headers, as a client with this address gets it."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if form is not None:
        sent["Content-Type"] = "application/x-www-form-urlencoded"
    connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=PATIENCE, source_address=(address, 0))
    try:
        connection.request(method, path, None if form is None else urlencode(form), sent)
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())
    finally:
        connection.close()


def shoal(folder: Path, *words: str, environ: dict[str, str]) -> Any:
    return forking.run(
        [*SHOAL, *words], cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("guarded"), TOKENS) as api:
        yield api


# -- tokens


@pytest.mark.parametrize(
    ("environ", "key"),
    [
        ({"SHOAL_SERVE__TOKEN": "abc"}, "serve.token:"),
        ({"SHOAL_SERVE__TOKENS": json.dumps({"ann": ANN, "bob": "x" * 15})}, "serve.tokens.bob:"),
    ],
)
def test_a_short_token_is_refused(tmp_path: Path, environ: dict[str, str], key: str) -> None:
    for words in (("serve", "--port", str(free_port())), ("doctor",)):
        done = shoal(tmp_path, *words, environ=environ)
        said = done.stdout + done.stderr
        assert done.returncode in (1, 2), said
        assert key in said
        assert "`openssl rand -hex 32`" in said
        assert "xxx" not in said


def guess_until_refused(api: Api, address: str, *, login: bool) -> int:
    """Try wrong tokens until the server slows the address, and return how many it checked."""
    for number in range(200):
        token = f"guess-{number}-{login}"
        answer = (
            ask(api, "POST", "/ui/login", address=address, form={"token": token})
            if login
            else ask(api, "GET", "/api/runs", address=address, Authorization=f"Bearer {token}")
        )
        if answer.status == 429:
            assert answer.headers["Retry-After"] == "1"
            return number
        assert answer.status == 401
    raise AssertionError("200 guesses were checked")


@pytest.mark.parametrize(("login", "address"), [(False, "127.0.0.11"), (True, "127.0.0.12")])
def test_guesses_are_slowed(guarded: Api, login: bool, address: str) -> None:
    """For the API and the login together. Those who were here before, and other addresses, notice nothing."""
    assert ask(guarded, "GET", "/api/runs", address=address, Authorization=f"Bearer {ANN}").status == 200
    began = time.monotonic()
    checked = guess_until_refused(guarded, address, login=login)
    assert checked <= 20 + (time.monotonic() - began) + 1
    assert guess_until_refused(guarded, address, login=not login) <= time.monotonic() - began + 1
    assert ask(guarded, "GET", "/api/runs", address=address, Authorization=f"Bearer {ANN}").status == 200
    assert ask(guarded, "POST", "/ui/login", address=address, form={"token": ANN}).status == 303
    assert ask(guarded, "GET", "/health", address=address, Authorization="Bearer wrong").status == 200
    assert ask(guarded, "GET", "/api/runs", address="127.0.0.13", X_API_Key=ADMIN).status == 200
    assert ask(guarded, "GET", "/api/runs", address=address).status == 401  # no token is no guess
    until(lambda: ask(guarded, "GET", "/api/runs", address=address, X_API_Key=ADMIN).status == 200, what="let in")
    assert f"{address} tries many wrong tokens" in guarded.process.said()
    assert "guess-0" not in guarded.process.said()


# -- sessions of the dashboard


def test_a_login_with_too_many_fields_is_refused(guarded: Api) -> None:
    """As an internal error, each one filled the log with a traceback."""
    form = {f"field{number}": "x" for number in range(20)}
    answer = ask(guarded, "POST", "/ui/login", form=form)
    assert (answer.status, b"more fields" in answer.body) == (422, True)
    assert "Traceback" not in guarded.process.said()


def log_in(api: Api, token: str = ANN, **headers: str) -> tuple[str, str]:
    """The cookie of a new session, and the header that set it."""
    answer = ask(api, "POST", "/ui/login", form={"token": token}, **headers)
    assert answer.status == 303, answer.body
    header = answer.headers["Set-Cookie"]
    return header.partition(";")[0], header


def csrf_of(api: Api, cookie: str) -> str:
    body = ask(api, "GET", "/ui/runs", Cookie=cookie).body.decode()
    return body.partition('"X-CSRF-Token": "')[2].partition('"')[0]


def log_out(api: Api, cookie: str) -> None:
    assert ask(api, "POST", "/ui/logout", Cookie=cookie, X_CSRF_Token=csrf_of(api, cookie)).status == 204


def test_a_logout_ends_the_session_in_the_server(guarded: Api) -> None:
    """Whoever copied the cookie has nothing. Other sessions of the same token go on."""
    (cookie, _), (other, _) = log_in(guarded), log_in(guarded)
    assert ask(guarded, "GET", "/api/runs", Cookie=cookie).status == 200
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=PATIENCE)
    connection.request("GET", "/ui/runs", headers={"Cookie": cookie, "Accept": "text/event-stream"})
    stream = connection.getresponse()
    assert stream.status == 200
    log_out(guarded, cookie)
    assert ask(guarded, "GET", "/api/runs", Cookie=cookie).status == 401
    answer = ask(guarded, "GET", "/ui/runs", Cookie=cookie, Accept="text/html")
    assert (answer.status, answer.headers["Set-Cookie"]) == (303, None)
    stream.read()  # open pages end too
    connection.close()
    assert ask(guarded, "GET", "/api/runs", Cookie=other).status == 200


def test_an_admin_ends_the_sessions_of_others(guarded: Api) -> None:
    ann, admin = log_in(guarded)[0], log_in(guarded, ADMIN)[0]
    for token, path, status in (
        (ANN, "/api/logins", 403), (BOB, "/api/logins", 403), (ADMIN, "/api/logins?name=eve", 404),
        (ADMIN, "/api/logins?name=ann", 200),
    ):  # fmt: skip
        assert ask(guarded, "DELETE", path, X_API_Key=token).status == status
    assert [ask(guarded, "GET", "/api/runs", Cookie=each).status for each in (ann, admin)] == [401, 200]
    assert ask(guarded, "GET", "/api/runs", Cookie=log_in(guarded)[0]).status == 200
    assert ask(guarded, "GET", "/api/runs", X_API_Key=ANN).status == 200
    assert json.loads(ask(guarded, "DELETE", "/api/logins", X_API_Key=ADMIN).body) == {"ended": ["ann", "bob", ""]}
    assert ask(guarded, "GET", "/api/runs", Cookie=admin).status == 401
    assert b"end logins" in ask(guarded, "GET", "/api/actions", X_API_Key=ADMIN).body


def test_a_logout_counts_in_all_servers_of_a_store(tmp_path: Path) -> None:
    """Also after a restart, and not only for the server that was asked."""
    with closing(RedisServer()) as redis, ExitStack() as stack:
        first, second = (
            stack.enter_context(serving(tmp_path, {**TOKENS, "SHOAL_FRONTIER": redis.url})) for _ in range(2)
        )
        cookie, kept = log_in(first)[0], log_in(second)[0]
        assert [ask(each, "GET", "/api/runs", Cookie=cookie).status for each in (first, second)] == [200, 200]
        log_out(first, cookie)
        until(lambda: ask(second, "GET", "/api/runs", Cookie=cookie).status == 401, what="logged out in the second")
        second.process.kill()
        second.start()
        assert [ask(second, "GET", "/api/runs", Cookie=each).status for each in (cookie, kept)] == [401, 200]


def test_a_new_memory_knows_no_old_session(tmp_path: Path) -> None:
    """Which sessions ended was in the memory of the server that stopped."""
    with serving(tmp_path, TOKENS) as api:
        cookie = log_in(api)[0]
        log_out(api, cookie)
        api.process.kill()
        api.start()
        assert ask(api, "GET", "/api/runs", Cookie=cookie).status == 401
        assert ask(api, "GET", "/api/runs", Cookie=log_in(api)[0]).status == 200


def test_a_cookie_is_secure_behind_a_trusted_proxy(tmp_path: Path, guarded: Api) -> None:
    with serving(tmp_path, {**TOKENS, "SHOAL_SERVE__TRUSTED_PROXIES": "127.0.0.21,127.0.0.22"}) as api:
        https = {"X_Forwarded_Proto": "https"}
        assert "; Secure" in log_in(api, address="127.0.0.21", **https)[1]
        assert "; Secure" not in log_in(api, address="127.0.0.21")[1]
        assert "; Secure" not in log_in(api, address="127.0.0.23", **https)[1]
        for number in range(30):  # guesses count for the proxy's client
            ask(api, "GET", "/api/runs", address="127.0.0.21", X_API_Key=f"guess-{number}", X_Forwarded_For="192.0.2.1")
        for client, status in (("192.0.2.1", 429), ("6.6.6.6, 192.0.2.1, 127.0.0.22", 429), ("192.0.2.2", 401)):
            guess = ask(api, "GET", "/api/runs", address="127.0.0.21", X_API_Key=client, X_Forwarded_For=client)
            assert guess.status == status, client
    assert "; Secure" not in log_in(guarded, **https)[1]


# -- headers of answers


@pytest.mark.parametrize(
    ("method", "path", "token", "status"),
    [
        ("GET", "/health", "", 200), ("GET", "/ready", "", 200), ("GET", "/api/runs", "", 401),
        ("GET", "/api/runs", ADMIN, 200), ("GET", "/api/runs", BOB, 403), ("GET", "/api/nothing", ADMIN, 404),
        ("PUT", "/api/runs", ADMIN, 405), ("POST", "/api/crawl/batch", ADMIN, 422), ("GET", "/metrics", ADMIN, 200),
        ("GET", "/openapi.json", ADMIN, 200), ("GET", "/docs", ADMIN, 200), ("GET", "/docs/assets/nothing", ADMIN, 404),
        ("GET", "/docs/assets/swagger-ui.css", ADMIN, 200), ("GET", "/ui/login", "", 200), ("GET", "/", ADMIN, 200),
        ("GET", "/ui/nothing", ADMIN, 404), ("GET", "/ui/static/icon.svg", "", 200), ("HEAD", "/ui/static/x", "", 404),
    ],
)  # fmt: skip
def test_every_answer_says_what_a_browser_may_do_with_it(
    guarded: Api, method: str, path: str, token: str, status: int
) -> None:
    answer = ask(guarded, method, path, **({"X_API_Key": token} if token else {}))
    assert answer.status == status
    (policy,) = answer.headers.get_all("Content-Security-Policy") or ("",)
    assert "default-src 'none';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers.get_all("X-Content-Type-Options") == ["nosniff"]
    is_page = path in ("/", "/docs", "/ui/login", "/ui/nothing")
    assert ("script-src 'self'" in policy) is is_page


def test_a_redirect_and_a_refused_page_too(guarded: Api) -> None:
    for headers, status in (({"Accept": "text/html"}, 303), ({"Sec_Fetch_Site": "cross-site"}, 403)):
        answer = ask(guarded, "GET" if status == 303 else "POST", "/ui/runs", **headers)
        assert (answer.status, answer.headers["X-Content-Type-Options"]) == (status, "nosniff")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
