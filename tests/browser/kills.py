"""Two workers render a shop while browsers, their parts and workers are killed at random."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from tests.acceptance.fleets import InProcessFleet, frontier_url
from tests.browser import shop
from tests.browser.processes import browsers, command, drivers, recorded, wait_until_gone

KILLS = ("--type=renderer", "--type=gpu-process", "browser", "driver", "worker")

SPIDER = """
from shoal import Spider

class Shop(Spider):
    name = "shop"
    render = True
    settings = {
        "browser.sandbox": False, "browser.page_timeout": 20, "download_delay": 0, "throttle.enabled": False,
        "retry.max_attempts": 20, "retry.base_delay": 0.1, "lease.ttl": 60, "worker.session": 3,
    }

    def parse(self, response):
        yield from response.follow_all("a.product", self.product)
        yield from response.follow_all("a.next")

    def product(self, response):
        yield {"url": response.url, "name": response.css("h1::text").get(), "price": response.css(".price::text").get()}
"""


def crawl_with_kills(folder: Path, products: int, patience: float) -> Counter[str]:
    """Crawl the shop, and check that nothing is lost or repeated and no process is left. Returns what was killed."""
    with (
        shop.serve(products, 0.05) as site,
        InProcessFleet(folder, frontier_url("redis"), SPIDER) as fleet,
        recorded(lambda: [process.pid for process in [*fleet.processes]]) as marks,
    ):
        fleet.start(f"{site.url}/")
        workers = [fleet.worker(), fleet.worker()]
        rng = random.Random()
        killed: Counter[str] = Counter()
        last = 0
        while (done := fleet.stats()["done"]) < products - 5:
            if done > last + 5:  # kill something after every few pages
                last = done
                for victim in KILLS:
                    if killed[victim] == min(killed[each] for each in KILLS):
                        killed[victim] += kill(victim, [worker.pid for worker in workers], set(marks), rng)
                        break
            for number, worker in enumerate(workers):
                if worker.poll() == -signal.SIGKILL:
                    workers[number] = fleet.worker()
            time.sleep(0.2)
        fleet.wait(timeout=patience)
        fleet.shoal("export", fleet.run_id, "-o", str(folder / "items.jsonl"))
        items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
        audit = fleet.shoal("audit", fleet.run_id)
        missing = site.expected() - {item["url"] for item in items}
        reasons = [fleet.shoal("why", url, "--run-id", fleet.run_id, check=False).stdout for url in missing]
    assert sum(killed.values()) >= len(KILLS), killed
    assert not reasons, "\n".join(reasons)
    assert Counter(item["url"] for item in items) == Counter(site.expected())
    for item in items:
        number = item["url"].rpartition("/")[2]
        assert (item["name"], item["price"]) == (f"Product {number}", f"{number}.99")
    assert "balanced" in audit.stdout
    assert len(marks) > 2
    assert wait_until_gone(marks) == []
    return killed


def kill(victim: str, workers: list[int], marks: set[str], rng: random.Random) -> int:
    """SIGKILL a process of this kind. Returns 1, or 0 if there is none now."""
    if victim == "worker":
        found = workers
    elif victim == "driver":
        found = [pid for worker in workers for pid in drivers(worker)]
    elif victim == "browser":
        found = [pid for pid in browsers(marks) if b"--type=" not in command(pid)]
    else:
        found = [pid for pid in browsers(marks) if victim.encode() in command(pid)]
    if not found:
        return 0
    try:
        os.kill(rng.choice(found), signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1
