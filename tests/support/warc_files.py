"""Reads WARC files with another library than the one that wrote them, and checks them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from shoal.sinks.archive_index import rebuild_index

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the library uses what it deprecates
    from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType


LOCK = ".lock"


class Found(NamedTuple):
    """A record."""

    kind: str
    headers: dict[str, str]
    line: str
    """The first line of the HTTP message, or empty."""
    http: list[tuple[str, str]]
    """The headers of the HTTP message, with names in lower case."""
    body: bytes

    @property
    def url(self) -> str:
        return self.headers.get("WARC-Target-URI", "")


def read_file(path: Path) -> list[Found]:
    """All records of a file. Checks each digest and length, and that nothing is left at the end."""
    found = []
    with path.open("rb") as file:
        for record in ArchiveIterator(file, parse_http=False, strict_mode=True):
            assert record.verify_block_digest(), (path, dict(record.headers))
            content = record.reader.read()
            assert len(content) == int(record.headers["Content-Length"]), path
            found.append(_found(record, content))
    with path.open("rb") as file:
        checked = 0
        for record in ArchiveIterator(file, parse_http=True):
            if record.record_type == WarcRecordType.response:
                assert record.verify_payload_digest(), (path, dict(record.headers))
            checked += 1
    assert checked == len(found), path
    return found


def _found(record: WarcRecord, content: bytes) -> Found:
    headers = dict(record.headers)
    kind = headers["WARC-Type"]
    if not headers["Content-Type"].startswith("application/http"):
        return Found(kind, headers, "", [], content)
    head, _, body = content.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    pairs = [(name.lower(), value) for name, _, value in (each.partition(": ") for each in lines)]
    return Found(kind, headers, line, pairs, body)


def read_folder(folder: Path) -> list[Found]:
    """The records of all files. Checks that each is whole and that records refer to each other as they should."""
    paths = warc_files(folder)
    records = [record for path in paths for record in _checked(read_file(path))]
    for path in paths:
        check_index(path)
    by_id = {record.headers["WARC-Record-ID"]: record for record in records}
    assert len(by_id) == len(records)
    for record in records:
        if record.kind == "revisit":
            original = by_id[record.headers["WARC-Refers-To"]]
            assert original.kind == "response"
            assert original.url == record.headers["WARC-Refers-To-Target-URI"]
            assert original.headers["WARC-Date"] == record.headers["WARC-Refers-To-Date"]
            assert original.headers["WARC-Payload-Digest"] == record.headers["WARC-Payload-Digest"]
            assert not record.body
    return records


def warc_files(folder: Path) -> list[Path]:
    """The WARC files of a folder. Checks that all of them are finished, and that nothing else than indexes is there."""
    names = {path.name for path in folder.iterdir()} - {LOCK}
    found = sorted(name for name in names if name.endswith(".warc.gz"))
    stems = [name.removesuffix(".warc.gz") for name in found]
    assert names == {*found, *(stem + ending for stem in stems for ending in (".cdxj", ".keys"))}, sorted(names)
    return [folder / name for name in found]


def check_index(path: Path) -> None:
    """Check that the index of a file is the one that is made from its records."""
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        copy.symlink_to(path.resolve())
        stem = path.name.removesuffix(".warc.gz")
        rebuild_index(str(Path(folder) / stem), size=path.stat().st_size)
        for ending in (".cdxj", ".keys"):
            assert (Path(folder) / (stem + ending)).read_bytes() == (path.parent / (stem + ending)).read_bytes()
    lines = (path.parent / (stem + ".cdxj")).read_bytes().splitlines(keepends=True)
    assert lines == sorted(lines)


def _checked(records: list[Found]) -> list[Found]:
    """The records of one file: a first record, then the records of one page after the other."""
    assert records[0].kind == "warcinfo"
    assert all(record.kind != "warcinfo" for record in records[1:])
    for page in _pages(records[1:]):
        first = page[0]
        assert first.kind in ("response", "revisit")
        assert [each.kind for each in page[1:]] in (["request", "metadata"], ["request", "conversion", "metadata"])
        for other in page[1:]:
            link = "WARC-Refers-To" if other.kind == "conversion" else "WARC-Concurrent-To"
            assert other.headers[link] == first.headers["WARC-Record-ID"]
            assert (other.url, other.headers["WARC-Date"]) == (first.url, first.headers["WARC-Date"])
    return records


def _pages(records: list[Found]) -> Iterator[list[Found]]:
    page: list[Found] = []
    for record in records:
        page.append(record)
        if record.kind == "metadata":
            yield page
            page = []
    assert not page


def pages_of(records: list[Found]) -> Counter[str]:
    """How often each URL has a response, or a record that says that it is the same as another one."""
    return Counter(record.url for record in records if record.kind in ("response", "revisit"))
