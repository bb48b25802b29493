"""WARC files: what a record says, and which records are in a file."""

from __future__ import annotations

import errno
import gzip
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal import Request, Response, Spider, crawl
from shoal.config import HttpSettings
from shoal.errors import SinkError
from shoal.fetch.http_fetcher import HttpFetcher
from shoal.http.exchange import Exchange, captured
from shoal.ports import Completion, Failure, Run
from shoal.sinks import open_sink
from shoal.testing import FakeClock
from tests.support.archives import Archive, die, exchange, store
from tests.support.fakes import memory_frontier
from tests.support.servers import ProxyServer
from tests.support.warc_files import Found, pages_of, read_file, read_folder, warc_files

BODY = b"<html>" + b"the same words " * 50


# -- what the fetcher keeps


async def plain(request: web.Request) -> web.StreamResponse:
    return web.Response(body=BODY, content_type="text/html", headers={"Set-Cookie": "a=1", "X-Name": "caf\xe9"})


async def packed(request: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(BODY), headers={"Content-Encoding": "gzip", "Content-Type": "text/html"})


async def chunked(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/html"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for begin in range(0, len(BODY), 100):
        await response.write(BODY[begin : begin + 100])
    await response.write_eof()
    return response


async def echo(request: web.Request) -> web.StreamResponse:
    return web.Response(text=f"{request.method} {await request.text()}", status=202, reason="Fine by me")


async def moved(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/plain")


@pytest.fixture
async def site() -> AsyncIterator[str]:
    app = web.Application()
    for path, handler in {"plain": plain, "packed": packed, "chunked": chunked, "moved": moved}.items():
        app.router.add_get(f"/{path}", handler)
    app.router.add_route("*", "/echo", echo)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0][:2])
    await runner.cleanup()


async def exchange_for(request: Request) -> Exchange:
    fetcher = HttpFetcher(HttpSettings(), "shoal-test")
    exchanges: list[Exchange] = []
    token = captured.set(exchanges)
    try:
        await fetcher.fetch(request)
    finally:
        captured.reset(token)
        await fetcher.close()
    (exchange,) = exchanges
    return exchange


@pytest.fixture
async def warc(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "warc", await memory_frontier(FakeClock()))


async def recorded(warc: Archive, request: Request) -> list[Found]:
    """The records of one page that was really fetched."""
    archive = await warc.open()
    (lease,) = await warc.lease(request.url)
    await archive.store([(lease, await exchange_for(request))])
    await warc.complete(archive, lease)
    await archive.close()
    return read_folder(warc.folder)[1:]


# -- records


async def test_a_page_as_it_was_sent_and_received(warc: Archive, site: str) -> None:
    response, request, metadata = await recorded(warc, Request(f"{site}/plain?a=b", headers={"X-Mine": "1"}))
    assert (response.kind, response.line, response.body) == ("response", "HTTP/1.1 200 OK", BODY)
    assert ("set-cookie", "a=1") in response.http
    assert dict(response.http)["x-name"] == "caf\xc3\xa9"  # the bytes as they came
    assert response.url == f"{site}/plain?a=b"
    assert response.headers["WARC-IP-Address"] == "127.0.0.1"
    assert request.line == "GET /plain?a=b HTTP/1.1"
    sent = dict(request.http)
    assert (sent["x-mine"], sent["user-agent"], sent["host"]) == ("1", "shoal-test", site.removeprefix("http://"))
    assert b"hopsFromSeed: 0\r\n" in metadata.body


async def test_a_compressed_body_stays_compressed(warc: Archive, site: str) -> None:
    response, *_ = await recorded(warc, Request(f"{site}/packed"))
    assert gzip.decompress(response.body) == BODY
    assert dict(response.http)["content-encoding"] == "gzip"
    assert int(dict(response.http)["content-length"]) == len(response.body)


async def test_a_header_that_does_not_describe_the_body_has_another_name(warc: Archive, site: str) -> None:
    response, *_ = await recorded(warc, Request(f"{site}/chunked"))
    assert response.body == BODY
    assert "transfer-encoding" not in dict(response.http)
    assert dict(response.http)["x-orig-transfer-encoding"] == "chunked"


async def test_the_body_of_a_request(warc: Archive, site: str) -> None:
    response, request, _ = await recorded(warc, Request(f"{site}/echo", method="POST", body=b"name=value"))
    assert (request.line, request.body) == ("POST /echo HTTP/1.1", b"name=value")
    assert (response.line, response.body) == ("HTTP/1.1 202 Fine by me", b"POST name=value")


async def test_the_password_of_a_proxy_is_not_recorded(warc: Archive, site: str) -> None:
    async with ProxyServer(login="user:secret") as proxy:
        response, request, _ = await recorded(warc, Request(f"{site}/plain", proxy=proxy.address))
        assert proxy.requests
    assert response.body == BODY
    assert "proxy-authorization" not in dict(request.http)
    assert "WARC-IP-Address" not in response.headers  # that would be the proxy's


async def test_the_first_record_says_what_the_file_is(warc: Archive) -> None:
    archive = await warc.open()
    await warc.complete(archive, *await store(warc, archive, "http://a.example/"))
    await archive.close()
    (path,) = warc_files(warc.folder)
    info = read_file(path)[0]
    assert info.headers["WARC-Filename"] == path.name
    assert b"isPartOf: run\r\n" in info.body
    assert b"http-header-user-agent: shoal-test\r\n" in info.body


async def test_a_rendered_page_is_a_conversion_of_its_response(warc: Archive) -> None:
    archive = await warc.open()
    (lease,) = await warc.lease("http://a.example/")
    await archive.store([(lease, exchange(lease.request.url, b"<script>", rendered=b"<h1>built</h1>"))])
    await warc.complete(archive, lease)
    await archive.close()
    _, response, _, rendered, _ = read_folder(warc.folder)
    assert (response.body, rendered.body) == (b"<script>", b"<h1>built</h1>")
    assert rendered.headers["Content-Type"] == "text/html; charset=utf-8"


async def test_a_body_that_was_not_read_is_marked(warc: Archive) -> None:
    archive = await warc.open()
    (lease,) = await warc.lease("http://a.example/")
    await archive.store([(lease, exchange(lease.request.url, truncated=True))])
    await warc.complete(archive, lease)
    await archive.close()
    assert read_folder(warc.folder)[1].headers["WARC-Truncated"] == "unspecified"


async def test_the_same_payload_is_stored_once(warc: Archive) -> None:
    archive = await warc.open()
    for path in ("a", "b", "c"):
        await warc.complete(archive, *await store(warc, archive, f"http://a.example/{path}", body=BODY))
    await archive.close()
    records = read_folder(warc.folder)
    assert [record.kind for record in records if record.kind in ("response", "revisit")] == [
        "response", "revisit", "revisit"
    ]  # fmt: skip
    assert pages_of(records) == {f"http://a.example/{path}": 1 for path in ("a", "b", "c")}


async def test_no_record_refers_to_a_page_that_was_left_out(warc: Archive) -> None:
    archive = await warc.open()
    (lost,) = await store(warc, archive, "http://a.example/lost", body=BODY)
    archive.settled([lost], [False])
    await warc.complete(archive, *await store(warc, archive, "http://a.example/kept", body=BODY))
    await archive.close()
    records = read_folder(warc.folder)
    assert [record.kind for record in records] == ["warcinfo", "response", "request", "metadata"]
    assert pages_of(records) == {"http://a.example/kept": 1}


# -- files


async def test_a_large_file_is_finished_and_another_one_begun(warc: Archive) -> None:
    archive = await warc.open(max_file_bytes=3000)
    urls = [f"http://a.example/{number}" for number in range(12)]
    for url in urls:
        await warc.complete(archive, *await store(warc, archive, url, body=os.urandom(800)))
    assert len([path for path in warc.folder.iterdir() if path.suffix == ".open"]) == 1
    await archive.close()
    files = warc_files(warc.folder)
    assert len(files) == 6
    assert ["00001" in files[0].name, "00006" in files[-1].name] == [True, True]
    assert pages_of(read_folder(warc.folder)) == dict.fromkeys(urls, 1)


async def test_a_process_without_a_page_leaves_no_file(warc: Archive) -> None:
    archive = await warc.open()
    await archive.close()
    lost = await store(warc, archive, "http://a.example/")
    archive.settled(lost, [False])
    await archive.close()
    assert warc_files(warc.folder) == []


async def test_what_the_frontier_did_not_answer_is_asked_later(warc: Archive) -> None:
    archive = await warc.open()
    done, lost = await store(warc, archive, "http://a.example/done", "http://a.example/lost")
    await warc.frontier.complete([Completion(lease=done)])  # its answer is lost
    await warc.frontier.fail([Failure(lease=lost, kind="test", reason="test")])
    await archive.close()
    assert pages_of(read_folder(warc.folder)) == {"http://a.example/done": 1}


async def test_the_next_process_finishes_the_file_of_a_dead_one(warc: Archive) -> None:
    dead = await warc.open()
    first, second, third = await store(warc, dead, *(f"http://a.example/{number}" for number in range(3)))
    await warc.complete(dead, first)
    await warc.frontier.fail([Failure(lease=second, kind="test", reason="test")])
    await warc.frontier.complete([Completion(lease=third)])
    path = die(dead)
    with path.open("ab") as file:
        file.write(path.read_bytes()[:400])  # the process died while it wrote
    archive = await warc.open()
    assert pages_of(read_folder(warc.folder)) == {first.request.url: 1, third.request.url: 1}
    await archive.close()


async def test_a_file_is_finished_when_it_is_known_what_became_of_its_pages(warc: Archive) -> None:
    dead = await warc.open()
    (lease,) = await store(warc, dead, "http://a.example/")
    path = die(dead)
    archive = await warc.open()
    assert path.exists()  # a completion may still arrive
    await warc.frontier.complete([Completion(lease=lease)])
    await archive.close()
    assert pages_of(read_folder(warc.folder)) == {"http://a.example/": 1}


@pytest.mark.parametrize("cut", [0, 1, 5, 100, 300])
async def test_any_end_of_a_torn_file(warc: Archive, cut: int) -> None:
    dead = await warc.open()
    for path in ("a", "b"):
        await warc.complete(dead, *await store(warc, dead, f"http://a.example/{path}", body=os.urandom(200)))
    path = die(dead)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    archive = await warc.open()
    await archive.close()
    found = pages_of(read_folder(warc.folder))
    assert found == ({"http://a.example/a": 1} | ({} if cut else {"http://a.example/b": 1}))


async def test_zeros_at_the_end_of_a_file_are_cut_off(warc: Archive) -> None:
    dead = await warc.open()
    await warc.complete(dead, *await store(warc, dead, "http://a.example/"))
    with die(dead).open("ab") as file:
        file.write(bytes(5000))
    await (await warc.open()).close()
    assert pages_of(read_folder(warc.folder)) == {"http://a.example/": 1}


async def test_a_file_without_its_first_record_is_removed(warc: Archive) -> None:
    dead = await warc.open()
    await store(warc, dead, "http://a.example/")
    with die(dead).open("r+b") as file:
        file.truncate(20)
    await (await warc.open()).close()
    assert warc_files(warc.folder) == []


async def test_files_of_living_processes_and_other_runs_are_left_alone(warc: Archive) -> None:
    living = await warc.open()
    await store(warc, living, "http://a.example/living")
    namesake = await warc.open(Run(run_id="run", spider="pages", state="running", created_at=99.0))
    await store(warc, namesake, "http://a.example/namesake")
    other = await warc.open(Run(run_id="run-2", spider="pages", state="running", created_at=1.5))
    await store(warc, other, "http://a.example/other")
    files = {die(namesake), die(other)}
    before = {path: path.read_bytes() for path in warc.folder.iterdir()}
    assert files < before.keys()
    await (await warc.open()).close()
    assert {path: path.read_bytes() for path in warc.folder.iterdir()} == before


# -- bad input


async def test_a_folder_that_cannot_be_made(tmp_path: Path, warc: Archive) -> None:
    (tmp_path / "file").write_text("")
    warc.folder = tmp_path / "file" / "warc"
    with pytest.raises(SinkError, match=r"warc\.folder"):
        await warc.open()


@pytest.mark.parametrize("spec", ["crawl.warc.gz", "folder/crawl.warc"])
async def test_a_warc_file_is_no_output_for_items(spec: str) -> None:
    with pytest.raises(SinkError, match="--warc"):
        open_sink(spec)


# -- a crawl


class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False}

    def parse(self, response: Response) -> Any:
        yield {"url": response.url}


async def crawl_site(site: str, **settings: Any) -> Callable[[], list[Found]]:
    paths = ("plain", "packed", "chunked", "moved", "missing")
    made = crawl(Pages, settings, arguments={"start_urls": [f"{site}/{path}" for path in paths]})
    await made
    assert made.error is None
    return partial(read_folder, Path(settings["warc.folder"]))


async def test_each_page_that_is_done_has_one_record(site: str, tmp_path: Path) -> None:
    read = await crawl_site(site, **{"warc.folder": str(tmp_path / "warc"), "retry.max_attempts": 1})
    records = read()
    assert pages_of(records) == {f"{site}/{path}": 1 for path in ("plain", "packed", "chunked", "moved")}
    (redirect,) = (each for each in records if each.url == f"{site}/moved" and each.kind == "response")
    assert redirect.line == "HTTP/1.1 302 Found"


async def test_pages_from_the_cache_are_not_recorded_again(site: str, tmp_path: Path) -> None:
    cached = {"cache.enabled": True, "cache.folder": str(tmp_path / "cache"), "retry.max_attempts": 1}
    await crawl_site(site, **cached, **{"warc.folder": str(tmp_path / "first")})
    (tmp_path / "second").mkdir()
    read = await crawl_site(site, **cached, **{"warc.folder": str(tmp_path / "second")})
    assert read() == []


async def test_a_full_disk_ends_the_crawl_and_loses_nothing(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".open"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    settings = {
        "warc.folder": str(tmp_path / "warc"), "frontier": f"sqlite:///{tmp_path}/crawl.db", "retry.max_attempts": 1,
        "items.patience": 0.3,
    }  # fmt: skip
    arguments = {"start_urls": [f"{site}/plain"]}
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        made = crawl(Pages, settings, arguments=arguments)
        await made
    assert "the disk is full" in str(made.error)
    assert made.summary is not None
    assert made.summary.stats.done == 0
    again = crawl(Pages, settings, arguments=arguments)
    await again
    assert again.error is None
    assert pages_of(read_folder(tmp_path / "warc")) == {f"{site}/plain": 1}


async def test_a_disk_that_has_room_again(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, failures = os.pwrite, 0

    def full(file: int, data: bytes, offset: int) -> int:
        nonlocal failures
        if failures < 3 and os.readlink(f"/proc/self/fd/{file}").endswith(".open"):
            failures += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    done = await crawl(
        Pages, {"warc.folder": str(tmp_path / "warc"), "retry.max_attempts": 1},
        arguments={"start_urls": [f"{site}/plain"]},
    )  # fmt: skip
    assert done.error is None
    assert done.summary is not None
    assert (done.summary.stats.done, done.summary.stats.dead) == (1, 0)
    assert pages_of(read_folder(tmp_path / "warc")) == {f"{site}/plain": 1}
