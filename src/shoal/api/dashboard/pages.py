"""Renders the pages of the dashboard.

Untrusted content is shown as text: Jinja escapes it, and the content security policy blocks inline scripts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple, TypeAlias

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from shoal import __version__
from shoal.api.dashboard import live as formats
from shoal.api.dashboard.live import STORE_AWAY, Rendered
from shoal.api.server.auth import allows, has_role
from shoal.api.server.budgets import caller_of
from shoal.api.server.errors import ProblemError, public_message
from shoal.api.server.responses import LimitedStream
from shoal.api.server.state import Server, server_of
from shoal.crawling.stats import STATE_NAMES
from shoal.errors import ShoalError, StoreAwayError
from shoal.operations.charts import STATES
from shoal.ports import Stats

Load: TypeAlias = Callable[[Server, Request], Awaitable[Mapping[str, object]]]

NAVIGATION = (
    ("/", "Overview"),
    ("/ui/runs", "Runs"),
    ("/ui/hosts", "Hosts"),
    ("/ui/workers", "Workers"),
    ("/ui/batches", "Batches"),
    ("/ui/schedules", "Schedules"),
    ("/ui/notifications", "Notifications"),
    ("/ui/actions", "Actions"),
    ("/ui/settings", "Settings"),
)
"""The screens that the navigation lists."""
SERVED_ONLY = ("/ui/batches",)
"""Screens of a server that crawls itself."""
ADMIN_ONLY = ("/ui/settings",)
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("shoal.api.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": formats.number,
        "duration": formats.duration,
        "size": formats.size,
        "time": _time,
        "share": _share,
        "parts": bar_parts,
    }
    environment.globals |= {"percent": formats.percent, "version": __version__, "asset": _asset, "may": _may}
    return environment


@cache
def _asset(name: str) -> str:
    """The address of a static file. It changes with the content, so browsers may cache the file forever."""
    content = (files("shoal.api.dashboard") / "static" / name).read_bytes()
    return f"/ui/static/{name}?v={hashlib.blake2b(content, digest_size=6).hexdigest()}"


def _time(at: float | None) -> Markup:
    """A moment. A script shows it in the time zone of the reader."""
    iso = formats.moment(at)
    if not iso:
        return Markup(formats.NOTHING)
    return Markup("<time datetime='{0}'>{1}</time>").format(iso, iso.replace("T", " ")[:19])


def _share(part: float, whole: float) -> str:
    """A share of a bar, as a class from w0 to w100: the policy allows no inline styles."""
    return f"w{min(100, max(1, round(100 * part / whole))) if whole and part else 0}"


@pass_context
def _may(context: Context, role: str) -> bool:
    """Whether the reader has this role."""
    return has_role(str(context["role"]), role)


def render(template: str, values: Mapping[str, object]) -> str:
    return _environment().get_template(template).render(values)


def page(request: Request, template: str, values: Mapping[str, object], status: int = 200) -> HTMLResponse:
    """A whole page."""
    return HTMLResponse(render(template, {**_common(request), **values}), status, HEADERS)


def _common(request: Request) -> dict[str, object]:
    """What every template may use."""
    state = request.state
    path = request.url.path
    role = getattr(state, "role", "viewer")
    hidden = {*(SERVED_ONLY if server_of(request).ui_only else ()), *(ADMIN_ONLY if role != "admin" else ())}
    return {
        "navigation": [(path, name) for path, name in NAVIGATION if path not in hidden],
        "path": path,
        "here": f"{path}?{request.url.query}" if request.url.query else path,
        "role": role,
        "user": getattr(state, "caller", ""),
        "csrf": getattr(state, "csrf", ""),
        "has_session": bool(getattr(state, "csrf", "")),
        "project": server_of(request).config.project_name,
    }


def screen(router: APIRouter, path: str, name: str, *, needs: str = "viewer") -> Callable[[Load], Load]:
    """Serve a screen at ``path``: its page, its live part, and an event stream with updates of that part.

    The decorated function returns the values for the templates ``NAME.html`` (the page) and ``NAME_live.html`` (what
    changes). If ``is_final`` is among them and true, the page gets no updates.
    """

    def decorate(load: Load) -> Load:
        async def show(request: Request) -> Response:
            try:
                if not allows(request, needs):
                    text = f"This page needs the role {needs}; yours is {request.state.role}."
                    return page(request, "error.html", {"problem": text}, 403)
                return await _answer(request, path, name, load)
            except ProblemError as exc:
                return page(request, "error.html", {"problem": str(exc)}, exc.status)
            except ShoalError as exc:
                away = isinstance(exc, StoreAwayError)
                text = "The store does not answer. Reload the page in a moment." if away else public_message(exc)
                return page(request, "error.html", {"problem": text}, 503 if away else 500)

        router.add_api_route(path, show, methods=["GET"], include_in_schema=False, response_class=HTMLResponse)
        return load

    return decorate


async def _answer(request: Request, path: str, name: str, load: Load) -> Response:
    """The page of a screen, its live part, or its stream, as the headers of the request say."""
    server = server_of(request)

    async def live() -> Rendered:
        values = await load(server, request)
        html = render(f"{name}_live.html", {**_common(request), **values})
        return Rendered(html, bool(values.get("is_final")))

    if "text/event-stream" in request.headers.get("accept", ""):
        key = (path, str(request.url), request.state.role, request.state.caller)
        view = server.views.stream(key, live, expected=(*STORE_AWAY, ProblemError))
        return LimitedStream(view, server.streams, caller_of(request), media_type="text/event-stream", headers=HEADERS)
    if request.headers.get("x-part") == "live":
        return HTMLResponse((await live()).html, headers=HEADERS)
    return page(request, f"{name}.html", await load(server, request))


class BarPart(NamedTuple):
    """A part of the bar that shows the ledger of a run."""

    state: str
    label: str
    number: int


def bar_parts(stats: Stats) -> list[BarPart]:
    """The parts of the bar: every pushed request is in exactly one of them."""
    return [BarPart(state, STATE_NAMES.get(state, state), getattr(stats, state)) for state in STATES]
