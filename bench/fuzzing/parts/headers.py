"""Headers of responses: content types, encodings, locations and retry times, and how they are displayed."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.spider import content_of, content_type, title_of
from shoal.errors import FetchError, RequestError, ShoalError
from shoal.fetch.layers.throttle import parse_retry_after
from shoal.http import Request, Response
from shoal.http.decompress import decompress
from shoal.http.exchange import redirected_request
from shoal.messages import printable
from shoal.urls.normalize import join_url

SECONDS, MEGABYTES = 1.0, 64.0

_LONGEST = 65_536
_UNSAFE = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_PIECES = [
    "text/html", "application/json", "; charset=", "charset", "=", "utf-8", "utf-16", "utf-7", "x-no-such", '"',
    "'", ";", ",", " ", "\t", "/", "+xml", "gzip", "deflate", "br", "zstd", "identity", "http://ex.com/", "//",
    "..", "?", "#", "ü", "\udcff", "\x1b[2J", "\x9b", "\u202e", "\0", "\r", "120", "1e9", "-1",
    "Wed, 21 Oct 2099 07:28:00 GMT", "Fri, 99", "[red]", "%", "@", ":", "[",
]  # fmt: skip
_NAMES = ["Content-Type", "Content-Encoding", "Location", "Retry-After", "Content-Length", "X-Other"]


def make(rng: random.Random) -> Any:
    return {
        "headers": {
            name: [_value(rng), rng.choice([1, 1, 100, 20_000])] for name in rng.sample(_NAMES, rng.randint(1, 4))
        },
        "body": rng.choice(["", "<title>x\x1b[2J</title>", "<p>ü" * 1000, "\x1f\x8b\x08" + "\0" * 100]),
    }


def _value(rng: random.Random) -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, 6)))


def mutate(rng: random.Random, case: Any) -> Any:
    headers = {name: [*value] for name, value in case["headers"].items()}
    name = rng.choice([*headers])
    headers[name][0] += rng.choice(_PIECES)
    headers[name][1] = max(1, min(60_000, int(headers[name][1] * rng.choice([0.5, 1, 3]))))
    return {**case, "headers": headers}


def run(case: Any) -> str:
    headers = {name: (unit * times)[:_LONGEST] for name, (unit, times) in case["headers"].items()}
    body = case["body"].encode("latin-1", "replace")
    coding = headers.get("Content-Encoding")
    with suppress(FetchError):
        body = decompress(body, coding, 10_000_000) if coding else body
    request = Request("http://ex.com/a", headers={"X-Api-Key": "secret", "Accept": "x"})
    response = Response("http://ex.com/a", headers=headers, body=body, request=request)
    parse_retry_after(headers.get("Retry-After"), datetime.now(UTC))
    with suppress(RequestError):
        url = join_url(response.url, headers.get("Location", ""))
        followed = redirected_request(request, url, 302)
        assert url.split("/")[2] == "ex.com" or "X-Api-Key" not in followed.headers
    for value in headers.values():
        assert not _UNSAFE.search(printable(value))
    for form in ("html", "text", "links"):
        with suppress(ShoalError):
            content_of(response, BatchOptions.model_validate({"format": form}))
    with suppress(ShoalError):
        title_of(response)
    content_type(response)
    return "read"
