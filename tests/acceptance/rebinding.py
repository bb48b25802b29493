"""A name server whose answers change, and a guarded fetcher that uses it, in their own network namespace.

The namespace has only a loopback device, so no packet leaves it. Two of its addresses are public elsewhere: they stand
for a site. Everything else is real: the resolver of the system and its configuration, the look-ups, the sockets.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import uvloop

from shoal.config import HttpSettings
from shoal.errors import FetchError
from shoal.fetch.browser.gateway import Gateway
from shoal.fetch.browser.gateway_conversation import GatewayLimits
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http_fetcher import HttpFetcher
from shoal.http import Request
from tests.support import forking
from tests.support.servers import answer, read_head

NAME = "rebinding.test"
PUBLIC = "8.8.8.8"
PUBLIC_6 = "2001:4860:4860::8888"

# The first command enters the namespace, the others set it up.
_ENTER = ["unshare", "--mount", "--net"]
_SET_UP = f"""
ip link set lo up
ip address add {PUBLIC}/32 dev lo
ip address add {PUBLIC_6}/128 dev lo nodad
mount --bind "$0/resolv.conf" /etc/resolv.conf
mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf
exec "$@"
"""
_NEW_MOUNTS, _NEW_NETWORK = 0x20000, 0x40000000
_PRIVATE = 0x4000 | 0x40000  # all mounts below: changes are not seen outside

_TYPES = {1: 4, 28: 6}  # A and AAAA records, and their versions of IP


class Outcome(NamedTuple):
    first: list[str]
    """The addresses of a look-up before all fetches, as by code that checks a URL first and opens it then."""
    fetched: list[str]
    """For each fetch in order: the address that served it, or the kind of the error."""
    connections: dict[str, int]
    """The number of connections to each address."""


def fetch_while_rebinding(
    answers: Sequence[Sequence[str]],
    *,
    fetches: int,
    allowed: Sequence[str] = (),
    down: Sequence[str] = (),
    via: str = "fetcher",
) -> Outcome:
    """Fetch while each look-up of the name gets the next of these answers, in a cycle. ``via`` says what has the
    guard: the ``fetcher``, or the ``gateway`` of the browser, which is used as a proxy."""
    task = json.dumps({"answers": answers, "fetches": fetches, "allowed": allowed, "down": down, "via": via})
    with _configured() as folder:
        words = [sys.executable, "-m", "tests.acceptance.rebinding", folder, task]
        return Outcome(*json.loads(_said(forking.run(words, capture_output=True, timeout=60))))


def said_apart(*words: str) -> str:
    """The output of Python with these arguments, in its own network namespace."""
    with _configured() as folder:
        command = [*_ENTER, "sh", "-ec", _SET_UP, folder, sys.executable, *words]
        return _said(subprocess.run(command, capture_output=True, text=True, timeout=60, check=False))


@contextmanager
def _configured() -> Iterator[str]:
    """A folder with the configuration of the resolver."""
    if subprocess.run([*_ENTER, "true"], capture_output=True, check=False).returncode:
        why = "these tests need root, for a network namespace"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "resolv.conf").write_text("nameserver 127.0.0.1\n")
        Path(folder, "nsswitch.conf").write_text("hosts: dns\n")
        yield folder


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- inside the namespace


def _enter(folder: str) -> None:
    """Move this process, which was forked, into a namespace, as `unshare` does before it starts a program."""
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(_NEW_MOUNTS | _NEW_NETWORK) or system.mount(b"none", b"/", None, _PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no namespace")
    subprocess.run(["sh", "-ec", _SET_UP, folder, "true"], check=True)


class NameServer(asyncio.DatagramProtocol):
    """Serves one name. A look-up asks for both types of records, so each type has its own cycle."""

    def __init__(self, answers: Sequence[Sequence[str]]) -> None:
        self._answers: dict[int, Iterator[Sequence[str]]] = {kind: cycle(answers) for kind in _TYPES}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        end = data.index(b"\0", 12) + 5
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        found = [ip_address(text) for text in next(self._answers[kind])]
        records = [each.packed for each in found if each.version == _TYPES[kind]]
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(records), 0, 0)
        body = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in records)
        self._transport.sendto(head + data[12:end] + body, addr)


async def run(answers: list[list[str]], fetches: int, allowed: list[str], down: list[str], via: str) -> Outcome:
    loop = asyncio.get_running_loop()
    connections: Counter[str] = Counter()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        connections[address] += 1
        await read_head(reader)
        writer.write(answer(address, ("Connection", "close")))
        writer.close()

    for address in {"127.0.0.1", "::1", PUBLIC, PUBLIC_6} - set(down):
        await asyncio.start_server(converse, address, 80)
    await loop.create_datagram_endpoint(lambda: NameServer(answers), ("127.0.0.1", 53))
    looked_up = await loop.getaddrinfo(NAME, 80, type=socket.SOCK_STREAM)
    guard = AddressGuard(allowed)
    gateway = Gateway(guard, GatewayLimits(dns_cache_seconds=0))
    listener = await gateway.open(None)
    if via == "gateway":
        fetcher = HttpFetcher(HttpSettings(proxy=listener.url), "test")
    else:
        fetcher = HttpFetcher(HttpSettings(dns_cache_seconds=0), "test", guard)
    fetched = []
    for _ in range(fetches):
        try:
            response = await fetcher.fetch(Request(f"http://{NAME}/"))
            failure = listener.failure(NAME, 80)
            fetched.append(response.body.decode() if failure is None else failure.kind)
        except FetchError as error:
            fetched.append(error.kind)
    await fetcher.close()
    await gateway.close()
    return Outcome([str(address[0]) for *_, address in looked_up], fetched, connections)


if __name__ == "__main__":
    _enter(sys.argv[1])
    print(json.dumps(uvloop.run(run(**json.loads(sys.argv[2])))))
