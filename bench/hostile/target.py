"""The attacked server (`shoal serve`), a site beside it, and a watch that measures both memory and waiting."""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TIMEOUT = 120.0  # seconds for an answer
OPERATOR, ANN, BOB = (secrets.token_hex(16) for _ in range(3))
SETTINGS = f"""
download_delay = 0
[serve]
token = "{OPERATOR}"
allow = ["127.0.0.0/8"]
[serve.tokens]
ann = "{ANN}"
bob = "{BOB}"
[spiders.Pages]
file = "pages.py"
"""
SPIDER = """
from shoal import Spider


class Pages(Spider):
    name = "pages"

    def __init__(self, begin="", count=1):
        super().__init__()
        self.start_urls = [f"{begin}{number}" for number in range(count)]

    def parse(self, response):
        yield {"url": response.url, "text": response.text}
"""
_SPAWN = multiprocessing.get_context("spawn")


class Target:
    """A running server and a site."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, site: str) -> None:
        self.process = process
        self.port = port
        self.site = site

    def ask(
        self, method: str, path: str, body: Any = None, token: str = ANN, address: str = "127.0.0.1"
    ) -> tuple[int, bytes]:
        """Send one request over a new connection. Returns the status and the body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, TIMEOUT, source_address=(address, 0))
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def batch(self, urls: Sequence[str], token: str = ANN, **more: Any) -> Any:
        body = {"urls": list(urls), "options": {"robots": False, "retries": 0}, "timeout": 100, **more}
        status, answer = self.ask("POST", "/api/crawl/batch", body, token)
        if status not in (200, 202):
            raise RuntimeError(f"a batch was answered {status}: {answer[:300]!r}")
        return json.loads(answer)

    def session(self, urls: Sequence[str]) -> str:
        """The id of a batch that is finished."""
        session: str = self.batch(urls, wait=False)["session_id"]
        path = f"/api/crawl/{session}?after=1000000"
        wait_until(lambda: json.loads(self.ask("GET", path)[1])["state"] == "finished", "the session is not finished")
        return session

    def connect(self, data: bytes, address: str = "127.0.0.1") -> socket.socket:
        """Open a connection and send some bytes. The server may refuse them."""
        connection = socket.create_connection(("127.0.0.1", self.port), TIMEOUT, source_address=(address, 0))
        with suppress(OSError):
            connection.sendall(data)
        return connection

    def begin(self, path: str, address: str = "127.0.0.1", token: str = ANN) -> socket.socket:
        """Send a GET request, and read nothing."""
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
        return self.connect(head.encode(), address)

    def memory(self) -> int:
        """The resident bytes of the server and all its processes."""
        return sum(_memory(pid) for pid in _family(self.process.pid))


def wait_until(holds: Callable[[], bool], otherwise: str, seconds: float = TIMEOUT) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError(f"after {seconds:g} s {otherwise}")
        time.sleep(0.05)


def _family(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    family = [root]
    for pid in family:
        family += children.get(pid, ())
    return family


def _memory(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


# -- the server


@contextmanager
def attacked(folder: Path, zone: str = "") -> Iterator[Target]:
    """Start a server and a site. ``zone``: the address of the only name server that the server knows."""
    (folder / "shoal.toml").write_text(SETTINGS)
    (folder / "pages.py").write_text(SPIDER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "shoal.cli.main", "serve", "--port", str(port)]
    if zone:
        (folder / "resolv.conf").write_text(f"nameserver {zone}\n")
        script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", script, str(folder / "resolv.conf"), *command]
    with _site() as site, (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        target = Target(process, port, site)
        try:
            wait_until(lambda: _answers(target), f"the server did not answer; see {folder}/log")
            yield target
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(target: Target) -> bool:
    if target.process.poll() is not None:
        raise RuntimeError("the server has ended")
    with suppress(OSError):
        return target.ask("GET", "/health", token="")[0] == 200
    return False


# -- the watch


class Watch:
    """The largest growth of memory, and the longest wait for `/health`, which is asked by a process of its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._before = target.memory()
        self.peak = 0
        self._stop = threading.Event()
        self._waits, child = _SPAWN.Pipe()
        self._asking = _SPAWN.Process(target=_ask_health, args=(target.port, target.site, child), daemon=True)
        self._measuring = threading.Thread(target=self._measure)

    def __enter__(self) -> Watch:
        self._asking.start()
        self._waits.recv()  # it has begun
        self._measuring.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._measuring.join()
        self._waits.send("stop")
        self.wait: float
        self.idle_wait: float
        self.asked: int
        self.wait, self.idle_wait, self.asked = self._waits.recv()
        self._asking.join()

    @property
    def growth(self) -> int:
        return max(0, self.peak - self._before)

    def _measure(self) -> None:
        while not self._stop.wait(0.05):
            self.peak = max(self.peak, self._target.memory())


def _ask_health(port: int, site: str, control: Any) -> None:
    """Another client, from its own address, with a new connection each time. Sends the longest wait for the server, the
    one for a page of the site, which is nearly idle, and the number of requests."""
    asked = 0
    waits = {f"127.0.0.1:{port}": [0.0, 0.0], site.removeprefix("http://"): [0.0, 0.0]}
    control.send("begun")
    while not control.poll(0.02):
        for host, (longest, failing_since) in waits.items():
            began = failing_since or time.monotonic()
            connection = http.client.HTTPConnection(host, timeout=TIMEOUT, source_address=("127.0.0.9", 0))
            status = 0
            with suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/health")
                status = connection.getresponse().status
            connection.close()
            waits[host] = [max(longest, time.monotonic() - began), 0.0 if status == 200 else began]
        asked += 1
    control.send((*(longest for longest, _ in waits.values()), asked))


# -- the site


@contextmanager
def _site() -> Iterator[str]:
    """A site in its own process. ``/300000`` is a page of so many bytes; in ``/300000/control`` these are control
    characters, six bytes each in JSON. ``/retry`` asks to come back in a day, and ``/never`` does not answer."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve_site, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _serve_site(control: Any) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                name = head.split(b" ", 2)[1].lstrip(b"/").partition(b"?")[0].partition(b"/")[0]
                if name == b"retry":
                    writer.write(b"HTTP/1.1 503 Busy\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n")
                elif name == b"never":
                    await reader.read()
                else:
                    letter = b"\x01" if b"/control" in head.partition(b"\r")[0] else b"x"
                    body = letter * (int(name) if name.isdigit() else 100)
                    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(body)
                    writer.write(head + body)
                await writer.drain()

    async def run() -> None:
        server = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=1000)
        control.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())
