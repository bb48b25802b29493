"""A name server whose answers change, and a guarded fetcher that asks it, in a network of their own.

The network has a loopback and nothing else, so no packet leaves it. Two of its addresses are public elsewhere: they
stand for a site. The rest is as it always is: the system's resolver and its configuration, the look-ups, the sockets.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import uvloop

from shoal.config import HttpSettings
from shoal.errors import FetchError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.http import HttpFetcher
from shoal.http import Request
from tests.servers import answer, read_head

NAME = "rebinding.test"
PUBLIC = "8.8.8.8"
PUBLIC_6 = "2001:4860:4860::8888"

# What is changed here is changed within: it begins with the command that goes there.
_APART = ["unshare", "--mount", "--net"]
_FURNISHED = f"""
ip link set lo up
ip address add {PUBLIC}/32 dev lo
ip address add {PUBLIC_6}/128 dev lo nodad
mount --bind "$0/resolv.conf" /etc/resolv.conf
mount --bind "$0/nsswitch.conf" /etc/nsswitch.conf
exec "$@"
"""

_TYPES = {1: 4, 28: 6}  # A and AAAA, and the version of IP that they are for


class Outcome(NamedTuple):
    first: list[str]
    """What the name was when it was looked up before all fetches, as one does who checks a URL and then opens it."""
    fetched: list[str]
    """Of each fetch, one after the other: the address that served it, or the kind of the error."""
    connections: dict[str, int]
    """How often each address was connected to."""


def fetch_while_rebinding(
    answers: Sequence[Sequence[str]], *, fetches: int, allowed: Sequence[str] = (), down: Sequence[str] = ()
) -> Outcome:
    """What comes of it when each look-up of a name gets the next of these answers, and the first after the last."""
    task = json.dumps({"answers": answers, "fetches": fetches, "allowed": allowed, "down": down})
    return Outcome(*json.loads(said_apart("-m", "tests.acceptance.rebinding", task)))


def said_apart(*words: str) -> str:
    """What Python says when it is run with these words in a network of its own."""
    if subprocess.run([*_APART, "true"], capture_output=True, check=False).returncode:
        why = "only root may have a network of its own"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "resolv.conf").write_text("nameserver 127.0.0.1\n")
        Path(folder, "nsswitch.conf").write_text("hosts: dns\n")
        command = [*_APART, "sh", "-ec", _FURNISHED, folder, sys.executable, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- within that network


class NameServer(asyncio.DatagramProtocol):
    """Has one name. A look-up of both kinds of addresses is two questions, so each kind has its own turn."""

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


async def run(answers: list[list[str]], fetches: int, allowed: list[str], down: list[str]) -> Outcome:
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
    fetcher = HttpFetcher(HttpSettings(dns_cache_seconds=0), "test", AddressGuard(allowed))
    fetched = []
    for _ in range(fetches):
        try:
            fetched.append((await fetcher.fetch(Request(f"http://{NAME}/"))).body.decode())
        except FetchError as error:
            fetched.append(error.kind)
    await fetcher.close()
    return Outcome([str(address[0]) for *_, address in looked_up], fetched, connections)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(**json.loads(sys.argv[1])))))
