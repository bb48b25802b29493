"""Requests from command lines of curl, as the developer tools of browsers copy them."""

from __future__ import annotations

import argparse
import shlex
import warnings
from base64 import b64encode
from http.cookies import SimpleCookie
from typing import NoReturn


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"There was an error parsing the curl command: {message}")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("url")
    parser.add_argument("-H", "--header", dest="headers", action="append", default=[])
    parser.add_argument("-X", "--request", dest="method")
    parser.add_argument("-b", "--cookie", dest="cookie")
    parser.add_argument("-d", "--data", "--data-raw", "--data-binary", "--data-ascii", dest="data", action="append")
    parser.add_argument("-u", "--user", dest="user")
    parser.add_argument("-A", "--user-agent", dest="agent")
    parser.add_argument("-I", "--head", dest="head", action="store_true")
    for words in (
        ("--compressed",),
        ("-s", "--silent"),
        ("-v", "--verbose"),
        ("-k", "--insecure"),
        ("-L", "--location"),
    ):
        parser.add_argument(*words, action="store_true")
    return parser


def curl_arguments(command: str, *, strict: bool) -> dict[str, object]:
    """Return the arguments of a Request for a command line. ValueError if it is not a curl command, or if it has
    unknown options and ``strict`` is set."""
    words = shlex.split(command)
    if words[:1] != ["curl"]:
        raise ValueError('A curl command must start with "curl"')
    found, unknown = _parser().parse_known_args(words[1:])
    if unknown:
        message = f"Unrecognized options: {', '.join(unknown)}"
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)
    url = found.url if "://" in found.url else f"http://{found.url}"
    made: dict[str, object] = {"url": url, "method": (found.method or ("HEAD" if found.head else "GET")).upper()}
    headers: list[tuple[str, str]] = []
    cookies: dict[str, str] = {}
    for header in found.headers:
        name, _, value = header.partition(":")
        if name.strip().lower() == "cookie":
            cookies |= {key: morsel.value for key, morsel in SimpleCookie(value.strip()).items()}
        else:
            headers.append((name.strip(), value.strip()))
    if found.cookie:
        cookies |= {key: morsel.value for key, morsel in SimpleCookie(found.cookie).items()}
    if found.agent:
        headers.append(("User-Agent", found.agent))
    if found.user:
        headers.append(("Authorization", "Basic " + b64encode(found.user.encode()).decode()))
    if found.data:
        made["body"] = "&".join(each.removeprefix("$") for each in found.data)
        if found.method is None:
            made["method"] = "POST"
    return made | ({"headers": headers} if headers else {}) | ({"cookies": cookies} if cookies else {})
