"""Builds the image, and runs what is deployed in containers. Prints a line per step; the last one is the sum."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from shoal import __version__
from tests.containers.browser import check_browser
from tests.containers.checks import Checks, Failed
from tests.containers.compose import check_compose
from tests.containers.engine import PYTHON_IMAGE, Podman
from tests.containers.kubernetes import check_kubernetes

IMAGE = f"shoal:{__version__}"
BROWSER_IMAGE = f"{IMAGE}-browser"
MAX_ADDED = 300_000_000  # bytes of the layers that the project adds to the base image
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "containers"
RUN = Path("/run/shoal-containers")


def check_image(podman: Podman, checks: Checks) -> None:
    with checks.step("base images are made"):
        podman.make_base_images()
    with checks.step("the image is built"):
        podman.build(IMAGE)
    with checks.step("the image runs read-only, as a user that is not root"):
        confined = ["run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]
        said = podman(*confined, IMAGE, "--version")
        assert said == f"shoal {__version__}", said
        assert podman(*confined, "--entrypoint", "id", IMAGE, "-u") == "10001"
    with checks.step("the image has nothing of this machine's settings"):
        script = "test ! -s /etc/pip.conf && test ! -e /root/.config && test ! -e /root/.cache"
        podman("run", "--rm", "--user", "0", "--entrypoint", "sh", IMAGE, "-c", script)
    with checks.step(f"the project adds less than {MAX_ADDED // 1_000_000} MB to the base image"):
        added = podman.size(IMAGE) - podman.size(PYTHON_IMAGE)
        if not 0 < added < MAX_ADDED:
            raise Failed(f"{added / 1e6:.0f} MB")
        print(f"{added / 1e6:.0f} MB", end=" ")


def stop(*_: object) -> NoReturn:
    sys.exit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    checks = Checks()
    podman = Podman(CACHE, RUN)
    with (CACHE / "lock").open("w") as lock:
        print("waiting for another run on this machine ..." if _is_locked(lock.fileno()) else "", end="", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        podman.remove_all()  # what a run left that was killed
        try:
            with checks.group("image"):
                check_image(podman, checks)
            if not checks.failed:
                with checks.group("Compose"), TemporaryDirectory() as folder:
                    check_compose(podman, checks, Path(folder))
                podman.remove_all()
                with checks.group("Chromium and Tor"), TemporaryDirectory() as folder:
                    check_browser(podman, checks, BROWSER_IMAGE, Path(folder))
                podman.remove_all()
                with checks.group("Kubernetes"), TemporaryDirectory() as folder:
                    check_kubernetes(podman, checks, Path(folder))
        finally:
            podman.remove_all()
            podman.remove_unused_images()
    print(f"{checks.passed} passed, {checks.failed} failed")
    sys.exit(1 if checks.failed else 0)


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


main()
