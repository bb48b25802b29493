"""The Compose file: all services, three Celery workers, a fleet, and what happens when containers are killed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.containers.checks import Checks, Failed, wait_for
from tests.containers.crawls import NETWORKS, Api, Site, address_of, login, status_of
from tests.containers.engine import ROOT, Podman
from tests.support.databases import free_port

FILE = ROOT / "compose.yml"
BROWSER_FILE = ROOT / "docker-compose.browser.yml"
PROJECT = "shoal-test"
RUN_ID = "fleet"
WORKERS = 3


class Compose:
    """The services of the file and of what changes it, by podman-compose."""

    def __init__(self, podman: Podman, folder: Path, project: str = PROJECT, *changes: Path) -> None:
        self.podman = podman
        self.project = project
        self._folder = folder
        self.ports = {name: free_port() for name in ("API_PORT", "FLOWER_PORT", "REDIS_PORT")}
        self.secrets = {name: secrets.token_hex(16) for name in ("token", "redis", "flower")}
        settings = {
            "SHOAL_SERVE__TOKEN": self.secrets["token"],
            "REDIS_PASSWORD": self.secrets["redis"],
            "SHOAL_FLOWER_PASSWORD": self.secrets["flower"],
            "SHOAL_FRONTIER": f"redis://:{self.secrets['redis']}@redis:6379/2",
            "SHOAL_SERVE__ALLOW": NETWORKS,
            "SHOAL_DOWNLOAD_DELAY": "0",
            "CELERY_TASK_RATE_LIMIT": "none",
            "SPIDERS": str(ROOT / "tests" / "containers"),
            "WORKER_SPIDER": "spider.py",
            "WORKER_RUN_ID": RUN_ID,
            **{name: str(port) for name, port in self.ports.items()},
        }
        self._settings = folder / "env"
        self._settings.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        # podman-compose knows a service only while it has a container to imitate.
        self._single = folder / "single.yml"
        self._single.write_text(yaml.safe_dump({"services": {"worker": {"scale": 1}}}))
        self.command = [
            str(ROOT / ".venv-containers" / "bin" / "podman-compose"), "--env-file", str(self._settings),
            "--project-name", project, *(word for file in (FILE, *changes) for word in ("--file", str(file))),
        ]  # fmt: skip

    def __call__(self, *words: str, files: tuple[Path, ...] = (), timeout: float = 240.0) -> str:
        more = [word for file in files for word in ("--file", str(file))]
        # Settings come from the file alone: the environment of this process would override it.
        clean = {
            name: value for name, value in self.podman.environment.items() if not name.startswith(("SHOAL_", "CELERY_"))
        }
        done = subprocess.run(
            [*self.command, *more, *words], capture_output=True, text=True, check=True, timeout=timeout, env=clean,
            stdin=subprocess.DEVNULL, cwd=ROOT,
        )  # fmt: skip
        return done.stdout

    def shoal(self, *words: str) -> str:
        """A `shoal` command in a new container of the service `worker`, as `docker compose run` does it."""
        return self("run", "--rm", "-T", "--no-deps", "worker", *words, files=(self._single,))

    def containers(self, service: str, *options: str) -> list[str]:
        return self.podman(
            "ps", "--quiet", "--no-trunc", "--filter", f"label=com.docker.compose.project={self.project}",
            "--filter", f"label=com.docker.compose.service={service}", *options,
        ).split()  # fmt: skip

    def kill(self, container: str) -> None:
        """SIGKILL for its first process, as the kernel does when memory is short. Nobody asked podman for it."""
        os.kill(int(self.podman("inspect", "--format", "{{.State.Pid}}", container)), signal.SIGKILL)

    def busy_container(self, service: str, site: Site) -> str:
        """The one that has just requested a page."""
        addresses = {address_of(self.podman, container): container for container in self.containers(service)}
        client = site.latest_client()
        if client not in addresses:
            raise Failed(f"none of {service} is at {client}: {addresses}")
        return addresses[client]

    def wait_restarted(self, service: str, count: int, timeout: float = 60.0) -> None:
        wait_for(f"{count} containers of {service}", lambda: len(self.containers(service)) == count, timeout)


def container_logs(podman: Podman) -> str:
    """The end of what each container said."""
    parts = []
    for line in podman("ps", "--all", "--format", "{{.ID}} {{.Names}} {{.Status}}", check=False).splitlines():
        said = subprocess.run(
            ["podman", "logs", "--tail", "12", line.split()[0]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=podman.environment,
        )  # fmt: skip
        parts.append(f"== {line}\n{said.stdout}")
    return "\n".join(parts)


def check_compose(podman: Podman, checks: Checks, folder: Path) -> None:
    compose = Compose(podman, folder)
    api = Api(f"http://127.0.0.1:{compose.ports['API_PORT']}", compose.secrets["token"])
    try:
        with checks.step("all services start"):
            compose("up", "--detach", "--no-build")
            api.wait_ready()
            api.wait_for_workers(2)
            assert not compose.containers("worker"), "a worker was started before there is a run"
        with checks.step(f"Celery scales to {WORKERS} workers"):
            compose("up", "--detach", "--no-build", "--no-deps", "--scale", f"celery-worker={WORKERS}", "celery-worker")
            api.wait_for_workers(WORKERS)
        site = Site(podman, f"{PROJECT}_default")
        _check_crawls(compose, checks, api, site)
        with checks.step("Flower is closed, and opens with its password"):
            check_flower(f"http://127.0.0.1:{compose.ports['FLOWER_PORT']}", "shoal", compose.secrets["flower"])
        with checks.step("the API is closed without its token"):
            assert status_of(f"{api.url}/api/crawl/distributed/status") == 401
        _check_fleet(compose, checks, site, folder)
        with checks.step("containers are read-only, and nobody is root"):
            for service in ("redis", "celery-worker", "api", "flower"):
                check_confined(podman, compose.containers(service))
    except BaseException:
        print(container_logs(podman), flush=True)
        raise
    with checks.step("all is gone after down --volumes"):
        podman("rm", "--force", "--time", "0", site.container)
        compose("down", "--volumes", "--remove-orphans")  # to podman-compose, scaled containers are orphans
        left = [podman("ps", "--all", "--quiet"), podman("volume", "ls", "--quiet")]
        left += [name for name in podman("network", "ls", "--format", "{{.Name}}").split() if PROJECT in name]
        assert not any(left), left


def _check_crawls(compose: Compose, checks: Checks, api: Api, site: Site) -> None:
    with checks.step("the API crawls the site"):
        site.check("api", api.results(api.begin(site.url("api"), distributed=False)))
    with checks.step("Celery crawls the site"):
        site.check("celery", api.results(api.begin(site.url("celery"), distributed=True)))
    with checks.step("nothing is lost when a Celery worker is killed"):
        session = api.begin(site.url("killed"), distributed=True)
        site.wait_for("killed", 15)
        compose.kill(compose.busy_container("celery-worker", site))
        site.check("killed", api.results(session), may_repeat=8)
        compose.wait_restarted("celery-worker", WORKERS)
        api.wait_for_workers(WORKERS)
    with checks.step("nothing is lost when Redis is killed"):
        session = api.begin(site.url("redis"), distributed=True)
        site.wait_for("redis", 15)
        compose.kill(compose.containers("redis")[0])
        compose.wait_restarted("redis", 1)
        site.check("redis", api.results(session), may_repeat=8)
        api.wait_for_workers(WORKERS)


def check_flower(url: str, user: str, password: str) -> None:
    for path in ("/", "/api/workers", "/api/tasks", "/broker"):
        assert status_of(f"{url}{path}") == 401, path
    assert status_of(f"{url}/", login(user, "wrong")) == 401
    for path in ("/", "/api/workers", "/api/tasks", "/broker"):
        assert status_of(f"{url}{path}", login(user, password)) == 200, path


def check_confined(podman: Podman, containers: list[str]) -> None:
    assert containers
    for container in containers:
        found: dict[str, Any] = json.loads(podman("inspect", container))[0]
        assert found["HostConfig"]["ReadonlyRootfs"], found["Name"]
        assert not found["EffectiveCaps"], found["Name"]
        assert podman("exec", container, "id", "-u") != "0", found["Name"]


# -- a fleet, scaled by `shoal autoscale`


def _check_fleet(compose: Compose, checks: Checks, site: Site, folder: Path) -> None:
    celery = sorted(compose.containers("celery-worker"))
    with checks.step("a fleet crawls the site; a worker and Redis are killed"):
        first = ["-a", f"first={site.url(RUN_ID)}", "--set", "concurrency_per_host=9"]
        compose.shoal("start", "spider.py", "--run-id", RUN_ID, *first, "--quiet")
        with _autoscaler(compose, folder) as autoscaler:
            wait_for("three workers", lambda: len(compose.containers("worker")) == WORKERS, 120.0)
            check_confined(compose.podman, compose.containers("worker"))
            site.open_gate()
            site.wait_for(RUN_ID, 20)
            compose.kill(compose.busy_container("worker", site))
            site.wait_for(RUN_ID, 40)
            compose.kill(compose.containers("redis")[0])
            compose.wait_restarted("redis", 1)
            code = autoscaler.wait(180.0)
        if code:
            raise Failed(f"shoal autoscale failed with exit code {code}:\n{(folder / 'autoscale.log').read_text()}")
        items = [json.loads(line)["path"] for line in compose.shoal("export", RUN_ID, "-o", "-").splitlines()]
        site.check(RUN_ID, items, may_repeat=12)
        compose.shoal("audit", RUN_ID)
        compose.shoal("export", RUN_ID, "-o", "/tmp/items.parquet")  # the image lacks some parts of Arrow
    with checks.step("the autoscaler leaves no worker, and left the other services alone"):
        assert not compose.containers("worker")
        assert sorted(compose.containers("celery-worker")) == celery


@contextmanager
def _autoscaler(compose: Compose, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`shoal autoscale` on this machine, with podman-compose for the `docker compose` that it calls."""
    (folder / "bin").mkdir(exist_ok=True)
    docker = folder / "bin" / "docker"
    words = [sys.executable, "-m", "tests.containers.docker", PROJECT, *compose.command]
    docker.write_text(f'#!/bin/sh\ncd {ROOT}\nexec {" ".join(words)} -- "$@"\n')
    docker.chmod(0o755)
    frontier = f"redis://:{compose.secrets['redis']}@127.0.0.1:{compose.ports['REDIS_PORT']}/2"
    (folder / "shoal.toml").write_text(f'frontier = "{frontier}"\n')
    command = [
        str(Path(sys.executable).parent / "shoal"), "autoscale", RUN_ID, "--via", f"compose:{FILE}",
        "--per-worker", "2", "--max", str(WORKERS), "--every", "0.5", "--cool-down", "600",
    ]  # fmt: skip
    environment = {**compose.podman.environment, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    with (folder / "autoscale.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
