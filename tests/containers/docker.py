"""`docker compose` as far as `shoal autoscale` calls it, by podman-compose, which neither counts the containers of one
service nor removes those that are too many.

    python -m tests.containers.docker PROJECT PODMAN_COMPOSE... -- compose -f FILE COMMAND...
"""

from __future__ import annotations

import re
import subprocess
import sys


def podman(*words: str) -> list[str]:
    return subprocess.run(["podman", *words], check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def main() -> None:
    split = sys.argv.index("--")
    project, *compose = sys.argv[1:split]
    called, _, _, *words = sys.argv[split + 1 :]
    if called != "compose":
        sys.exit(f"not expected: {sys.argv[split + 1 :]}")
    service = words[-1]
    of_service = [
        "--filter", f"label=com.docker.compose.project={project}",
        "--filter", f"label=com.docker.compose.service={service}",
    ]  # fmt: skip
    if words[:2] == ["ps", "-q"]:
        print("\n".join(podman("ps", "--quiet", *of_service)))
        return
    (wanted,) = [int(word.partition("=")[2]) for word in words if re.fullmatch(rf"{service}=\d+", word)]
    for name in podman("ps", "--all", "--format", "{{.Names}}", *of_service):
        if int(name.rpartition("_")[2]) > wanted:
            podman("stop", "--time", "30", name)
            podman("rm", name)
    if wanted:
        subprocess.run([*compose, *words, "--no-build"], check=True, stdout=sys.stderr)


main()
