"""What a caller may ask for. Data only: nothing in it is ever executed."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from shoal.batch.limits import StrictModel, at_most
from shoal.batch.queries import LONGEST, check_css, check_xpath
from shoal.errors import RequestError, SelectorError
from shoal.http import Request
from shoal.selector import Selector

Format: TypeAlias = Literal["html", "text", "markdown", "links", "fields"]

_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"})
_LONGEST_NAME = 100
_LARGEST_HEAD = 16 * 1024  # bytes of headers and cookies together: they are kept with each URL


class FieldQuery(StrictModel):
    """Where a field is on a page: a CSS query (with `::text` or `::attr(name)` if wanted) or an XPath. Only the part of
    both is taken that is fast on any page."""

    css: Annotated[str | None, Field(max_length=LONGEST, examples=["h1"])] = None
    xpath: Annotated[str | None, Field(max_length=LONGEST, examples=["//h1/text()"])] = None
    all: Annotated[bool, Field(description="A list of all that is found, instead of the first.")] = False

    @model_validator(mode="after")
    def _can_be_read(self) -> FieldQuery:
        if (self.css is None) == (self.xpath is None):
            raise ValueError("give one of css and xpath")
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


def _text_is_css(query: Any) -> Any:
    return {"css": query} if isinstance(query, str) else query


class BatchOptions(StrictModel):
    """How the pages of a batch are fetched, and what is taken from them."""

    format: Annotated[Format, Field(description="What `content` is.")] = "html"
    fields: Annotated[
        dict[str, Annotated[FieldQuery, BeforeValidator(_text_is_css, json_schema_input_type=FieldQuery | str)]],
        Field(description="For the format `fields`: name to query; text is a CSS query.", max_length=50),
        at_most(50),
    ] = {}
    headers: Annotated[dict[str, str], Field(description="Sent with each request.", max_length=50), at_most(50)] = {}
    cookies: Annotated[dict[str, str], Field(description="Sent with each request.", max_length=100), at_most(100)] = {}
    timeout: Annotated[float, Field(gt=0, le=600, description="Seconds for one page.")] = 30.0
    max_bytes: Annotated[int, Field(ge=1, le=64 << 20, description="A larger page fails.")] = 5 << 20
    robots: Annotated[bool, Field(description="Keep to robots.txt.")] = True
    retries: Annotated[int, Field(ge=0, le=10, description="Attempts after the first one that failed.")] = 2
    depth: Annotated[
        int, Field(ge=0, le=10, description="How many links away from the given URLs, on their own hosts.")
    ] = 0
    max_pages: Annotated[int, Field(ge=1, le=100_000, description="With `depth`: pages of the whole batch.")] = 1000
    render: Annotated[bool, Field(description="Needs a browser, which this server does not have.")] = False
    screenshot: Annotated[bool, Field(description="Needs a browser, which this server does not have.")] = False

    @field_validator("fields")
    @classmethod
    def _have_names(cls, fields: dict[str, FieldQuery]) -> dict[str, FieldQuery]:
        for name in fields:
            if not (0 < len(name.strip()) <= len(name) <= _LONGEST_NAME and name.isprintable()):
                raise ValueError(f"a field's name has 1 to {_LONGEST_NAME} characters, not {name!r:.80}")
        return fields

    @field_validator("render", "screenshot")
    @classmethod
    def _no_browser(cls, wanted: bool) -> bool:
        if wanted:
            raise ValueError("this server has no browser: pages are fetched over HTTP, and not rendered")
        return wanted

    @model_validator(mode="after")
    def _can_be_sent(self) -> BatchOptions:
        if (self.format == "fields") != bool(self.fields):
            raise ValueError('the format "fields" and the option fields go together')
        head = (*self.headers.items(), *self.cookies.items())
        if sum(len(text.encode(errors="replace")) for pair in head for text in pair) > _LARGEST_HEAD:
            raise ValueError(f"headers and cookies have {_LARGEST_HEAD} bytes at most, together")
        for name, value in self.headers.items():
            if name.lower() in _OURS:
                raise ValueError(f"the header {name} is not yours to set")
            if not _is_possible(headers={name: value}):
                raise ValueError(f"the header {name!r:.80} can't be sent: its name or its value can't be one")
        for name, value in self.cookies.items():
            if not _is_possible(cookies={name: value}):
                raise ValueError(f"the cookie {name!r:.80} can't be sent: its name or its value can't be one")
        return self


def _is_possible(headers: dict[str, str] | None = None, cookies: dict[str, str] | None = None) -> bool:
    """Nothing more is told than that: a value may be a secret."""
    try:
        Request("http://localhost/", headers=headers or {}, cookies=cookies or {})
    except RequestError:
        return False
    return True
