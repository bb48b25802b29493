"""The image with Chromium and Tor: it renders with little shared memory, with a full disk, and with Compose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.containers.checks import Checks, Failed, wait_for
from tests.containers.compose import BROWSER_FILE, Compose, check_confined, container_logs
from tests.containers.crawls import Api, Site
from tests.containers.engine import ROOT, Podman
from tests.containers.tor import check_tor, starting_network

NETWORK = "shoal-browser"
PROJECT = "shoal-browser-test"
PROFILE = ROOT / "deploy" / "chromium-seccomp.json"
CONFINED = [
    "run", "--rm", "--read-only", "--cap-drop", "ALL", "--workdir=/tmp",
    "--security-opt", "no-new-privileges", "--security-opt", f"seccomp={PROFILE}",
]  # fmt: skip
MADE_BY_A_SCRIPT, UNTOUCHED = "/script/0", "not rendered"
"""The heading of the page, see tests/containers/site.py."""


def check_browser(podman: Podman, checks: Checks, image: str, folder: Path) -> None:
    with starting_network() as network:
        with checks.step("the image with Chromium and Tor is built"):
            podman.build(image, "Dockerfile.browser")
        with checks.step("Chromium and Tor start read-only, for a user that is not root"):
            _check_programs(podman, image)
        with checks.step("Chromium needs the seccomp profile, which allows no more than its sandbox needs"):
            _check_profile(podman, image)
        with checks.step("a site is crawled through Tor, and knows only addresses of exits"):
            check_tor(podman, CONFINED, image, *network.result())
    podman("network", "create", NETWORK)
    site = Site(podman, NETWORK)
    with checks.step("pages are rendered with 1 MB of shared memory"):
        headings, said = _crawl(podman, image, "--shm-size=1m", "--tmpfs=/tmp:size=512m,mode=1777")
        if headings != sorted([MADE_BY_A_SCRIPT, UNTOUCHED, UNTOUCHED]):
            raise Failed(f"{headings}\n{said}")
    with checks.step("with a full disk a page fails with this reason, and the worker continues"):
        headings, said = _crawl(podman, image, "--tmpfs=/tmp:size=2m,mode=1777", code=5)
        if headings != [UNTOUCHED] * 2 or "The disk is full: /tmp, where Chromium keeps its profile" not in said:
            raise Failed(f"{headings}\n{said}")
    podman("rm", "--force", "--time", "0", site.container)
    try:
        _check_compose(podman, checks, folder)
    except BaseException:
        print(container_logs(podman), flush=True)
        raise


def _check_programs(podman: Podman, image: str) -> None:
    alone = [*CONFINED, "--network=none", "--tmpfs=/tmp:size=512m,mode=1777"]
    user = podman(*alone, "--entrypoint", "id", image, "-u")
    said = podman(*alone, image, "doctor")
    starting = [line for line in said.splitlines() if line.startswith("ok ") and " starts" in line]
    is_sandboxed = "\nok  the sandbox of Chromium\n" in said
    if user != "10001" or [line.split()[1] for line in starting] != ["Chromium", "Tor"] or not is_sandboxed:
        raise Failed(f"as user {user}, shoal doctor says:\n{said}")


def _check_profile(podman: Podman, image: str) -> None:
    """Without the profile Chromium does not start, and says what is missing. With it, containers can do no more than
    its sandbox needs."""
    without = [word for word in CONFINED if not word.endswith(str(PROFILE))]
    without.pop()  # its option
    said = podman(*without, "--network=none", "--tmpfs=/tmp:size=512m,mode=1777", image, "doctor", check=False)
    if "needs the seccomp profile deploy/chromium-seccomp.json" not in said:
        raise Failed(said)
    for refused in ("unshare --user --mount true", "unshare --user --map-root-user --uts true"):
        said = podman(*CONFINED, "--entrypoint", "sh", image, "-c", f"{refused} 2>&1 || true")
        if "Function not implemented" not in said:
            raise Failed(f"{refused}: {said or 'nothing'}")


def _crawl(podman: Podman, image: str, *options: str, code: int = 0) -> tuple[list[str], str]:
    """The headings that a crawl of one rendered page and two others found, and what its log says about failures.
    ``code``: its exit code."""
    spiders = f"--volume={ROOT / 'tests' / 'containers'}:/spiders:ro"
    said = podman(
        *CONFINED, f"--network={NETWORK}", spiders, *options, "--entrypoint", "sh", image, "-c",
        f"shoal run /spiders/rendering_spider.py -o - 2>&1 || test $? -eq {code}",
    )  # fmt: skip
    items = [json.loads(line)["heading"] for line in said.splitlines() if line.startswith("{")]
    return sorted(items), said


def _check_compose(podman: Podman, checks: Checks, folder: Path) -> None:
    compose = Compose(podman, folder, PROJECT, BROWSER_FILE)
    api = Api(f"http://127.0.0.1:{compose.ports['API_PORT']}", compose.secrets["token"])
    with checks.step("Compose: the API and a Celery worker render a page"):
        compose("up", "--detach", "--no-build", "--scale", "celery-worker=1", "redis", "api", "celery-worker")
        api.wait_ready()
        api.wait_for_workers(1)
        site = Site(podman, f"{PROJECT}_default")
        for distributed in (False, True):
            options = {"format": "fields", "fields": {"path": "h1"}, "render": {"wait_for": 1500}}
            session = api.begin(site.url("script"), distributed=distributed, options=options)
            check_sandbox(podman, *compose.containers("celery-worker" if distributed else "api"))
            found = api.results(session)
            if found != [MADE_BY_A_SCRIPT]:
                raise Failed(f"distributed={distributed}: {found}")
        for service in ("api", "celery-worker"):
            check_confined(podman, compose.containers(service))


def check_sandbox(podman: Podman, container: str) -> None:
    """The container renders a page. Its renderers have a user namespace, a network and a seccomp filter of their own,
    and see no files."""
    worker = Path("/proc", podman("inspect", "--format", "{{.State.Pid}}", container))

    def are_sandboxed() -> bool:
        renderers = [each for each in _descendants(worker) if "--type=renderer" in (each / "cmdline").read_text()]
        return bool(renderers) and all(
            _namespaces(each).isdisjoint(_namespaces(worker)) and _filters(each) > _filters(worker)
            and not _sees_files(each)
            for each in renderers
        )  # fmt: skip

    wait_for(f"renderers of {container} in a sandbox", are_sandboxed, 20.0)


def _descendants(process: Path) -> Iterator[Path]:
    for child in (process / "task" / process.name / "children").read_text().split():
        yield process.with_name(child)
        yield from _descendants(process.with_name(child))


def _namespaces(process: Path) -> set[Path]:
    return {(process / "ns" / kind).readlink() for kind in ("user", "net")}


def _filters(process: Path) -> int:
    """How many seccomp filters it has."""
    return next(int(line.split()[1]) for line in (process / "status").read_text().splitlines() if "_filters:" in line)


def _sees_files(process: Path) -> bool:
    try:
        return any((process / "root").iterdir())
    except OSError:  # its root was a folder of a process that has ended
        return False
