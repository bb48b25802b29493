"""What the tests of the dashboard look at: a server, and a fleet and a cluster that crawl a slow site on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from shoal.frontier import open_store
from shoal.ports import Frontier, Run, Store
from tests.acceptance.clusters import SESSION, Cluster
from tests.acceptance.fleets import frontier_url
from tests.acceptance.forked_workers import ForkedFleet
from tests.acceptance.serving import CELERY, FAST, Api, Process, serving, until
from tests.dashboard.site import SlowSite, slow_site
from tests.support.databases import RedisServer, free_port, shared

T = TypeVar("T")

TOKENS = {"anna": "token-of-the-admin", "otto": "token-of-the-operator", "vera": "token-of-the-viewer"}
"""By name. Their roles are admin, operator and viewer."""
ROLES = {"anna": "admin", "otto": "operator", "vera": "viewer"}

SPIDER = """
from shoal import Spider

class Shop(Spider):
    name = "shop"
    settings = {"download_delay": 0, "throttle.enabled": False, "concurrency": 2, "concurrency_per_host": 8,
                "retry.max_attempts": 2, "retry.base_delay": 0.1}

    def parse(self, response):
        yield {"url": response.url, "title": response.css("h1::text").get(), "empty": None}
        yield response.follow_all("a")
"""
SETTINGS = f"""
[spiders.shop]
file = "spider.py"

[serve.tokens]
{"".join(f'{name} = "{token}"' + chr(10) for name, token in TOKENS.items())}
[serve.roles]
{"".join(f'{name} = "{role}"' + chr(10) for name, role in ROLES.items())}
"""
MORE = """
[schedules.yearly]
spider = "shop"
cron = "0 0 1 1 *"

[notifications.channels.ops]
type = "webhook"
url = "http://127.0.0.1:{port}/hook"
key_env = "OPS_KEY"

[notifications.rules.quiet]
events = ["channel_failing"]
failure_rate = 0.5
"""


def apart(work: Callable[[], T]) -> T:
    """Do this in another thread: Playwright runs an event loop in the thread of the tests."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


class Stage:
    """The server, with what it shows. Tests share it: they leave the runs of the fleet and the cluster active."""

    def __init__(self, api: Api, site: SlowSite, fleet: ForkedFleet, cluster: Cluster) -> None:
        self.api = api
        self.url = api.url
        self.site = site
        self.fleet = fleet
        """Three workers on one run. One of them was killed."""
        self.cluster = cluster
        """A Runner and a Backup Runner. The Runner before was killed."""
        self.killed_worker = 0
        """The pid of the worker that was killed."""

        self.channel_port = 0
        """Where the notification channel ``ops`` sends its messages. A test may listen there."""

    def ask(self, question: Callable[[Store], Awaitable[T]]) -> T:
        """Ask the store itself."""

        async def answered() -> T:
            store = await open_store(self.fleet.frontier)
            try:
                return await question(store)
            finally:
                await store.close()

        return apart(lambda: asyncio.run(answered()))

    def ask_run(self, run_id: str, question: Callable[[Frontier], Awaitable[T]]) -> T:
        """Ask the frontier of a run."""

        async def answered(store: Store) -> T:
            run = await store.get_run(run_id)
            assert run is not None
            return await question(await store.frontier(run_id))

        return self.ask(answered)

    def run(self, run_id: str) -> Run | None:
        return self.ask(lambda store: store.get_run(run_id))

    def batch(self, *paths: str, **more: object) -> str:
        """The session of a batch with these paths of the site, by default with a hostile page and a broken one."""
        urls = [f"{self.site.url}{path}" for path in paths or ("/hostile", "/broken/0")]
        status, answer = self.api.ask("POST", "/api/crawl/batch", {"urls": urls, **more})
        assert status in (200, 202), answer
        session_id: str = answer["session_id"]
        return session_id

    def start_run(self, *urls: str, mode: str = "single") -> str:
        """Start a new run, in the server or for workers, and return its run_id."""
        body = {"spider": "shop", "urls": list(urls), "new_run": True, "mode": mode}
        status, answer = self.api.ask("POST", "/api/runs", body)
        assert status == 201, answer
        run_id: str = answer["run_id"]
        return run_id

    def finished_run(self, *urls: str) -> str:
        """A run of its own that is finished."""
        run_id = self.start_run(*urls)
        until(lambda: (found := self.run(run_id)) is not None and found.state == "finished", what="the end of a run")
        return run_id


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    """Start everything: about ten processes."""
    frontier = frontier_url("redis")
    channel_port = free_port()
    (folder / "shoal.toml").write_text(SETTINGS + MORE.format(port=channel_port))
    environ = {
        "SHOAL_FRONTIER": frontier, "CELERY_BROKER_URL": shared(RedisServer).url.removesuffix("/0") + "/7",
        "SHOAL_BROWSER__SANDBOX": "false", "OPS_KEY": "the-key-of-the-channel",
    }  # fmt: skip
    with ExitStack() as stack:
        site = stack.enter_context(slow_site(latency=0.4))
        fleet = stack.enter_context(ForkedFleet(folder, frontier, SPIDER))
        cluster = stack.enter_context(Cluster(folder, frontier, frontier, SPIDER))
        celery = Process([*CELERY, "worker", "--concurrency", "1"], folder, "celery", {**FAST, **environ})
        stack.callback(celery.kill)
        api = stack.enter_context(serving(folder, environ))
        api.headers = {"Authorization": f"Bearer {TOKENS['anna']}"}
        stage = Stage(api, site, fleet, cluster)
        stage.channel_port = channel_port
        fleet.run_id = stage.start_run(f"{site.url}/", mode="distributed")
        for _ in range(3):
            fleet.fork(settings={"worker.session": SESSION})
        cluster.run_id = stage.start_run(f"{site.url}/list/500", mode="distributed")
        for name in ("crawler_1", "crawler_2", "crawler_3"):
            cluster.node(name, runner=1, backup=1)
        _kill_some(stage)
        yield stage


def _kill_some(stage: Stage) -> None:
    """Kill one worker of the fleet, and the Runner of the cluster. It takes a few seconds until others notice."""
    reports = f"run/{stage.fleet.run_id}/process/"
    until(lambda: len(stage.ask(lambda store: store.list_documents(reports))) == 3, what="the report of each worker")
    victim = stage.fleet.workers[0]
    stage.killed_worker = victim.pid
    victim.kill()
    stage.cluster.until(lambda view: len(view.members) == 3 and any(slot.holder for slot in view.slots))
    stage.cluster.nodes[stage.cluster.with_role("Runner")[0]].kill()
