"""Post mutated bodies to a real server, and measure how long another caller has to wait: the fuzzing of the API.

``python -m bench.fuzz_api --seconds 60 --seed 1`` prints the results. It is an error if the server dies, responds with
500, or refuses a body with a response of more than 64 KB. The body is then saved to a file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SIZE = 8_000_000  # just below serve.max_request_bytes
TIMEOUT = 30.0  # seconds for an answer
LARGEST_REFUSAL = 64 * 1024
PATHS = ("/api/crawl/batch", "/api/runs", "/api/hosts/a.example/block", "/api/clusters/a/scale")
TEMPLATES: tuple[dict[str, Any], ...] = (
    {"urls": ["http://127.0.0.1:1/"], "wait": False, "options": {"format": "markdown", "retries": 0}},
    {
        "urls": ["http://127.0.0.1:1/a", "no url"], "wait": False, "timeout": 5,
        "options": {"format": "fields", "fields": {"a": "h1", "b": {"xpath": "//p[1]/text()", "all": True}}},
    },
    {"urls": ["http://127.0.0.1:1/"], "wait": False, "webhook": {"url": "http://127.0.0.1:1/", "secret": "12345678"}},
    {"spider": "Books", "arguments": {"a": 1, "b": "c"}, "mode": "single", "urls": ["http://127.0.0.1:1/"]},
    {"seconds": 10, "reason": "x"},
    {"runner": 2, "backup": 1},
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1e308, 2**70, "", "\0", "\ud800", "€" * 500, "x" * 9000, [], {}, [[[]]], {"": {"": {}}}, "http://ü/",
    "//" * 500, "[" * 199, "a" + " " * 150 + "!", "*" * 199, ":not(" * 40, "\u202e", "http://[::1]:0/", "\r\nX: y",
)  # fmt: skip
REPEATED = (
    b"1,",
    b"[],",
    b"{},",
    b'"",',
    b'"ab",',
    rb'"\\",',
    b'"http://\xc3\xbc.example/",',
    b"[",
    b'{"a":',
    b"\0",
    b"-",
)


def run(seconds: float, seed: int) -> dict[str, float]:
    """Fuzz for some seconds. Return the longest wait of another caller, the growth of memory, and the bodies sent."""
    chance = random.Random(seed)
    with _server() as (port, process), _watched(port) as watch:
        before = _memory(process)
        count, slowest = 0, 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            body, path = _body(chance), chance.choice(PATHS)
            began = time.monotonic()
            try:
                status, answer = _post(port, path, body)
            except TimeoutError:
                raise _failure(f"no answer from {path} in {TIMEOUT:g} s", body) from None
            slowest = max(slowest, time.monotonic() - began)
            count += 1
            _check(process, status, answer, body)
        return {
            "bodies": float(count),
            "worst_latency_s": watch["worst"],
            "worst_answer_s": slowest,
            "worst_rss_growth_mb": float(_memory(process) - before),
        }


# -- bodies


def _body(chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.15:
        return _flood(chance)
    body = json.dumps(_mutated(chance, chance.choice(TEMPLATES)), ensure_ascii=chance.random() < 0.5)
    data = body.encode("utf-8", "surrogatepass")
    return _torn(chance, data) if kind < 0.4 else data


def _flood(chance: random.Random) -> bytes:
    """A body in which one value is repeated very often."""
    data = json.dumps(chance.choice(TEMPLATES)).encode()
    at = chance.choice([place for place, sign in enumerate(data) if sign in b"[{:,"]) + 1
    part = chance.choice(REPEATED)
    size = chance.choice((1000, 100_000, SIZE - len(data)))
    return data[:at] + part * (size // len(part)) + data[at:]


def _torn(chance: random.Random, data: bytes) -> bytes:
    torn = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(torn))
        match chance.randrange(4):
            case 0:
                torn[at] = chance.randrange(256)
            case 1:
                del torn[at : at + chance.randint(1, 20)]
            case 2:
                torn[at:at] = torn[: chance.randint(1, 50)]
            case _:
                torn[at:at] = os.urandom(chance.randint(1, 9))
        torn = torn or bytearray(b"{")
    return bytes(torn)


def _mutated(chance: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with some of its parts replaced, repeated, renamed or removed."""
    if chance.random() < 0.08:
        return chance.choice(ODD)
    if isinstance(value, dict):
        found = {key: _mutated(chance, each, depth + 1) for key, each in value.items() if chance.random() > 0.05}
        if chance.random() < 0.1:
            extra = chance.choice((1, 30, 5000))
            found |= {f"{chance.choice(('k', 'ü', 'x-'))}{number}": chance.choice(ODD) for number in range(extra)}
        return found
    if isinstance(value, list):
        found = [_mutated(chance, each, depth + 1) for each in value]
        if chance.random() < 0.2:
            found += [chance.choice(("http://127.0.0.1:1/%d", "http://ü%d.example/", "%d"))] * chance.choice(
                (1, 900, 9000)
            )
            found = [
                each % number if isinstance(each, str) and "%d" in each else each for number, each in enumerate(found)
            ]
        return found
    return value


# -- the server


@contextmanager
def _server() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "log"), "wb") as log:
        Path(folder, "shoal.toml").write_text('[spiders.Books]\nfile = "books.py"\n[serve]\nmax_sessions = 50\n')
        Path(folder, "books.py").write_text("from shoal import Spider\n\n\nclass Books(Spider):\n    name = 'books'\n")
        command = [
            sys.executable,
            "-m",
            "shoal.cli.main",
            "serve",
            "--port",
            str(port),
            "--set",
            "serve.keep_results=2",
        ]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            _await(port, process)
            yield port, process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _await(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if _ask(port, "GET", "/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start")


@contextmanager
def _watched(port: int) -> Iterator[dict[str, float]]:
    """Another caller, which sends requests all the time."""
    found, stop = {"worst": 0.0}, threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            began = time.monotonic()
            with suppress(TimeoutError):
                _ask(port, "GET", "/health")
            found["worst"] = max(found["worst"], time.monotonic() - began)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(60)


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    return _ask(port, "POST", path, body)


def _memory(process: subprocess.Popen[bytes]) -> int:
    """The peak memory of the server, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def _check(process: subprocess.Popen[bytes], status: int, answer: bytes, body: bytes) -> None:
    wrong = ""
    if process.poll() is not None:
        wrong = "the server died"
    elif status >= 500 and status != 503:
        wrong = f"it answered {status}"
    elif status >= 400 and len(answer) > LARGEST_REFUSAL:
        wrong = f"it refused with {len(answer)} bytes"
    if wrong:
        raise _failure(f"{wrong}: {answer[:300]!r}", body)


def _failure(what: str, body: bytes) -> AssertionError:
    with tempfile.NamedTemporaryFile("wb", prefix="fuzz-api-", suffix=".json", delete=False) as file:
        file.write(body)
    return AssertionError(f"{what}; the body is in {file.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(run(options.seconds, options.seed), indent=2))


if __name__ == "__main__":
    main()
