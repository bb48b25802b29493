"""A name server on the loopback that never answers for some zones, and processes that ask it.

A process asks it because it has its own /etc/resolv.conf, in its own mount namespace. Everything else is shared with
the tests: the network, the files, the sites.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

_SET_UP = 'for name in "$0"/*; do mount --bind "$name" "/etc/${name##*/}"; done; exec "$@"'
_VERSIONS = {1: 4, 28: 6}  # A and AAAA records, and their versions of IP
_NO_ERROR, _FAILED, _NO_SUCH_NAME = 0x8180, 0x8182, 0x8183


class NameServer:
    """Answers for ``*.good.test`` with 127.0.0.1 and for the names of ``zone``. It never answers for names with
    ``silent`` in them, and fails for ``broken.test``. Other names do not exist."""

    def __init__(self, folder: Path, zone: Mapping[str, Sequence[str]] = {}) -> None:
        self._zone = dict(zone)
        self._names: Counter[str] = Counter()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self._any_address(), 53))
        self._etc = folder / "etc"
        self._etc.mkdir()
        # The resolver of the system waits for longer than any test.
        options = "options timeout:30 attempts:5"
        self.configure("resolv.conf", f"nameserver {self._socket.getsockname()[0]}\nsearch corp.test\n{options}\n")
        self.configure("nsswitch.conf", "hosts: files dns\n")
        threading.Thread(target=self._serve, daemon=True).start()

    @staticmethod
    def _any_address() -> str:
        return f"127.{random.randrange(1, 255)}.{random.randrange(255)}.{random.randrange(1, 255)}"

    def configure(self, name: str, text: str) -> None:
        """Write a file that the processes see in /etc."""
        (self._etc / name).write_text(text)

    def asking(self, *command: str) -> list[str]:
        """A command whose process asks this server."""
        return ["unshare", "--mount", "sh", "-ec", _SET_UP, str(self._etc), *command]

    def asked(self, zone: str) -> int:
        """For how many names of a zone it was asked."""
        return sum(name.endswith(f".{zone}") for name in [*self._names])

    def questions(self, name: str) -> int:
        """How often it was asked for a name. A lookup asks twice, for both kinds of addresses."""
        return self._names[name]

    def add(self, name: str, address: str) -> None:
        """Answer for a name from now on."""
        self._zone[name] = [address]

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, client = self._socket.recvfrom(4096)
                if reply := self._reply(query):
                    self._socket.sendto(reply, client)
            except OSError:  # closed
                return

    def _reply(self, query: bytes) -> bytes | None:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        name, (kind,) = ".".join(labels).lower(), struct.unpack("!H", query[at + 1 : at + 3])
        self._names[name] += 1
        if "silent" in name and name not in self._zone:
            return None
        addresses = self._zone.get(name, ["127.0.0.1"] if name.endswith(".good.test") else [])
        found = [address.packed for address in map(ip_address, addresses) if address.version == _VERSIONS.get(kind)]
        code = _FAILED if name == "broken.test" else _NO_ERROR if addresses else _NO_SUCH_NAME
        head = query[:2] + struct.pack("!HHHHH", code, 1, len(found), 0, 0)
        records = [struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(each)) + each for each in found]
        return head + query[12 : at + 5] + b"".join(records)


@contextmanager
def name_server(folder: Path, zone: Mapping[str, Sequence[str]] = {}) -> Iterator[NameServer]:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        why = "these tests need root, for a mount namespace"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    server = NameServer(folder, zone)
    yield server
    server.close()
