"""Pages that are expensive to parse, and a program that measures each one in its own process.

``python -m tests.support.hostile_pages`` prints one line of JSON for each page: CPU seconds for each way to read it,
the peak of memory in MB, and how it ended.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.spider import content_of, title_of
from shoal.errors import ShoalError
from shoal.http import Response
from shoal.runs.command_spiders import PageSpider
from shoal.selector import Selector

SIZE = 2_000_000
FORMATTING = ["a", "b", "big", "code", "em", "font", "i", "nobr", "s", "small", "strike", "strong", "tt", "u"]

NAMES = [f"{a}{b}" for a in ("", *"abcdefgh") for b in "ijklmnopqrstuvwxyz0123456789-._~!$*+"]


def fill(unit: str, start: str = "", size: int = SIZE) -> bytes:
    return (start + unit * ((size - len(start)) // len(unit))).encode()


def unclosed(count: int, attributes: str = "") -> str:
    """Formatting tags that are not closed, no two alike. Each following paragraph repeats all of them."""
    return "<p>" + "".join(f"<{FORMATTING[n % 12 + 1]} {n}{attributes}>" for n in range(count))


PAGES: dict[str, Callable[[], bytes]] = {
    "600 open tags": lambda: fill("<p>x", "<p>" + "".join(f"<b id={n}>" for n in range(600)), 246_000),
    "500 open tags in 20 KB": lambda: fill("<p>x", unclosed(500), 20_000),
    "open tags with attributes": lambda: fill("<p>x", unclosed(300, " a b c d e f g h"), 40_000),
    "few open tags with many attributes": lambda: fill(
        "<p>x", "".join(f"<{FORMATTING[n % 12 + 1]} {' '.join(NAMES[n % 7 :][:210])}>" for n in range(50)), 31_500
    ),
    "three of each open tag": lambda: fill("<p>x", "<p>" + "".join(f"<{name}>" * 3 for name in FORMATTING)),
    "open tags in each paragraph": lambda: "".join(f"<p><b id={n}>" for n in range(120_000)).encode(),
    "open tags in cells": lambda: fill("<td>x<p>x", "<table><tr><td>" + unclosed(400)),
    "open tags, in UTF-16": lambda: b"\xff\xfe" + fill("<p>x", unclosed(400), SIZE // 2).decode().encode("utf-16-le"),
    "an open link with a long address": lambda: fill("<p>x", "<p><a href=/" + "u" * 50_000 + ">", 130_000),
    "an open link with a huge address": lambda: fill("<p>x", "<p><a href=/" + "u" * 1_000_000 + ">"),
    "an open link with a wide address": lambda: fill("<p>x", "<p><a href=/&#128512;" + "u" * 60_000 + ">", 190_000),
    "an open tag with a long class": lambda: fill("<p>x", "<p><b class=" + "u" * 50_000 + ">", 130_000),
    "bodies with new attributes": lambda: "".join(f"<body a{n}>" for n in range(150_000)).encode(),
    "a million attributes": lambda: f"<p {' '.join(f'{n:x}' for n in range(330_000))}>".encode(),
    "CDATA": lambda: fill("<![CDATA["),
    "a huge title": lambda: fill("x", "<title>"),
    "a deep page": lambda: fill("<div>"),
    "a deep page of pre": lambda: fill("<hr>", "<pre>" * 505),
    "lists in a deep page": lambda: fill("<dl>[", "<x-y>" * 500),
    "line breaks in empty elements": lambda: fill("<s><br></s>"),
    "line breaks in open elements": lambda: fill("<b><br>", size=280_000),
    "tables in tables": lambda: fill("<td><table>"),
    "a wide and long table": lambda: fill("<tr>", "<table><tr>" + "<td>x" * 200_000),
    "a long table": lambda: fill("<tr><td>1<td>2", "<table>"),
    "a wide cell": lambda: fill("<tr><td>a<td>b", "<table><tr><td>" + "w" * 50_000 + "<td>x", 190_000),
    "a wide cell in a deep page": lambda: fill(
        "<tr><td>a<td>b", "<div>" * 135 + "</div>" * 135 + "<table><tr><td>" + "w" * 150_000 + "<td>x", 390_000
    ),
    "nested tables of many rows": lambda: fill("<tr><td>a<td>b", "<table><tr><td>" * 100 + "w" * 1000, 300_000),
    "lines in nested lists": lambda: fill("\n", "<ol start=999999999999999999><li>" * 240 + "<pre>x"),
    "paragraphs in nested lists": lambda: fill("<p>x", "<ol start=999999999999999999><li>" * 240),
    "lines in nested quotes": lambda: fill("\n", "<blockquote>" * 400 + "<pre>x"),
    "paragraphs in nested quotes": lambda: fill("<p>x", "<blockquote>" * 400),
    "line ends and open tags": lambda: fill("\\n<i>"),
    "wide cells": lambda: fill("<tr><td colspan=1000 rowspan=65534>x", "<table>"),
    "forms": lambda: fill("<form><div></form>"),
    "links around blocks": lambda: fill("<a><b><div></a>"),
    "end tags without starts in SVG": lambda: fill("</x>", "<svg>" + "<g>" * 600),
}


def read(mode: str, response: Response) -> None:
    if mode == "spider":
        list(PageSpider().parse(response))
    elif mode == "text":
        assert response.text is not None
        response.main_text()
    elif mode == "xml":
        Selector(response.body.decode("latin-1"), type="xml")
    else:
        fields = {"a": "p b::text", "b": {"xpath": "//div//a/@href", "all": True}} if mode == "fields" else {}
        title_of(response)
        content_of(response, BatchOptions.model_validate({"format": mode, "fields": fields}))


def cost(body: bytes) -> dict[str, object]:
    response = Response("http://example.com/", headers={"Content-Type": "text/html"}, body=body)
    seconds, ended = {}, {}
    for mode in ("links", "spider", "text", "markdown", "fields", "xml"):
        began = time.process_time()
        try:
            read(mode, response)
            ended[mode] = "read"
        except ShoalError as error:
            ended[mode] = f"{type(error).__name__}: {error}"
            if "parsing its" in str(error) and len(ended) > 1:
                break  # the other modes parse it in the same way
        seconds[mode] = round(time.process_time() - began, 3)
    return {"seconds": seconds, "ended": ended}


def peak() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024


def main() -> None:
    Response("http://example.com/", body=b"<p>x").to_markdown()
    for name, make in PAGES.items():
        body = make()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")
            before = peak()
            print(
                json.dumps({"name": name, "bytes": len(body), **cost(body), "megabytes": peak() - before}), flush=True
            )
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
