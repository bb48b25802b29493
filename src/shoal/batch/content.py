"""What is taken from a page."""

from __future__ import annotations

from typing import Any

from shoal.batch.options import BatchOptions, FieldQuery
from shoal.http import Response

_TEXTS = ("text/", "json", "xml", "html", "javascript", "yaml", "csv", "x-www-form-urlencoded")


def content_type(response: Response) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def title_of(response: Response) -> str | None:
    """None where there is none, and for what is no HTML."""
    if not _is_html(response):
        return None
    title = response.document.select_one("title")
    return (title.text.strip() or None) if title is not None else None


def content_of(response: Response, options: BatchOptions) -> Any:
    """In the format that was asked for. None for what is not text: an image has no Markdown."""
    kind = content_type(response)
    if kind and not any(word in kind for word in _TEXTS):
        return None
    match options.format:
        case "links":
            return response.links() if _is_html(response) else []
        case "fields":
            return {name: _field(response, query) for name, query in options.fields.items()}
        case "text" if _is_html(response):
            return response.document.main_text() or response.document.to_text().strip()
        case "markdown" if _is_html(response):
            return response.to_markdown()
    return response.text


def _field(response: Response, query: FieldQuery) -> str | list[str] | None:
    found = response.css(query.css) if query.css is not None else response.xpath(query.xpath or "")
    texts = [text for each in found if (text := each.text_content().strip())]
    return texts if query.all else texts[0] if texts else None


def _is_html(response: Response) -> bool:
    kind = content_type(response)
    return not kind or "html" in kind
