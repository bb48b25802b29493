"""The memory of a server is bounded by its limits, whatever callers send, repeat, or do not read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.serving import Api, beside, serving
from tests.servers import StreamServer, answer, read_head

MB = 1_000_000


class Sized(StreamServer):
    """``/100`` is a page with a text of 100 bytes. In ``/100?control`` they are control characters: JSON has six bytes for
    each."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            size, _, kind = request.path.lstrip("/").partition("?")
            letter = "\x01" if kind.startswith("control") else "x"
            page = answer(letter * int(size), content_type="text/plain") if size.isdecimal() else answer(status=404)
            writer.write(page)
            await writer.drain()


@pytest.fixture(scope="module")
def site() -> Iterator[Sized]:
    with beside(Sized()) as server:
        yield server


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with serving(tmp_path) as server:
        yield server


def memory_of(api: Api, field: str = "VmRSS") -> int:
    status = Path(f"/proc/{api.process.process.pid}/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_a_url_that_is_sent_often_is_answered_with_its_content_once(api: Api, site: Sized) -> None:
    url = f"{site.url}/300000"
    before = memory_of(api, "VmHWM")
    results = api.batch(["no url", *[url] * 1500, f"{site.url}/nowhere", f"{site.url}/nowhere"])["results"]
    assert memory_of(api, "VmHWM") - before < 100 * MB
    first = results[1]
    assert (len(first["content"]), "same_as" in first) == (300_000, False)
    assert {(each["url"], each["status"], each["content"], each["same_as"]) for each in results[2:1501]} == {
        (url, "success", None, 1)
    }
    assert {frozenset(each) for each in results[2:1501]} == {frozenset({*first, "same_as"})}
    assert results[-1]["same_as"] == 1501
    assert results[-1]["error"] == {"kind": "http 404", "message": "see results[1501]"}
