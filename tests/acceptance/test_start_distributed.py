"""`scripts/start-distributed` starts all parts of distributed crawling, restarts them, and stops them at Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shoal.messages import pip_install
from tests.acceptance.fleets import SHOAL
from tests.acceptance.target import target
from tests.acceptance.test_cli import ROOT
from tests.support.databases import RedisServer, free_port

SCRIPT = str(ROOT / "scripts" / "start-distributed")


class Distributed:
    """The script as a process, on ports of its own, and what it said."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder = folder
        self.ports = {name: free_port() for name in ("redis", "api", "flower")}
        self._said = folder / "said"
        settings = {
            "CELERY_BROKER_URL": f"redis://127.0.0.1:{self.ports['redis']}/0",
            "CELERY_TASK_RATE_LIMIT": "none",
            "SHOAL_DOWNLOAD_DELAY": "0",
            "SHOAL_SERVE__ALLOW": "127.0.0.0/8",
            "API_PORT": str(self.ports["api"]),
            "FLOWER_PORT": str(self.ports["flower"]),
            **environment,
        }
        with self._said.open("w") as said:
            self.process = subprocess.Popen(
                [f"{SCRIPT}.sh", *arguments, "--folder", str(folder)],
                stdout=said, stderr=said, env={**os.environ, **settings}, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def processes(self) -> set[int]:
        """All that were started here: their output, and that of their children, goes to files of the folder."""
        found = set()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "fd" / "1").readlink().is_relative_to(self.folder):
                    found.add(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
        return found

    def pid(self, name: str) -> int:
        (found,) = re.findall(rf"^{name}: starting \.\.\. ready \(process (\d+)\)$", self.said, re.MULTILINE)
        return int(found)

    def wait_until(self, holds: Callable[[], object], timeout: float = 60.0) -> None:
        until = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < until, self.said
            time.sleep(0.05)

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.said or self.process.poll() is not None)
        assert text in self.said, self.said

    def ask(self, part: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[part]}{path}")
        if part == "flower":
            login = b64encode(f"shoal:{self.flower_password}".encode()).decode()
            request.add_header("Authorization", f"Basic {login}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        with urllib.request.urlopen(request, timeout=30.0) as answer:
            return json.load(answer)

    @property
    def flower_password(self) -> str:
        """As it was printed, once."""
        (found,) = re.findall(r"\(user shoal, password (\S+)\)", self.said)
        return str(found)

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(40.0)

    def close(self) -> None:
        for pid in self.processes:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Distributed]]:
    made: list[Distributed] = []

    def begin(*arguments: str, **environment: str) -> Distributed:
        made.append(Distributed(tmp_path, *arguments, **environment))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def check_closed(url: str) -> None:
    """Nobody gets anything there without the password."""
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)
    with refused.value:
        assert refused.value.code == 401


def check_private(fleet: Distributed) -> None:
    """What it wrote is for its user alone, and no secret is on a command line."""
    assert fleet.folder.stat().st_mode & 0o077 == 0
    written = [
        file for name in ("logs", "redis", "lock") for file in (fleet.folder / name, *fleet.folder.glob(f"{name}/**/*"))
    ]
    assert len(written) > 8
    assert [str(file) for file in written if file.stat().st_mode & 0o077] == []
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in fleet.processes}
    assert any("flower" in line for line in lines.values())
    assert not any(fleet.flower_password in line for line in lines.values())


def test_from_the_start_to_the_end(start: Callable[..., Distributed]) -> None:
    fleet = start()
    fleet.wait_for("Press Ctrl-C to stop everything.")
    for name in ("redis", "api", "worker-1", "worker-2", "flower"):
        assert fleet.pid(name) in fleet.processes
    status = fleet.ask("api", "/api/crawl/distributed/status")
    members = status.pop("members")
    assert status == {"distributed_available": True, "message": "Redis connected", "workers": 2}
    assert {member["pid"] for member in members} == {fleet.pid("worker-1"), fleet.pid("worker-2")}

    with target() as site:
        urls = [f"{site.url}/{number}?wait=0.1" for number in range(20)]
        batch = fleet.ask("api", "/api/crawl/batch", {"urls": urls, "distributed": True, "timeout": 20})
    assert [result["status"] for result in batch["results"]] == ["success"] * 20
    assert batch["stats"]["workers_used"] == 2
    assert {result["worker_id"].partition("@")[0] for result in batch["results"]} == {"worker-1", "worker-2"}
    workers = [f"worker-{number}@{socket.gethostname()}" for number in (1, 2)]
    fleet.wait_until(lambda: sorted(fleet.ask("flower", "/api/workers")) == workers)
    fleet.wait_until(lambda: {task["state"] for task in fleet.ask("flower", "/api/tasks").values()} == {"SUCCESS"})
    tasks = fleet.ask("flower", "/api/tasks").values()
    assert all(any(url in task["args"] for task in tasks) for url in urls)
    assert (fleet.folder / "redis" / "appendonlydir").is_dir()

    for path in ("/", "/api/workers", "/api/tasks", "/broker"):
        check_closed(f"http://127.0.0.1:{fleet.ports['flower']}{path}")
    check_private(fleet)

    before = fleet.processes
    os.kill(fleet.pid("worker-1"), signal.SIGKILL)
    fleet.wait_for("worker-1 was killed by signal 9; restarting in 1 s")
    fleet.wait_for("worker-1 restarted: process ")
    fleet.wait_until(lambda: fleet.ask("api", "/api/crawl/distributed/status")["workers"] == 2)
    assert len(fleet.processes) == len(before)  # the children of the one that was killed are gone with it

    assert fleet.stop(signal.SIGINT) == 0, fleet.said
    assert "killed because" not in fleet.said
    assert fleet.processes == set()
    assert all(map(is_free, fleet.ports.values()))


def test_pages_in_work_are_finished_and_a_redis_that_answers_is_used(start: Callable[..., Distributed]) -> None:
    with closing(RedisServer()) as redis, target() as site:
        fleet = start(
            "1",
            CELERY_BROKER_URL=redis.url,
            SHOAL_SERVE__TOKEN="the-token-of-this-test",
            SHOAL_FLOWER_PASSWORD="my-own",
        )
        fleet.wait_for('-H "Authorization: Bearer $SHOAL_SERVE__TOKEN"')
        fleet.wait_for("Press Ctrl-C to stop everything.")
        assert f"redis: using the server at {redis.url}" in fleet.said
        assert "my-own" not in fleet.said
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{fleet.ports['flower']}/")
        login = {"Authorization": f"Basic {b64encode(b'shoal:my-own').decode()}"}
        asked = urllib.request.Request(f"http://127.0.0.1:{fleet.ports['flower']}/", headers=login)
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200
        request = urllib.request.Request(
            f"http://127.0.0.1:{fleet.ports['api']}/api/crawl/batch",
            json.dumps({"urls": [f"{site.url}/slow?wait=3"], "distributed": True, "wait": False}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer the-token-of-this-test"},
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 202
        site.wait_until(lambda seen: any(visit.path.startswith("/slow") for visit in seen))
        assert fleet.stop(signal.SIGTERM) == 0, fleet.said
        (slow,) = [visit for visit in site.visits() if visit.path.startswith("/slow")]
        assert slow.end is not None
        assert slow.end - slow.start >= 3
        assert "succeeded in" in (fleet.folder / "logs" / "worker-1.log").read_text()
        assert redis._answers()  # it is not ours to stop


def test_what_keeps_it_from_starting_is_told(start: Callable[..., Distributed]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        for variable, option in (("API_PORT", "--api-port"), ("FLOWER_PORT", "--flower-port")):
            fleet = start(**{variable: port})
            assert fleet.process.wait(20) == 1
            assert f"port {port} is taken" in fleet.said
            assert option in fleet.said
        fleet = start(CELERY_BROKER_URL=f"redis://127.0.0.1:{port}/0")
        assert fleet.process.wait(20) == 1
        assert "not a Redis that answers" in fleet.said
    fleet = start(CELERY_BROKER_URL="redis://127.0.0.2:1/0")
    assert fleet.process.wait(20) == 1
    assert "no Redis answers at redis://127.0.0.2:1/0 (CELERY_BROKER_URL)" in fleet.said
    fleet = start(CELERY_WORKER_CONCURRENCY="many")
    assert fleet.process.wait(20) == 1
    assert "start-distributed: CELERY_WORKER_CONCURRENCY must be a whole number" in fleet.said
    fleet = start("none")
    assert fleet.process.wait(20) == 2
    assert "invalid count value: 'none'" in fleet.said


def test_the_log_of_a_part_that_does_not_come_up_is_shown(start: Callable[..., Distributed]) -> None:
    fleet = start(SHOAL_HTTP__PROXY="nonsense")
    assert fleet.process.wait(30) == 1
    assert re.search(r"(?m)^start-distributed: (api|worker-\d) ended with exit code 2\nthe end of ", fleet.said)
    assert "  shoal: SHOAL_HTTP__PROXY" in fleet.said
    assert fleet.said.endswith("stopped\n")
    assert fleet.processes == set()


def test_the_name_that_ends_in_sh_is_the_same_script() -> None:
    said = [subprocess.run([name, "--help"], capture_output=True, text=True) for name in (SCRIPT, f"{SCRIPT}.sh")]
    assert [done.returncode for done in said] == [0, 0]
    assert said[0].stdout == said[1].stdout
    assert "number of workers (default 2)" in said[0].stdout


def test_a_worker_says_what_it_lacks() -> None:
    without = "import sys; sys.modules['celery'] = None; from shoal.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", without, "celery-worker"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"shoal: `shoal celery-worker` needs celery; install it with: {pip_install('celery')}\n"
    done = subprocess.run([*SHOAL, "celery-worker", "--log-level", "loud"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: --log-level: ")
