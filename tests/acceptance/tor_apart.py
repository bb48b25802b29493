"""A crawl in a network namespace where only Tor has a way out.

The namespace has a loopback device and a device to nowhere, which has the default route and the name server. So every
packet that does not go to the loopback device is counted. The relays of a Tor network outside are forwarded to the
loopback device by a process that has sockets on both sides. Nothing else is.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support.servers import pump

_ENTER = ["unshare", "--mount", "--net"]
_SET_UP = """
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
ip link add out0 type veth peer name out1
ip link set out0 up
ip link set out1 up
ip address add 198.51.100.1/24 dev out0
ip neighbour add 198.51.100.2 lladdr 02:00:00:00:00:01 dev out0
ip route add default via 198.51.100.2 dev out0
mount --bind "$0/resolv.conf" /etc/resolv.conf
mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf
exec "$@"
"""
_CLONE_NEWNET = 0x40000000


class Step(NamedTuple):
    """A command, and whether the relays can be reached while it runs."""

    words: Sequence[str]
    forwarded: bool


class Result(NamedTuple):
    code: int
    said: str
    packets: int
    """That left for anywhere but the loopback device."""


def run_apart(folder: Path, places: Sequence[tuple[str, int]], steps: Sequence[Step]) -> list[Result]:
    """Run commands in a folder, one after the other, in a namespace of their own."""
    task = json.dumps({"places": places, "steps": steps})
    with tempfile.TemporaryDirectory() as settings, Path("/proc/self/ns/net").open() as outside:
        Path(settings, "resolv.conf").write_text("nameserver 198.51.100.2\noptions timeout:1 attempts:1\n")
        Path(settings, "nsswitch.conf").write_text("hosts: dns\n")
        root = str(Path(__file__).parents[2])
        done = subprocess.run(
            [*_ENTER, "sh", "-ec", _SET_UP, settings, sys.executable, "-m", "tests.acceptance.tor_apart", task,
             str(outside.fileno())],
            cwd=folder, capture_output=True, text=True, timeout=240, check=False, pass_fds=[outside.fileno()],
            env={**os.environ, "PYTHONPATH": root, "TMPDIR": str(folder)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Result(*result) for result in json.loads(done.stdout)]


# -- inside the namespace


def sent() -> int:
    """The packets that left through the device to nowhere."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "out0:" in line]
    return int(line.partition(":")[2].split()[9])


def forward(places: Sequence[tuple[str, int]], outside: int) -> int:
    """Start the process that forwards. It listens here, and connects outside."""
    listening = [socket.create_server((host, port)) for host, port in places]
    pid = os.fork()
    if pid == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(outside, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        asyncio.run(_forward(listening))
    for each in listening:
        each.close()
    return pid


async def _forward(listening: Sequence[socket.socket]) -> None:
    for each in listening:
        host, port = each.getsockname()

        async def converse(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str = host, port: int = port
        ) -> None:
            with suppress(OSError):
                far_reader, far = await asyncio.open_connection(host, port)
                await asyncio.gather(pump(reader, far), pump(far_reader, writer))
                far.close()
            writer.close()

        await asyncio.start_server(converse, sock=each)
    await asyncio.Event().wait()


def main() -> None:
    task, outside = json.loads(sys.argv[1]), int(sys.argv[2])
    results = []
    for words, forwarded in task["steps"]:
        helper = forward(task["places"], outside) if forwarded else None
        before = sent()
        done = subprocess.run(
            [sys.executable, "-m", "shoal.cli.main", *words], capture_output=True, text=True, check=False, timeout=200
        )
        results.append(Result(done.returncode, done.stdout + done.stderr, sent() - before))
        if helper is not None:
            os.kill(helper, signal.SIGKILL)
            os.waitpid(helper, 0)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
