"""A process that has imported everything and forks nodes: one that starts by itself needs most of a second of a core
for its imports, and fifty of them would measure little else.

Says when it is ready, then reads one JSON object a line, the arguments of a node, and answers with the number of its
process. The nodes are killed when there is nothing more to read.
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
from shoal.cluster.node import Node

IMPORTED_LATE = (
    *("shoal.cluster.zookeeper", "shoal.cluster.redis", "shoal.cluster.postgres"),
    *("shoal.frontier.redis", "shoal.frontier.postgres", "shoal.fetch.http", "uvloop"),
    *("shoal.middleware.cache", "shoal.middleware.cookies", "shoal.middleware.robots"),
)


def main() -> None:
    for module in IMPORTED_LATE:
        importlib.import_module(module)
    print("ready", flush=True)
    living: set[int] = set()
    while line := sys.stdin.readline():
        living -= buried()
        pid = os.fork()
        if not pid:
            be_node(**json.loads(line))
        living.add(pid)
        print(pid, flush=True)
    for pid in living - buried():
        os.kill(pid, signal.SIGKILL)


def buried() -> set[int]:
    """Those who have ended. They are waited for, so that their CPU time counts as that of the nursery's children."""
    found = set()
    with suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            found.add(pid)
    return found


def be_node(frontier: str, name: str, log: str, **options: Any) -> NoReturn:
    """In the new process, to its end."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    try:
        Node(Endless, config(frontier, name), name=name, **options).run()
    except BaseException:
        traceback.print_exc()
    os._exit(0)  # what follows in this program is the nursery's


if __name__ == "__main__":
    main()
