"""A site with accounts: pages behind a login, whose sessions end after some pages. One session is valid at a time."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import Counter
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs

PASSWORD = "open sesame"
FORM = (
    '<form id="login" method="post" action="/login"><input name="user"><input name="password" type="password">'
    '<input type="hidden" name="token" value="{token}"><button>Log in</button></form>'
)


class LoginSite:
    """Serves ``/account/0`` to ``/account/N-1`` in a thread of its own. Every page links to the next ones."""

    def __init__(
        self, pages: int, *, lasts: int = 10**9, latency: float = 0.01, always_out: frozenset[int] = frozenset()
    ):
        """``lasts``: pages that a session serves. ``always_out``: pages that nobody may see."""
        self.pages = pages
        self.lasts = lasts
        self.latency = latency
        self.always_out = always_out
        self.served: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()
        self.logins: list[tuple[float, float]] = []
        """When each login began (its form was asked for) and ended."""
        self.wrong = 0
        self.requests: list[tuple[float, str]] = []
        self.client = threading.local()
        """``address``: of the client that this thread answers."""
        self._lock = threading.Lock()
        self._session = ""
        self._left = 0
        self._forms: dict[str, float] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def overlaps(self) -> int:
        """How many logins began before the one before them had ended."""
        with self._lock:
            logins = sorted(self.logins)
        return sum(second[0] < first[1] for first, second in zip(logins, logins[1:], strict=False))

    def end_session(self) -> None:
        with self._lock:
            self._session = ""

    # -- answers: status, headers, text

    def form(self, _cookies: dict[str, str], _fields: dict[str, str]) -> Answer:
        token = secrets.token_hex(8)
        with self._lock:
            self._forms[token] = time.monotonic()
        return 200, [("Set-Cookie", f"token={token}; Path=/")], FORM.format(token=token)

    def log_in(self, cookies: dict[str, str], fields: dict[str, str]) -> Answer:
        token = fields.get("token", "")
        with self._lock:
            began = self._forms.get(token)
            if fields.get("password") != PASSWORD or token != cookies.get("token") or began is None:
                self.wrong += 1
                return 200, [], "<p>Please log in: wrong password</p>" + FORM.format(token="")
            self._session, self._left = secrets.token_hex(8), self.lasts
            self.logins.append((began, time.monotonic()))
            return 302, [("Location", "/"), ("Set-Cookie", f"session={self._session}; Path=/; HttpOnly")], ""

    def account(self, number: int, cookies: dict[str, str]) -> Answer:
        time.sleep(self.latency)
        with self._lock:
            has_session = bool(self._session) and cookies.get("session") == self._session and self._left > 0
            if not has_session or number in self.always_out:
                self.refused[number] += 1
                return 302, [("Location", "/login"), ("Set-Cookie", "session=; Path=/; Max-Age=0")], ""
            self._left -= 1
            self.served[number] += 1
        links = "".join(
            f'<a href="/account/{each}">{each}</a>' for each in range(number + 1, min(number + 4, self.pages))
        )
        return 200, [], f"<h1>account {number}</h1>{links}"

    def _answer(self, method: str, path: str, cookies: dict[str, str], fields: dict[str, str]) -> Answer:
        with self._lock:
            self.requests.append((time.monotonic(), path))
        if path == "/login":
            return (self.log_in if method == "POST" else self.form)(cookies, fields)
        if found := re.fullmatch(r"/account/(\d+)", path):
            return self.account(int(found[1]), cookies)
        if path == "/":
            return 200, [], "<p>welcome</p>"
        return 404, [], "nothing here"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._respond("GET", {})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
                self._respond("POST", {name: values[0] for name, values in parse_qs(body).items()})

            def _respond(self, method: str, fields: dict[str, str]) -> None:
                cookies = {name: each.value for name, each in SimpleCookie(self.headers.get("Cookie", "")).items()}
                site.client.address = self.client_address[0]
                status, headers, text = site._answer(method, self.path.partition("?")[0], cookies, fields)
                body = text.encode()
                self.send_response(status)
                for name, value in [("Content-Type", "text/html"), *headers, ("Content-Length", str(len(body)))]:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_arguments: object) -> None:
                pass

        return Handler


Answer = tuple[int, list[tuple[str, str]], str]
