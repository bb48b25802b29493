"""A process that has imported everything and forks nodes. A node that starts by itself needs almost a second for its
imports, and fifty of them would measure little else.

Prints a line when it is ready. Then it reads the arguments of a node from each line of JSON, and prints the process ID
of the new node. The nodes are killed at the end of the input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from nodes.work import Endless, config
from shoal.runs.cluster.node import Node

IMPORTED_LATE = (
    *("shoal.runs.cluster.zookeeper", "shoal.runs.cluster.redis", "shoal.runs.cluster.postgres"),
    *("shoal.frontier.redis", "shoal.frontier.postgres", "shoal.fetch.http_fetcher", "uvloop"),
    *("shoal.fetch.layers.cache", "shoal.fetch.sessions.session", "shoal.fetch.layers.robots"),
)


def main() -> None:
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    print("ready", flush=True)
    living: set[int] = set()
    while line := sys.stdin.readline():
        living -= reap_nodes()
        pid = os.fork()
        if not pid:
            run_node(**json.loads(line))
        living.add(pid)
        print(pid, flush=True)
    for pid in living - reap_nodes():
        os.kill(pid, signal.SIGKILL)


def reap_nodes() -> set[int]:
    """Return the nodes that have ended, and reap them, so that their CPU time counts as that of child processes."""
    found = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            found.add(pid)
    return found


def run_node(frontier: str, name: str, log: str, **options: Any) -> NoReturn:
    """Run a node in the new process until it ends."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        Node(Endless, config(frontier, name), name=name, **options).run()
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # the rest of the program is for the parent


if __name__ == "__main__":
    main()
