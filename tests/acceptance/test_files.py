"""Files of items: each item once, each content once and whole in the store, whatever is killed."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

from shoal import Crawl, DropItem, File, Response, Spider, crawl
from shoal.errors import FileStoreError
from tests.acceptance.crawls import QUICK
from tests.acceptance.faults import fill
from tests.acceptance.file_site import content_of, files_of, picture
from tests.acceptance.fleets import KINDS, SHOAL, Fleet, frontier_url, serving
from tests.support import forking
from tests.support.databases import shared
from tests.support.object_storage import AzureServer, ObjectServer, S3Server, use
from tests.support.servers import MisbehavingServer, SiteServer

pytestmark = pytest.mark.timeout(240)

ITEMS = 60
SPIDER = """
from shoal import File, Spider

class Items(Spider):
    name = "items"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 6,
                "retry.max_attempts": 20, "retry.base_delay": 0.01, "images.thumbs": ["60x60"]}

    def parse(self, response):
        yield response.follow_all("a", callback=self.item)

    def item(self, response):
        item = {"n": response.css("h1::text").get()}
        for url in response.css("a.file::attr(href)").getall():
            yield File(url, item=item)
"""


def file_site(items: int = ITEMS, latency: float = 0.0) -> AbstractContextManager[str]:
    return serving("tests.acceptance.file_site", items=items, latency=latency)


def hits_of(url: str) -> Counter[str]:
    with urllib.request.urlopen(f"{url}/-/hits") as answer:
        return Counter(json.load(answer))


def stored_in(folder: Path) -> dict[str, bytes]:
    """All files of a store by path, without its index and thumbnails."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "full").rglob("*") if path.is_file()}


def assert_complete(items: list[dict[str, Any]], url: str, stored: Mapping[str, bytes], count: int = ITEMS) -> None:
    """Each item is there once with all its files, and each content is in the store once, and whole."""
    assert Counter(item["n"] for item in items) == Counter(str(number) for number in range(count))
    for item in items:
        number = int(item["n"])
        entries = item["files"]
        assert [entry["url"] for entry in entries] == [url + path for path in files_of(number)]
        own, common, missing, image = entries
        assert missing.keys() == {"url", "error"}
        assert "404" in missing["error"]
        contents = {own["path"]: content_of(number), common["path"]: b"shared by all"}
        for path, content in (contents | {image["path"]: picture(number % 5)}).items():
            assert stored[path] == content
        for entry in (own, common, image):
            assert entry["checksum"] == hashlib.sha256(stored[entry["path"]]).hexdigest()
            assert entry["size"] == len(stored[entry["path"]])
        assert image["thumbs"].keys() == {"60x60"}
    expected = {content_of(number) for number in range(count)} | {b"shared by all"}
    expected |= {picture(number % 5) for number in range(count)}
    assert Counter(stored.values()) == Counter(expected)


def wait_for(so: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not so():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- kills


def test_a_crawl_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    store = tmp_path / "store"
    with file_site(latency=0.02) as url:
        command = [
            *SHOAL, "run", "spider.py", "-a", f"start_urls={url}/", "--frontier", f"sqlite:///{tmp_path}/crawl.db",
            "-q", "-o", "items.jsonl", f"--set=files.store={store}",
        ]  # fmt: skip
        moments = random.Random(time.time_ns())
        for kill in range(6):
            before = hits_of(url).total()
            crawl = forking.Popen(command, cwd=tmp_path)
            wait_for(lambda before=before: hits_of(url).total() > before)  # type: ignore[misc]
            time.sleep(moments.uniform(0.0, 0.25))
            if crawl.poll() is not None:  # on a busy machine, a kill comes late
                assert kill >= 2, f"it ended after {kill} kills"
                break
            crawl.kill()
            crawl.wait()
        forking.run(command, cwd=tmp_path, check=True, timeout=120)
        items = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
        assert_complete(items, url, stored_in(store))


@pytest.mark.parametrize("kind", KINDS)
def test_workers_are_killed(kind: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {"files.store": store, "worker.session": 2, "lease.ttl": 3}
    with file_site(latency=0.05) as url, closing(Fleet(tmp_path, frontier_url(kind), SPIDER)) as fleet:
        fleet.start(f"{url}/")
        workers = [fleet.worker(settings=settings) for _ in range(3)]
        for worker in workers[:2]:
            before = hits_of(url).total()
            wait_for(lambda before=before: hits_of(url).total() > before + 10)  # type: ignore[misc]
            worker.kill()
        fleet.wait(120)
        fleet.shoal("export", fleet.run_id, "-o", str(tmp_path / "items.jsonl"))
        items = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
        assert_complete(items, url, stored_in(store))


@pytest.mark.parametrize("kind", [S3Server, AzureServer], ids=["s3", "azure"])
def test_files_in_object_storage(kind: type[ObjectServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two processes, one of which is killed."""
    server = shared(kind)
    use(server, monkeypatch)
    bucket = server.bucket()
    settings = {"files.store": f"{server.scheme}://{bucket}/shop", "worker.session": 2}
    with file_site(20, latency=0.05) as url, closing(Fleet(tmp_path, frontier_url("redis"), SPIDER)) as fleet:
        fleet.start(f"{url}/")
        first, _ = (fleet.worker(settings=settings, env=dict(server.variables)) for _ in range(2))
        wait_for(lambda: hits_of(url).total() > 15)
        first.kill()
        fleet.wait(120)
        fleet.shoal("export", fleet.run_id, "-o", str(tmp_path / "items.jsonl"))
        items = [json.loads(line) for line in (tmp_path / "items.jsonl").read_text().splitlines()]
        found = {path.removeprefix("shop/"): content for path, content in server.objects(bucket).items()}
        assert_complete(items, url, {path: found[path] for path in found if path.startswith("full/")}, 20)


@pytest.mark.parametrize("kind", [S3Server, AzureServer], ids=["s3", "azure"])
async def test_a_bucket_that_is_missing_or_away_fails_the_crawl_before_its_first_page(
    kind: type[ObjectServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = shared(kind)
    use(server, monkeypatch)
    bucket = server.bucket()
    async with SiteServer() as site:
        for place, problem in (
            (f"{server.scheme}://{bucket}/x", ""),
            (f"{server.scheme}://missing-{bucket}/x", "does not exist; create it first"),
            (f"{server.scheme}://{bucket}/x?endpoint=http://127.0.0.1:9/&timeout=1", "no connection to"),
        ):
            made = Crawl(OneItem(start_urls=[f"{site.url}/leaf/0"]), QUICK | {"files.store": place})
            if not problem:
                await made
                assert sum(site.hits.values())
                site.hits.clear()
                continue
            with pytest.raises(FileStoreError, match=problem):
                await made
            assert not site.hits
    assert server.objects(bucket) == {}, "a check stores nothing"


# -- what happens to a file


class OneItem(Spider):
    """One item with the files in ``files``."""

    name = "one"
    files: tuple[str, ...] = ()

    def parse(self, response: Response) -> Any:
        item = {"title": response.css("h1::text").get()}
        for url in self.files:
            yield File(url, item=item)


async def crawled(spider: type[Spider], settings: Mapping[str, Any], **arguments: Any) -> tuple[list[Any], Crawl]:
    done = await crawl(spider, {**QUICK, **settings}, arguments=arguments)
    assert done.summary is not None
    assert done.summary.state == "finished"
    assert done.summary.stats.balanced
    return done.items, done


async def test_each_failure_is_an_entry_of_the_item(tmp_path: Path) -> None:
    async with MisbehavingServer() as server:
        files = (
            f"{server.url}/leaf/1", "/status/404", "/reset", "/huge-declared", "http://other.example/x.pdf", "mailto:x",
            f"{server.url}/leaf/2",
        )  # fmt: skip
        items, done = await crawled(
            OneItem,
            {"files.store": str(tmp_path), "files.max_bytes": 100_000, "scope.allowed_domains": ["127.0.0.1"]},
            start_urls=[f"{server.url}/leaf/0"], files=files,
        )  # fmt: skip
    (item,) = items
    assert item["title"] == "Leaf 0"
    first, missing, reset, huge, outside, invalid, last = item["files"]
    assert first["path"] != last["path"]
    assert "404" in missing["error"]
    assert "closed the connection" in reset["error"]
    assert "larger than 100000 bytes" in huge["error"]
    assert "files.max_bytes" in huge["error"]
    assert "outside the allowed domains" in outside["error"]
    assert "not fetched" in invalid["error"]
    assert done.spider.stats["files stored"] == 2
    assert done.spider.stats["files failed"] == 5
    assert done.summary is not None
    assert done.summary.stats.dead == 0


async def test_robots_apply_to_files(tmp_path: Path) -> None:
    async with SiteServer(20, robots="User-agent: *\nDisallow: /p/9\n") as server:
        items, _ = await crawled(
            OneItem, {"files.store": str(tmp_path), "robots.obey": True},
            start_urls=[f"{server.url}/"], files=("/p/9", "/p/1"),
        )  # fmt: skip
    refused, stored = items[0]["files"]
    assert "robots" in refused["error"]
    assert stored["size"] > 0


async def test_a_file_that_was_stored_before_is_not_fetched_again(tmp_path: Path) -> None:
    async with MisbehavingServer() as server:
        for age, expected in ((1000, 1), (0, 2)):
            for _ in range(2):
                items, _ = await crawled(
                    OneItem, {"files.store": str(tmp_path), "files.max_age": age},
                    start_urls=[f"{server.url}/leaf/0"], files=("/leaf/1",),
                )  # fmt: skip
                assert items[0]["files"][0]["checksum"]
            assert Counter(visit.path for visit in server.requests)["/leaf/1"] == expected + (age == 0)


async def test_a_dropped_item_fetches_nothing(tmp_path: Path) -> None:
    def drop(item: Any, spider: Spider) -> Any:
        raise DropItem("unwanted")

    class Dropping(OneItem):
        pipelines = [drop]

    async with MisbehavingServer() as server:
        items, _ = await crawled(
            Dropping, {"files.store": str(tmp_path)}, start_urls=[f"{server.url}/leaf/0"], files=("/leaf/1",)
        )
        assert items == []
        assert [visit.path for visit in server.requests] == ["/leaf/0"]


async def test_a_file_without_an_item_and_fields(tmp_path: Path) -> None:
    class Plain(Spider):
        name = "plain"

        def parse(self, response: Response) -> Any:
            yield File("/leaf/1")
            item = {"n": 1}
            yield File("/leaf/2", item=item, field="cover")
            yield File("/leaf/3", item=item, field="manual")
            yield {"page": response.save()}

    async with MisbehavingServer() as server:
        items, _ = await crawled(Plain, {"files.store": str(tmp_path)}, start_urls=[f"{server.url}/leaf/0"])
    by_kind = {frozenset(item): item for item in items}
    saved = by_kind[frozenset({"page"})]["page"]
    assert "Leaf 0" in (tmp_path / saved["path"]).read_text()
    both = by_kind[frozenset({"n", "cover", "manual"})]
    assert [both["cover"][0]["url"], both["manual"][0]["url"]] == [f"{server.url}/leaf/2", f"{server.url}/leaf/3"]
    assert any(item.get("url") == f"{server.url}/leaf/1" for item in items)
    assert len(items) == 3


async def test_a_redirect_of_a_file_is_followed(tmp_path: Path) -> None:
    async with MisbehavingServer() as server:
        items, _ = await crawled(
            OneItem, {"files.store": str(tmp_path)}, start_urls=[f"{server.url}/leaf/0"], files=("/redirect/1",)
        )
    (entry,) = items[0]["files"]
    assert entry["url"] == f"{server.url}/redirect/1"
    assert entry["size"] > 0


async def test_a_file_that_was_removed_from_the_store_is_fetched_again(tmp_path: Path) -> None:
    """Also if only a thumbnail of it was removed."""
    store = tmp_path / "store"
    with file_site(1) as url:
        for path in ("", "full", "thumbs"):
            if path:
                (lost,) = (file for file in (store / path).rglob("*") if file.suffix in (".png", ".jpg"))
                lost.unlink()
            items, _ = await crawled(
                OneItem, {"files.store": str(store), "images.thumbs": ["60x60"]},
                start_urls=[f"{url}/item/0"], files=("/picture/0.png", "/shared.txt"),
            )  # fmt: skip
            image, _ = items[0]["files"]
            assert (store / image["path"]).read_bytes() == picture(0)
            assert (store / image["thumbs"]["60x60"]).stat().st_size > 0
        assert (hits_of(url)["/picture/0.png"], hits_of(url)["/shared.txt"]) == (3, 1)


# -- a store that is full or away


class SavedPage(Spider):
    name = "saved"

    def parse(self, response: Response) -> Any:
        return {"page": response.save()}


@pytest.mark.parametrize("spider", [OneItem, SavedPage])
async def test_a_store_that_cannot_be_written_stops_the_crawl(spider: type[Spider], tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "full").write_text("a file, not a folder")
    settings = {**QUICK, "files.store": str(store), "frontier": f"sqlite:///{tmp_path}/crawl.db"}
    async with MisbehavingServer() as server:
        arguments = {"start_urls": [f"{server.url}/leaf/0"], "files": ("/leaf/1",)}
        stopped = await crawl(spider, settings, arguments=arguments)
        assert isinstance(stopped.error, FileStoreError)
        assert stopped.summary is not None
        assert (stopped.summary.stats.dead, stopped.summary.stats.remaining) == (0, 1)
        assert stopped.items == []
        (store / "full").unlink()
        finished = await crawl(spider, settings, arguments=arguments)
    assert finished.error is None
    (item,) = finished.items
    (entry,) = [item["page"]] if "page" in item else item["files"]
    assert (store / entry["path"]).stat().st_size == entry["size"]


LIMITED = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
from shoal import File, Spider, crawl

class Large(Spider):
    name = "large"

    def parse(self, response):
        yield File("/own/1.pdf", item={})
        yield File("/shared.txt", item={})

settings = {"download_delay": 0, "robots.obey": False, "files.store": sys.argv[2]}
print(json.dumps(crawl(Large, settings, arguments={"start_urls": [sys.argv[1] + "/item/0"]}).items))
"""


def test_a_file_that_the_store_cannot_hold_is_an_error_of_its_item(tmp_path: Path) -> None:
    with file_site(1) as url:
        done = subprocess.run(
            [sys.executable, "-c", LIMITED, url, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
        )
    entries = [item["files"][0] for item in json.loads(done.stdout)]
    (large,) = (entry for entry in entries if "error" in entry)
    assert "File too large" in large["error"]
    assert len(entries) == 2


def run_crawl(folder: Path, url: str, *settings: str) -> forking.Popen:
    """A crawl in which each page has one attempt. Its log is ``log``."""
    (folder / "spider.py").write_text(SPIDER)
    command = [
        *SHOAL, "run", "spider.py", "-a", f"start_urls={url}/", "--frontier", f"sqlite:///{folder}/crawl.db",
        "-o", "items.jsonl", "--set=retry.max_attempts=1", *(f"--set={setting}" for setting in settings),
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        return forking.Popen(command, cwd=folder, stdout=log, stderr=log, text=True)


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


def test_a_full_disk_stops_the_crawl_and_the_same_command_continues(tmp_path: Path, small_disk: Path) -> None:
    with file_site(latency=0.02) as url:
        crawl = run_crawl(tmp_path, url, f"files.store={small_disk}", "items.patience=1")
        wait_for(lambda: hits_of(url).total() > 30)
        ballast = fill(small_disk)
        assert crawl.wait(60) == 1
        log = (tmp_path / "log").read_text()
        assert "No space left on device" in log
        assert "every page found is accounted for" not in log
        ballast.unlink()
        assert run_crawl(tmp_path, url, f"files.store={small_disk}").wait(60) == 0
        assert_complete(written(tmp_path), url, stored_in(small_disk))


def test_a_full_disk_pauses_the_crawl_until_it_has_room(tmp_path: Path, small_disk: Path) -> None:
    with file_site(latency=0.02) as url:
        crawl = run_crawl(tmp_path, url, f"files.store={small_disk}")
        wait_for(lambda: hits_of(url).total() > 30)
        ballast = fill(small_disk)
        wait_for(lambda: (tmp_path / "log").read_text().count("trying again in") >= 3)
        fetched = hits_of(url)
        wait_for(lambda: (tmp_path / "log").read_text().count("trying again in") >= 4)
        assert hits_of(url) == fetched
        ballast.unlink()
        assert crawl.wait(60) == 0
        assert_complete(written(tmp_path), url, stored_in(small_disk))
        assert (tmp_path / "log").read_text().count("trying again in") < 10  # not one for each page


def test_a_crawl_that_waits_for_its_store_can_be_stopped(tmp_path: Path, small_disk: Path) -> None:
    with file_site(latency=0.02) as url:
        crawl = run_crawl(tmp_path, url, f"files.store={small_disk}", "shutdown_grace=1")
        wait_for(lambda: hits_of(url).total() > 30)
        fill(small_disk)
        wait_for(lambda: (tmp_path / "log").read_text().count("trying again in") >= 4)
        crawl.send_signal(signal.SIGINT)
        crawl.wait(10)


def test_object_storage_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server()
    try:
        use(server, monkeypatch)
        bucket = server.bucket()
        with file_site(latency=0.02) as url:
            crawl = run_crawl(tmp_path, url, f"files.store=s3://{bucket}/shop?timeout=2")
            wait_for(lambda: hits_of(url).total() > 30)
            server.kill()
            wait_for(lambda: (tmp_path / "log").read_text().count("trying again in") >= 3)
            assert crawl.poll() is None
            server.start()
            assert crawl.wait(120) == 0, (tmp_path / "log").read_text()
            found = {path.removeprefix("shop/"): content for path, content in server.objects(bucket).items()}
            stored = {path: content for path, content in found.items() if path.startswith("full/")}
            assert_complete(written(tmp_path), url, stored)
    finally:
        server.close()


def test_a_worker_with_a_full_disk_costs_no_page_an_attempt(tmp_path: Path, small_disk: Path) -> None:
    """Others continue."""
    fill(small_disk)
    spider = SPIDER.replace('"retry.max_attempts": 20', '"retry.max_attempts": 1')
    with file_site(latency=0.05) as url, closing(Fleet(tmp_path, frontier_url("redis"), spider)) as fleet:
        fleet.start(f"{url}/")
        fleet.worker(settings={"files.store": small_disk})
        wait_for(lambda: "trying again in" in (tmp_path / "worker-0.log").read_text())
        fleet.worker(settings={"files.store": tmp_path / "store"})
        fleet.wait(120)
        assert fleet.stats()["failed"] == 0
        fleet.shoal("export", fleet.run_id, "-o", str(tmp_path / "items.jsonl"))
        assert_complete(written(tmp_path), url, stored_in(tmp_path / "store"))
