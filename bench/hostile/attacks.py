"""Attacks of strangers on the memory and the time of a server. Each returns what it saw, as text for the table."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from hostile.target import ANN, BOB, OPERATOR, Target, Watch, wait_until

MB = 1_000_000
HOLD = 10.0  # seconds for which connections are held open
ZONE = "127.53.53.53"
PAGE_LIMIT = {"silent zone": 10.0, "retry after": 90.0}
"""How long a page of another caller may take, in seconds, where an attack is meant to delay it."""

Prepared = Callable[[], str]


def duplicates(target: Target) -> Prepared:
    """One URL 10,000 times in one batch, with a page of 300 KB."""

    def attack() -> str:
        body = {"urls": [f"{target.site}/300000"] * 10_000, "options": {"robots": False}, "timeout": 100}
        status, answer = target.ask("POST", "/api/crawl/batch", body)
        return f"{status}, {len(answer) / MB:.1f} MB"

    return attack


def login_bodies(target: Target) -> Prepared:
    """200 anonymous connections that post 8 MB each to the login."""

    def post(number: int) -> int:
        head = b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n"
        with target.connect(head + b"x" * (8 * MB - 1)) as connection, suppress(OSError):
            return int(connection.recv(100).partition(b" ")[2][:3] or 0)
        return 0

    return lambda: _counted(_concurrently(post, 200))


def unread_answers(target: Target) -> Prepared:
    """8 clients that never read the answer, and 8 that never read the stream, of 60 MB (360 MB in JSON)."""
    session = target.session([f"{target.site}/3000000/control?{number}" for number in range(20)])

    def attack() -> str:
        with ExitStack() as held:
            paths = [f"/api/crawl/{session}", f"/api/crawl/{session}/stream"] * 8
            opened = [held.enter_context(target.begin(path)) for path in paths]
            time.sleep(HOLD)
            return _counted(_status(connection) for connection in opened)

    return attack


def unread_pages(target: Target) -> Prepared:
    """60 clients of two callers that never read answers of 3 MB (18 MB in JSON), which are encoded at once."""
    sessions = [
        (token, json.loads(target.ask("POST", "/api/crawl/batch", body, token)[1])["session_id"])
        for token in (ANN, BOB)
        for body in [{"urls": [f"{target.site}/3000000/control?{token[:4]}"], "options": {"robots": False}}]
    ]

    def attack() -> str:
        with ExitStack() as held:
            opened = [
                held.enter_context(target.begin(f"/api/crawl/{session}", token=token))
                for token, session in sessions * 30
            ]
            time.sleep(HOLD)
            return _counted(_status(connection) for connection in opened)

    return attack


def slow_bodies(target: Target) -> Prepared:
    """900 connections from 9 addresses, half with slow headers, half with a slow body."""

    def attack() -> str:
        kinds = (
            b"POST /ui/login HTTP/1.1\r\nHost: localhost\r\nX: ",
            b"POST /api/crawl/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8000000\r\n\r\n{",
        )
        with ExitStack() as held:
            opened = [
                held.enter_context(target.connect(kinds[number % 2], f"127.0.1.{number % 9}")) for number in range(900)
            ]
            end = time.monotonic() + HOLD
            while time.monotonic() < end:
                for connection in opened:
                    with suppress(OSError):
                        connection.send(b"x")
                time.sleep(0.5)
        return "held"

    return attack


def tiny_chunks(target: Target) -> Prepared:
    """200 anonymous connections that send bodies of 600 KB in chunks of one byte, half of them to the login."""

    def post(number: int) -> int:
        path = (b"/ui/login", b"/api/crawl/batch")[number % 2]
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path
        with suppress(OSError), target.connect(head + b"1\r\n \r\n" * 100_000) as connection:
            return _status(connection)
        return 0

    return lambda: _counted(_concurrently(post, 200))


def streams(target: Target) -> Prepared:
    """800 streams of a session that goes on, from 8 addresses."""
    session = target.batch([f"{target.site}/never"], wait=False)["session_id"]

    def attack() -> str:
        with ExitStack() as held:
            opened = [
                held.enter_context(target.begin(f"/api/crawl/{session}/stream", f"127.0.2.{number % 8}"))
                for number in range(800)
            ]
            time.sleep(HOLD)
            return _counted(_status(connection) for connection in opened)

    return attack


def listed_items(target: Target) -> Prepared:
    """40 requests at once for 1 or 1,000 items of a run, and results of a session, each with 120 MB."""
    pages = f"{target.site}/3000000?"
    session = target.session([f"{pages}{number}" for number in range(40)])
    body = {"spider": "Pages", "arguments": {"begin": pages, "count": 40}}
    status, answer = target.ask("POST", "/api/runs", body, OPERATOR)
    if status not in (200, 201, 202):
        raise RuntimeError(f"a run was answered {status}: {answer[:300]!r}")
    run = json.loads(answer)["run_id"]
    state = f"/api/runs/{run}"
    wait_until(
        lambda: json.loads(target.ask("GET", state, token=OPERATOR)[1])["state"] == "finished",
        "the run is not finished",
    )
    paths = [f"/api/runs/{run}/items?limit={limit}" for limit in (1, 1000)]
    paths += [f"/api/crawl/{session}?limit={limit}" for limit in (1, 1000)]

    def ask(number: int) -> int:
        return target.ask("GET", paths[number % len(paths)], token=OPERATOR)[0]

    return lambda: _counted(_concurrently(ask, 40))


def patterns(target: Target) -> Prepared:
    """Catastrophic regular expressions in the scope of ten schedules, which run against URLs of 2,000 letters."""

    def attack() -> str:
        answers = Counter[int]()
        for number in range(10):
            pattern = ("(a|a)*!$", "(a+)+!$", "(?:a?){50}a{50}!$")[number % 3]
            schedule = {
                "name": f"s{number}", "spider": "Pages", "every": "1d", "settings": {"scope.deny": [pattern]},
                "arguments": {"begin": f"{target.site}/10?{'a' * 2000}"},
            }  # fmt: skip
            answers[target.ask("POST", "/api/schedules", schedule, OPERATOR)[0]] += 1
            answers[target.ask("POST", f"/api/schedules/s{number}/run", {}, OPERATOR)[0]] += 1
        states = Counter[str]()

        def are_over() -> bool:
            runs = json.loads(target.ask("GET", "/api/runs", token=OPERATOR)[1])["runs"]
            states.clear()
            states.update(run["state"] for run in runs if run["spider"] == "pages")
            return set(states) <= {"finished", "cancelled"} and bool(states)

        wait_until(are_over, f"the runs are not over: {states}")
        return f"{_shown(answers)}; runs: {_shown(states)}"

    return attack


def guesses(target: Target) -> Prepared:
    """4,000 guesses of a token, from 40 addresses, half of them at the login."""

    def guess(number: int) -> int:
        address = f"127.0.3.{number % 40}"
        if number % 2:
            return target.ask("GET", "/api/crawl", token=f"guess-number-{number:010}", address=address)[0]
        return target.ask("POST", "/ui/login", b"token=guess-%010d" % number, token="", address=address)[0]

    return lambda: _counted(_concurrently(guess, 4000))


def large_session(target: Target) -> Prepared:
    """A session of 600 MB, which stays until it is deleted."""

    def attack() -> str:
        session = target.session([f"{target.site}/3000000?{number}" for number in range(200)])
        progress = json.loads(target.ask("GET", f"/api/crawl/{session}?after=1000000")[1])["progress"]
        return f"{progress['done']} pages, {progress['failed']} failed"

    return attack


def silent_zone(target: Target) -> Prepared:
    """300 names in a zone whose name server never answers; meanwhile pages of another caller."""

    def attack() -> str:
        names = [f"http://name{number}.silent.example/" for number in range(300)]
        target.batch(names, wait=False)
        time.sleep(2)
        return _other_pages(target, 5, "silent zone")

    return attack


def retry_after(target: Target) -> Prepared:
    """A page that asks everybody to come back in a day; then a page of another caller on its host."""

    def attack() -> str:
        target.batch([f"{target.site}/retry"])
        return _other_pages(target, 1, "retry after")

    return attack


ATTACKS: dict[str, Callable[[Target], Prepared]] = {
    "duplicates": duplicates,
    "login bodies": login_bodies,
    "unread answers": unread_answers,
    "unread pages": unread_pages,
    "slow bodies": slow_bodies,
    "tiny chunks": tiny_chunks,
    "streams": streams,
    "listed items": listed_items,
    "patterns": patterns,
    "guesses": guesses,
    "large session": large_session,
    "silent zone": silent_zone,
    "retry after": retry_after,
}


def measure(name: str, target: Target) -> dict[str, object]:
    """Prepare an attack, then run it under a watch."""
    attack = ATTACKS[name](target)
    problem = seen = ""
    with Watch(target) as watch:
        try:
            seen = attack()
        except (OSError, RuntimeError, ValueError) as exc:
            problem = str(exc) or type(exc).__name__
        time.sleep(0.5)
    if target.process.poll() is not None:
        problem = "the server has ended"
    return {
        "what": (ATTACKS[name].__doc__ or "").strip(), "growth": watch.growth, "peak": watch.peak,
        "wait": round(watch.wait, 3), "idle_wait": round(watch.idle_wait, 3), "asked": watch.asked,
        "seen": seen, "problem": problem,
    }  # fmt: skip


@contextmanager
def silent_name_server() -> Iterator[str]:
    """The address of a name server that takes all queries and never answers. It needs root."""
    with ExitStack() as sockets:
        udp = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind((ZONE, 53))
        tcp = sockets.enter_context(socket.socket())
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((ZONE, 53))
        tcp.listen()
        yield ZONE


def _other_pages(target: Target, count: int, name: str) -> str:
    """How long pages of another caller take, one after the other."""
    longest, limit = 0.0, PAGE_LIMIT[name]
    for number in range(count):
        began = time.monotonic()
        (result,) = target.batch([f"{target.site}/100?other={number}"], BOB)["results"]
        longest = max(longest, time.monotonic() - began)
        if result["status"] != "success":
            raise RuntimeError(f"a page of another caller failed after {longest:.1f} s ({result['error']['kind']})")
    if longest > limit:
        raise RuntimeError(f"a page of another caller took {longest:.1f} s; the limit is {limit:g} s")
    return f"another caller's page: {longest:.1f} s"


def _concurrently(act: Callable[[int], int], count: int) -> list[int]:
    threading.stack_size(256 * 1024)
    with ThreadPoolExecutor(200) as threads:
        return list(threads.map(act, range(count)))


def _counted(statuses: Iterable[int]) -> str:
    return _shown(Counter(statuses))


def _shown(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} times {what or 'closed'}" for what, count in sorted(counts.items()))


def _status(connection: socket.socket) -> int:
    connection.settimeout(5)
    with suppress(OSError, ValueError):
        return int(connection.recv(100).partition(b" ")[2][:3] or 0)
    return 0
