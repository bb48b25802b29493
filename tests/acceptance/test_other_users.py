"""Other users of the machine learn no secret of a crawl, and cannot take part in it or mislead it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.acceptance.fleets import SHOAL
from tests.acceptance.serving import until
from tests.acceptance.target import target

STRANGER = 12345
SECRET = "s3cret-of-the-crawl"
SPIDER = """
import os

from shoal import Request, Spider


class Pages(Spider):
    name = "pages"

    async def start(self):
        for number in range(200):
            yield Request(f"{self.site}/p{number}", headers={"Authorization": os.environ["SECRET"]})

    def parse(self, response):
        yield {"url": response.url}
"""
LOOK = """
import json, os, socket, sys
folders, pid, secret = sys.argv[1].split(":"), sys.argv[2], sys.argv[3].encode()
read, found, entered, connected = 0, [], [], []
places = [f"/proc/{pid}/{name}" for name in ("cmdline", "environ", "maps", "mem", "fd")]
for folder in folders:
    for root, names, files in os.walk(folder):
        entered.append(root)
        places += [os.path.join(root, name) for name in files]
for place in places:
    try:
        client = socket.socket(socket.AF_UNIX)
        client.connect(place)
        connected.append(place)
    except OSError:
        pass
    try:
        with open(place, "rb") as file:
            read += 1
            if secret in file.read():
                found.append(place)
    except OSError:
        pass
print(json.dumps({"read": read, "found": found, "connected": connected, "entered": entered}))
"""


def look(process: subprocess.Popen[Any], *folders: Path, user: int = STRANGER) -> dict[str, Any]:
    """What another user sees."""
    words = ["/usr/bin/env", "python3", "-c", LOOK, ":".join(map(str, folders)), str(process.pid), SECRET]
    done = subprocess.run(
        words, user=user, group=user, extra_groups=[], capture_output=True, check=True, cwd="/",
        env={"PATH": "/usr/bin:/usr/local/bin"},
    )  # fmt: skip
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.fixture
def places() -> Iterator[tuple[Path, Path]]:
    """A folder that everybody can enter, and one for temporary files that everybody can write to."""
    if os.geteuid() != 0:
        why = "this test needs root, to become another user"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with TemporaryDirectory(prefix="s", dir="/tmp") as top:  # the path of a socket must be short
        Path(top).chmod(0o755)
        folder, temporary = Path(top, "crawl"), Path(top, "tmp")
        for place, mode in ((folder, 0o755), (temporary, 0o1777)):
            place.mkdir()
            place.chmod(mode)
        yield folder, temporary


def start(places: tuple[Path, Path], url: str, frontier: str) -> subprocess.Popen[Any]:
    """A crawl with everything that it can write, whose umask permits everything."""
    folder, temporary = places
    (folder / "pages.py").write_text(SPIDER)
    settings = {
        "SHOAL_FRONTIER": frontier, "SHOAL_CACHE__ENABLED": "true", "SHOAL_CACHE__FOLDER": str(folder / "cache"),
        "SHOAL_WARC__FOLDER": str(folder / "warc"), "SHOAL_HTTP__HEADERS": json.dumps({"X-Key": SECRET}),
        "SHOAL_DOWNLOAD_DELAY": "0.1", "SECRET": SECRET, "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": "",
    }  # fmt: skip
    words = [*SHOAL, "run", "pages.py", "-a", f"site={url}", "-o", "items.jsonl"]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=log, env={**os.environ, **settings}, umask=0, start_new_session=True
        )


def stop(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGINT)
    process.wait(60)


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///crawl.db"])
def test_they_read_no_secret_and_enter_no_socket(places: tuple[Path, Path], frontier: str) -> None:
    folder, temporary = places
    with target() as web:
        process = start(places, web.url, frontier)
        try:
            until(lambda: (folder / "items.jsonl").exists() and (folder / "items.jsonl").stat().st_size > 500)
            sockets = [path for path in temporary.rglob("*") if path.is_socket()]
            assert sockets, "the crawl serves its queue"
            seen, own = look(process, folder, temporary), look(process, folder, temporary, user=0)
        finally:
            stop(process)
    assert seen["read"] > 3, "the program, its log and its output are not secret"
    assert own["found"], "the user itself can read them"
    assert own["connected"], "the user itself can connect"
    assert seen["found"] == []
    assert seen["connected"] == []
    assert str(sockets[0].parent) not in seen["entered"] or not os.listdir(sockets[0].parent)


@pytest.mark.parametrize("trap", ["folder", "link", "file"])
def test_a_folder_that_they_made_is_not_used(places: tuple[Path, Path], trap: str) -> None:
    folder, temporary = places
    bait = temporary / "shoal-0"
    aside = temporary / "aside"
    aside.mkdir(mode=0o777)
    aside.chmod(0o777)
    os.chown(aside, STRANGER, STRANGER)
    if trap == "folder":
        bait.mkdir()
        bait.chmod(0o777)
    elif trap == "link":
        bait.symlink_to(aside)
    else:
        bait.write_text("")
    os.chown(bait, STRANGER, STRANGER, follow_symlinks=False)
    with target() as web:
        process = start(places, web.url, "memory:")
        try:
            until(
                lambda: (
                    process.poll() is not None
                    or ((folder / "items.jsonl").exists() and (folder / "items.jsonl").stat().st_size > 500)
                )
            )
            assert process.poll() is None, (folder / "log").read_text()
            assert list(aside.iterdir()) == []
            assert trap == "file" or list(bait.iterdir()) == []
            assert look(process, folder, temporary)["connected"] == []
        finally:
            stop(process)
