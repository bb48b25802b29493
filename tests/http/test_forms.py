"""Forms: what a browser would send for the same page."""

from __future__ import annotations

from email import message_from_bytes
from typing import Any
from urllib.parse import parse_qsl

import pytest

from shoal.errors import RequestError, SelectorError
from shoal.http import Request, Response

LOGIN = """<form id=search action=/find><input name=q value=books></form>
<form id=login name=enter method=post action="/login?next=1">
<input type=hidden name=csrf value=t0k3n><input name=user><input type=password name=password>
<input type=checkbox name=remember value=yes><input type=checkbox name=news checked>
<input type=radio name=kind value=a><input type=radio name=kind value=b checked>
<select name=lang><option value=en><option value=de selected></select>
<select name=tags multiple><option value=1 selected><option value=2 selected><option value=3></select>
<textarea name=note>hi</textarea><input name=off disabled value=x><input type=file name=photo>
<button name=go value=in>Sign in</button>
<button name=go value=out formaction=/logout formmethod=get>Sign out</button></form>
<input form=login name=far value=away>"""


def page(html: str = LOGIN, content_type: str = "text/html; charset=utf-8") -> Response:
    encoding = content_type.partition("charset=")[2] or "utf-8"
    return Response("http://ex.com/a/b?x=1", headers={"Content-Type": content_type}, body=html.encode(encoding))


def sent(request: Request) -> list[tuple[str, str]]:
    return parse_qsl(request.body.decode(), keep_blank_values=True)


DEFAULTS = [
    ("csrf", "t0k3n"), ("user", ""), ("password", ""), ("news", "on"), ("kind", "b"), ("lang", "de"), ("tags", "1"),
    ("tags", "2"), ("note", "hi"), ("far", "away"),
]  # fmt: skip


def test_what_the_page_has_is_sent() -> None:
    request = page().form(id="login").submit()
    assert (request.method, request.url) == ("POST", "http://ex.com/login?next=1")
    assert request.headers == {"Content-Type": "application/x-www-form-urlencoded"}
    assert sent(request) == [*DEFAULTS, ("go", "in")]


def test_fill() -> None:
    form = page().form(name="enter")
    filled = form.fill(user="me", password="ß&", remember=True, news=False, tags=["3"], lang="en").fill({"note": None})
    assert dict(sent(filled.submit())) == {
        "csrf": "t0k3n", "user": "me", "password": "ß&", "kind": "b", "lang": "en", "tags": "3", "far": "away",
        "remember": "yes", "go": "in",
    }  # fmt: skip
    assert form.fields["user"] == ""  # the form itself did not change
    assert filled.fields["tags"] == "3"
    assert form.fields["tags"] == ["1", "2"]


def test_a_button_has_its_own_address_and_method() -> None:
    request = page().form("#login").fill(user="me").submit(button="Sign out")
    assert request.method == "GET"
    assert request.url.startswith("http://ex.com/logout?csrf=t0k3n&user=me&")
    assert request.url.endswith("&go=out")


def test_the_first_form_is_the_default_and_get_replaces_the_query() -> None:
    assert page().form().fill(q="a b").submit().url == "http://ex.com/find?q=a+b"
    bare = page("<form><input name=q value=1></form>").form().submit()
    assert bare.url == "http://ex.com/a/b?q=1"


def test_options_go_to_the_request() -> None:
    request = page().form(id="login").submit("inside", meta={"a": 1}, priority=5, headers={"X-A": "1"})
    assert (request.callback, request.meta, request.priority) == ("inside", {"a": 1}, 5)
    assert request.headers == {"X-A": "1", "Content-Type": "application/x-www-form-urlencoded"}


def test_files_are_sent_as_multipart() -> None:
    html = "<form method=post enctype=multipart/form-data><input name=t value=ü><input type=file name=photo></form>"
    form = page(html).form().fill(photo=('a"b.png', b"\x00\xff\r\n"))
    request = form.submit()
    mail = message_from_bytes(b"Content-Type: " + request.headers["Content-Type"].encode() + b"\r\n\r\n" + request.body)
    text, photo = mail.get_payload()
    assert text.get_payload(decode=True).decode() == "ü"
    assert photo.get_filename() == "a%22b.png"
    assert photo.get_payload(decode=True).rstrip(b"\r\n") == b"\x00\xff"
    assert request.fingerprint() == form.submit().fingerprint()  # the same fields are the same request


def test_the_encoding_is_that_of_the_page() -> None:
    html = "<form method=post><input name=q value=é></form>"
    assert page(html, "text/html; charset=iso-8859-1").form().submit().body == b"q=%E9"
    assert page(html).form().submit().body == b"q=%C3%A9"


def test_plain_text_and_image_buttons() -> None:
    html = "<form method=post enctype=text/plain><input name=a value=1><input type=image name=i></form>"
    assert page(html).form().submit().body == b"a=1\r\ni.x=0\r\ni.y=0\r\n"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: page().form(id="nope"), "no form .id='nope'.*id='login'"),
        (lambda: page("<p>").form(), "the page has no forms"),
        (lambda: page().form(id="login").fill(usr="x"), "no field 'usr'; did you mean 'user'"),
        (lambda: page().form(id="login").submit(button="x"), "no button 'x': it has 'go'"),
        (lambda: page().form(id="login").fill(photo=("a", "text")), "a file is a pair"),
    ],
)
def test_what_is_not_there(use: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        use()
    assert dict(sent(page().form(id="login").add(made_by_a_script="1").submit()))["made_by_a_script"] == "1"


def test_a_bad_query() -> None:
    with pytest.raises(SelectorError):
        page().form("form[")
