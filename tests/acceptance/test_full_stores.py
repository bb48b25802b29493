"""A store that is full: the API says so, refuses batches, ends the session that filled it, and goes on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from redis import Redis

from tests.acceptance.fleets import frontier_url
from tests.acceptance.serving import Api, Celery, beside, serving, until
from tests.support.databases import PostgresServer, RedisServer, shared
from tests.support.servers import StreamServer, answer, read_head

MB = 1_000_000
CALLERS = ("ann", "bob", "cid", "dan", "eva")


class Pages(StreamServer):
    """``/100/7`` is a page of 100 bytes."""

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            size = request.path.split("/")[1]
            known = size.isdecimal()
            writer.write(answer("x" * int(size), content_type="text/plain") if known else answer(status=404))
            await writer.drain()


@pytest.fixture(scope="module")
def site() -> Iterator[Pages]:
    with beside(Pages()) as server:
        yield server


def pages(site: Pages, size: int, count: int) -> list[str]:
    return [f"{site.url}/{size}/{number}" for number in range(count)]


class FullStore:
    """A server with five callers, and a Redis of 64 MB."""

    def __init__(self, api: Api, redis: RedisServer) -> None:
        self.api = api
        self.redis: Redis = Redis(port=redis.port)

    def ask(self, caller: str, urls: Sequence[str], **more: Any) -> tuple[int, Any]:
        body = {"urls": urls, "wait": False, **more}
        return self.api.ask("POST", "/api/crawl/batch", body, {"Authorization": f"Bearer {token_of(caller)}"})

    def start(self, caller: str, urls: Sequence[str], **more: Any) -> str:
        status, started = self.ask(caller, urls, **more)
        assert status == 202, started
        return str(started["session_id"])

    def outcomes(self, session_id: str) -> Counter[str]:
        """How many results of an ended session succeeded, and the reasons of the others."""
        self.api.wait(session_id)
        return Counter(each["error"]["message"] if each["error"] else "success" for each in self._results(session_id))

    def all_outcomes(self, sessions: Sequence[str]) -> dict[str, Counter[str]]:
        """The outcomes of sessions, each read when it ends."""
        found: dict[str, Counter[str]] = {}

        def read() -> bool:
            for each in set(sessions) - found.keys():
                if self.api.get(f"/api/crawl/{each}?limit=1")[1]["state"] == "finished":
                    found[each] = self.outcomes(each)
            return len(found) == len(sessions)

        until(read, what="the end of all sessions")
        return found

    def _results(self, session_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after = 0
        while True:
            status, page = self.api.get(f"/api/crawl/{session_id}?after={after}&limit=1000")
            assert status == 200, page
            if not page["results"]:
                return found
            found += page["results"]
            after = page["next"]

    def progress(self, session_id: str) -> dict[str, int]:
        found: dict[str, int] = self.api.get(f"/api/crawl/{session_id}?limit=1")[1]["progress"]
        return found

    def stands_still(self, session_id: str) -> dict[str, int] | None:
        """The progress of a session, if it makes none for a while."""
        before = self.progress(session_id)
        time.sleep(1.0)
        return before if before == self.progress(session_id) else None

    @property
    def ready(self) -> int:
        return self.api.get("/ready")[0]

    @property
    def used(self) -> int:
        return int(self.redis.info("memory")["used_memory"])


def token_of(caller: str) -> str:
    return f"the-secret-token-of-{caller}"


@contextmanager
def full_store(folder: Path, **environ: str) -> Iterator[FullStore]:
    tokens = "\n".join(f'{caller} = "{token_of(caller)}"' for caller in CALLERS)
    (folder / "shoal.toml").write_text(f'[serve]\ntoken = "{token_of("root")}"\n[serve.tokens]\n{tokens}\n')
    redis = RedisServer(maxmemory="64mb", maxmemory_policy="noeviction")
    with closing(redis), serving(folder, {"SHOAL_FRONTIER": redis.url, **environ}) as api:
        api.headers["Authorization"] = f"Bearer {token_of('root')}"
        yield FullStore(api, redis)


def test_one_caller_cannot_fill_the_store(tmp_path: Path, site: Pages) -> None:
    with full_store(tmp_path) as store:
        assert "sessions may hold 15099494 bytes, not 1073741824" in store.api.process.said()
        greedy = [store.start("ann", pages(site, MB, 20)) for _ in range(6)]
        outcomes = [store.outcomes(session_id) for session_id in greedy]
        assert 15 < sum(each["success"] for each in outcomes) < 30
        reasons = {reason for each in outcomes for reason in each} - {"success"}
        assert all("limit of" in reason for reason in reasons), reasons
        status, refused = store.ask("ann", pages(site, 10, 1))
        assert (status, refused["error"]["kind"]) == (429, "too many sessions")
        assert store.ready == 200
        assert store.outcomes(store.start("bob", pages(site, MB, 5))) == {"success": 5}
        assert store.used < 57 * MB


def test_a_full_store_is_a_state_that_ends(tmp_path: Path, site: Pages) -> None:
    with full_store(tmp_path, SHOAL_SERVE__KEEP_RESULTS="8") as store:
        sessions = [store.start(caller, pages(site, MB // 10, 130)) for caller in CALLERS]
        until(lambda: store.ready == 503, what="not ready")
        status, refused = store.ask("ann", pages(site, 10, 1))
        assert (status, refused["error"]["kind"]) == (503, "store full")
        assert store.used < 64 << 20
        outcomes = store.all_outcomes(sessions)
        ended = {each for each in sessions if f"session {each} ends" in store.api.process.said()}
        assert 1 <= len(ended) <= 2
        for session_id, results in outcomes.items():
            if session_id in ended:
                assert results.keys() <= {"success", "the store is full, and this session held the most of it"}
            else:
                assert results == {"success": 130}
        until(lambda: store.ready == 200, what="ready")


def test_sessions_wait_while_other_programs_fill_the_store(tmp_path: Path, site: Pages) -> None:
    with full_store(tmp_path, SHOAL_DOWNLOAD_DELAY="0.1") as store:
        session_id = store.start("ann", pages(site, 1000, 40))
        until(lambda: store.progress(session_id)["done"] > 3)
        while store.used < 62 * MB:
            store.redis.append("junk", b"x" * 100_000)
        until(lambda: store.ready == 503, what="not ready")
        assert store.ask("bob", pages(site, 10, 1))[0] == 503
        before = until(lambda: store.stands_still(session_id), what="waiting")
        assert before["done"] < 40
        store.redis.delete("junk")
        until(lambda: store.ready == 200, what="ready")
        assert store.outcomes(session_id) == {"success": 40}


def test_results_expire_even_if_redis_accepts_nothing(tmp_path: Path, site: Pages) -> None:
    with full_store(tmp_path, SHOAL_SERVE__KEEP_RESULTS="3") as store:
        first = store.start("ann", pages(site, MB, 10))
        store.api.wait(first)
        store.redis.config_set("maxmemory", "6mb")
        until(lambda: store.ready == 503, what="not ready")
        until(lambda: store.ready == 200, what="ready")
        assert store.outcomes(store.start("bob", pages(site, 1000, 2))) == {"success": 2}


def test_workers_share_the_room_of_the_store(tmp_path: Path, site: Pages) -> None:
    celery = Celery(tmp_path)
    try:
        redis: Redis = Redis(port=celery.store.port)
        redis.config_set("maxmemory", "64mb")
        celery.start_workers(1)
        urls = pages(site, MB // 2, 40)
        sessions = [celery.api.batch(urls, distributed=True, wait=False)["session_id"] for _ in range(4)]
        for session_id in sessions:
            celery.api.wait(session_id, 120)
        errors = [each["error"] for session_id in sessions for each in celery.api.results(session_id)]
        reasons = Counter(error["message"].partition(" of ")[0] for error in errors if error)
        assert len(errors) - sum(reasons.values()) < 120  # the reserve is left, however fast the worker is
        assert reasons.keys() <= {
            "the session has reached its limit", "the sessions", "the store is full, and this session held the most"
        }  # fmt: skip
        assert reasons["the sessions"], reasons
        assert redis.info("memory")["used_memory"] < 64 * MB  # of 67
        assert redis.info("errorstats").get("errorstat_OOM") is None
    finally:
        celery.close()


FULL_DISK = """
CREATE TABLE "{0}".full_disk (); CREATE FUNCTION "{0}".refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF EXISTS (SELECT FROM "{0}".full_disk) THEN RAISE 'could not extend file' USING ERRCODE = '53100'; END IF; RETURN NEW;
END $$; CREATE TRIGGER refuse BEFORE INSERT ON "{0}".item FOR EACH ROW EXECUTE FUNCTION "{0}".refuse();
"""


def execute(statements: str) -> None:
    async def run() -> None:
        link = await asyncpg.connect(shared(PostgresServer).url)
        await link.execute(statements)
        await link.close()

    asyncio.run(run())


def test_a_full_disk_of_postgresql(tmp_path: Path, site: Pages) -> None:
    url = frontier_url("postgresql")
    schema = url.partition("schema=")[2]
    with serving(tmp_path, {"SHOAL_FRONTIER": url, "SHOAL_DOWNLOAD_DELAY": "0.1"}) as api:
        execute(FULL_DISK.format(schema))
        session_id = api.batch(pages(site, 1000, 30), wait=False)["session_id"]
        until(lambda: api.get(f"/api/crawl/{session_id}?limit=1")[1]["progress"]["done"] > 3)
        execute(f'INSERT INTO "{schema}".full_disk DEFAULT VALUES')
        until(lambda: api.get("/ready")[0] == 503, what="not ready")
        assert api.ask("POST", "/api/crawl/batch", {"urls": pages(site, 10, 1)})[1]["error"]["kind"] == "store full"
        execute(f'DELETE FROM "{schema}".full_disk')
        until(lambda: api.get("/ready")[0] == 200, what="ready")
        assert api.wait(session_id)["progress"]["done"] == 30
