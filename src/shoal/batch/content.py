"""Extracts title and content from a page."""

from __future__ import annotations

import re

from shoal.batch.fields import fields_of
from shoal.batch.options import BatchOptions, Format
from shoal.http import Response
from shoal.http.rendered import RenderedResponse

_TEXT = re.compile(
    r"text/.* | .*[/+](?:x-)?(?:json|ndjson|xml|html|javascript|yaml|csv|www-form-urlencoded)", re.VERBOSE
)


def content_type(response: Response) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def title_of(response: Response) -> str | None:
    """The title of a page; None if it has none or is not HTML."""
    if not _is_html(response):
        return None
    titles = response.css("title")
    return (titles[0].text_content().strip() or None) if titles else None


def content_of(response: Response, options: BatchOptions, format: Format | None = None) -> object:
    """The content in a format, or in the one that was requested. None if the page is not text."""
    kind = content_type(response)
    if kind and not _TEXT.fullmatch(kind):
        return None
    match format or options.format:
        case "links":
            return response.links() if _is_html(response) else []
        case "fields":
            return fields_of(response, options.fields)
        case "text" if _is_html(response):
            return response.main_text()
        case "markdown" if _is_html(response):
            return response.to_markdown()
    return response.text


def further_content(response: Response, options: BatchOptions) -> dict[str, object]:
    """The page in each additional format that was requested."""
    formats: list[Format] = [*options.also]
    if options.fields and options.format != "fields":
        formats.append("fields")
    return {name: content_of(response, options, name) for name in formats}


def browser_content(response: Response) -> dict[str, object]:
    """What the browser returned besides the page. Bytes become Base64 in JSON."""
    return {
        "rendered": isinstance(response, RenderedResponse),
        "screenshot": response.screenshot,
        "pdf": response.pdf,
        "captured": [
            {"url": each.url, "status": each.status, "content_type": each.content_type, "body": _text_of(each.body)}
            for each in response.captured
        ],
    }


def _text_of(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None


def _is_html(response: Response) -> bool:
    kind = content_type(response)
    return not kind or "html" in kind
