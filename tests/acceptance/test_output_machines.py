"""Workers on two machines with the same path of an output: mount and UTS namespaces, and one Redis.

Each machine has its own folder at that path, as with local disks, or both have the same one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.frontier import open_store
from shoal.sinks.drainer import output_name
from tests.acceptance.fleets import SHOAL, Fleet, frontier_url, site

PAGES = 400
ITEMS = PAGES + 1  # and the page that links to them
_MACHINE = 'hostname "$1" && mount --bind "$2" "$3" && shift 3 && exec "$@"'

pytestmark = pytest.mark.timeout(120)


class Machines(Fleet):
    """A run whose workers have a hostname and a disk of their own. The disk is at ``out`` for them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, frontier_url("redis"))
        self.out = folder / "out"
        self.out.mkdir()

    def disk(self, name: str) -> Path:
        disk = self.folder / name
        disk.mkdir(exist_ok=True)
        return disk

    def machine(self, host: str, disk: Path, name: str = "books.jsonl") -> subprocess.Popen[str]:
        """Start a worker on a machine. Its standard error goes to ``HOST.log``."""
        command = [
            *("unshare", "--mount", "--uts", "sh", "-c", _MACHINE, "sh", host, str(disk), str(self.out)),
            *(*SHOAL, "worker", self.name, "--run-id", self.run_id, "--frontier", self.frontier),
            *("-o", str(self.out / name), "--set=lease.ttl=4"),
        ]
        with (self.folder / f"{host}.log").open("a") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, text=True)
        self.processes.append(process)
        return process

    def log(self, host: str) -> str:
        return (self.folder / f"{host}.log").read_text()

    def outputs(self) -> list[str]:
        """The names of the outputs that the run has."""

        async def read() -> list[str]:
            store = await open_store(self.frontier)
            try:
                frontier = await store.frontier(self.run_id)
                return sorted(output_name(role.role) for role in await frontier.roles() if role.role != "seed")
            finally:
                await store.close()

        return asyncio.run(read())


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True, check=False).returncode:
        why = "this test needs root, for two machines"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with Machines(tmp_path) as fleet:
        yield fleet


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def check_complete(path: Path, items: int) -> None:
    urls = [json.loads(line)["url"] for line in lines(path)]
    assert len(urls) == items
    assert len(set(urls)) == items, "an item is in the file twice"


def test_local_disks_get_a_complete_copy_each(machines: Machines) -> None:
    with site(PAGES) as url:
        machines.start(url)
        disks = {host: machines.disk(host) for host in ("web1", "web2")}
        first = machines.machine("web1", disks["web1"])
        until(lambda: bool(lines(disks["web1"] / "books.jsonl")))
        second = machines.machine("web2", disks["web2"])
        assert (first.wait(60), second.wait(60)) == (0, 0), machines.log("web1") + machines.log("web2")
    for disk in disks.values():
        check_complete(disk / "books.jsonl", ITEMS)
    assert list(machines.out.iterdir()) == []
    path = machines.out / "books.jsonl"
    assert machines.outputs() == [f"{path} (web1)", f"{path} (web2)"]
    announced = f"also writes {path} on web1, which is another file: each machine writes a complete copy"
    assert machines.log("web2").count(announced) == 1


@pytest.mark.parametrize("name", ["books.jsonl", "books.csv"])
def test_a_machine_that_dies_does_not_stop_the_other(machines: Machines, name: str) -> None:
    with site(PAGES, latency=0.03) as url:
        machines.start(url)
        disks = {host: machines.disk(host) for host in ("web1", "web2")}
        doomed, healthy = [machines.machine(host, disk, name) for host, disk in disks.items()]
        until(lambda: all(len(lines(disk / name)) > 20 for disk in disks.values()))
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        assert healthy.wait(90) == 0, machines.log("web2")
    header = 1 if name.endswith("csv") else 0
    assert len(set(lines(disks["web2"] / name))) == len(lines(disks["web2"] / name)) == ITEMS + header
    assert len(lines(disks["web1"] / name)) < ITEMS + header
    assert machines.machine("web1", disks["web1"], name).wait(60) == 0, machines.log("web1")
    assert lines(disks["web1"] / name) == lines(disks["web2"] / name), "completed when the machine is back"


def test_a_shared_file_system_has_one_writer(machines: Machines) -> None:
    """When it dies, the other machine continues the same file."""
    shared = machines.disk("shared")
    with site(PAGES, latency=0.03) as url:
        machines.start(url)
        doomed = machines.machine("web1", shared)
        until(lambda: len(lines(shared / "books.jsonl")) > 20)
        healthy = machines.machine("web2", shared)
        until(lambda: "works on run" in machines.log("web2"))
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
        assert healthy.wait(90) == 0, machines.log("web2")
    check_complete(shared / "books.jsonl", ITEMS)
    assert machines.outputs() == [f"{machines.out / 'books.jsonl'} (web1)"]
    assert "a complete copy" not in machines.log("web2")
