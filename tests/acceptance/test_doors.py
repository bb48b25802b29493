"""The doors of a real server: tokens, guesses, sessions of the dashboard, headers of answers."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest

from tests import forking
from tests.acceptance.fleets import SHOAL
from tests.acceptance.serving import PATIENCE, Api, serving, until
from tests.databases import free_port

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
