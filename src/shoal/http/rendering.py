"""How a page is rendered in a browser, and what the browser returns besides its HTML."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from shoal.errors import RequestError
from shoal.messages import did_you_mean

MAX_ACTIONS = 100
_MAX_TEXT = 10_000  # characters of one value of an action
_MAX_CAPTURES = 20

Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=_MAX_TEXT)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=600_000)]
LoadState: TypeAlias = Literal["domcontentloaded", "load", "networkidle"]
LOAD_STATES: tuple[LoadState, ...] = get_args(LoadState)


class _Action(Struct, frozen=True, forbid_unknown_fields=True, tag_field="do", kw_only=True):
    """One step on a page, done by a browser after the page has loaded."""


class Click(_Action, frozen=True, tag="click"):
    """Click on the first element that a CSS selector finds."""

    selector: Text


class Fill(_Action, frozen=True, tag="fill"):
    """Type a text into a field."""

    selector: Text
    text: Annotated[str, Meta(max_length=_MAX_TEXT)]


class Press(_Action, frozen=True, tag="press"):
    """Press a key, such as ``Enter``, in an element or on the page."""

    key: Text
    selector: Text | None = None


class Scroll(_Action, frozen=True, tag="scroll"):
    """Scroll to the end of the page until it no longer grows, at most ``times`` times."""

    times: Annotated[int, Meta(ge=1, le=1000)] = 50


class Wait(_Action, frozen=True, tag="wait"):
    """Wait for an element, a load state, or a number of milliseconds."""

    wait_for: Text | Milliseconds


class Evaluate(_Action, frozen=True, tag="evaluate"):
    """Run JavaScript in the page. Only spiders may do this, not callers of the API."""

    script: Annotated[str, Meta(min_length=1, max_length=1_000_000)]


Action: TypeAlias = Click | Fill | Press | Scroll | Wait | Evaluate


class Render(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """How a page is rendered: ``Request(url, render=Render(wait_for=".price"))``.

    ``mode="auto"`` fetches the page over HTTP, and renders it only if its HTML is an empty shell. ``wait_for`` is a CSS
    selector, a load state (``load``, ``domcontentloaded``, ``networkidle``) or a number of milliseconds. Without it,
    the page is complete when it has loaded and its own requests have been answered. ``actions`` are done after that, in
    order. ``screenshot`` is True for the visible page, ``"full"`` for the whole one, or the CSS selector of an element.
    ``capture`` has patterns with ``*`` for URLs: the responses that the page itself loaded from them are kept.
    ``page=True`` keeps a successful page open for an async callback: ``response.page``, a page of Playwright.
    """

    mode: Literal["always", "auto"] = "always"
    wait_for: Text | Milliseconds | None = None
    actions: Annotated[tuple[Action, ...], Meta(max_length=MAX_ACTIONS)] = ()
    screenshot: bool | Text = False
    pdf: bool = False
    capture: Annotated[tuple[Text, ...], Meta(max_length=_MAX_CAPTURES)] = ()
    page: bool = False

    def __post_init__(self) -> None:
        """Convert actions that are written as dicts. RequestError for a value that no page could be rendered with."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            try:
                checked = msgspec.convert(msgspec.to_builtins(value), field.type)
            except (msgspec.ValidationError, TypeError) as exc:
                reason = _unknown_action(value) if field.name == "actions" else ""
                raise RequestError(f"invalid render option {field.name}: {reason or exc}") from exc
            msgspec.structs.force_setattr(self, field.name, checked)


def _unknown_action(actions: object) -> str:
    """Which action has a name that does not exist; empty if none has."""
    names = [kind.__struct_config__.tag for kind in get_args(Action)]
    for action in actions if isinstance(actions, list | tuple) else ():
        if isinstance(action, Mapping) and action.get("do") not in names:
            name = action.get("do")
            hint = did_you_mean(str(name), names)
            return f"there is no action {name!r:.80}; use {', '.join(names)}{hint}"
    return ""


RenderChoice: TypeAlias = Render | bool | None
"""None: the default of the spider. False: do not render."""


def render_choice(value: object) -> RenderChoice:
    """Convert what users write: True, False, ``"auto"``, a dict or a `Render`. RequestError if it is something else."""
    if value is None or value is False or isinstance(value, Render):
        return value
    if value is True:
        return Render()
    if value == "auto":
        return Render(mode="auto")
    if isinstance(value, Mapping):
        options = [field.name for field in msgspec.structs.fields(Render)]
        for name in value:
            if name not in options:
                raise RequestError(f"there is no render option {name!r:.80}{did_you_mean(str(name), options)}")
        return Render(**value)
    raise RequestError(f'render must be True, False, "auto", Render(...) or a dict, not {value!r:.80}')


class Captured(Struct, frozen=True):
    """A response that the page itself loaded."""

    url: str
    status: int
    content_type: str
    body: bytes

    def json(self) -> Any:
        """The body as JSON. ValueError if it is not."""
        return json.loads(self.body)


# Permission for a page to navigate while actions of the user run in it.

Permit: TypeAlias = Callable[[str], Awaitable[float | None]]
"""Called with a URL on the host of the page. Returns the seconds to wait before the page navigates there; None if the
frontier must decide."""

permit: ContextVar[Permit | None] = ContextVar("permit", default=None)
"""For the pages that this task renders. None: every URL of the host is allowed."""
