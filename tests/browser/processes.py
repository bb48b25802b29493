"""The processes of browsers that tests started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.fetch.browser import guardian


def tokens(ancestor: int) -> set[str]:
    """The tokens of the browsers that this process or a descendant of it started, and that live."""
    found = set()
    for pid in descendants(ancestor):
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(f"{guardian.VARIABLE}=".encode()):
                    found.add(entry.partition(b"=")[2].decode())
    return found


@contextmanager
def recorded(ancestors: Callable[[], Iterable[int]]) -> Iterator[set[str]]:
    """Record the tokens of all browsers that these processes start."""
    marks: set[str] = set()
    end = threading.Event()

    def record() -> None:
        while not end.wait(0.1):
            for pid in ancestors():
                marks.update(tokens(pid))

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield marks
    finally:
        end.set()
        thread.join()


def descendants(ancestor: int) -> list[int]:
    found = [ancestor]
    for pid in found:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def browsers(marks: Iterable[str]) -> list[int]:
    """The living processes of the browsers with these tokens."""
    return [pid for token in marks for pid in guardian.find(token)]


def wait_until_gone(marks: Iterable[str], seconds: float = 10.0) -> list[int]:
    """The processes of browsers that are still there after a while."""
    end = time.monotonic() + seconds
    while (left := browsers(marks)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def drivers(worker: int) -> list[int]:
    """The processes through which a worker controls its browsers."""
    return [pid for pid in descendants(worker) if b"run-driver" in command(pid)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
