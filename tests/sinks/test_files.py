"""Names, stores and thumbnails of files."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shoal.config import Config, FileSettings, ImageSettings
from shoal.crawling.files import Chain, FileChains, WantedFile
from shoal.errors import ConfigError, FileStoreError, RequestError, SpiderError
from shoal.http import File, Request, Response
from shoal.http.files import describe_file, ending_of
from shoal.item import decode_item, encode_item
from shoal.sinks.downloads import FileKeeper, FolderStore, open_file_store
from shoal.sinks.thumbnails import make_thumbnails
from shoal.spider import SpiderStats
from shoal.urls.normalize import Scope
from tests.support import forking

PDF = b"%PDF-1.7 text"


def picture(kind: str = "PNG", size: tuple[int, int] = (400, 200), mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, kind)
    return out.getvalue()


# -- names


@pytest.mark.parametrize(
    ("body", "url", "kind", "expected"),
    [
        (PDF, "http://a.example/x.exe", "text/html", "pdf"),
        (picture(), "http://a.example/x.php", "text/plain", "png"),
        (picture("JPEG"), "http://a.example/", "", "jpg"),
        (picture("WEBP"), "http://a.example/", "", "webp"),
        (b"a,b", "http://a.example/data.CSV?x=1", "text/plain; charset=utf-8", "csv"),
        (b"PK\3\4", "http://a.example/book.epub", "application/zip", "epub"),
        (b"a,b", "http://a.example/data", "text/csv", "csv"),
        (b"MZ", "http://a.example/setup.exe", "application/octet-stream", ""),
        (b"<?php", "http://a.example/shell.php", "", ""),
        (b"x", "http://a.example/..%2f..%2fetc/passwd.txt/../", "", ""),
    ],
)
def test_the_content_decides_the_ending(body: bytes, url: str, kind: str, expected: str) -> None:
    assert ending_of(body, url, kind) == expected


@given(body=st.binary(max_size=40), url=st.text(), kind=st.text())
def test_no_url_or_header_leads_out_of_the_folder(body: bytes, url: str, kind: str) -> None:
    entry = describe_file(body, f"http://a.example/{url}", kind)
    folder, start, name = entry["path"].split("/")
    checksum, _, ending = name.partition(".")
    assert (folder, start, checksum) == ("full", entry["checksum"][:2], entry["checksum"])
    assert ending == "" or ending.isalnum()
    assert "\n" not in entry["content_type"]


def test_the_same_content_has_one_path() -> None:
    paths = {describe_file(PDF, f"http://{host}.example/{host}", "text/html")["path"] for host in "abc"}
    assert len(paths) == 1


# -- stores


async def test_a_file_is_written_whole_and_once(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "new" / "store"))
    await store.put("full/ab/x.pdf", PDF, "")
    await store.put("full/ab/x.pdf", b"other", "")
    assert await store.get("full/ab/x.pdf") == PDF
    await store.put("full/ab/x.pdf", b"newer", "", replace=True)
    assert await store.get("full/ab/x.pdf") == b"newer"
    assert await store.get("full/ab/y.pdf") is None
    assert [await store.exists(f"full/ab/{name}.pdf") for name in "xy"] == [True, False]
    assert list((tmp_path / "new" / "store" / ".tmp").iterdir()) == []


async def test_what_a_dead_process_left_is_removed_later(tmp_path: Path) -> None:
    temporary = tmp_path / ".tmp"
    temporary.mkdir()
    (temporary / "old").write_bytes(b"half")
    (temporary / "young").write_bytes(b"being written")
    os.utime(temporary / "old", (time.time() - 2 * 86400,) * 2)
    await FolderStore(str(tmp_path)).put("full/x", PDF, "")
    assert [path.name for path in temporary.iterdir()] == ["young"]


WRITER = """
import asyncio, os, sys
from shoal.sinks.downloads import FolderStore
from shoal.http.files import describe_file

async def main():
    store = FolderStore(sys.argv[1])
    print("ready", flush=True)
    while True:
        body = os.urandom(16) * 500_000
        await store.put(describe_file(body, "")["path"], body, "")

asyncio.run(main())
"""


def test_a_writer_that_is_killed_leaves_no_torn_file(tmp_path: Path) -> None:
    for pause in (0.0, 0.02, 0.05, 0.1, 0.15):
        with forking.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(0.1 + pause)
            writer.kill()
    found = list((tmp_path / "full").rglob("*/*"))
    assert found
    for path in found:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


LATE_WRITER = """
import asyncio, os, sys
from shoal.config import FileSettings, ImageSettings
from shoal.sinks.downloads import FileKeeper

async def main():
    keeper, body = FileKeeper(FileSettings(store=sys.argv[1]), ImageSettings()), b"old " * 5_000_000
    print("ready", flush=True)
    await keeper.save(body, "http://a.example/x", "text/plain")

asyncio.run(main())
"""


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.03, 0.06])
async def test_a_process_that_stores_late_changes_nothing_of_its_successor(tmp_path: Path, pause: float) -> None:
    """It is frozen while it stores, and continues after another process has stored the same URL."""
    command = [sys.executable, "-c", LATE_WRITER, str(tmp_path)]
    keeper = FileKeeper(FileSettings(store=str(tmp_path)), ImageSettings())
    with forking.Popen(command, stdout=subprocess.PIPE, text=True) as late:
        assert late.stdout is not None
        assert late.stdout.readline() == "ready\n"
        await asyncio.sleep(pause)
        late.send_signal(signal.SIGSTOP)
        for body in (b"old " * 5_000_000, b"new"):
            await keeper.save(body, "http://a.example/x", "text/plain")
        before = {path: path.read_bytes() for path in (tmp_path / "full").rglob("*") if path.is_file()}
        late.send_signal(signal.SIGCONT)
        assert late.wait(60) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "full").rglob("*") if path.is_file()} == before
    assert len(before) == 2
    entry = await keeper.known("http://a.example/x")  # the index is a cache: either of the two is right
    assert entry is not None
    assert hashlib.sha256(before[tmp_path / entry["path"]]).hexdigest() == entry["checksum"]


async def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    await store.put("full/ab/x", PDF, "")
    (tmp_path / "full/ab/x").unlink()
    (tmp_path / "full/ab").rmdir()
    with pytest.raises(FileStoreError) as caught:
        await store.put("full/ab/y", PDF, "")
    assert caught.value.retryable
    await store.put("full/ab/y", PDF, "")
    assert (tmp_path / "full/ab/y").read_bytes() == PDF


async def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileStoreError, match=r"can't store a file in .*files\.store") as caught:
        await FolderStore(str(tmp_path / "file")).put("full/x", PDF, "")
    assert not caught.value.retryable


async def test_a_folder_that_cannot_be_made_is_noticed_at_once(tmp_path: Path) -> None:
    await FolderStore(str(tmp_path / "new" / "store")).check()
    assert not list(tmp_path.iterdir()), "a check makes nothing"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileStoreError, match=r"can't store a file in .*/file/a/b: Not a directory: .*/file ") as caught:
        await FolderStore(str(tmp_path / "file" / "a" / "b")).check()
    assert not caught.value.retryable


async def test_a_folder_without_permission_is_noticed_at_once(forbidden: Path) -> None:
    with pytest.raises(FileStoreError, match="Permission denied"):
        await FolderStore(str(forbidden / "store")).check()


@pytest.mark.parametrize("store", ["s3://bucket/path", "gs://bucket", "az://container/path?account=me"])
def test_object_storage(store: str) -> None:
    assert type(open_file_store(store)).__name__ == "ObjectFileStore"
    Config().with_settings({"files.store": store})


@pytest.mark.parametrize("store", ["ftp://host/path", "s3://", "s3://user:password@bucket/path"])
def test_invalid_stores(store: str) -> None:
    with pytest.raises(ConfigError, match=r"files\.store") as caught:
        Config().with_settings({"files.store": store})
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("size", ["120", "0x5", "100x", "10000x10000x1", "axb", "99999x1"])
def test_invalid_sizes(size: str) -> None:
    with pytest.raises(ConfigError, match="sizes such as 120x120"):
        Config().with_settings({"images.thumbs": [size]})


# -- thumbnails


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_thumbnails_fit_into_their_size(kind: str) -> None:
    small, large = make_thumbnails(picture(kind), [(100, 100), (1000, 1000)], 1_000_000)
    assert Image.open(io.BytesIO(small)).size == (100, 50)
    assert Image.open(io.BytesIO(large)).size == (400, 200)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "1", "L", "I;16"])
def test_all_modes(mode: str) -> None:
    (made,) = make_thumbnails(picture(mode=mode), [(50, 50)], 1_000_000)
    assert Image.open(io.BytesIO(made)).format == "JPEG"


def test_an_image_that_lies_on_its_side() -> None:
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    Image.new("RGB", (400, 200)).save(out, "JPEG", exif=exif)
    (made,) = make_thumbnails(out.getvalue(), [(100, 100)], 1_000_000)
    assert Image.open(io.BytesIO(made)).size == (50, 100)


def test_transparency_becomes_white() -> None:
    out = io.BytesIO()
    Image.new("RGBA", (10, 10), (0, 0, 0, 0)).save(out, "PNG")
    (made,) = make_thumbnails(out.getvalue(), [(10, 10)], 1_000_000)
    assert Image.open(io.BytesIO(made)).getpixel((5, 5)) == (255, 255, 255)


def bomb() -> bytes:
    """A small PNG that says it has 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10_000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (bomb(), "not an image that can be read|pixels are too many"),
        (picture(size=(2000, 1000)), "2000x1000 pixels are too many; the limit is 1000000"),
        (picture()[:100], "damaged|not an image"),
        (b"\x89PNG\r\n\x1a\nnot a picture", "damaged|not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "not an image"),  # a decoder that starts another program
        (picture("BMP"), "not an image"),
        (b"", "not an image"),
    ],
)
def test_bad_images(body: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_thumbnails(body, [(100, 100)], 1_000_000)


@pytest.mark.parametrize(("tag", "kind"), [(0x100, 1), (0x201, 7), (0x10E, 5), (0x10E, 11)])
def test_odd_metadata_does_not_matter(tag: int, kind: int) -> None:
    """Cameras write tags with the wrong type."""
    entries = struct.pack("<HHIHH", 0x112, 3, 1, 6, 0) + struct.pack("<HHI4s", tag, kind, 1, b"\1\0\0\0")
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2) + entries + bytes(4)
    out = io.BytesIO()
    Image.new("RGB", (200, 100)).save(out, "JPEG", exif=exif)
    (made,) = make_thumbnails(out.getvalue(), [(50, 50)], 1_000_000)
    assert Image.open(io.BytesIO(made)).size == (25, 50)


def test_whatever_a_decoder_raises_is_an_error_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise struct.error("unpack requires a buffer of 4 bytes")

    monkeypatch.setattr(Image.Image, "thumbnail", fail)
    with pytest.raises(ValueError, match="a damaged image: unpack requires"):
        make_thumbnails(picture(), [(50, 50)], 1_000_000)


async def test_a_bad_image_is_stored_with_an_error(tmp_path: Path) -> None:
    keeper = FileKeeper(FileSettings(store=str(tmp_path)), ImageSettings(thumbs=("50x50", "20x20")))
    bad = await keeper.save(bomb(), "http://a.example/bomb.png", "image/png")
    assert bad["error"].startswith("no thumbnail: ")
    assert (tmp_path / bad["path"]).read_bytes() == bomb()
    good = await keeper.save(picture(), "http://a.example/x.png", "image/png")
    assert "error" not in good
    for size, path in good["thumbs"].items():
        assert max(Image.open(tmp_path / path).size) == int(size.partition("x")[0])
    other = await keeper.save(PDF, "http://a.example/x.pdf", "application/pdf")
    assert "thumbs" not in other


# -- the index of URLs


async def test_a_known_url(tmp_path: Path) -> None:
    settings = FileSettings(store=str(tmp_path), max_age=100)
    keeper = FileKeeper(settings, ImageSettings())
    assert await keeper.known("http://a.example/x.pdf") is None
    entry = await keeper.save(PDF, "http://a.example/x.pdf")
    assert await keeper.known("http://a.example/x.pdf") == entry
    assert await keeper.known("http://a.example/%78.pdf") == entry  # another spelling of the URL
    assert await FileKeeper(settings, ImageSettings(thumbs=("50x50",))).known("http://a.example/x.pdf") is None
    assert await FileKeeper(FileSettings(store=str(tmp_path), max_age=0), ImageSettings()).known(entry["url"]) is None
    (index,) = (tmp_path / "urls").rglob("*.json")
    index.write_bytes(index.read_bytes().replace(b'"fetched_at":', b'"fetched_at":0.'))
    assert await keeper.known(entry["url"]) is None
    index.write_bytes(b"\0\0")
    assert await keeper.known(entry["url"]) is None
    await keeper.save(PDF, entry["url"])
    (tmp_path / entry["path"]).unlink()  # by the user
    assert await keeper.known(entry["url"]) is None


async def test_a_known_url_whose_thumbnail_is_gone(tmp_path: Path) -> None:
    keeper = FileKeeper(FileSettings(store=str(tmp_path)), ImageSettings(thumbs=("50x50", "90x90")))
    entry = await keeper.save(picture(), "http://a.example/x.png")
    assert await keeper.known(entry["url"]) == entry
    (tmp_path / entry["thumbs"]["90x90"]).unlink()
    assert await keeper.known(entry["url"]) is None
    await keeper.save(picture(), entry["url"])
    assert await keeper.known(entry["url"]) == entry


async def test_the_call_that_failed_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("a file, not a folder")
    keeper = FileKeeper(FileSettings(store=str(tmp_path)), ImageSettings())
    with pytest.raises(FileStoreError):
        await keeper.save(PDF, "http://a.example/x.pdf")
    assert await keeper.known("http://a.example/x.pdf") is None  # to read works
    with pytest.raises(FileStoreError):
        await keeper.retry()
    (tmp_path / "full").unlink()
    await keeper.retry()
    assert (tmp_path / describe_file(PDF, "")["path"]).read_bytes() == PDF


# -- items that wait


def chains(tmp_path: Path, **settings: object) -> FileChains:
    config = Config().with_settings({"files.store": str(tmp_path), **settings})
    return FileChains(config, Scope(config.scope), SpiderStats())


async def test_the_item_comes_after_its_last_file(tmp_path: Path) -> None:
    made, page = chains(tmp_path), Request("http://a.example/page", priority=3, depth=2)
    files = [File("one.pdf", item={}), File("http://b.example/two.pdf", item={}, field="more")]
    first = await made.begin(files, encode_item({"n": 1, "files": "replaced"}), page, None)
    assert isinstance(first, Request)
    assert (first.url, first.priority, first.depth, first.dont_filter) == ("http://a.example/one.pdf", 4, 2, True)
    second = await made.fetched(first, Response(first.url, body=PDF, request=first))
    assert isinstance(second, Request)
    assert second.url == "http://b.example/two.pdf"
    item = await made.failed(second, "no answer")
    assert isinstance(item, bytes)
    name, record = decode_item(item)
    assert (name, record["n"]) == ("item", 1)
    assert record["files"][0]["checksum"] == describe_file(PDF, "")["checksum"]
    assert record["more"] == [{"url": "http://b.example/two.pdf", "error": "no answer"}]


async def test_known_and_refused_files_need_no_request(tmp_path: Path) -> None:
    made = chains(tmp_path, **{"scope.deny": ["secret"]})
    await made.keeper.save(PDF, "http://a.example/one.pdf")
    files = [File(url, item={}) for url in ("http://a.example/one.pdf", "http://a.example/secret", "tel:1")]
    item = await made.begin(files, encode_item({}), Request("http://a.example/"), None)
    assert isinstance(item, bytes)
    stored, denied, invalid = decode_item(item)[1]["files"]
    assert stored["path"].endswith(".pdf")
    assert "denied by the rule 'secret'" in denied["error"]
    assert invalid == {"url": "tel:1", "error": invalid["error"]}


async def test_an_error_page_is_not_a_file(tmp_path: Path) -> None:
    """A spider may handle the status 404 itself; then the page comes this far."""
    made = chains(tmp_path)
    request = await made.begin([File("/x", item={})], encode_item({}), Request("http://a.example/"), None)
    assert isinstance(request, Request)
    item = await made.fetched(request, Response(request.url, status=404, body=b"no", request=request))
    assert isinstance(item, bytes)
    assert decode_item(item)[1]["files"][0]["error"] == "HTTP status 404"


async def test_limits(tmp_path: Path) -> None:
    made, page = chains(tmp_path), Request("http://a.example/")
    with pytest.raises(SpiderError, match="1001 files; the limit is 1000"):
        await made.begin([File("/x", item={})] * 1001, b"", page, None)
    with pytest.raises(SpiderError, match="must be a name"):
        await made.begin([File("/x", item={}, field="")], b"", page, None)
    with pytest.raises(RequestError, match="invalid HTTP header"):
        await made.begin([File("/x", item={}), File("/y", item={}, headers={"a": "b\n"})], b"", page, None)


@pytest.mark.parametrize("url", [None, "", "  "])
async def test_an_element_without_a_url(tmp_path: Path, url: Any) -> None:
    item = await chains(tmp_path).begin([File(url, item={})], encode_item({}), Request("http://a.example/"), None)
    assert isinstance(item, bytes)
    assert decode_item(item)[1]["files"] == [{"url": "", "error": "not fetched: there is no URL"}]


def test_the_type_of_an_item_stays() -> None:
    class Book(dict[str, object]):
        pass

    chain = Chain(encode_item(Book(title="T")), [WantedFile("files", "http://a.example/")])
    chain.finish({"url": "http://a.example/"})
    assert decode_item(chain.complete()) == ("Book", {"title": "T", "files": [{"url": "http://a.example/"}]})


async def test_a_relative_url_with_another_one_in_its_query(tmp_path: Path) -> None:
    page = Request("http://a.example/x/page")
    response = Response(page.url, body=b'<base href="/docs/">', request=page)
    for url in ("get?from=http://b.example/", " get?from=http://b.example/"):
        made = await chains(tmp_path).begin([File(url, item={})], encode_item({}), page, response)
        assert isinstance(made, Request)
        assert made.url == "http://a.example/docs/get?from=http://b.example/"
