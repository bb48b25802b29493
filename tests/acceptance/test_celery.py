"""Batches on real Celery workers with a real Redis and a real Flower, while processes are killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from msgspec.structs import replace

from shoal.api.celery.messages import pack, unpack
from tests.acceptance.serving import Celery, beside, celery, stands_still, until
from tests.acceptance.target import Target, closest, target
from tests.support.databases import RedisServer
from tests.support.servers import MisbehavingServer


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Celery]:
    """Three workers, for all tests: each leaves as many behind as it found."""
    with celery(tmp_path_factory.mktemp("celery"), 3, CELERY_TASK_MAX_RETRIES="1") as made:
        yield made


def pages(site: Target, count: int, **query: Any) -> list[str]:
    words = "".join(f"&{name}={value}" for name, value in query.items())
    return [f"{site.url}/{number}?x=1{words}" for number in range(count)]


def seen(site: Target) -> Counter[str]:
    """The pages that were asked for; robots.txt is none."""
    return Counter(visit.path for visit in site.visits() if "x=1" in visit.path)


def check(answer: dict[str, Any], urls: list[str]) -> None:
    """Each URL has its page, in the order in which they were given."""
    assert answer["state"] == "finished"
    assert [result["url"] for result in answer["results"]] == urls
    assert not [result for result in answer["results"] if result["status"] != "success"]
    for number, result in enumerate(answer["results"]):
        assert f"<h1>/{number}</h1>" in result["content"]


def check_log(fleet: Celery, session_id: str, urls: list[str]) -> None:
    """The session's own log of results has each URL once, and each went well."""
    results = fleet.api.results(session_id)
    assert Counter(result["url"] for result in results) == Counter(urls)
    assert {result["status"] for result in results} == {"success"}


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def test_three_workers_and_flower(fleet: Celery, site: Target) -> None:
    flower = fleet.flower()
    until(lambda: _answers(f"{flower}/healthcheck"), 30, "Flower")
    until(lambda: len(ask(f"{flower}/api/workers")) == 3, 30, "Flower's list of workers")
    fleet.control("rate_limit", "shoal.crawl", "900/s")
    workers = ask(f"{flower}/api/workers?refresh=1")
    fleet.control("rate_limit", "shoal.crawl", "0")
    assert [worker["registered"][0] for worker in workers.values()] == ["shoal.crawl [rate_limit=900/s]"] * 3
    urls = pages(site, 300)
    answer = fleet.api.batch(urls, distributed=True, timeout=60)
    check(answer, urls)
    assert answer["distributed"] is True
    assert answer["stats"] | {"total": 300, "success": 300, "failed": 0, "workers_used": 3} == answer["stats"]
    names = {result["worker_id"].partition("@")[0] for result in answer["results"]}
    assert names == {"worker-1", "worker-2", "worker-3"}
    assert seen(site) == Counter(url.removeprefix(site.url) for url in urls)
    until(lambda: _tasks(flower)["shoal.crawl", "SUCCESS"] == 300, 20, "Flower's list of tasks")
    assert set(_tasks(flower)) == {("shoal.crawl", "SUCCESS"), ("shoal.robots", "SUCCESS")}  # a page is one task
    check_failures_in_flower(fleet, site, flower)
    assert "shoal_celery_workers{} 3" in fleet.api.text("/metrics")


def check_failures_in_flower(fleet: Celery, site: Target, flower: str) -> None:
    """A page that failed is a failed task with its reason, and a page that is tried again a task with a retry."""
    fleet.api.batch([f"{site.url}/a?x=2&status=500", f"{site.url}/b?x=2&status=404"], distributed=True)

    def shown() -> list[tuple[str, str]]:
        tasks = ask(f"{flower}/api/tasks?limit=1000").values()
        return sorted((task["state"], task["exception"]) for task in tasks if "x=2" in task["args"])

    until(lambda: [state for state, _ in shown()] == ["FAILURE", "FAILURE", "RETRY"], 20, "Flower's failures")
    assert [status for _, reason in shown() for status in ("404", "500") if f"http {status}" in reason] == [
        "404",
        "500",
        "500",
    ]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _tasks(flower: str) -> Counter[tuple[str, str]]:
    """How many there are, by name and state."""
    return Counter((task["name"], task["state"]) for task in ask(f"{flower}/api/tasks?limit=1000").values())


def test_what_is_delivered_twice_is_done_once(fleet: Celery, site: Target) -> None:
    fleet.control("cancel_consumer", "shoal")
    urls = pages(site, 8)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    broker = redis.Redis.from_url(fleet.environ["CELERY_BROKER_URL"])
    until(lambda: broker.llen("shoal") >= 8, 20, "the queue")
    for message in broker.lrange("shoal", 0, -1):
        broker.rpush("shoal", message)
    fleet.control("add_consumer", "shoal")
    fleet.api.wait(session)
    check_log(fleet, session, urls)
    # More of them when a lease ended meanwhile: its page is sent again then.
    until(lambda: sum(worker.said().count("'state': 'stale'") for worker in fleet.workers) >= 8, 20, "the copies")
    assert sum(seen(site).values()) == 8


def test_tasks_that_somebody_else_wrote_are_refused(fleet: Celery, site: Target) -> None:
    """With the lease of a session's own page: another URL, other headers, a proxy, or something else altogether."""
    fleet.control("cancel_consumer", "shoal")
    urls = pages(site, 6)
    session = fleet.api.batch(urls, distributed=True, wait=False, options={"robots": False})["session_id"]
    broker = redis.Redis.from_url(fleet.environ["CELERY_BROKER_URL"])
    until(lambda: broker.llen("shoal") == 6, 20, "the queue")
    message = json.loads(broker.lindex("shoal", 0))
    arguments, *rest = json.loads(b64decode(message["body"]))
    lease = unpack(arguments[2])
    evil = {"url": f"{site.url}/stolen", "headers": {"X-Evil": "1"}, "proxy": "http://127.0.0.1:1"}
    altered = [replace(lease, request=lease.request.replace(**{name: value})) for name, value in evil.items()]
    hostile = [[session, "", pack(each), arguments[3]] for each in altered]
    hostile += [[session, "", "x" * 600_000, arguments[3]], ["../" + session, "", arguments[2], arguments[3]], [7] * 4]
    for number, words in enumerate(hostile):
        message["headers"]["id"] = message["properties"]["correlation_id"] = f"{number:032x}"
        body = b64encode(json.dumps([words, *rest]).encode()).decode()
        broker.rpush("shoal", json.dumps({**message, "body": body}))  # taken before all others
    fleet.control("add_consumer", "shoal")
    fleet.api.wait(session)
    check_log(fleet, session, urls)
    said = [worker.said() for worker in fleet.workers]
    until(lambda: sum(worker.said().count("refused a task of") for worker in fleet.workers) == 3, 20, "refusals")
    until(lambda: sum(worker.said().count("invalid task") for worker in fleet.workers) >= 3, 20, "refusals")
    assert seen(site) == Counter(url.removeprefix(site.url) for url in urls), said
    assert not any("stolen" in visit.path for visit in site.visits())


def crafted_messages(message: dict[str, Any], proof: Path) -> Iterator[bytes]:
    """Messages that Shoal does not send: no envelopes at all, envelopes with wrong parts, and code."""
    yield from (b"", b"\xff\xfe", b"no json", b"7", b"null", b"[]", b'"text"', b"{}", b"[" * 100_000, b"1" * 5000)
    yield from (json.dumps({**message, name: None}).encode() for name in message)
    yield from (json.dumps({key: message[key] for key in message if key != name}).encode() for name in message)
    for body in ("%%%", b64encode(b"[" * 100_000).decode(), b64encode(b"\xff").decode(), 7, [], "x" * 20_000_000):
        yield json.dumps({**message, "body": body}).encode()
    pickled = b64encode(pickle.dumps(Touch(proof))).decode()
    for kind in ("application/x-python-serialize", "application/x-yaml", "text/x-none", 7):
        yield json.dumps({**message, "body": pickled, "content-type": kind}).encode()
    headers = {
        "task": ("os.system", "celery.chunks", "../../x", 7), "id": ("../../x", 7, "x" * 100_000), "lang": ("java",),
        "eta": ("9999-12-31T23:59:59+00:00", "soon", 1e308), "expires": ("soon", -1), "retries": ("many", -1),
        "timelimit": (["x", {}], 7), "reply_to": ("../../x", 7), "root_id": (7,), "argsrepr": ("x" * 100_000,),
    }  # fmt: skip
    for name, values in headers.items():
        for value in values:
            yield json.dumps({**message, "headers": {**message["headers"], name: value}}).encode()
    words, _, embedded = json.loads(b64decode(message["body"]))
    deep: dict[str, Any] = {"task": "os.system", "args": [f"touch {proof}"], "kwargs": {}, "options": {}}
    for name in ("callbacks", "errbacks", "chain", "chord"):
        value = deep if name == "chord" else [deep]
        body = json.dumps([[7, *words[1:]], {}, {**embedded, name: value}])
        yield json.dumps({**message, "body": b64encode(body.encode()).decode()}).encode()


class Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (os.mkdir, (str(self.file),))


def test_messages_that_somebody_else_wrote_to_the_broker(fleet: Celery, site: Target, tmp_path: Path) -> None:
    """Nothing of them is run, no worker ends for good, and the pages of a session are done once."""
    fleet.control("cancel_consumer", "shoal")
    urls = pages(site, 6)
    session = fleet.api.batch(urls, distributed=True, wait=False, options={"robots": False})["session_id"]
    broker = redis.Redis.from_url(fleet.environ["CELERY_BROKER_URL"])
    until(lambda: broker.llen("shoal") == 6, 20, "the queue")
    message = json.loads(broker.lindex("shoal", 0))
    message["headers"]["id"] = message["properties"]["correlation_id"] = "0" * 32
    crafted = list(crafted_messages(message, tmp_path / "proof"))
    before = {worker.process.pid for worker in fleet.workers}
    broker.rpush("shoal", *crafted)  # taken before all others
    fleet.control("add_consumer", "shoal")
    fleet.api.wait(session, 120)
    check_log(fleet, session, urls)
    assert seen(site) == Counter(url.removeprefix(site.url) for url in urls)
    assert not (tmp_path / "proof").exists()
    assert {worker.process.pid for worker in fleet.workers if worker.process.poll() is None} == before
    until(lambda: not broker.llen("shoal"), 60, "an empty queue")


def test_a_session_holds_no_more_on_many_processes(tmp_path: Path) -> None:
    limit = 200_000
    with (
        beside(MisbehavingServer()) as large,
        celery(tmp_path, 1, SHOAL_SERVE__MAX_SESSION_BYTES=str(limit), CELERY_WORKER_CONCURRENCY="4") as fleet,
    ):
        urls = [f"{large.url}/links/200?{number}" for number in range(100)]
        answer = fleet.api.batch(urls, distributed=True, timeout=60, options={"robots": False})
        held = sum(len(json.dumps(result)) for result in answer["results"] if result["status"] == "success")
        assert limit / 4 < held < 1.3 * limit
        failed = [result["error"]["kind"] for result in answer["results"] if result["status"] == "failed"]
        assert set(failed) == {"limit"}


def test_politeness_is_the_fleets(fleet: Celery, site: Target) -> None:
    """Two sessions, three workers, one site."""
    fleet.api.batch([f"{site.url}/"], distributed=True)  # a store without a run knows no hosts
    status, answer = fleet.api.ask("PUT", f"/api/hosts/{site.url.removeprefix('http://')}", {"delay": 0.1})
    assert status == 200, answer
    urls = pages(site, 30)
    sessions = [fleet.api.batch(urls, distributed=True, wait=False)["session_id"] for _ in range(2)]
    for session in sessions:
        fleet.api.wait(session)
        check_log(fleet, session, urls)
    assert closest([visit for visit in site.visits() if "x=1" in visit.path]) >= 0.1


def test_failures_are_tried_again(fleet: Celery, site: Target) -> None:
    answer = fleet.api.batch([f"{site.url}/a?x=1&status=500", f"{site.url}/b?x=1&status=404"], distributed=True)
    found = [(result["error"]["kind"], result["http_status"]) for result in answer["results"]]
    assert found == [("http 500", 500), ("http 404", 404)]
    assert seen(site) == {"/a?x=1&status=500": 2, "/b?x=1&status=404": 1}


@pytest.mark.parametrize("asked", [{}, {"retries": 2}], ids=["default", "option"])
def test_three_retries_are_four_attempts_with_backoff(tmp_path: Path, site: Target, asked: dict[str, int]) -> None:
    with celery(tmp_path, 1, SHOAL_RETRY__BASE_DELAY="0.4") as fleet:
        fleet.api.batch([f"{site.url}/a?x=1&status=500"], distributed=True, options=asked)
    visits = [visit for visit in site.visits() if "x=1" in visit.path]
    pauses = [later.start - (earlier.end or 0.0) for earlier, later in pairwise(visits)]
    assert len(pauses) == asked.get("retries", 3)
    assert all(pause >= 0.29 * 2**number for number, pause in enumerate(pauses))  # three quarters, and doubling


def test_a_page_comes_back_when_its_site_has_asked_for_it(fleet: Celery, site: Target) -> None:
    """Its Retry-After is far longer than the wait after a failure would be."""
    url = f"{site.url}/a?x=1&status=503&after=3"
    fleet.api.batch([url], distributed=True)
    first, second = [visit for visit in site.visits() if "x=1" in visit.path]
    assert first.end is not None
    assert second.start - first.end >= 2.9  # the site's clock and the store's may differ a little


def test_results_of_tasks_expire(fleet: Celery, site: Target) -> None:
    results = redis.Redis.from_url(fleet.environ["CELERY_RESULT_BACKEND"])
    fleet.api.batch(pages(site, 3), distributed=True)
    kept = [results.ttl(key) for key in results.scan_iter("celery-task-meta-*")]
    assert len(kept) >= 3
    assert all(0 < seconds <= 3600 for seconds in kept)


def test_a_cancelled_session_is_left_alone(fleet: Celery, site: Target) -> None:
    session = fleet.api.batch(pages(site, 200, wait=0.1), distributed=True, wait=False)["session_id"]
    site.wait_for(5)
    status, answer = fleet.api.ask("DELETE", f"/api/crawl/{session}")
    assert (status, answer["state"]) == (200, "cancelled")
    until(lambda: stands_still(site), what="the site left alone")
    assert len(site.visits()) < 200


def test_the_rate_limit_is_celerys(fleet: Celery, site: Target) -> None:
    fleet.control("rate_limit", "shoal.crawl", "1/s")
    try:
        began = time.monotonic()
        urls = pages(site, 9)
        check(fleet.api.batch(urls, distributed=True, timeout=60), urls)
        assert time.monotonic() - began > 1.5  # three workers, and the first page of each goes at once
    finally:
        fleet.control("rate_limit", "shoal.crawl", "0")


def test_a_worker_is_killed(fleet: Celery, site: Target) -> None:
    urls = pages(site, 300, wait=0.05)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    site.wait_for(60)
    fleet.workers[0].kill()
    fleet.api.wait(session)
    check_log(fleet, session, urls)
    fleet.replace_the_dead()
    until(lambda: fleet.status().get("workers") == 3, 40, "a fleet of three")


@pytest.mark.timeout(120)
def test_pages_of_a_dead_worker_return_within_its_session(tmp_path: Path, site: Target) -> None:
    """The leases themselves would last five minutes, and the broker keeps unacknowledged tasks for an hour."""
    with celery(tmp_path, 1, SHOAL_LEASE__TTL="300", SHOAL_WORKER__SESSION="4") as fleet:
        urls = pages(site, 4, gate=1)
        session = fleet.api.batch(urls, distributed=True, wait=False, timeout=100)["session_id"]
        site.wait_until(lambda visits: any("gate=1" in visit.path for visit in visits))
        fleet.workers[0].kill()
        begun = seen(site)
        fleet.worker()
        site.wait_until(lambda visits: all(seen(site)[path] > count for path, count in begun.items()), 40)
        site.open_gate()
        fleet.api.wait(session)
        check_log(fleet, session, urls)


def test_the_processes_of_a_worker_are_killed(fleet: Celery, site: Target) -> None:
    """Its main process lives and gives the tasks back."""
    urls = pages(site, 100, wait=0.1)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    site.wait_for(15)
    main = fleet.workers[-1].process.pid
    for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    fleet.api.wait(session)
    check_log(fleet, session, urls)


def test_the_broker_is_killed_and_has_forgotten_its_tasks(fleet: Celery, site: Target) -> None:
    """Workers are there again by themselves, or are replaced, and get once more what nobody has begun."""
    urls = pages(site, 200, wait=0.05)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    site.wait_for(40)
    fleet.broker.kill()
    gone = {"distributed_available": False, "message": "Redis not available", "workers": None}
    assert fleet.status() == gone
    assert fleet.api.get("/health")[0] == 200
    fleet.broker.start()
    until(lambda: not fleet.replace_the_dead() and fleet.status().get("workers") == 3, 60, "a fleet of three")
    fleet.api.wait(session, 60)
    check_log(fleet, session, urls)
    assert fleet.status()["message"] == "Redis connected"


def test_the_store_is_killed_and_comes_back(fleet: Celery, site: Target) -> None:
    urls = pages(site, 200, wait=0.05)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    site.wait_for(40)
    fleet.store.kill()
    assert not fleet.status()["distributed_available"]
    assert fleet.api.get("/health")[0] == 200
    assert fleet.api.get("/ready")[0] == 503
    fleet.store.start()
    fleet.api.wait(session, 90)
    check_log(fleet, session, urls)
    assert fleet.api.get("/ready")[0] == 200


def test_a_server_that_is_killed_goes_on_when_it_is_back(fleet: Celery, site: Target) -> None:
    urls = pages(site, 200, wait=0.05)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    site.wait_for(30)
    fleet.api.process.kill()
    fleet.api.start()
    fleet.api.wait(session)
    check_log(fleet, session, urls)


QUEUE = """
import redis
from shoal.http import Request
from shoal.ports import Lease
from shoal.api.celery import broker
from shoal.api.celery.app import app

lease = Lease(Request("http://127.0.0.1/"), bytes(16), 1, 1, "127.0.0.1", 0.0)
before = broker._queue_is_empty()
sent = broker._publish("session", "store", [lease])
between = broker._queue_is_empty()
redis.Redis.from_url(app.conf.broker_url).lpop("shoal")
print(before, sent, between, broker._queue_is_empty(), len(app.backend.result_consumer.subscribed_to))
"""


def test_it_is_known_when_the_broker_has_no_task_left() -> None:
    """Else one that a worker has dropped is not sent again. Nobody listens for results of tasks."""
    server = RedisServer()
    environ = {"CELERY_BROKER_URL": server.url, "CELERY_RESULT_BACKEND": server.url}
    try:
        done = subprocess.run(
            [sys.executable, "-c", QUEUE], env={**os.environ, **environ}, capture_output=True, text=True, check=False
        )
    finally:
        server.close()
    assert done.stdout.split() == ["True", "1", "False", "True", "0"], done.stderr


def test_everything_dies_but_the_store(tmp_path: Path, site: Target) -> None:
    """What was in work comes back, though it was as much as may be in work at a time, or as a session may have."""
    with celery(tmp_path, 1, SHOAL_CONCURRENCY_PER_HOST="50") as fleet:
        limited = [f"{site.url}/{number}?wait=60" for number in range(2)]
        few = fleet.api.batch(limited, distributed=True, wait=False, options={"depth": 1, "max_pages": 2})["session_id"]
        site.wait_until(lambda visits: sum("wait" in visit.path for visit in visits) == 2)
        urls = pages(site, 40)
        many = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
        until(lambda: fleet.api.get(f"/api/crawl/{many}")[1]["progress"]["in_flight"] >= 16, 20, "a full window")
        for process in (*fleet.workers, fleet.api.process, fleet.broker):
            process.kill()
        fleet.workers.clear()
        site.hurry()
        fleet.broker.start()
        fleet.api.start()
        fleet.start_workers(1)
        for session, given in ((few, limited), (many, urls)):
            fleet.api.wait(session)
            check_log(fleet, session, given)


def test_what_waits_in_vain_loses_no_attempts(fleet: Celery, site: Target) -> None:
    """While nobody takes tasks and the server is away, leases run out, as often as a page may be tried."""
    broker = redis.Redis.from_url(fleet.environ["CELERY_BROKER_URL"])
    fleet.control("cancel_consumer", "shoal")
    urls = pages(site, 8)
    session = fleet.api.batch(urls, distributed=True, wait=False)["session_id"]
    for count in (8, 16):
        until(lambda count=count: broker.llen("shoal") >= count, 20, f"{count} tasks")  # type: ignore[misc]
        fleet.api.process.kill()
        time.sleep(float(fleet.environ["SHOAL_LEASE__TTL"]) + 0.5)
        fleet.api.start()
    fleet.control("add_consumer", "shoal")
    fleet.api.wait(session)
    check_log(fleet, session, urls)
    assert sum(seen(site).values()) == 8
