"""Outputs in object storage: an old writer changes nothing, and a bucket that was set back is completed.

The items in the bucket are the judge: those in the parts that the manifest names, and in the end those in all parts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest

from shoal.errors import OutputTakenError, SinkError
from shoal.ports import LoggedItem, Sink
from shoal.sinks import open_sink
from shoal.sinks.drainer import is_retryable
from shoal.sinks.objects import MissingPartsSink
from shoal.testing.sinks import logged
from tests.acceptance.fleets import SHOAL, Fleet, frontier_url, site
from tests.acceptance.test_object_storage import (
    SMALL,
    SPIDER,
    assert_once,
    log_of,
    manifest_in,
    pages_of,
    wait_for,
)
from tests.support import forking
from tests.support.databases import shared
from tests.support.object_storage import AzureServer, CarelessS3Server, ObjectServer, S3Server, use

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=[S3Server, AzureServer], ids=["s3", "azure"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    server: ObjectServer = shared(request.param)
    use(server, monkeypatch)
    return server


# -- a writer that comes late


class Gate:
    """A proxy to a local server that can hold requests, and deliver them after their client has given up."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = [self._listener]
        self._held: re.Pattern[bytes] | None = None
        self._unanswered: re.Pattern[bytes] | None = None
        self._released = threading.Event()
        self._late: set[socket.socket] = set()
        self.held = 0
        self.delivered = 0
        """How many held requests the server has answered."""
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self, request: bytes) -> None:
        """Hold each request whose first line matches, until ``release``."""
        self._held = re.compile(request)

    def lose_answer(self, request: bytes) -> None:
        """Break the connection of the next request whose first line matches, after the server has answered it."""
        self._unanswered = re.compile(request)

    def release(self) -> None:
        self._held = None
        self._released.set()
        wait_for(lambda: self.delivered == self.held)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward requests one at a time: a client sends the next one after the answer."""
        threading.Thread(target=self._return, args=(server, client), daemon=True).start()
        with suppress(OSError):
            while data := client.recv(65536):
                line = data.partition(b"\r\n")[0]
                if self._unanswered is not None and self._unanswered.match(line):
                    self._unanswered = None
                    self._cut(client, server, data)
                    return
                if self._held is not None and self._held.match(line):
                    self.held += 1
                    data += _rest_of(client, data)
                    self._released.wait()
                    self._late.add(server)
                server.sendall(data)

    def _cut(self, client: socket.socket, server: socket.socket, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._to)) as other:
            other.sendall(data + _rest_of(client, data))
            other.recv(65536)
        client.close()
        server.close()

    def _return(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if server in self._late:
                    self._late.remove(server)
                    self.delivered += 1
                client.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread that waits for connections
        for connection in self._sockets:
            connection.close()


def _rest_of(client: socket.socket, data: bytes) -> bytes:
    """What is still to come of a request that begins with ``data``."""
    rest = b""
    while (end := (data + rest).find(b"\r\n\r\n")) < 0:
        rest += client.recv(65536)
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", data + rest)
    while length and len(data + rest) < end + 4 + int(length[1]):
        rest += client.recv(65536)
    return rest


@pytest.fixture
def gate(server: ObjectServer) -> Iterator[Gate]:
    with closing(Gate(server.port)) as gate:
        yield gate


class Output:
    """An output of the run ``run`` in a new bucket."""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.bucket = server.bucket()
        self.url = f"{server.scheme}://{self.bucket}/items.jsonl"

    async def open(self, state: bytes = b"", epoch: int = 0, *, last: int | None = None, options: str = "") -> Sink:
        sink = open_sink(f"{self.url}?{options}", run_id="run")
        assert await sink.open(state, epoch) == last
        return sink

    async def open_late(self, gate: Gate, state: bytes, epoch: int, *, timeout: int = 1) -> Sink:
        """A writer whose requests pass the gate, and who gives up a request after this time."""
        endpoint = self.server.endpoint_at(gate.port)
        return await self.open(state, epoch, options=f"timeout={timeout}&endpoint={endpoint}")

    def counted(self) -> list[int]:
        """The items in the parts that the manifest names."""
        parts = {path.rpartition("/")[2]: content for path, content in self.server.parts(self.bucket).items()}
        names = [part["name"] for part in manifest_in(self.server, self.bucket)["parts"]]
        return numbers_in(parts[name] for name in names)

    def all(self) -> list[int]:
        """The items in all parts, in order."""
        return sorted(numbers_in(self.server.parts(self.bucket).values()))

    def remove(self, part: int) -> None:
        obstore.delete(self.server.store(self.bucket), list(self.server.parts(self.bucket))[part])


def numbers_in(contents: Any) -> list[int]:
    return [json.loads(line)["n"] for content in contents for line in content.splitlines()]


async def write(sink: Sink, items: Sequence[LoggedItem]) -> bytes:
    await sink.write(items)
    return await sink.flush()


async def finish(output: Output, sink: Sink, last: int) -> None:
    """Write up to this item, and end."""
    await write(sink, logged(range(1, last + 1)))
    await sink.close(finished=True)
    assert output.counted() == output.all() == list(range(1, last + 1))


@pytest.mark.parametrize("what", [b"PUT .*/part-", b"PUT .*/_manifest-"], ids=["part", "manifest"])
async def test_a_write_that_arrives_late(server: ObjectServer, gate: Gate, what: bytes) -> None:
    output = Output(server)
    first = await output.open(epoch=1)
    state = await write(first, logged([1, 2, 3]))
    late = await output.open_late(gate, state, 2)
    gate.hold(what)
    with pytest.raises(SinkError) as raised:
        await write(late, logged([4, 5], 4))
    assert is_retryable(raised.value)
    assert gate.held
    successor = await output.open(state, 3)
    await write(successor, logged(range(4, 11), 4))
    await asyncio.to_thread(gate.release)
    assert output.counted() == list(range(1, 11))
    with pytest.raises(OutputTakenError):
        await output.open(state, 2)
    await finish(output, successor, 12)


async def test_a_delete_that_arrives_late(server: ObjectServer, gate: Gate) -> None:
    """The old writer deletes parts after the state of a store that went back. Its successor writes these items."""
    output = Output(server)
    first = await output.open(epoch=1)
    state = await write(first, logged([1, 2, 3]))
    await write(first, logged(range(4, 10), 4))
    late = await output.open_late(gate, state, 2)
    gate.hold(b"DELETE |POST ")  # a POST deletes a batch
    with pytest.raises(SinkError):
        await write(late, logged([4, 5], 4))
    assert gate.held
    successor = await output.open(state, 3)
    await write(successor, logged(range(4, 10), 4))
    await write(successor, logged(range(10, 13), 10))
    await asyncio.to_thread(gate.release)
    assert output.counted() == list(range(1, 13))
    await finish(output, successor, 13)


async def test_a_writer_that_lists_the_folder_late(server: ObjectServer, gate: Gate) -> None:
    """Its manifest does not name the parts that its successor has written meanwhile. They are not leftovers."""
    output = Output(server)
    state = await write(await output.open(epoch=1), logged([1, 2, 3]))
    gate.hold(rb"GET .*" + server.listing)
    opening = asyncio.create_task(output.open_late(gate, state, 2, timeout=60))
    await asyncio.to_thread(wait_for, lambda: gate.held == 1)
    successor = await output.open(state, 3)
    await write(successor, logged([4, 5], 4))
    await asyncio.to_thread(gate.release)
    late = await opening
    for step in (late.flush, lambda: late.close(finished=True)):
        with suppress(SinkError):
            await step()
    assert output.counted() == output.all() == [1, 2, 3, 4, 5]
    await finish(output, successor, 6)


async def test_an_answer_that_is_lost(server: ObjectServer, gate: Gate) -> None:
    """The manifest was replaced, and the request is repeated. It fails, but the manifest is that of the writer."""
    output = Output(server)
    sink = await output.open_late(gate, b"", 1)
    gate.lose_answer(b"PUT .*/_manifest-")
    await write(sink, logged([1, 2]))
    await finish(output, sink, 4)


@pytest.mark.parametrize("kind", [CarelessS3Server, S3Server, AzureServer], ids=["careless", "s3", "azure"])
async def test_a_server_that_ignores_conditions(
    kind: type[ObjectServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old writer is refused even so, unless it writes in the same instant as its successor."""
    server = shared(kind)
    use(server, monkeypatch)
    output = Output(server)
    await output.open(epoch=1, options="conditional=no")
    assert not caplog.records
    late = await output.open(epoch=2)
    assert ("ignores the conditions of writes" in caplog.text) == (kind is CarelessS3Server)
    successor = await output.open(epoch=3)
    await write(successor, logged([1, 2, 3]))
    with pytest.raises(OutputTakenError):
        await write(late, logged([1, 2]))
    await finish(output, successor, 4)


@pytest.mark.parametrize("what", [b"PUT .*/part-", b"PUT .*/_manifest-"], ids=["part", "manifest"])
def test_a_worker_whose_writes_arrive_late(server: ObjectServer, gate: Gate, what: bytes, tmp_path: Path) -> None:
    bucket = server.bucket()
    output = f"{server.scheme}://{bucket}/pages.jsonl"
    env = {**server.variables, "SHOAL_WORKER__OUTPUTS": f'["{output}"]'}
    through = {name: value.replace(server.endpoint, server.endpoint_at(gate.port)) for name, value in env.items()}
    settings = {"lease.ttl": 2, "worker.session": 2}
    with site(400, latency=0.05) as url, closing(Fleet(tmp_path, frontier_url("redis"), SPIDER)) as fleet:
        fleet.start(f"{url}/", arguments=("-o", f"{output}?{SMALL}&timeout=20"), settings={"lease.ttl": 2})
        late = fleet.worker(env=through, settings=settings)
        wait_for(lambda: len(server.parts(bucket)) >= 2)
        other = fleet.worker(env=env, settings=settings)
        gate.hold(what)
        wait_for(lambda: gate.held > 0)
        seq = manifest_in(server, bucket)["seq"]
        wait_for(lambda: manifest_in(server, bucket)["seq"] > seq)
        assert "writes the items" in log_of(fleet, other)
        gate.release()
        fleet.wait(120)
        assert late.returncode == 0
        assert_once(server, bucket, pages_of(url, 400))


# -- a bucket that was set back


@contextmanager
def crawling(server: ObjectServer, folder: Path, *words: str) -> Iterator[tuple[list[str], str, str]]:
    """The command of a crawl of 300 pages, the URL of the site, and the bucket."""
    (folder / "spider.py").write_text(SPIDER)
    bucket = server.bucket()
    with site(300, latency=0.1) as url:
        yield [
            *SHOAL, "run", "spider.py", "-a", f"start_urls={url}/", "--frontier", f"sqlite:///{folder}/crawl.db",
            "-q", "-o", f"{server.scheme}://{bucket}/pages.jsonl?{SMALL}", *words,
        ], url, bucket  # fmt: skip


def more_parts(server: ObjectServer, bucket: str, count: int) -> None:
    before = len(server.parts(bucket))
    wait_for(lambda: len(server.parts(bucket)) >= before + count)


def set_back(server: ObjectServer, bucket: str) -> Callable[[], None]:
    """Return what restores the bucket as it is now."""
    backup = server.objects(bucket)
    return lambda: server.restore(bucket, backup)


def remove_parts(server: ObjectServer, bucket: str) -> Callable[[], None]:
    """Return what removes two parts that exist now."""
    paths = list(server.parts(bucket))[1:3]
    return lambda: [obstore.delete(server.store(bucket), path) for path in paths] and None


def truncate_part(server: ObjectServer, bucket: str) -> Callable[[], None]:
    """Return what truncates a part that exists now."""
    path = list(server.parts(bucket))[1]
    return lambda: obstore.put(server.store(bucket), path, b"{}\n") and None


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "between"])
@pytest.mark.parametrize("damage", [set_back, remove_parts, truncate_part])
def test_a_bucket_that_lost_parts_is_completed(
    server: ObjectServer, damage: Callable[[ObjectServer, str], Callable[[], None]], is_live: bool, tmp_path: Path
) -> None:
    env = {**os.environ, **server.variables}
    with crawling(server, tmp_path) as (command, url, bucket):
        crawl = forking.Popen(command, cwd=tmp_path, env=env)
        more_parts(server, bucket, 4)
        happen = damage(server, bucket)
        more_parts(server, bucket, 4)
        if not is_live:
            crawl.kill()
            crawl.wait()
        happen()
        assert not is_live or crawl.poll() is None, "the crawl had ended before"
        if not is_live:
            crawl = forking.Popen(command, cwd=tmp_path, env=env)
        assert crawl.wait(120) == 0
        assert_once(server, bucket, pages_of(url, 300))


def test_a_bucket_that_lost_parts_which_the_log_no_longer_has(server: ObjectServer, tmp_path: Path) -> None:
    """The run stops, names what is missing, and removes nothing."""
    env = {**os.environ, **server.variables}
    with crawling(server, tmp_path, "--set", "items.keep=false") as (command, _, bucket):
        crawl = forking.Popen(command, cwd=tmp_path, env=env)
        more_parts(server, bucket, 8)
        crawl.kill()
        crawl.wait()
        obstore.delete(server.store(bucket), list(server.parts(bucket))[1])
        before = server.parts(bucket)
        stopped = forking.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert stopped.returncode != 0, stopped.stderr
        assert "was set back: it ends with item" in stopped.stderr
        assert "are missing" in stopped.stderr
        assert server.parts(bucket) == before


async def test_the_manifest_is_deleted(server: ObjectServer) -> None:
    """Nothing says which parts count. They stay until the same items were written again."""
    output = Output(server)
    sink = await output.open(epoch=1)
    state = await write(sink, logged([1, 2, 3]))
    obstore.delete(server.store(output.bucket), "items/run/_manifest-jsonl.json")
    with pytest.raises(SinkError, match="its manifest is gone") as raised:
        await write(sink, logged([4], 4))
    assert is_retryable(raised.value)
    await sink.close(finished=False)
    sink = await output.open(state, 2, last=0)
    assert output.all()[:3] == [1, 2, 3]
    await finish(output, sink, 5)


async def test_a_manifest_that_cannot_be_read(server: ObjectServer) -> None:
    output = Output(server)
    await write(await output.open(epoch=1), logged([1]))
    obstore.put(server.store(output.bucket), "items/run/_manifest-jsonl.json", b'{"run"')
    with pytest.raises(SinkError, match="not a manifest of Shoal") as raised:
        await output.open(epoch=2)
    assert not is_retryable(raised.value)
    assert output.all() == [1]


async def test_two_formats_of_one_name(server: ObjectServer) -> None:
    """They share a folder, and each has its own manifest."""
    output = Output(server)
    lines = await output.open(epoch=1)
    table = open_sink(output.url.replace(".jsonl", ".csv"), run_id="run")
    await table.open(b"", 2)
    for sink in (lines, table):
        await write(sink, logged([1, 2]))
    for sink in (lines, table):
        await sink.close(finished=True)
        assert (await sink.count(b"")).items == 2


# -- counting


async def test_a_part_that_is_gone_does_not_count(server: ObjectServer) -> None:
    output = Output(server)
    sink = await output.open(epoch=1)
    await write(sink, logged([1, 2, 3]))
    state = await write(sink, logged([4, 5], 4))
    count = await sink.count(state)
    assert (count.items, count.position) == (5, 5)
    output.remove(0)
    count = await sink.count(state)
    assert (count.items, count.position) == (2, 5)


# -- output of an earlier version


async def earlier(server: ObjectServer) -> tuple[Output, bytes]:
    """Two parts with four items, and a third one whose state was lost, as an earlier version wrote them."""
    output = Output(server)
    for number, items in enumerate([[1, 2], [3, 4], [5, 6]], 1):
        lines = b"".join(json.dumps({"n": n, "text": f"item {n}"}).encode() + b"\n" for n in items)
        obstore.put(server.store(output.bucket), f"items/run/part-{number:06}.jsonl", lines)
    return output, msgspec.msgpack.encode({"run": "run", "parts": 2, "fields": []})


async def test_output_of_an_earlier_version_is_continued(server: ObjectServer) -> None:
    output, state = await earlier(server)
    assert (await open_sink(output.url, run_id="run").count(state)).items is None
    sink = await output.open(state, 1)
    state = await sink.flush()
    await sink.close(finished=False)
    sink = await output.open(state, 2)
    await write(sink, logged([5], 5))
    await sink.close(finished=False)
    sink = await output.open(state, 3)  # the state of that flush was lost
    state = await write(sink, logged([5, 6, 7], 5))
    assert output.counted() == output.all() == list(range(1, 8))
    await sink.close(finished=True)
    sink = await output.open(state, 4)
    await finish(output, sink, 8)
    output.remove(-1)
    output.remove(0)  # nobody knows which items it had
    sink = await output.open(state, 5, last=0)
    await finish(output, sink, 9)


async def test_output_of_an_earlier_version_that_lost_a_part(server: ObjectServer) -> None:
    output, state = await earlier(server)
    output.remove(1)
    sink = await output.open(state, 1, last=0)
    assert output.all() == [1, 2, 5, 6]
    await finish(output, sink, 5)


# -- exports


async def test_an_export_leaves_the_output_of_a_run_alone(server: ObjectServer) -> None:
    output = Output(server)
    await write(await output.open(epoch=1), logged([1, 2]))
    with pytest.raises(SinkError, match=r"run run writes to .* itself.*--missing") as raised:
        await output.open()
    assert not is_retryable(raised.value)
    assert output.counted() == output.all() == [1, 2]


async def missing(output: Output, last: int) -> int:
    """Export what is missing of these items, and return how many were added."""
    sink = open_sink(f"{output.url}?part_mb=0.0001", run_id="run", export="missing")
    assert isinstance(sink, MissingPartsSink)
    await sink.open(b"")
    await sink.write(logged(range(1, last + 1)))
    await sink.flush()
    await sink.close(finished=True)
    return sink.added


async def test_an_export_of_what_is_missing(server: ObjectServer) -> None:
    output = Output(server)
    assert await missing(output, 2) == 2
    sink = await output.open(epoch=1)
    for first in (1, 4, 7, 10):
        state = await write(sink, logged(range(first, first + 3), first))
    await sink.close(finished=True)
    output.remove(3)
    output.remove(1)
    assert await missing(output, 14) == 8
    assert output.counted() == output.all() == list(range(1, 15))
    assert await missing(output, 14) == 0
    assert (await sink.count(state)).items == 14
    sink = await output.open(state, 2)  # the run goes on where it was
    await finish(output, sink, 15)


async def test_an_export_of_what_is_missing_beside_a_writer(server: ObjectServer) -> None:
    output = Output(server)
    sink = await output.open(epoch=1)
    await write(sink, logged([1, 2]))
    state = await write(sink, logged([3, 4], 3))
    output.remove(0)
    assert await missing(output, 6) == 4
    with pytest.raises(SinkError) as raised:
        await write(sink, logged([5], 5))
    assert is_retryable(raised.value)
    await sink.close(finished=False)
    sink = await output.open(state, 1)
    await finish(output, sink, 7)


async def test_nothing_says_what_is_missing(server: ObjectServer) -> None:
    output, _ = await earlier(server)
    with pytest.raises(SinkError, match="nothing says which items"):
        await missing(output, 3)
    assert output.all() == [1, 2, 3, 4, 5, 6]
