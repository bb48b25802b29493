"""podman with a store of its own, base images made from Debian's packages, and the image of the project.

No registry is needed: the base images are made with debootstrap, under the names that the Dockerfile, the Compose file
and the Kubernetes objects use. They are kept in the store, so only the first run makes them.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.containers.checks import Failed, explain

ROOT = Path(__file__).parents[2]
PYTHON_IMAGE = "python:3.11-slim"
REDIS_IMAGE = "redis:7-bookworm"
SUITE = "bookworm"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "redis-server")
REDIS_FILE = f"""
FROM {PYTHON_IMAGE}
RUN groupmod --gid 999 redis && usermod --uid 999 redis && install --directory --owner redis --group redis /data
VOLUME /data
WORKDIR /data
"""
ATTEMPTS = 3
PIP_SETTINGS = {
    "index-url", "extra-index-url", "find-links", "cert", "client-cert", "proxy", "trusted-host", "default-timeout",
}  # fmt: skip

CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
log_driver = "k8s-file"

[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "{run}/engine"

[network]
network_backend = "netavark"
network_config_dir = "{cache}/networks"
"""
STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{cache}/storage"
runroot = "{run}/storage"
"""


class Podman:
    """The podman of this machine, apart from images, containers and networks that others made with it."""

    def __init__(self, cache: Path, run: Path) -> None:
        self._cache = cache
        for folder in (cache, cache / "networks", run):
            folder.mkdir(parents=True, exist_ok=True)
        files = {"CONTAINERS_CONF": CONTAINERS_CONF, "CONTAINERS_STORAGE_CONF": STORAGE_CONF}
        self.environment = dict(os.environ)
        for variable, text in files.items():
            path = cache / f"{variable.lower()}.toml"
            path.write_text(text.format(cache=cache, run=run))
            self.environment[variable] = str(path)

    def __call__(self, *words: str, stdin: str | None = None, check: bool = True, timeout: float = 300.0) -> str:
        """What the command printed."""
        done = subprocess.run(
            ["podman", *words], input=stdin, stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True, text=True, check=check, timeout=timeout, env=self.environment,
        )  # fmt: skip
        return done.stdout.strip()

    def remove_all(self) -> None:
        """Everything but images."""
        self("pod", "rm", "--all", "--force", "--time", "0", check=False)
        self("rm", "--all", "--force", "--time", "0", "--volumes", check=False)
        self("volume", "rm", "--all", "--force", check=False)
        self("network", "prune", "--force", check=False)
        self("secret", "rm", "--all", check=False)

    # -- images

    def make_base_images(self) -> None:
        recipe = repr((SUITE, PACKAGES, REDIS_FILE))
        kept = f"shoal-base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
        if not self("images", "--quiet", kept):
            with TemporaryDirectory(dir=self._cache, prefix="base-") as folder:
                retry("debootstrap", lambda: self._make_base_image(Path(folder) / "root", kept))
        self("tag", kept, PYTHON_IMAGE)
        self("build", "--tag", REDIS_IMAGE, "-", stdin=REDIS_FILE)

    def _make_base_image(self, root: Path, tag: str) -> None:
        shutil.rmtree(root, ignore_errors=True)
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root), debian_mirror())
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        (root / "usr/bin/python").symlink_to("python3")
        for leftover in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*_*")):
            leftover.unlink()
        with subprocess.Popen(["tar", "--create", "--directory", str(root), "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(
                ["podman", "import", "--quiet", "-", tag],
                stdin=tar.stdout, check=True, capture_output=True, text=True, env=self.environment,
            )  # fmt: skip
        if tar.returncode:
            raise Failed(f"tar failed with exit code {tar.returncode}")

    def build(self, image: str, file: str = "Dockerfile") -> None:
        """A file of deploy/, with this machine's way to PyPI and nothing of it in the image.

        Without its cache: podman 4.3 mounts a stage that it finds there without the last layer.
        """
        with pip_settings() as mounts:
            volumes = [word for mount in mounts for word in ("--volume", mount)]
            retry("podman build", lambda: self(
                "build", "--no-cache", "--format", "docker", "--network", "host", *volumes,
                "--file", str(ROOT / "deploy" / file), "--tag", image, str(ROOT), timeout=900.0,
            ))  # fmt: skip

    def size(self, image: str) -> int:
        return int(self("image", "inspect", "--format", "{{.Size}}", image))

    def remove_unused_images(self) -> None:
        """Layers of earlier builds."""
        self("image", "prune", "--force", check=False)


def run(*words: str) -> str:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def debian_mirror() -> str:
    """Where apt gets Debian's own packages from."""
    listed = ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]
    if not run(*listed, "Label: Debian"):
        run("apt-get", "update", "--quiet", "--quiet")
    sites = run(*listed, "Label: Debian").split() or run(*listed).split()
    if not sites:
        raise Failed("apt-get has no source of packages")
    return sites[0]


def retry(what: str, attempt: Callable[[], Any]) -> None:
    """Downloads fail now and then."""
    for left in reversed(range(ATTEMPTS)):
        try:
            attempt()
            return
        except (Failed, OSError, subprocess.SubprocessError) as exc:
            if not left:
                raise
            print(f"\n{what} failed, trying again: {explain(exc)[-1000:]}", flush=True)
            time.sleep(5.0)


@contextmanager
def pip_settings() -> Iterator[Sequence[str]]:
    """Mounts that make pip in a container find packages as pip does here: settings of files and of the environment."""
    mounts = ["/etc/ssl/certs:/etc/ssl/certs:ro"]
    found: dict[str, str] = {}
    for line in run("python3", "-m", "pip", "config", "list").splitlines():  # those of the environment come first
        name, _, quoted = line.partition("=")
        key = name.rpartition(".")[2]
        if key in PIP_SETTINGS:
            found.setdefault(key, " ".join(ast.literal_eval(quoted).split()))
    paths = {path for path in (*found.get("find-links", "").split(), found.get("cert", "")) if path.startswith("/")}
    mounts += [f"{path}:{path}:ro" for path in paths if Path(path).exists() and not path.startswith("/etc/ssl/certs/")]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "pip.conf"
        file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in found.items()))
        yield [*mounts, f"{file}:/etc/pip.conf:ro"]
