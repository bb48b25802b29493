"""Archives: what an index says, reading pages by their request, bodies that are stored once, and damaged files."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import random
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

import shoal.sinks.warc
from shoal import Request
from shoal.ports import Completion, Failure, Run
from shoal.sinks import archive, archive_index
from shoal.sinks.archive import ArchiveFolder, FolderLock, Found
from shoal.sinks.archive_index import ArchiveError, IndexBuilder, rebuild_index, surt
from shoal.sinks.archive_upkeep import check, prune
from shoal.sinks.warc_records import Damage, members, scan
from shoal.testing import FakeClock
from tests.support.archives import Archive, die, exchange, store
from tests.support.fakes import memory_frontier
from tests.support.warc_files import pages_of, read_file, read_folder, warc_files

URLS = [f"http://www.a.example/{number}?b=2&a=1" for number in range(5)]


def run(number: int) -> Run:
    return Run(run_id=f"run_{number}", spider="pages", state="running", created_at=float(number))


class Folder:
    """An archive with several runs, each with a frontier of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def write(self, number: int, bodies: dict[str, bytes], **settings: Any) -> None:
        """Write a run."""
        warc = Archive(self.path, await memory_frontier(FakeClock()))
        archive = await warc.open(run(number), **settings)
        for url, body in bodies.items():
            await warc.complete(archive, *await store(warc, archive, url, body=body))
        await archive.close()

    def open(self, *runs: int) -> ArchiveFolder:
        return ArchiveFolder(str(self.path), [f"run_{number}" for number in runs] if runs else None)

    def bodies(self, number: int) -> dict[str, bytes]:
        """The pages of a run, as they are read by their request."""
        with self.open(number) as archive:
            found = {url: archive.find(Request(url)) for url in URLS}
            return {url: archive.read(page).body for url, page in found.items() if page is not None}

    def faults(self, *, repair: bool = False) -> list[str]:
        return [fault.text for fault in check(str(self.path), repair=repair)]

    def files(self, ending: str) -> list[Path]:
        return sorted(each for each in self.path.iterdir() if each.name.endswith(ending))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "archive")


def contents(*numbers: int) -> dict[str, bytes]:
    """Bodies for the URLs: the same number is the same body."""
    return {url: random.Random(number).randbytes(400) for url, number in zip(URLS, numbers, strict=False)}


# -- the index


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("http://www.example.com/", "com,example)/"),
        ("https://WWW2.Example.com:443/A/b/", "com,example)/a/b"),
        ("http://example.com:8080/a//b/./../c", "com,example:8080)/a/c"),
        ("http://127.0.0.1/x", "1,0,0,127)/x"),
        ("http://user:pw@shop.example.co.uk/?b=2&a=1&a", "uk,co,example,shop)/?a&a=1&b=2"),
        ("http://a.example/%7Eann/%2541%20b?q=%C3%A4", "example,a)/~ann/a%20b?q=%c3%a4"),
        ("http://a.example/?sid=0123456789abcdef0123456789abcdef&c=d", "example,a)/?c=d"),
        ("http://a.example/(a(0123456789abcdef01234567))/x.aspx", "example,a)/x.aspx"),
        ("http://a.example/?=&", "example,a)/?&="),
        ("http://a.example", "example,a)/"),
        ("urn:some:id", "urn:some:id"),
        ("", "-"),
    ],
)
def test_the_key_of_a_url_is_that_of_other_programs(url: str, key: str) -> None:
    """The expected keys are those of the package ``surt``, which pywb uses."""
    assert surt(url) == key


async def test_a_line_has_what_other_programs_and_a_later_crawl_need(tmp_path: Path) -> None:
    warc = Archive(tmp_path, await memory_frontier(FakeClock()))
    archive = await warc.open()
    made = exchange("http://www.a.example/b?y=1&x=2", b"body")
    made.status, made.reason = 301, "Moved"
    made.received = [
        (b"content-type", b"text/html; charset=utf-8"), (b"ETag", b'W/"a b"'), (b"Vary", b"Cookie, accept-ENCODING"),
        (b"Last-Modified", b"yesterday"), (b"Location", b"/c#d"), (b"vary", b"Accept"),
    ]  # fmt: skip
    (lease,) = await warc.lease(made.url)
    await archive.store([(lease, made)])
    await warc.complete(archive, lease)
    await archive.close()
    (path,) = warc_files(tmp_path)
    key, moment, values = (tmp_path / path.name.replace(".warc.gz", ".cdxj")).read_text().split(" ", 2)
    _, response, *_ = read_file(path)
    with ArchiveFolder(str(tmp_path)) as opened:
        (line,) = (line for index in opened.indexes() for line in index)
    assert (key, moment) == ("example,a)/b?x=2&y=1", "20010909014640")
    assert json.loads(values) == {
        "url": made.url, "mime": "text/html", "status": "301", "digest": response.headers["WARC-Payload-Digest"],
        "length": line.entry.length, "offset": line.entry.offset, "filename": path.name,
        "record": response.headers["WARC-Record-ID"][10:-1], "fingerprint": lease.request.fingerprint().hex(),
        "etag": 'W/"a b"', "modified": "yesterday", "vary": "accept,accept-encoding,cookie",
        "redirect": "http://www.a.example/c",
    }  # fmt: skip


async def test_a_request_that_may_be_repeated_is_found_by_its_own_fingerprint(tmp_path: Path) -> None:
    warc = Archive(tmp_path, await memory_frontier(FakeClock()))
    archive = await warc.open()
    await warc.frontier.push([Request("http://a.example/", dont_filter=True)])
    (lease,) = (await warc.frontier.lease(1, 60.0)).leases
    await archive.store([(lease, exchange(lease.request.url))])
    await warc.complete(archive, lease)
    await archive.close()
    read_folder(tmp_path)  # the index that is made from the records is equal
    with ArchiveFolder(str(tmp_path)) as opened:
        assert opened.find(Request("http://a.example/")) is not None


@pytest.mark.parametrize("buffer", [1, 1000, 1 << 20])
async def test_lines_are_sorted_on_disk(folder: Folder, monkeypatch: pytest.MonkeyPatch, buffer: int) -> None:
    monkeypatch.setattr(archive_index, "_BUFFER", buffer)
    urls = [f"http://{name}.example/{number}" for number in range(9) for name in "cab"]
    await folder.write(1, {url: url.encode() for url in urls})
    assert pages_of(read_folder(folder.path)) == dict.fromkeys(urls, 1)
    with folder.open() as archive:
        assert [len(archive.pages_of(url)) for url in urls] == [1] * len(urls)
        assert archive.pages_of("http://b.example/99") == []
        assert archive.find(b"x" * 16) is None


async def test_a_full_disk_for_lines_does_not_matter(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(builder: IndexBuilder) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    warc = Archive(folder.path, await memory_frontier(FakeClock()))
    archive = await warc.open(run(1))
    with monkeypatch.context() as patch:
        patch.setattr(archive_index, "_BUFFER", 1)
        patch.setattr(IndexBuilder, "_spill", full)
        await warc.complete(archive, *await store(warc, archive, URLS[0]))
    await archive.close()
    assert pages_of(read_folder(folder.path)) == {URLS[0]: 1}


def test_a_url_with_many_quoted_signs_takes_no_time() -> None:
    url = "http://a.example/" + "%25" * 5000 + "25" * 10_000 + "41"
    began = time.process_time()
    assert surt(url).startswith("example,a)/%25%25")
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize("name", ["write_index", "rebuild_index"])
async def test_a_full_disk_while_a_file_is_finished(folder: Folder, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The file stays open, and the next process finishes it."""

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    warc = Archive(folder.path, await memory_frontier(FakeClock()))
    archive = await warc.open(run(1))
    await warc.complete(archive, *await store(warc, archive, URLS[0]))
    assert archive._file is not None
    archive._file._index.is_broken = name == "rebuild_index"
    with monkeypatch.context() as patch:
        patch.setattr(shoal.sinks.warc, name, full)
        await archive.close()
    assert len(folder.files(".open")) == 1
    assert len(folder.files(".warc.gz")) == 0
    await (await warc.open(run(1))).close()
    assert pages_of(read_folder(folder.path)) == {URLS[0]: 1}


# -- reading pages


async def test_pages_of_a_run_are_read_by_their_request(folder: Folder) -> None:
    first, second = contents(1, 2, 3), contents(1, 2, 4)
    await folder.write(1, first)
    await folder.write(2, second)
    assert (folder.bodies(1), folder.bodies(2)) == (first, second)
    with folder.open() as archive:
        assert len(archive.pages_of(URLS[0])) == 2
        assert archive.find(Request(URLS[0], method="POST")) is None
        found = archive.find(Request(URLS[0]).fingerprint())
        assert found is not None
        page = archive.read(found)
    assert (page.status, page.reason, page.headers) == (200, "OK", [(b"Content-Type", b"text/html")])
    assert page.date == "2001-09-09T01:46:40.000000Z"


async def test_a_rendered_page(tmp_path: Path) -> None:
    warc = Archive(tmp_path, await memory_frontier(FakeClock()))
    archive = await warc.open()
    first, second = await warc.lease("http://a.example/1", "http://a.example/2")
    shown = exchange(first.request.url, b"<script>", rendered=b"<h1>built</h1>")
    await archive.store([(first, shown), (second, exchange(second.request.url))])
    await warc.complete(archive, first, second)
    await archive.close()
    with ArchiveFolder(str(tmp_path)) as opened:
        pages = [opened.find(lease.request) for lease in (first, second)]
        assert [opened.rendered(page) for page in pages if page is not None] == [b"<h1>built</h1>", None]


@pytest.mark.parametrize("missing", [False, True])
def test_a_folder_that_is_no_archive(tmp_path: Path, missing: bool) -> None:
    if missing:
        with pytest.raises(ArchiveError, match="cannot read the archive"):
            ArchiveFolder(str(tmp_path / "missing"))
    else:
        with ArchiveFolder(str(tmp_path)) as archive:
            assert (archive.runs(), archive.find(b"x" * 16), archive.pages_of(URLS[0])) == ([], None, [])


async def test_files_of_other_programs(folder: Folder) -> None:
    folder.path.mkdir()
    with (folder.path / "other.warc.gz").open("wb") as file:
        writer = WARCWriter(file, gzip=True)
        writer.write_record(writer.create_warcinfo_record("other.warc.gz", {"software": "another"}))
        for url in URLS:
            head = StatusAndHeaders("200 OK", [("Content-Type", "text/html")], protocol="HTTP/1.1")
            record = writer.create_warc_record(url, "response", payload=BytesIO(url.encode()), http_headers=head)
            request = StatusAndHeaders("GET /x HTTP/1.1", [("Host", "a.example")], is_http_request=True)
            writer.write_request_response_pair(writer.create_warc_record(url, "request", http_headers=request), record)
    (fault,) = folder.faults(repair=True)
    assert "other.keys is missing" in fault
    assert folder.faults() == []
    await folder.write(1, {URLS[0]: URLS[0].encode()})
    with folder.open() as archive:
        assert [(each.run, each.pages, each.revisits) for each in archive.runs()] == [("run_1", 1, 1), ("", 5, 0)]
    assert folder.bodies(1) == {URLS[0]: URLS[0].encode()}
    assert [each.run for each in prune(str(folder.path), keep=0).runs] == ["run_1"]
    assert [path.name for path in folder.files(".warc.gz")] == ["other.warc.gz"]


# -- bodies once


async def test_a_body_is_stored_once_in_a_folder(folder: Folder) -> None:
    for number in range(1, 5):
        await folder.write(number, contents(1, 2, 10 + number))
    with folder.open() as archive:
        assert [(each.run, each.pages, each.revisits) for each in archive.runs()] == [
            ("run_4", 3, 2), ("run_3", 3, 2), ("run_2", 3, 2), ("run_1", 3, 0)
        ]  # fmt: skip
    records = read_folder(folder.path)  # checks what revisits refer to
    assert sum(record.kind == "response" for record in records) == 6
    for number in range(1, 5):
        assert folder.bodies(number) == contents(1, 2, 10 + number)


async def test_a_body_in_an_earlier_file_of_the_same_process(folder: Folder) -> None:
    bodies = contents(1, 1, 1, 2, 2)
    await folder.write(1, bodies, max_file_bytes=1000)
    assert len(warc_files(folder.path)) > 1
    assert sum(record.kind == "revisit" for record in read_folder(folder.path)) == 3
    assert folder.bodies(1) == bodies


@pytest.mark.parametrize("kind", ["damaged", "removed", "swapped", "without index", "other body"])
async def test_a_damaged_body_is_not_referred_to(folder: Folder, kind: str) -> None:
    await folder.write(1, contents(1, 2))
    (path,) = folder.files(".warc.gz")
    match kind:
        case "damaged":
            data = bytearray(path.read_bytes())
            data[len(data) // 4 :] = bytes(len(data) - len(data) // 4)
            path.write_bytes(data)
        case "removed":
            path.unlink()
        case "swapped":
            await (other := Folder(folder.path.parent / "other")).write(1, contents(3, 4))
            path.write_bytes(other.files(".warc.gz")[0].read_bytes())
        case "other body":  # its headers are right
            body = contents(1)[URLS[0]]
            with path.open("rb") as file:
                records = [member.content.replace(body, bytes(len(body))) for member in members(file)]
            path.write_bytes(b"".join(map(gzip.compress, records)))
            rebuild_index(str(path).removesuffix(".warc.gz"), size=path.stat().st_size)
        case "without index":
            path.with_name(path.name.replace(".warc.gz", ".keys")).write_bytes(b"SHOALKEY1 nonsense")
    await folder.write(2, contents(1, 2))
    with folder.open(2) as archive:
        assert [each.revisits for each in archive.runs() if each.run == "run_2"] == [int(kind == "other body")]
    assert folder.bodies(2) == contents(1, 2)


async def test_more_files_than_stay_open(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "_MAX_OPEN", 2)
    for number in range(1, 7):
        await folder.write(number, contents(1, number, 10 + number))
    assert folder.faults() == []
    prune(str(folder.path), keep=3)
    for number in range(4, 7):
        assert folder.bodies(number) == contents(1, number, 10 + number)
    assert folder.faults() == []


# -- crashes while a file is finished


class Killed(Exception):
    """The process was killed here."""


class Kill:
    """Ends a process before its n-th change of the folder. After that it changes nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.is_over = False
        self._left = after
        for name in ("rename", "unlink", "fsync", "replace"):
            monkeypatch.setattr(os, name, self._before(getattr(os, name)))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                self.is_over = True
                raise Killed
            return call(*args, **options)

        return changed


@pytest.mark.parametrize("drops", [False, True])
async def test_a_process_that_is_killed_while_it_finishes_a_file(
    tmp_path: Path, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 0
    for after in range(30):
        folder = Folder(tmp_path / f"{drops}{after}")
        warc = Archive(folder.path, await memory_frontier(FakeClock()))
        archive = await warc.open(run(1))
        first, second, third = await store(warc, archive, *URLS[:3])
        await warc.complete(archive, first)
        await warc.frontier.complete([Completion(lease=third)])
        if drops:
            await warc.frontier.fail([Failure(lease=second, kind="test", reason="test")])
        else:
            await warc.frontier.complete([Completion(lease=second)])
        with monkeypatch.context() as patch:
            kill = Kill(patch, after)
            with suppress(Killed):
                await archive.close()
        if archive._file is not None:
            die(archive)
        with folder.open() as opened:  # whatever has its name has an index, and can be read
            assert opened.faults == []
            for index in opened.indexes():
                for line in index:
                    assert opened.read(Found(index, line)).body == line.entry.url.encode()
        await (await warc.open(run(1))).close()
        assert folder.faults() == []
        done = [URLS[0], URLS[2]] if drops else URLS[:3]
        assert pages_of(read_folder(folder.path)) == dict.fromkeys(done, 1)
        if not kill.is_over:
            break
        kills += 1
    assert kills >= 5


# -- check and repair


async def damaged(folder: Folder, change: Callable[[Folder], object]) -> list[str]:
    await folder.write(1, contents(1, 2, 3))
    await folder.write(2, contents(1, 2, 4))
    assert folder.faults() == []
    change(folder)
    return folder.faults()


def change(ending: str, edit: Callable[[bytes], bytes], number: int = 0) -> Callable[[Folder], object]:
    def write(folder: Folder) -> None:
        path = folder.files(ending)[number]
        path.write_bytes(edit(path.read_bytes()))

    return write


def remove(ending: str) -> Callable[[Folder], object]:
    return lambda folder: folder.files(ending)[0].unlink()


def without_second_line(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[:1] + lines[2:])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove(".cdxj"), "cdxj is missing"),
        (remove(".keys"), "keys is missing"),
        (change(".cdxj", lambda data: b""), "cdxj is damaged"),
        (change(".cdxj", lambda data: data[:-30]), "cdxj is damaged"),
        (change(".cdxj", without_second_line), "cdxj is damaged"),
        (change(".cdxj", lambda data: data.replace(b'"status":"200"', b'"status":"404"', 1)), "has no line"),
        (change(".cdxj", lambda data: data.replace(b"http://", b"http:/\xff", 1)), "cannot be read"),
        (change(".cdxj", lambda data: bytes(len(data))), "cannot be read"),
        (change(".keys", lambda data: b""), "keys is damaged"),
        (change(".keys", lambda data: data[:50]), "keys is damaged"),
        (change(".keys", lambda data: data[:-1]), "keys is damaged"),
        (change(".keys", lambda data: data[:-40] + bytes(40)), "does not belong"),
        (change(".keys", lambda data: struct.pack("<9sI", b"SHOALKEY1", 2**32 - 1) + data[13:]), "keys is damaged"),
        (change(".keys", lambda data: data.replace(b'"bits":1', b'"bits":9')), "keys is damaged"),
    ],
)
async def test_a_damaged_index_is_reported_and_made_again(
    folder: Folder, damage: Callable[[Folder], object], says: str
) -> None:
    faults = await damaged(folder, damage)
    assert any(says in fault for fault in faults), faults
    assert folder.faults(repair=True)
    assert folder.faults() == []
    assert (folder.bodies(1), folder.bodies(2)) == (contents(1, 2, 3), contents(1, 2, 4))


async def test_a_damaged_record_is_reported_and_the_others_are_read(folder: Folder) -> None:
    await folder.write(1, contents(1, 2, 3))
    with folder.open() as archive:
        found = archive.find(Request(URLS[1]))
        assert found is not None
        at = int(found.entry.offset)
    change(".warc.gz", lambda data: data[: at + 40] + bytes(40) + data[at + 80 :])(folder)
    faults = folder.faults(repair=True)
    assert f"is damaged from byte {at} to" in faults[0]
    assert "unless you restore the file" in faults[0]
    (fault,) = folder.faults()
    assert fault == faults[0]
    assert folder.bodies(1) == {URLS[0]: contents(1)[URLS[0]], URLS[2]: contents(1, 2, 3)[URLS[2]]}


async def test_a_file_that_becomes_shorter_while_it_is_read(folder: Folder) -> None:
    await folder.write(1, contents(1))
    (path,) = folder.files(".warc.gz")
    size = path.stat().st_size
    with path.open("rb") as file:
        *_, last = scan(file, size + 1000)
    assert last == Damage(size, size + 1000)


async def test_a_payload_that_is_lost_is_reported(folder: Folder) -> None:
    await folder.write(1, contents(1))
    await folder.write(2, contents(1))
    folder.files(".warc.gz")[0].unlink()
    faults = folder.faults()
    assert [fault.partition(" ")[2] for fault in faults[:2]] == ["belongs to no WARC file"] * 2
    assert "is lost: no file has it" in faults[2]
    with folder.open(2) as archive:
        found = archive.find(Request(URLS[0]))
        assert found is not None
        with pytest.raises(ArchiveError, match="is lost"):
            archive.read(found)


async def test_random_damage_is_an_archive_error_or_the_right_page(folder: Folder) -> None:
    """Whatever was changed, a page is never another one, and nothing else fails."""
    pages = contents(1, 2, 1)
    await folder.write(1, pages)
    await folder.write(2, pages)
    originals = {path: path.read_bytes() for path in folder.path.iterdir()}
    dice = random.Random(33)
    for _ in range(300):
        path = dice.choice([path for path in originals if originals[path]])
        data = bytearray(originals[path])
        for _ in range(dice.choice([1, 1, 8])):
            at = dice.randrange(len(data))
            data[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
        path.write_bytes(data[: dice.choice([len(data), dice.randrange(len(data) + 1)])])
        with folder.open() as archive:
            for url, body in pages.items():
                with suppress(ArchiveError):
                    for found in (archive.find(Request(url)), *archive.pages_of(url)):
                        if found is not None and found.entry.url == url:
                            assert archive.read(found).body == body
        folder.faults()
        path.write_bytes(originals[path])
    assert folder.faults() == []


# -- prune


async def four_runs(folder: Folder) -> None:
    for number in range(1, 5):
        await folder.write(number, contents(1, 2, 10 + number))


async def test_later_runs_are_whole_after_a_prune(folder: Folder) -> None:
    await four_runs(folder)
    before = folder.files("")
    planned = prune(str(folder.path), keep=2, dry_run=True)
    assert folder.files("") == before
    pruned = prune(str(folder.path), keep=2)
    assert [each.run for each in pruned.runs] == [each.run for each in planned.runs] == ["run_2", "run_1"]
    assert (pruned.kept, planned.kept) == (2, 2)
    assert [folder.bodies(number) for number in (3, 4)] == [contents(1, 2, 13), contents(1, 2, 14)]
    assert folder.faults() == []
    with folder.open() as archive:
        assert [(each.run, each.pages) for each in archive.runs()] == [("run_4", 3), ("run_3", 3), ("", 2)]
    check_references(folder)
    await folder.write(5, contents(1, 2, 15))  # a later run refers to what was kept
    prune(str(folder.path), runs=["run_4", "run_3"])
    assert folder.bodies(5) == contents(1, 2, 15)
    assert folder.faults() == []
    check_references(folder)


def check_references(folder: Folder) -> None:
    """Other programs find what a revisit refers to by its URL and its date."""
    records = [record for path in warc_files(folder.path) for record in read_file(path)]
    stored = {(record.url, record.headers["WARC-Date"]) for record in records if record.kind == "response"}
    for record in records:
        if record.kind == "revisit":
            headers = record.headers
            assert (headers["WARC-Refers-To-Target-URI"], headers["WARC-Refers-To-Date"]) in stored


async def test_what_no_run_needs_any_more_goes_with_the_next_prune(folder: Folder) -> None:
    await four_runs(folder)
    prune(str(folder.path), keep=1)
    assert len(folder.files(".warc.gz")) == 2
    await folder.write(5, contents(21, 22))
    prune(str(folder.path), keep=1)
    assert len(folder.files(".warc.gz")) == 1
    assert folder.bodies(5) == contents(21, 22)
    assert prune(str(folder.path), keep=1).runs == []


async def test_a_crawl_and_a_prune_exclude_each_other(folder: Folder) -> None:
    await four_runs(folder)
    warc = Archive(folder.path, await memory_frontier(FakeClock()))
    archive = await warc.open(run(5))
    with pytest.raises(ArchiveError, match="a crawl writes to"):
        prune(str(folder.path), keep=1)
    assert prune(str(folder.path), keep=1, dry_run=True).kept == 2
    await archive.close()
    lock = FolderLock(str(folder.path))
    assert lock.take(shared=False)
    opening = asyncio.create_task(warc.open(run(5)))
    await asyncio.sleep(0.1)
    assert not opening.done()
    lock.close()
    await (await opening).close()


async def test_a_file_of_a_dead_process_keeps_what_it_refers_to(folder: Folder) -> None:
    await folder.write(1, contents(1, 2))
    warc = Archive(folder.path, await memory_frontier(FakeClock()))
    archive = await warc.open(run(2))
    await warc.complete(archive, *await store(warc, archive, URLS[0], body=contents(1)[URLS[0]]))
    die(archive)
    assert prune(str(folder.path), keep=1).kept == 1
    await (await warc.open(run(2))).close()
    assert folder.bodies(2) == contents(1)
    assert folder.faults() == []


async def test_a_prune_that_is_killed_at_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 0
    for after in range(60):
        folder = Folder(tmp_path / str(after))
        await four_runs(folder)
        prune(str(folder.path), runs=["run_1"])
        await folder.write(5, contents(1, 13))
        with monkeypatch.context() as patch:
            kill = Kill(patch, after)
            with suppress(Killed):
                prune(str(folder.path), keep=2)
        expected = {4: contents(1, 2, 14), 5: contents(1, 13)}
        assert {number: folder.bodies(number) for number in expected} == expected
        prune(str(folder.path), keep=2)
        assert {number: folder.bodies(number) for number in expected} == expected
        assert folder.faults() == []
        assert {"2", "3"}.isdisjoint(path.name[4] for path in folder.files(".warc.gz"))
        if not kill.is_over:
            break
        kills += 1
    assert kills >= 15


async def test_a_damaged_archive_is_not_pruned(folder: Folder) -> None:
    await four_runs(folder)
    folder.files(".keys")[3].unlink()
    with pytest.raises(ArchiveError, match=r"not pruned: .*--repair"):
        prune(str(folder.path), keep=2)
    folder.faults(repair=True)
    change(".warc.gz", lambda data: data[:500] + bytes(300) + data[800:])(folder)
    with pytest.raises(ArchiveError, match=r"damaged|digest"):
        prune(str(folder.path), keep=2)
    assert len(folder.files(".warc.gz")) == 4
    with pytest.raises(ArchiveError, match="has no run run_9; did you mean"):
        prune(str(folder.path), runs=["run_9"])
