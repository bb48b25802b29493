"""Outputs in object storage: kills of the process that writes, of the server, and rewinds of the store lose nothing."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

from shoal.config import load_config
from shoal.errors import RunError, SinkError
from shoal.item import encode_item
from shoal.ports import LoggedItem, Sink
from shoal.runs.trust import check_outputs
from shoal.sinks import is_shared, open_sink, sink_id
from shoal.sinks.drainer import is_retryable
from shoal.testing.sinks import logged
from tests.acceptance.fleets import KINDS, SHOAL, Fleet, InProcessFleet, frontier_url, site
from tests.nemesis.servers import AofRedis
from tests.support import forking
from tests.support.databases import shared
from tests.support.object_storage import AzureServer, ObjectServer, S3Server, use

pytestmark = pytest.mark.timeout(240)

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    settings = {"download_delay": 0, "robots.obey": False, "throttle.enabled": False, "concurrency": 8,
                "retry.max_attempts": 50}

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get()}
        yield response.follow_all("a")
"""
SMALL = "part_mb=0.002&part_seconds=0.2"


@pytest.fixture(params=[S3Server, AzureServer], ids=["s3", "azure"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    found: ObjectServer = shared(request.param)
    use(found, monkeypatch)
    return found


@pytest.fixture
def own_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that a test may kill."""
    server = S3Server()
    use(server, monkeypatch)
    with closing(server):
        yield server


def pages_of(url: str, pages: int) -> Counter[str]:
    return Counter([f"{url}/", *(f"{url}/p/{number}" for number in range(pages))])


def items_in(server: ObjectServer, bucket: str) -> Counter[str]:
    """The URLs of all items in all parts, and how often each is there. The manifest names these parts and no others."""
    parts, manifest = server.parts(bucket), manifest_in(server, bucket)
    assert [part["name"] for part in manifest["parts"]] == [path.rpartition("/")[2] for path in parts]
    ends = [0, *(part["last"] for part in manifest["parts"])]
    assert [part["first"] for part in manifest["parts"]] == [end + 1 for end in ends[:-1]]
    assert manifest["seq"] == ends[-1]
    return Counter(json.loads(line)["url"] for part in parts.values() for line in part.splitlines())


def manifest_in(server: ObjectServer, bucket: str) -> dict[str, Any]:
    manifest = server.manifest(bucket)
    assert manifest is not None
    return manifest


def position_in(server: ObjectServer, bucket: str) -> int:
    """The last item that the manifest names; 0 if there is no manifest."""
    manifest = server.manifest(bucket)
    return int(manifest["seq"]) if manifest else 0


def assert_once(server: ObjectServer, bucket: str, expected: Counter[str]) -> None:
    found = items_in(server, bucket)
    assert not expected - found, f"{(expected - found).total()} items are missing"
    assert not found - expected, f"{(found - expected).total()} items too many"


def wait_for(so: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not so():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- kills


def test_a_crawl_that_is_killed_writes_every_item_once(server: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "spider.py").write_text(SPIDER)
    bucket = server.bucket()
    with site(900, latency=0.03) as url:
        command = [
            *SHOAL, "run", "spider.py", "-a", f"start_urls={url}/", "--frontier", f"sqlite:///{tmp_path}/crawl.db",
            "-q", "-o", f"{server.scheme}://{bucket}/pages.jsonl?{SMALL}",
        ]  # fmt: skip
        moments = random.Random(time.time_ns())
        for kill in range(5):
            crawl = forking.Popen(command, cwd=tmp_path, env={**os.environ, **server.variables})
            seq = position_in(server, bucket)  # not the number of parts: it falls when leftovers are removed
            wait_for(lambda seq=seq: position_in(server, bucket) > seq)  # type: ignore[misc]
            time.sleep(moments.uniform(0.0, 0.3))
            assert crawl.poll() is None, f"it ended after {kill} kills"
            crawl.kill()
            crawl.wait()
        forking.run(command, cwd=tmp_path, check=True, timeout=120, env={**os.environ, **server.variables})
        assert_once(server, bucket, pages_of(url, 900))


@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_the_server_are_killed(own_s3: S3Server, kind: str, tmp_path: Path) -> None:
    """Whoever writes the parts dies, another worker takes over, and the server dies while it receives one."""
    bucket = own_s3.bucket()
    output = f"s3://{bucket}/pages.jsonl"
    env = {**own_s3.variables, "SHOAL_WORKER__OUTPUTS": f'["{output}"]'}
    with site(500, latency=0.05) as url, closing(Fleet(tmp_path, frontier_url(kind), SPIDER)) as fleet:
        fleet.start(f"{url}/", arguments=("-o", f"{output}?{SMALL}"), settings={"lease.ttl": 3})
        workers = [fleet.worker(env=env, settings={"lease.ttl": 3}) for _ in range(2)]
        for number in range(2):
            count = len(own_s3.parts(bucket))
            wait_for(lambda count=count: len(own_s3.parts(bucket)) > count)  # type: ignore[misc]
            writer = next(each for each in workers if "writes the items" in log_of(fleet, each))
            writer.kill()
            workers.remove(writer)
            workers.append(fleet.worker(env=env, settings={"lease.ttl": 3}))
            if number == 0:
                own_s3.kill()
                time.sleep(0.5)
                own_s3.start()
        fleet.wait(120)
        assert_once(own_s3, bucket, pages_of(url, 500))


WRITER = """
import asyncio, sys
from shoal.item import encode_item
from shoal.ports import LoggedItem
from shoal.sinks import open_sink

def item(number):
    return LoggedItem(number, number.to_bytes(16, "big"), 0, encode_item({"n": number, "text": "x" * 500_000}))

async def main():
    sink = open_sink(sys.argv[1], run_id="run")
    await sink.open(bytes.fromhex(sys.argv[2]))
    for first in range(int(sys.argv[3]), 81, 20):
        await sink.write([item(number) for number in range(first, first + 20)])
        print("writing", flush=True)
        state = await sink.flush()
        print("saved", state.hex(), first + 20, flush=True)
    await sink.close(finished=True)

asyncio.run(main())
"""


def test_killed_in_the_middle_of_a_part(server: ObjectServer) -> None:
    """A part of 10 MB is on its way. The state that the next process gets is that of the last complete flush."""
    bucket = server.bucket()
    output = f"{server.scheme}://{bucket}/items.jsonl"
    state, first, kills = "", "1", 0
    moments = random.Random(time.time_ns())
    while True:
        command = [sys.executable, "-c", WRITER, output, state, first]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for line in writer.stdout:
                if line.startswith("saved"):
                    _, state, first = line.split()
                elif kills < 6:
                    time.sleep(moments.uniform(0.0, 0.1))
                    writer.kill()
                    kills += 1
            if writer.wait() == 0:
                break
    numbers = [json.loads(line)["n"] for content in server.parts(bucket).values() for line in content.splitlines()]
    assert numbers == list(range(1, 81))


def log_of(fleet: Fleet, process: subprocess.Popen[str]) -> str:
    return (fleet.folder / f"worker-{fleet.processes.index(process)}.log").read_text()


def test_the_store_goes_back(server: ObjectServer, tmp_path: Path) -> None:
    """Parts after the cursor that the store has again are replaced or deleted."""
    bucket, redis = server.bucket(), AofRedis()
    output = f"{server.scheme}://{bucket}/pages.jsonl"
    env = {**server.variables, "SHOAL_WORKER__OUTPUTS": f'["{output}"]'}
    with closing(redis), site(500, latency=0.05) as url:
        fleet = Fleet(tmp_path, redis.url, SPIDER)
        with closing(fleet):
            fleet.start(f"{url}/", arguments=("-o", f"{output}?{SMALL}"))
            for _ in range(2):
                fleet.worker(env=env)
            wait_for(lambda: len(server.parts(bucket)) >= 3)
            redis.mark()
            count = len(server.parts(bucket))
            wait_for(lambda: len(server.parts(bucket)) >= count + 5)
            redis.back_to_mark()
            fleet.wait(120)
            assert any("went back" in log or "rewound" in log or "lost changes" in log for log in logs_of(fleet))
            assert_once(server, bucket, pages_of(url, 500))


def logs_of(fleet: Fleet) -> list[str]:
    return [log_of(fleet, process).lower() for process in fleet.processes]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_an_export(server: ObjectServer, ending: str, tmp_path: Path) -> None:
    bucket = server.bucket()
    with site(30) as url, closing(InProcessFleet(tmp_path, frontier_url("redis"), SPIDER)) as fleet:
        fleet.start(f"{url}/")
        fleet.worker()
        fleet.wait()
        for _ in range(2):  # the second one replaces the parts of the first
            fleet.shoal("export", fleet.run_id, "-o", f"{server.scheme}://{bucket}/all.{ending}")
    ((path, content),) = server.parts(bucket).items()
    assert re.fullmatch(rf"all/{fleet.run_id}/part-0{{11}}1-0{{10}}31-0-[0-9a-f]{{8}}\.{ending}", path)
    found: list[dict[str, Any]]
    match ending:
        case "jsonl":
            found = [json.loads(line) for line in content.splitlines()]
        case "csv":
            found = list(csv.DictReader(io.StringIO(content.decode())))
        case _:
            found = pq.read_table(io.BytesIO(content)).to_pylist()
    assert Counter(item["url"] for item in found) == pages_of(url, 30)


async def test_formulas(server: ObjectServer) -> None:
    bucket = server.bucket()
    items = [LoggedItem(1, bytes(16), 0, encode_item({"=a": "=1", "n": "-5"}))]
    for query in ("", "?formulas=keep"):
        sink = open_sink(f"{server.scheme}://{bucket}/items.csv{query}", run_id=query.strip("?=") or "escaped")
        await sink.open(b"")
        await sink.write(items)
        await sink.flush()
        await sink.close(finished=True)
    assert sorted(server.parts(bucket).values()) == [b"'=a,n\n'=1,-5\n", b"=a,n\n=1,-5\n"]


# -- a process that lost its role


def test_a_worker_that_is_suspended_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it continues, it believes that it still writes the parts. No log has a secret."""
    server = shared(AzureServer)
    use(server, monkeypatch)
    bucket = server.bucket()
    output = f"az://{bucket}/pages.jsonl"
    env = {**server.variables, "SHOAL_WORKER__OUTPUTS": f'["{output}"]'}
    settings = {"lease.ttl": 2, "worker.session": 2, "log_level": "DEBUG"}
    with site(400, latency=0.05) as url, closing(Fleet(tmp_path, frontier_url("redis"), SPIDER)) as fleet:
        fleet.start(f"{url}/", arguments=("-o", f"{output}?{SMALL}"), settings={"lease.ttl": 2})
        workers = [fleet.worker(env=env, settings=settings) for _ in range(2)]
        wait_for(lambda: len(server.parts(bucket)) >= 2)
        writer = next(each for each in workers if "writes the items" in log_of(fleet, each))
        (other,) = (each for each in workers if each is not writer)
        writer.send_signal(signal.SIGSTOP)
        count = len(server.parts(bucket))
        wait_for(lambda: "writes the items" in log_of(fleet, other))
        wait_for(lambda: len(server.parts(bucket)) > count)
        writer.send_signal(signal.SIGCONT)
        fleet.wait(120)
        assert_once(server, bucket, pages_of(url, 400))
        assert not any(server.variables["AZURE_STORAGE_ACCOUNT_KEY"].lower() in log for log in logs_of(fleet))


async def opened(spec: str, state: bytes = b"") -> Sink:
    sink = open_sink(spec, run_id="run")
    await sink.open(state)
    return sink


async def test_parts_are_bounded(server: ObjectServer) -> None:
    """One large write becomes parts of the given size, so that a sink never holds more than that."""
    bucket = server.bucket()
    sink = await opened(f"{server.scheme}://{bucket}/items.jsonl?part_mb=0.001")
    await sink.write(logged(range(500)))
    sizes = [len(content) for content in server.parts(bucket).values()]
    assert len(sizes) > 10
    assert max(sizes) < 2 << 10
    await sink.flush()
    await sink.close(finished=True)
    lines = b"".join(server.parts(bucket).values()).splitlines()
    assert [json.loads(line)["n"] for line in lines] == list(range(500))


async def test_many_stale_parts_are_removed(server: ObjectServer) -> None:
    bucket = server.bucket()
    spec = f"{server.scheme}://{bucket}/items.jsonl?part_mb=0.0001"
    sink = await opened(spec)
    await sink.write(logged(range(1000)))
    await sink.flush()
    assert len(server.parts(bucket)) > 200
    sink = await opened(spec)
    await sink.write(logged([7]))
    await sink.flush()
    assert 1 < len(server.parts(bucket)) < 100  # a flush takes a while at most
    await sink.close(finished=True)
    assert [json.loads(content)["n"] for content in server.parts(bucket).values()] == [7]


# -- errors


async def failure(spec: str) -> SinkError:
    with pytest.raises(SinkError) as caught:
        await opened(spec)
    return caught.value


async def test_errors_say_what_to_do(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, scheme = server.bucket(), server.scheme
    error = await failure(f"{scheme}://no-such-bucket/items.jsonl")
    assert "no-such-bucket does not exist; create it first" in str(error)
    assert not is_retryable(error)
    key = "AWS_ACCESS_KEY_ID" if scheme == "s3" else "AZURE_STORAGE_ACCOUNT_KEY"
    monkeypatch.setenv(key, "c2VjcmV0LWtleQ==")
    error = await failure(f"{scheme}://{bucket}/items.jsonl")
    assert "is denied" in str(error)
    assert key in str(error)
    assert "c2VjcmV0LWtleQ" not in str(error)
    assert not is_retryable(error)
    endpoint = "AWS_ENDPOINT_URL" if scheme == "s3" else "AZURE_STORAGE_ENDPOINT"
    monkeypatch.setenv(endpoint, "http://127.0.0.1:1/")
    error = await failure(f"{scheme}://{bucket}/items.jsonl?timeout=2")
    assert "no connection to http://127.0.0.1:1/: connection refused" in str(error)
    assert is_retryable(error)


class Answering(BaseHTTPRequestHandler):
    """Answers every request with one status and body, and keeps its path and headers."""

    status, body, seen = 200, b"", list[tuple[str, str, str]]()

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        type(self).seen.append((self.command, self.path, self.headers.get("Authorization", "")))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.send_header("ETag", '"tag"')
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _answer

    def log_message(self, format: str, *values: object) -> None:
        pass


@contextmanager
def answers(base: type[Answering]) -> Iterator[tuple[str, type[Answering]]]:
    kind = type("Own", (base,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", kind
    server.shutdown()
    server.server_close()


@pytest.fixture
def answering() -> Iterator[tuple[str, type[Answering]]]:
    with answers(Answering) as server:
        yield server


@pytest.mark.parametrize(
    ("status", "code", "expected", "retryable"),
    [
        (301, "PermanentRedirect", "is in another region; set AWS_REGION", False),
        (400, "AuthorizationHeaderMalformed", "is in another region; set AWS_REGION", False),
        (501, "NotImplemented", "add conditional=no", False),
        (503, "SlowDown", "the server answered 503 (SlowDown)", True),
        (400, "InvalidArgument", "the server answered 400 (InvalidArgument)", False),
    ],
)
async def test_answers_of_servers(
    answering: tuple[str, type[Answering]], monkeypatch: pytest.MonkeyPatch,
    status: int, code: str, expected: str, retryable: bool,
) -> None:  # fmt: skip
    url, kind = answering
    kind.status, kind.body = status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
    use(shared(S3Server), monkeypatch)
    error = await failure(f"s3://bucket/items.jsonl?endpoint={url}&timeout=3")
    assert expected in str(error)
    assert is_retryable(error) is retryable


class GoogleLike(Answering):
    """Answers as Google Cloud Storage does while a bucket is empty."""

    def do_GET(self) -> None:
        is_list = "?" in self.path
        self.status = 200 if is_list else 404
        self.body = b"<ListBucketResult></ListBucketResult>" if is_list else b""
        self._answer()

    do_HEAD = do_GET


async def test_google_cloud_storage_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no server of it for tests. This one shows which requests are sent, to where, with which credentials."""
    with answers(GoogleLike) as (url, kind):
        monkeypatch.setenv("GOOGLE_BASE_URL", url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "token-of-the-test")
        sink = await opened("gs://my-bucket/some/items.jsonl?timeout=5")
        await sink.write(logged([1]))
        with pytest.raises(SinkError, match="its manifest is gone"):
            await sink.flush()
        requests = [(method, unquote(path.partition("?")[0])) for method, path, _ in kind.seen]
        manifest = "/my-bucket/some/items/run/_manifest-jsonl.json"
        assert requests[:4] == [("GET", manifest), ("PUT", manifest), ("PUT", manifest), ("GET", "/my-bucket")]
        assert "prefix=some%2Fitems%2Frun%2F" in kind.seen[3][1]
        assert re.fullmatch(r"/my-bucket/some/items/run/part-0{11}1-0{11}1-0-[0-9a-f]{8}\.jsonl", requests[4][1])
        assert {authorization for _, _, authorization in kind.seen} == {"Bearer token-of-the-test"}


# -- names and trust


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("s3://bucket/items.txt", "write s3://bucket/name.jsonl, .csv or .parquet"),
        ("s3://bucket", "write s3://bucket/name.jsonl"),
        ("s3://key:secret@bucket/items.jsonl", "has no user, password or port"),
        ("s3://bucket/../items.jsonl", "invalid s3:// URL"),
        ("s3://bucket//items.jsonl?part_mb=0", "invalid option; allowed: ?part_mb=N&part_seconds=N"),
        ("s3://bucket/items.jsonl?part_seconds=x", "invalid option"),
        ("s3://bucket/items.jsonl?endpoint=ftp://x", "invalid option"),
        ("az://bucket/items.csv?region=x", "account=name"),
        ("gs://bucket/items.csv?formulas=no", "formulas=keep"),
        ("s4://bucket/items.jsonl", "s3://bucket/name.jsonl (also gs:// and az://)"),
    ],
)
def test_invalid_urls(spec: str, expected: str) -> None:
    with pytest.raises(SinkError) as caught:
        sink_id(spec)
    assert expected in str(caught.value)
    assert "secret" not in str(caught.value)


def test_the_name_of_an_output() -> None:
    assert sink_id("s3://b/a/items.jsonl?part_mb=5&region=x") == "s3://b/a/items.jsonl"
    assert sink_id("s3://b/a/items.jsonl?endpoint=http://x") == "s3://b/a/items.jsonl?endpoint=http://x"
    assert is_shared("gs://b/items.parquet")


def test_a_run_may_use_the_credentials_of_a_worker_only_where_it_allows_that() -> None:
    def check(spec: str, *allowed: str, own: tuple[str, ...] = ()) -> None:
        check_outputs("run", [spec], own, load_config(code={"worker.outputs": list(allowed)}).config)

    spec = "s3://bucket/a/items.jsonl?part_mb=5"
    for allowed in ((), ("s3://other",), ("s3://bucket/b",), ("s3://bucket/a/item",), ("gs://bucket",)):
        with pytest.raises(RunError, match=r"worker\.outputs"):
            check(spec, *allowed)
    for allowed in ("s3://bucket", "s3://bucket/a", "s3://bucket/a/", "s3://bucket/a/items.jsonl"):
        check(spec, allowed)
    check(spec, own=("s3://bucket/a/items.jsonl",))
    with pytest.raises(RunError, match="endpoint of its own environment"):
        check("s3://bucket/items.jsonl?endpoint=http://evil.example", "s3://bucket")
