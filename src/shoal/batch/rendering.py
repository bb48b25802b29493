"""How the pages of a batch are rendered. The options come from strangers: they are data with limits, and no code."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from shoal.batch.limits import StrictModel, at_most
from shoal.http import Render

_MAX_ACTIONS = 20
_MAX_CAPTURES = 10
_MAX_SELECTOR = 300
_MAX_WAIT = 60_000
# Playwright understands more than CSS: `text=`, `xpath=`, "quoted", //path, ..parent, and >> between them.
_NOT_CSS = re.compile(r"""\s*(?:[\w+:*-]+\s*=|["']|\(*//|\.\.)|.*>>""", re.DOTALL)


def _check_css(selector: str) -> str:
    if _NOT_CSS.match(selector) or not selector.strip() or not selector.isprintable():
        raise ValueError("must be a CSS selector")
    return selector


Css: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=_MAX_SELECTOR, examples=["#more"]), AfterValidator(_check_css)
]
Milliseconds: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_WAIT, strict=True)]
WaitFor: TypeAlias = Annotated[
    Milliseconds | Css,
    Field(description="A CSS selector, `load`, `domcontentloaded`, `networkidle`, or milliseconds."),
]


class ClickAction(StrictModel):
    """Click on the first element that the selector finds."""

    do: Literal["click"]
    selector: Css


class FillAction(StrictModel):
    """Type a text into a field."""

    do: Literal["fill"]
    selector: Css
    text: Annotated[str, Field(max_length=2000)]


class PressAction(StrictModel):
    """Press a key such as `Enter`, in an element or on the page."""

    do: Literal["press"]
    key: Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9+]+$", examples=["Enter"])]
    selector: Css | None = None


class ScrollAction(StrictModel):
    """Scroll to the end of the page until it no longer grows."""

    do: Literal["scroll"]
    times: Annotated[int, Field(ge=1, le=100, description="Maximum number of steps.")] = 20


class WaitAction(StrictModel):
    """Wait for an element, a load state, or a number of milliseconds."""

    do: Literal["wait"]
    wait_for: WaitFor


Action: TypeAlias = Annotated[
    ClickAction | FillAction | PressAction | ScrollAction | WaitAction, Field(discriminator="do")
]


class RenderOptions(StrictModel):
    """How a browser renders the pages of a batch, and what it returns besides `content`."""

    mode: Annotated[
        Literal["always", "auto"],
        Field(description="`auto` fetches a page over HTTP, and renders it only if its HTML is an empty shell."),
    ] = "always"
    wait_for: WaitFor | None = None
    actions: Annotated[
        list[Action],
        Field(max_length=_MAX_ACTIONS, description="Steps on each page, in this order, after it has loaded."),
        at_most(_MAX_ACTIONS),
    ] = []
    screenshot: Annotated[
        bool | Css,
        Field(description="`true` for the visible page, `full` for the whole page, or the selector of an element."),
    ] = False
    pdf: bool = False
    capture: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_SELECTOR, examples=["*/api/*"])]],
        Field(max_length=_MAX_CAPTURES, description="URL patterns of responses that the page loads."),
        at_most(_MAX_CAPTURES),
    ] = []

    @model_validator(mode="after")
    def _check_mode(self) -> RenderOptions:
        if self.mode == "auto" and (self.actions or self.screenshot or self.pdf or self.capture):
            raise ValueError('mode "auto" may not render a page: actions, screenshot, pdf and capture need "always"')
        return self

    def as_render(self) -> Render:
        return msgspec.convert(self.model_dump(exclude_none=True), Render)


def _as_options(value: object) -> object:
    """The options that ``true``, ``false`` and ``"auto"`` stand for."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if value == "auto":
        return {"mode": "auto"}
    if isinstance(value, dict | RenderOptions):
        return value
    raise ValueError('must be true, false, "auto" or an object')


RenderField: TypeAlias = Annotated[
    RenderOptions | None,
    Field(description="Render the pages in a browser: `true`, `auto`, or an object with options.", examples=[True]),
    BeforeValidator(_as_options, json_schema_input_type=bool | Literal["auto"] | RenderOptions | None),
]
