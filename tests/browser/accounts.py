"""A site with account pages and a form to log in, and a spider for it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from shoal import LoggedOut, Login, Render, Request, Response, Spider
from shoal.http.rendering import Click, Fill, Wait

FORM = '<form method=post><input name=user><input name=password type=password><button id="in">Log in</button></form>'
STORE = "document.body.dataset.before = localStorage.sid || '{sid}'; localStorage.sid = '{sid}'"


class Accounts:
    """A site with account pages. One session at a time is good, for a number of pages."""

    def __init__(self, pages: int, *, lasts: int = 10_000, latency: float = 0.0, shared: bool = False) -> None:
        """``shared``: the login is at another host, and both send people to the other one by a form."""
        self.pages = pages
        self.lasts = lasts
        self.latency = latency
        self.shared = shared
        self.logins = 0
        self.left = 0
        self.shown: list[int] = []
        """The account pages, in the order in which they were answered."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/robots.txt":
            return web.Response(text="User-agent: *\nDisallow: /login")
        if path == "/login":
            return await self._log_in(request)
        if not path.startswith(("/account", "/home")):
            return web.Response(status=404)
        sid = request.cookies.get("sid", "")
        if sid != f"s{self.logins}" or (path != "/home" and not self.left):
            raise web.HTTPFound("/login")
        if path == "/home":
            links = "".join(f'<a href="/account/{number}">x</a>' for number in range(self.pages))
            return web.Response(text=f"<h1>home</h1>{links}", content_type="text/html")
        await asyncio.sleep(self.latency)
        self.left = max(0, self.left - 1)
        self.shown.append(int(path.rpartition("/")[2]))
        script = f"<script>{STORE.format(sid=sid)}</script>"
        return web.Response(text=f"<h1>{path}</h1><b>{sid}</b>{script}", content_type="text/html")

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        at_home = request.host.startswith("127.")
        if self.shared and at_home and form.get("ticket") != "t1":
            return send_by_form(f"http://localhost:{request.url.port}/login", "for=accounts")
        if form.get("for") == "accounts":
            response = web.Response(text=FORM, content_type="text/html")
            response.set_cookie("for", "accounts")
            return response
        if "ticket" not in form and (form.get("user"), form.get("password")) != ("ann", "s3cret"):
            return web.Response(text=FORM, content_type="text/html")
        if self.shared and not at_home:
            assert request.cookies["for"] == "accounts"
            return send_by_form(f"http://127.0.0.1:{request.url.port}/login", "ticket=t1")
        self.logins += 1
        self.left = self.lasts
        response = web.Response(status=303, headers={"Location": "/home"})
        response.set_cookie("sid", f"s{self.logins}", httponly=True)
        return response


def send_by_form(url: str, field: str) -> web.Response:
    """A page that sends a form to another host."""
    name, _, value = field.partition("=")
    form = f'<form method=post action="{url}"><input type=hidden name={name} value={value}></form>'
    return web.Response(text=f"{form}<script>document.forms[0].submit()</script>", content_type="text/html")


class Account(Spider):
    name = "account"
    logged_out = LoggedOut(redirect="/login", selector="#in")
    settings = {
        "browser.sandbox": False, "browser.page_timeout": 60, "download_delay": 0, "throttle.enabled": False,
        "concurrency": 3,
    }  # fmt: skip
    form: Any = True

    async def log_in(self, login: Login) -> None:
        url = self.start_urls[0].replace("/home", "/login")
        if self.form:
            actions = (Fill("[name=user]", "ann"), Fill("[name=password]", "s3cret"), Click("#in"), Wait("a"))
            page = await login.fetch(Request(url, render=Render(actions=actions)))
        else:
            page = await login.fetch(Request(url, form={"user": "ann", "password": "s3cret"}, render=False))
        if page.css("h1::text").get() != "home":
            login.fail(f"no home page: {page.text}")

    def parse(self, response: Response) -> Any:
        yield response.follow_all("a", self.account)

    def account(self, response: Response) -> Any:
        yield {
            "page": response.css("h1::text").get(),
            "sid": response.css("b::text").get(),
            "before": response.css("body::attr(data-before)").get(),
        }
