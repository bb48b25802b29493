"""Requests and responses: the module ``scrapy.http``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.scrapy.headers import Headers as Headers
from shoal.scrapy.request import NO_CALLBACK as NO_CALLBACK
from shoal.scrapy.request import JsonRequest as JsonRequest
from shoal.scrapy.request import Request as Request
from shoal.scrapy.response import HtmlResponse as HtmlResponse
from shoal.scrapy.response import JsonResponse as JsonResponse
from shoal.scrapy.response import Response as Response
from shoal.scrapy.response import TextResponse as TextResponse
from shoal.scrapy.response import XmlResponse as XmlResponse

if TYPE_CHECKING:
    from shoal.scrapy.forms import FormRequest as FormRequest

JSONRequest = JsonRequest

__all__ = [
    "FormRequest",
    "Headers",
    "HtmlResponse",
    "JSONRequest",
    "JsonRequest",
    "JsonResponse",
    "Request",
    "Response",
    "TextResponse",
    "XmlResponse",
]


def __getattr__(name: str) -> type[FormRequest]:
    if name == "FormRequest":
        from shoal.scrapy.forms import FormRequest

        return FormRequest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
