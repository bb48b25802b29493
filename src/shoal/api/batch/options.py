"""The options of a batch. They are data: nothing in them is executed."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shoal.api.batch.queries import MAX_LENGTH, check_css, check_xpath
from shoal.errors import RequestError, SelectorError
from shoal.http import Render, Request
from shoal.selector import Selector

# Limits that are checked before pydantic validates the elements of a list or an object.
#
# pydantic validates every element and keeps an error for each. A list of a million invalid elements would cost
# gigabytes.


_MAX_KEYS = 40  # more than any model has, so that a few unknown keys are still reported by name


def at_most(count: int) -> BeforeValidator:
    """Limit the elements of a list or an object to ``count``. Put it after ``Field`` in the annotation: pydantic would
    check constraints that follow it on None too."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > count:
            raise ValueError(f"has {len(value)} elements; the limit is {count}")
        return value

    return BeforeValidator(check)


class StrictModel(BaseModel):
    """A part of a request that refuses unknown keys. Many unknown keys are one error, not one for each."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _limit_keys(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > _MAX_KEYS:
            raise ValueError(f"has {len(value)} keys; the limit is {len(cls.model_fields)}")
        return value


# How the pages of a batch are rendered. The options come from strangers: they are data with limits, and no code.


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


AlsoFormat: TypeAlias = Literal["html", "text", "markdown", "links"]
Format: TypeAlias = Literal["html", "text", "markdown", "links", "fields"]

_RESERVED_HEADERS = frozenset(
    {
        "host", "content-length", "transfer-encoding", "connection", "proxy-connection", "keep-alive", "upgrade", "te",
        "trailer", "trailers", "expect", "http2-settings", "proxy-authorization", "proxy-authenticate",
    }
)  # fmt: skip
"""Headers of a connection. A caller could end a request early, or smuggle one to whom the connection serves next."""
_MAX_NAME_LENGTH = 100
_MAX_HEAD_BYTES = 16 * 1024  # headers and cookies together: they are stored with each URL


class FieldQuery(StrictModel):
    """Selects a field on a page: a CSS selector (optionally with `::text` or `::attr(name)`) or an XPath expression.
    Only the parts of both languages that are fast on any page are allowed."""

    css: Annotated[str | None, Field(max_length=MAX_LENGTH, examples=["h1"])] = None
    xpath: Annotated[str | None, Field(max_length=MAX_LENGTH, examples=["//h1/text()"])] = None
    all: Annotated[bool, Field(description="Return a list of all matches instead of the first one.")] = False

    @model_validator(mode="after")
    def _check_query(self) -> FieldQuery:
        if (self.css is None) == (self.xpath is None):
            raise ValueError("must have either css or xpath")
        page = Selector("")
        try:
            if self.css is not None:
                check_css(self.css)
                page.css(self.css)
            elif self.xpath is not None:
                check_xpath(self.xpath)
                page.xpath(self.xpath)
        except SelectorError as exc:
            raise ValueError(str(exc)) from exc
        return self


def _string_to_query(query: object) -> object:
    return {"css": query} if isinstance(query, str) else query


class BatchOptions(StrictModel):
    """How to fetch the pages of a batch, and what to extract from them."""

    format: Annotated[Format, Field(description="The format of `content`.")] = "html"
    fields: Annotated[
        dict[str, Annotated[FieldQuery, BeforeValidator(_string_to_query, json_schema_input_type=FieldQuery | str)]],
        Field(
            description="A query for each name. A string is a CSS selector. With the format `fields` they are the "
            "content, otherwise the result has them under `also`.",
            max_length=50,
        ),
        at_most(50),
    ] = {}
    headers: Annotated[dict[str, str], Field(description="Sent with each request.", max_length=50), at_most(50)] = {}
    cookies: Annotated[dict[str, str], Field(description="Sent with each request.", max_length=100), at_most(100)] = {}
    timeout: Annotated[float, Field(gt=0, le=600, description="Seconds per page.")] = 30.0
    max_bytes: Annotated[int, Field(ge=1, le=64 << 20, description="Maximum size of a page; larger pages fail.")] = (
        5 << 20
    )
    robots: Annotated[bool, Field(description="Obey robots.txt.")] = True
    retries: Annotated[int, Field(ge=0, le=10, description="Attempts after the first one.")] = 2
    depth: Annotated[
        int, Field(ge=0, le=10, description="Follow links up to this many steps from each URL, on the same host.")
    ] = 0
    max_pages: Annotated[
        int, Field(ge=1, le=100_000, description="With `depth`: maximum number of pages of the whole batch.")
    ] = 1000
    also: Annotated[
        list[AlsoFormat],
        Field(max_length=4, description="Additional formats of the page. The result has them under `also`."),
        at_most(4),
    ] = []
    render: RenderField = None

    @field_validator("fields")
    @classmethod
    def _check_names(cls, fields: dict[str, FieldQuery]) -> dict[str, FieldQuery]:
        for name in fields:
            if not (0 < len(name.strip()) <= len(name) <= _MAX_NAME_LENGTH and name.isprintable()):
                raise ValueError(
                    f"a field's name must have 1 to {_MAX_NAME_LENGTH} printable characters, not {name!r:.80}"
                )
        return fields

    @model_validator(mode="after")
    def _check_together(self) -> BatchOptions:
        if self.format == "fields" and not self.fields:
            raise ValueError('the format "fields" needs the option fields')
        head = (*self.headers.items(), *self.cookies.items())
        if sum(len(text.encode(errors="replace")) for pair in head for text in pair) > _MAX_HEAD_BYTES:
            raise ValueError(f"headers and cookies together must not exceed {_MAX_HEAD_BYTES} bytes")
        for name, value in self.headers.items():
            if name.lower().replace("_", "-") in _RESERVED_HEADERS:  # many servers read both as the same
                raise ValueError(f"the header {name} cannot be set: it belongs to the connection, which Shoal manages")
            if not _is_valid(headers={name: value}):
                raise ValueError(f"header {name!r:.80}: invalid name or value")
        for name, value in self.cookies.items():
            if not _is_valid(cookies={name: value}):
                raise ValueError(f"cookie {name!r:.80}: invalid name or value")
        return self


def _is_valid(headers: dict[str, str] | None = None, cookies: dict[str, str] | None = None) -> bool:
    """Messages say no more than this: a value may be secret."""
    try:
        Request("http://localhost/", headers=headers or {}, cookies=cookies or {})
    except RequestError:
        return False
    return True
