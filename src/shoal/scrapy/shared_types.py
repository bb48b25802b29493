"""Types that several modules of this package share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

from shoal.scrapy.headers import Source

if TYPE_CHECKING:
    from shoal.selector import Selector

Function: TypeAlias = Callable[..., object]
"""A function of the project: a callback, an errback, a receiver of a signal."""
Values: TypeAlias = dict[str, Any]
"""Values by name that a project stores and reads, such as ``meta``. As in Scrapy, their types are the project's own."""
Given: TypeAlias = Mapping[str, Any]
"""The same, where they are only read."""
Cookies: TypeAlias = dict[Any, Any] | list[dict[str, Any]]
"""Cookies of a request: by name, or one dict for each with ``name``, ``value``, ``domain`` and ``path``."""


class HasUrl(Protocol):
    """A request, a response or a link."""

    @property
    def url(self) -> str: ...


Followed: TypeAlias = "str | HasUrl | Selector"
"""What a response can follow: a URL, a Link, or a selected element or attribute."""


class RequestOptions(TypedDict, total=False):
    """The arguments of a Request after its URL and callback, by name."""

    method: str
    headers: Source
    body: bytes | str | None
    cookies: Cookies | None
    meta: Given | None
    encoding: str
    priority: int
    dont_filter: bool
    errback: Function | str | None
    flags: list[str] | None
    cb_kwargs: Given | None
