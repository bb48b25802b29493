"""File: an output of a callback that downloads a file for an item."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import TypedDict
from urllib.parse import urlsplit

from msgspec import Struct

FILE_CALLBACK = "<file>"
"""The callback of requests for files. No method of a spider can have this name."""

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"%PDF-", "pdf"),
    (b"\x1f\x8b", "gz"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"7z\xbc\xaf'\x1c", "7z"),
    (b"(\xb5/\xfd", "zst"),
    (b"ID3", "mp3"),
    (b"OggS", "ogg"),
    (b"fLaC", "flac"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"SQLite format 3\0", "sqlite"),
    (b"PAR1", "parquet"),
)
"""The first bytes of common types. They decide before the URL and the header, which may lie."""
_BY_TYPE = {
    "application/epub+zip": "epub",
    "application/json": "json",
    "application/msword": "doc",
    "application/vnd.ms-excel": "xls",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "pptx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/xml": "xml",
    "application/zip": "zip",
    "audio/mpeg": "mp3",
    "audio/wav": "wav",
    "image/avif": "avif",
    "image/bmp": "bmp",
    "image/svg+xml": "svg",
    "image/webp": "webp",
    "text/calendar": "ics",
    "text/css": "css",
    "text/csv": "csv",
    "text/html": "html",
    "text/plain": "txt",
    "text/xml": "xml",
    "video/mp4": "mp4",
    "video/webm": "webm",
}
_WITHOUT_TYPE = ("htm", "jsonl", "md", "odp", "ods", "odt", "ppt", "rtf", "tar", "tsv", "yaml")
_IN_URLS = frozenset((*_BY_TYPE.values(), *_WITHOUT_TYPE))
_TYPE = re.compile(r"[\w.+-]{1,60}/[\w.+-]{1,80}")
_IMAGES = frozenset({"jpg", "png", "gif", "webp"})


class File(Struct):
    """A file to download for an item. Yield it in a callback, in place of the item.

    The item is stored once, when all its files are stored or have failed. ``field`` of the item then has a list with an
    entry for each file: ``url``, ``path``, ``checksum``, ``size`` and ``content_type``, or ``url`` and ``error``. If a
    callback yields several files with the same item, they belong together. ``url`` may be relative to the page.
    Without an item, the entry itself is the item.
    """

    url: str
    item: object = None
    field: str = "files"
    headers: dict[str, str] = {}
    cookies: dict[str, str] = {}
    priority: float | None = None
    """None: above that of the page, so that items do not wait for other pages."""


class FileEntry(TypedDict, total=False):
    """What an item says of a file. One that was not stored has only ``url`` and ``error``."""

    url: str
    path: str
    checksum: str
    size: int
    content_type: str
    thumbs: dict[str, str]
    """The path of each thumbnail, by its size."""
    error: str


def describe_file(body: bytes, url: str, content_type: str = "") -> FileEntry:
    """The entry of a file: its URL, path in the store, checksum, size and type.

    The path comes from the content. Nothing of the URL enters it, except an ending from a fixed list."""
    checksum = sha256(body).hexdigest()
    ending = ending_of(body, url, content_type)
    kind = content_type.partition(";")[0].strip().lower()
    return {
        "url": url,
        "path": f"full/{checksum[:2]}/{checksum}{ending and f'.{ending}'}",
        "checksum": checksum,
        "size": len(body),
        "content_type": kind if _TYPE.fullmatch(kind) else "",
    }


def ending_of(body: bytes, url: str, content_type: str) -> str:
    """The ending of a file's name, without the dot; empty if unknown."""
    start = body[:16]
    for signature, ending in _SIGNATURES:
        if start.startswith(signature):
            return ending
    if start[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}.get(start[8:12], "")
    by_type = _BY_TYPE.get(content_type.partition(";")[0].strip().lower(), "")
    in_url = urlsplit(url).path.rpartition("/")[2].rpartition(".")[2].lower()
    return in_url if in_url in _IN_URLS and by_type in ("", "txt", "zip") else by_type


def is_image(body: bytes, content_type: str) -> bool:
    """Whether the file should get thumbnails: it is an image, or unknown content that the server calls an image."""
    ending = ending_of(body, "", "")
    return ending in _IMAGES or (not ending and content_type.lower().startswith("image/") and "svg" not in content_type)
