"""Batches: a form that tries a URL, the sessions with their progress, and the Celery workers."""

from __future__ import annotations

import base64

import msgspec
from fastapi import APIRouter, Request

from shoal.api.batch.results import Result, SessionResults
from shoal.api.batch.session import OVER, Session
from shoal.api.dashboard.pages import screen
from shoal.api.resources.batches import find_session
from shoal.api.server.auth import allows
from shoal.api.server.errors import ProblemError
from shoal.api.server.state import Server

router = APIRouter()

_SESSIONS = 50


def check_serves(server: Server) -> None:
    """ProblemError if batches belong to other processes."""
    if server.ui_only:
        raise ProblemError(
            404, "no batches", "Batches are shown by `shoal serve`: this server only shows the runs of a store."
        )


@screen(router, "/ui/batches", "batches")
async def load_batches(server: Server, request: Request) -> dict[str, object]:
    check_serves(server)
    caller = None if allows(request, "admin") else request.state.caller
    return {
        "sessions": await server.list_sessions(caller, _SESSIONS),
        "limit": _SESSIONS,
        "celery": server.remote.last_status(),
        "renders": server.config.serve.render,
        "shows_callers": caller is None and bool(server.config.serve.tokens),
        "keep_results": server.config.serve.keep_results,
    }


# -- one batch: its progress, and its results


_PAGE = 50
_MAX_READ = 4 << 20
_MAX_RESULT = 16 << 20
_MAX_TEXT = 40_000
_MAX_LINKS = 200
_MAX_NUMBER = 16  # digits
_KEPT = 100
"""Pages of results without their contents."""


@screen(router, "/ui/batches/{session_id}", "session")
async def load_session(server: Server, request: Request) -> dict[str, object]:
    check_serves(server)
    session = await find_session(request, request.path_params["session_id"][:100])
    query = request.query_params
    is_single = len(session.settings.urls) == 1 and not session.options.depth
    number = _number(query.get("result", "1" if is_single else ""))
    after = _number(query.get("after", "0")) or 0
    state, progress = await session.state(), await session.progress()
    outlines = [] if number is not None else await _outlines.read(session, after, progress.results, state)
    result = None if number is None else await _read_result(session, number)
    is_over = state in OVER
    return {
        "session": session,
        "state": state,
        "progress": progress,
        "is_over": is_over,
        "is_single": is_single,
        "result": result,
        "number": number,
        "outlines": outlines,
        "after": after,
        "next": outlines[-1][0] if len(outlines) == _PAGE else None,
        "is_final": is_over or (result is not None and not is_single),
    }


class _Outlines:
    """Pages of results without their contents. When a page is shown again, only new results are read."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[tuple[int, str], list[tuple[int, Result]]]] = {}
        """By session and position: the number of results and the state at the last read, and the page."""

    async def read(self, session: Session, after: int, results: int, state: str) -> list[tuple[int, Result]]:
        """``results``: how many the session has now."""
        key, at = (session.id, after), (results, state)
        before, outlines = self._known.pop(key, ((0, ""), []))
        if results < before[0]:  # the store went back in time
            outlines = []
        if at != before and len(outlines) < _PAGE:
            last = outlines[-1][0] if outlines else after
            outlines = outlines + await SessionResults(session).read_outlines(last, _PAGE - len(outlines), _MAX_READ)
        self._known[key] = at, outlines
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        return outlines


_outlines = _Outlines()


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < _MAX_NUMBER else None


async def _read_result(session: Session, number: int) -> dict[str, object] | None:
    """One result with all the forms that were requested; None if it does not exist yet."""
    results = await SessionResults(session).read(max(0, number - 1), 1, _MAX_RESULT)
    if not results or results[0][0] != number:
        return None
    result = results[0][1]
    return {
        **result,
        "parts": _parts(result, session),
        "screenshot": _image(result.get("screenshot")),
        "truncated": bool(result.get("truncated")),
        "rendered": bool(result.get("rendered")),
    }


def _parts(result: Result, session: Session) -> list[dict[str, object]]:
    """The page in each form, as text that is not too long, or as a list of links."""
    also = result.get("also")
    forms = {session.options.format: result.get("content"), **(also if isinstance(also, dict) else {})}
    return [_part(form, content) for form, content in forms.items() if content is not None]


def _part(form: str, content: object) -> dict[str, object]:
    if form == "links" and isinstance(content, list):
        return {"form": form, "links": [str(link) for link in content[:_MAX_LINKS]], "total": len(content)}
    if form == "fields" and isinstance(content, dict):
        fields = {name: value if isinstance(value, list) else [value] for name, value in content.items()}
        return {"form": form, "fields": fields, "total": len(fields)}
    text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
    return {"form": form, "text": text[:_MAX_TEXT], "total": len(text), "is_cut": len(text) > _MAX_TEXT}


def _image(content: object) -> str:
    """A PNG as the source of an image; empty if there is none."""
    if not isinstance(content, bytes) or not content.startswith(b"\x89PNG"):
        return ""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
