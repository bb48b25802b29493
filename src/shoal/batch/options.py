"""The options of a batch. They are data: nothing in them is executed."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shoal.batch.limits import StrictModel, at_most
from shoal.batch.queries import MAX_LENGTH, check_css, check_xpath
from shoal.batch.rendering import RenderField
from shoal.errors import RequestError, SelectorError
from shoal.http import Request
from shoal.selector import Selector

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
