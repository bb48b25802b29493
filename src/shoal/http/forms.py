"""Forms: fill in the fields of a page's form and make the request that a browser would send."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeAlias, Unpack
from urllib.parse import urlencode

from shoal.errors import RequestError, SelectorError, TooComplexError
from shoal.http.request import Callback, LinkOptions, Request

if TYPE_CHECKING:
    from turbohtml import Element

    from shoal.http.response import Response

Upload: TypeAlias = tuple[str, bytes]
"""The name and the content of a file."""
Value: TypeAlias = str | int | float | bool | list[str] | list[int] | list[float] | Upload | None
Pair: TypeAlias = tuple[str, str | Upload]

_URLENCODED, _MULTIPART, _PLAIN = "application/x-www-form-urlencoded", "multipart/form-data", "text/plain"
_CONTROLS = "input, select, textarea, button"
_MAX_LISTED = 30
_MAX_MARKUP = (8 << 20, 2)  # characters of the controls outside of a form, or this multiple of the page's size


def find_form(response: Response, css: str | None, id: str | None, name: str | None) -> Form:
    """Return the first form of the page that fits. RequestError says which forms the page has."""
    forms = response.document.select("form")
    if css is not None:
        try:
            chosen = [element for element in response.document.select(css) if element.tag == "form"]
        except ValueError as exc:
            raise SelectorError(f"bad CSS query {css!r}: {exc}") from exc
    else:
        chosen = [form for form in forms if id in (None, form.attr("id")) and name in (None, form.attr("name"))]
    if chosen:
        return Form(response, chosen[0])
    criteria = {"css": css, "id": id, "name": name}
    query = ", ".join(f"{key}={value!r}" for key, value in criteria.items() if value is not None)
    have = ", ".join(_label(form) for form in forms[:_MAX_LISTED]) or "no forms"
    raise RequestError(f"no form ({query}) on {response.url}: the page has {have}")


def _label(form: Element) -> str:
    names = [f"{key}={value!r:.40}" for key in ("id", "name", "action") if (value := form.attr(key))]
    return f"<form {' '.join(names)}>" if names else "<form>"


class Form:
    """A form of a page. ``fill`` returns a changed copy, and ``submit`` the request.

    Hidden fields and defaults stay as the page has them, so a token against forged requests is sent too.
    """

    def __init__(self, response: Response, element: Element) -> None:
        self._response = response
        self._element = element
        self._controls = _controls(response, element)
        self._pairs: list[Pair] = [*element.form_data(), *_outside(response, element)]

    @property
    def fields(self) -> dict[str, str | Upload | list[str | Upload]]:
        """The fields that would be sent now, without the button: a value, or a list for a repeated name."""
        fields: dict[str, list[str | Upload]] = {}
        for name, value in self._pairs:
            fields.setdefault(name, []).append(value)
        return {name: values if len(values) > 1 else values[0] for name, values in fields.items()}

    def fill(self, values: Mapping[str, Value] | None = None, /, **fields: Value) -> Form:
        """Return a copy with these fields changed; names that are not identifiers go into a dict.

        A list sets several values, True checks a checkbox, False and None leave the field out, and ``(name, content)``
        is a file. RequestError for a field that the form does not have: use ``add`` for fields that a script adds.
        """
        names = {name for control in self._controls if (name := control.attr("name"))}
        changes = {**(values or {}), **fields}
        for name in changes:
            if name not in names:
                near = get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(names)[:_MAX_LISTED])}"
                raise RequestError(f"the form has no field {name!r}{hint}")
        return self._with(changes)

    def add(self, values: Mapping[str, Value] | None = None, /, **fields: Value) -> Form:
        """Return a copy with these fields, whether the page's form has them or not."""
        return self._with({**(values or {}), **fields})

    def _with(self, changes: Mapping[str, Value]) -> Form:
        form = object.__new__(Form)
        form._response, form._element, form._controls = self._response, self._element, self._controls
        pairs: list[Pair] = []
        new = {name: self._values(name, value) for name, value in changes.items()}
        for name, value in self._pairs:
            if name not in changes:
                pairs.append((name, value))
            else:  # the new values stand where the first of the old ones stood
                pairs += [(name, new_value) for new_value in new.pop(name, [])]
        form._pairs = pairs + [(name, value) for name, values in new.items() for value in values]
        return form

    def _values(self, name: str, value: Value) -> list[str | Upload]:
        if value is None or value is False:
            return []
        if value is True:
            box = next((control for control in self._controls if control.attr("name") == name), None)
            return [(box.attr("value") if box is not None else None) or "on"]
        if isinstance(value, tuple):
            if len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], bytes):
                return [value]
            raise RequestError(f"a file is a pair of its name and its content in bytes, not {value!r:.80}")
        return [str(text) for text in value] if isinstance(value, list) else [str(value)]

    def submit(
        self,
        callback: Callback | None = None,
        *,
        button: str | None = None,
        errback: Callback | None = None,
        **options: Unpack[LinkOptions],
    ) -> Request:
        """Return the request. ``button`` is the name, the value or the text of a button (default: the first one).

        The method, the address and the encoding are those of the button, or else of the form. ``options`` go to the
        request. RequestError if there is no such button.
        """
        pressed = self._button(button)
        pairs = self._pairs + _sent_by(pressed)
        action = self._attribute(pressed, "action").strip()
        url = self._response.urljoin(action) if action else self._response.shown_url or self._response.url
        method = self._attribute(pressed, "method").upper()
        charset = _charset(self._element.attr("accept-charset"), self._response.encoding)
        if method != "POST":
            texts = [(name, value if isinstance(value, str) else value[0]) for name, value in pairs]
            query = urlencode(texts, encoding=charset, errors="xmlcharrefreplace")
            path = url.partition("?")[0]
            return Request(f"{path}?{query}" if query else path, callback, errback=errback, **options)
        body, kind = _encode(pairs, self._attribute(pressed, "enctype").lower(), charset)
        options["headers"] = {**options.get("headers", {}), "Content-Type": kind}
        return Request(url, callback, method="POST", body=body, errback=errback, **options)

    def _attribute(self, pressed: Element | None, name: str) -> str:
        own = pressed.attr("form" + name) if pressed is not None else None
        return own if own is not None else self._element.attr(name) or ""

    def _button(self, label: str | None) -> Element | None:
        buttons = [control for control in self._controls if _is_submit(control)]
        if label is None:
            return buttons[0] if buttons else None
        for button in buttons:
            if label in (button.attr("name"), button.attr("value"), button.text.strip()):
                return button
        shown = buttons[:_MAX_LISTED]
        have = ", ".join(
            f"{button.attr('name') or button.attr('value') or button.text.strip()!r:.40}" for button in shown
        )
        raise RequestError(f"the form has no button {label!r}: it has {have or 'none'}")


def _controls(response: Response, element: Element) -> list[Element]:
    """Return the controls inside the form, and those elsewhere that belong to it by their ``form`` attribute."""
    own = [control for control in element.select(_CONTROLS) if control.attr("form") in (None, element.attr("id"))]
    return own + _elsewhere(response, element)


def _elsewhere(response: Response, element: Element) -> list[Element]:
    if not (id := element.attr("id")):
        return []
    inside, tags = set(element.select(_CONTROLS)), _CONTROLS.split(", ")
    controls = [control for control in response.document.select("[form]") if control.attr("form") == id]
    return [control for control in controls if control not in inside and control.tag in tags]


def _outside(response: Response, element: Element) -> list[Pair]:
    """Return what the controls elsewhere send. A form with copies of them encodes their values."""
    controls = _elsewhere(response, element)
    if not controls:
        return []
    from shoal.selector import parsing

    parts: list[str] = []
    room = limit = max(_MAX_MARKUP[0], _MAX_MARKUP[1] * len(response.body))
    for control in controls:
        parts.append(control.html)
        room -= len(parts[-1])
        if room < 0:  # buttons in buttons
            raise TooComplexError(f"the page is too complex: the fields of a form have more than {limit} characters")
    copy = parsing.parse("<form>" + "".join(parts) + "</form>").select_one("form")
    return list(copy.form_data()) if copy is not None else []


def _is_submit(control: Element) -> bool:
    kind = (control.attr("type") or "").lower()
    if control.attr("disabled") is not None:
        return False
    return kind in ("submit", "image") if control.tag == "input" else control.tag == "button" and kind in ("", "submit")


def _sent_by(button: Element | None) -> list[Pair]:
    """Return what a pressed button adds to the fields."""
    if button is None:
        return []
    name = button.attr("name") or ""
    if (button.attr("type") or "").lower() == "image":
        prefix = f"{name}." if name else ""
        return [(prefix + "x", "0"), (prefix + "y", "0")]
    return [(name, button.attr("value") or "")] if name else []


def _charset(accepted: str | None, encoding: str) -> str:
    for name in (*(accepted or "").replace(",", " ").split(), encoding):
        try:
            "".encode(name)
        except LookupError:
            continue
        return "utf-8" if name.lower().startswith("utf-16") else name
    return "utf-8"


def _encode(pairs: list[Pair], kind: str, charset: str) -> tuple[bytes, str]:
    """Return the body and its content type."""
    if kind == _MULTIPART:
        return _multipart(pairs, charset)
    texts = [(name, value if isinstance(value, str) else value[0]) for name, value in pairs]
    if kind == _PLAIN:
        lines = "".join(f"{name}={value}\r\n" for name, value in texts)
        return lines.encode(charset, "xmlcharrefreplace"), _PLAIN
    return urlencode(texts, encoding=charset, errors="xmlcharrefreplace").encode(), _URLENCODED


def _multipart(pairs: list[Pair], charset: str) -> tuple[bytes, str]:
    parts = []
    for name, value in pairs:
        head = f'Content-Disposition: form-data; name="{_quoted(name)}"'
        if isinstance(value, str):
            parts.append((head + "\r\n\r\n" + value).encode(charset, "xmlcharrefreplace"))
        else:
            head += f'; filename="{_quoted(value[0])}"\r\nContent-Type: application/octet-stream\r\n\r\n'
            parts.append(head.encode(charset, "xmlcharrefreplace") + value[1])
    # Derived from the content, so that the same fields always give the same request.
    mark = "shoal-" + hashlib.blake2b(b"\0".join(parts), digest_size=16).hexdigest()
    body = b"".join(b"--" + mark.encode() + b"\r\n" + part + b"\r\n" for part in parts)
    return body + b"--" + mark.encode() + b"--\r\n", f"{_MULTIPART}; boundary={mark}"


def _quoted(text: str) -> str:
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
