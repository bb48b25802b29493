"""Requests and responses: the module ``scrapy.http``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, TypeAlias
from urllib.parse import urlencode, urljoin, urlsplit, urlunsplit

from turbohtml import Element

from shoal.scrapy.headers import Headers as Headers
from shoal.scrapy.request import NO_CALLBACK as NO_CALLBACK
from shoal.scrapy.request import JsonRequest as JsonRequest
from shoal.scrapy.request import Request as Request
from shoal.scrapy.response import HtmlResponse as HtmlResponse
from shoal.scrapy.response import JsonResponse as JsonResponse
from shoal.scrapy.response import Response as Response
from shoal.scrapy.response import TextResponse as TextResponse
from shoal.scrapy.response import XmlResponse as XmlResponse
from shoal.scrapy.values import Function

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
        return FormRequest
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ``FormRequest``: a request with form data, which can come from a form of a page.


FormData: TypeAlias = Mapping[str, object] | Iterable[tuple[str, object]] | None
Pair: TypeAlias = tuple[str, object]

_CONTROLS = "input, select, textarea, button"
_TABLE_PARTS = ("table", "thead", "tbody", "tfoot", "tr")
_SPACE = " \t\n\x0c\r"


class FormRequest(Request):
    """A request with form data: the body of a POST, or the query of a GET. With data, the method is POST by default."""

    valid_form_methods = ["GET", "POST"]

    def __init__(
        self, url: str, callback: Function | str | None = None, method: str | None = None, *args: Any,
        formdata: FormData = None, **options: Any,
    ) -> None:  # fmt: skip
        method = (method or ("POST" if formdata else "GET")).upper()
        encoded = _encode(formdata, options.get("encoding") or "utf-8") if formdata else ""
        if formdata and method == "POST":
            options["body"] = encoded
        elif formdata:
            url = urlunsplit(urlsplit(url)._replace(query=encoded))
        super().__init__(url, callback, method, *args, **options)
        if formdata and method == "POST":
            self.headers.setdefault("Content-Type", "application/x-www-form-urlencoded")

    @classmethod
    def from_response(
        cls,
        response: TextResponse,
        formname: str | None = None,
        formid: str | None = None,
        formnumber: int = 0,
        formdata: FormData = None,
        clickdata: Mapping[str, str | int] | None = None,
        dont_click: bool = False,
        formxpath: str | None = None,
        formcss: str | None = None,
        **options: Any,
    ) -> Self:
        """Return the request that submits a form of the page: its fields, the button, and ``formdata``, which replaces
        fields.

        A value of None leaves the field out. ValueError or IndexError if the page has no such form or button.
        """
        form = _find(response, formname, formid, formnumber, formxpath, formcss)
        given = _pairs(formdata)
        fields = _Fields(form)
        pairs = [pair for pair in fields.values() if pair[0] not in dict(given)]
        if not dont_click:
            button = fields.button(clickdata)
            if button is not None and (name := button.attr("name")) is not None and name not in dict(given):
                pairs.append((name, button.attr("value") or ""))
        pairs += [(name, value) for name, value in given if value is not None]
        address = options.pop("url", None)
        if address is None:
            address = (form.attr("action") or "").strip(_SPACE)
        method = str(options.pop("method", None) or form.attr("method") or "GET").upper()
        return cls(
            url=urljoin(response.page.base_url, address),
            method=method if method in cls.valid_form_methods else "GET",
            formdata=pairs,
            **{"encoding": response.encoding, **options},
        )


def _find(
    response: TextResponse, name: str | None, id: str | None, number: int, xpath: str | None, css: str | None
) -> Element:
    forms = response.page.document.select("form")
    if not forms:
        raise ValueError(f"No <form> element found in {response}")
    for attribute, value in (("name", name), ("id", id)):
        if value is not None:
            for form in forms:
                if form.attr(attribute) == value:
                    return form
    if xpath is not None or css is not None:
        matches = response.css(css) if css is not None else response.xpath(xpath or "")
        node: object = matches[0].root if matches else None
        while isinstance(node, Element):
            if node.tag == "form":
                return node
            node = node.parent
        raise ValueError(f"No <form> element found with {css if css is not None else xpath}")
    try:
        return forms[number]
    except IndexError:
        raise IndexError(f"Form number {number} not found in {response}: it has {len(forms)}") from None


class _Fields:
    """The fields and buttons of a form."""

    def __init__(self, form: Element) -> None:
        self._controls = form.select(_CONTROLS) or _controls_after_form(form)

    def values(self) -> Iterator[Pair]:
        """Yield the named fields as a browser would send them, and also disabled ones."""
        for control in self._controls:
            name, kind = control.attr("name"), (control.attr("type") or "").lower()
            if not name or control.tag == "button" or kind in ("submit", "image", "reset"):
                continue
            if control.tag == "select":
                yield from ((name, value) for value in _selected(control))
            elif control.tag == "textarea":
                yield name, control.text
            elif kind not in ("checkbox", "radio"):
                yield name, control.attr("value") or ""
            elif control.attr("checked") is not None:
                yield name, control.attr("value") or "on"

    def button(self, attributes: Mapping[str, str | int] | None) -> Element | None:
        """Return the first button, or the one control that has these attributes. ValueError if none or several have
        them."""
        if attributes is None:
            return next(filter(_is_submit, self._controls), None)
        if not any(map(_is_submit, self._controls)):
            return None
        number = attributes.get("nr")
        if isinstance(number, int) and number < len(self._controls):
            return self._controls[number]
        controls = [
            control
            for control in self._controls
            if all(control.attr(key) == str(attributes[key]) for key in attributes)
        ]
        if len(controls) != 1:
            problem = "Multiple elements found matching" if controls else "No clickable element matching"
            raise ValueError(f"{problem} clickdata: {dict(attributes)!r}")
        return controls[0]


def _controls_after_form(form: Element) -> list[Element]:
    """Return the controls that follow a form inside a table. The parser cannot keep them inside the form."""
    parent = form.parent
    if not isinstance(parent, Element) or parent.tag not in _TABLE_PARTS:
        return []
    following = parent.select(f"form, {_CONTROLS}")
    after = following[following.index(form) + 1 :]
    end = next((place for place, element in enumerate(after) if element.tag == "form"), len(after))
    return after[:end]


def _is_submit(control: Element) -> bool:
    kind = (control.attr("type") or "").lower()
    return kind in ("submit", "image") if control.tag == "input" else control.tag == "button" and kind in ("", "submit")


def _selected(select: Element) -> list[str]:
    options = select.select("option")
    chosen = [option for option in options if option.attr("selected") is not None]
    if select.attr("multiple") is None:
        chosen = chosen[-1:] or options[:1]
    return [value if (value := option.attr("value")) is not None else option.text.strip() for option in chosen]


def _pairs(formdata: FormData) -> list[Pair]:
    try:
        pairs = list(formdata.items() if isinstance(formdata, Mapping) else formdata or ())
        dict(pairs)
    except (TypeError, ValueError):
        raise ValueError("formdata should be a dict or iterable of tuples") from None
    return pairs


def _encode(formdata: FormData, encoding: str) -> str:
    values: list[tuple[bytes, bytes]] = []
    for name, value in _pairs(formdata):
        several = [value] if isinstance(value, str | bytes) or not isinstance(value, Iterable) else value
        values += [(_bytes(name, encoding), _bytes(member, encoding)) for member in several]
    return urlencode(values)


def _bytes(value: object, encoding: str) -> bytes:
    if value is None:
        raise TypeError("a value of formdata is None: leave the field out, or use an empty string")
    return value if isinstance(value, bytes) else str(value).encode(encoding)
