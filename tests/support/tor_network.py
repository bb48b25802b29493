"""A private Tor network on the loopback device: three authorities, six exits, and an onion service.

Every relay has its own loopback address, and connects to sites from it. So a site can tell the exits apart. The site
itself is at an address of this machine that is not on the loopback device, because Tor ignores the addresses of relays
for connections to the loopback device. The packets do not leave the machine.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

AUTHORITIES = range(1, 4)
EXITS = range(11, 17)
OR_PORT = 5000
DIR_PORT = 7000
NAMES = tuple(f"shop{number}.test" for number in range(8))
"""Names that only the daemons of the clients know."""
_NO_AUTHORITY = "none 127.0.0.1:1 ffffffffffffffffffffffffffffffffffffffff"
_START_TIMEOUT = 150.0

_COMMON = """
TestingTorNetwork 1
AssumeReachable 1
PathsNeededToBuildCircuits 0.25
ShutdownWaitLength 0
GeoIPFile {empty}
GeoIPv6File {empty}
"""
_AUTHORITY = """
AuthoritativeDirectory 1
V3AuthoritativeDirectory 1
ContactInfo tests@example.com
ExitRelay 0
TestingV3AuthInitialVotingInterval 5
TestingV3AuthInitialVoteDelay 2
TestingV3AuthInitialDistDelay 2
V3AuthVotingInterval 20
V3AuthVoteDelay 3
V3AuthDistDelay 3
V3AuthNIntervalsValid 30
TestingDirAuthVoteExit *
TestingDirAuthVoteGuard *
TestingDirAuthVoteHSDir *
TestingMinExitFlagThreshold 1
"""
_EXIT = """
ExitRelay 1
ExitPolicy accept *:*
ExitPolicyRejectPrivate 0
IPv6Exit 0
"""


def own_address() -> str:
    """An address of this machine that is not a loopback address. Nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
    assert not address.startswith("127."), "these tests need an address that is not on the loopback device"
    return address


class TorNetwork:
    """The network. ``torrc`` is the configuration of its clients."""

    def __init__(self, folder: Path, site_port: int) -> None:
        """``site_port``: the onion service leads to this port."""
        self.folder = folder
        self._net = f"127.{1 + secrets.randbelow(250)}.{1 + secrets.randbelow(250)}"
        self.site_address = own_address()
        self.torrc = folder / "client.torrc"
        self.onion = ""
        self._site_port = site_port
        self._processes: list[subprocess.Popen[bytes]] = []
        self._empty = folder / "empty"
        self._empty.write_text("")

    def address(self, number: int) -> str:
        return f"{self._net}.{number}"

    @property
    def exits(self) -> set[str]:
        """The addresses that sites see."""
        return {self.address(number) for number in EXITS}

    @property
    def places(self) -> list[tuple[str, int]]:
        """All addresses that a client connects to."""
        relays = [(self.address(number), OR_PORT) for number in (*AUTHORITIES, *EXITS)]
        return relays + [(self.address(number), DIR_PORT) for number in AUTHORITIES]

    def start(self) -> None:
        with ThreadPoolExecutor(2) as pool:
            lines = list(pool.map(self._make_authority, AUTHORITIES))
        self._common = "\n".join(lines) + _COMMON.format(empty=self._empty)
        maps = "".join(f"MapAddress {name} {self.site_address}\n" for name in NAMES)
        self.torrc.write_text(self._common + maps)
        for number in AUTHORITIES:
            self._start_relay(number, f"DirPort {self.address(number)}:{DIR_PORT}\n{_AUTHORITY}")
        for number in EXITS:
            self._start_relay(number, _EXIT)
        self._start_onion_service()
        self._wait()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """No relay runs while the block does."""
        self.close()
        try:
            yield
        finally:
            self._processes = [subprocess.Popen(process.args) for process in self._processes]

    def _data(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _make_authority(self, number: int) -> str:
        """Make the keys of an authority. Return the line that others know it by."""
        folder = self._data(f"relay{number}")
        keys = folder / "keys"
        keys.mkdir(mode=0o700)
        certificate = keys / "authority_certificate"
        subprocess.run(
            ["tor-gencert", "--create-identity-key", "--passphrase-fd", "0", "-m", "12",
             "-a", f"{self.address(number)}:{DIR_PORT}", "-i", keys / "authority_identity_key",
             "-s", keys / "authority_signing_key", "-c", certificate],
            input=b"test\n", check=True, capture_output=True,
        )  # fmt: skip
        identity = re.search(r"^fingerprint (\w+)", certificate.read_text(), re.MULTILINE)
        said = subprocess.run(
            ["tor", "--list-fingerprint", "--orport", "1", "--datadirectory", folder, "--dirauthority", _NO_AUTHORITY,
             "-f", self._empty, "--defaults-torrc", self._empty],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        fingerprint = said.splitlines()[-1].split(None, 1)[1].strip()
        assert identity is not None
        return (
            f"DirAuthority relay{number} orport={OR_PORT} no-v2 v3ident={identity[1]} "
            f"{self.address(number)}:{DIR_PORT} {fingerprint}"
        )

    def _start_relay(self, number: int, more: str) -> None:
        address = self.address(number)
        self._start(
            f"relay{number}",
            f"Nickname relay{number}\nAddress {address}\nORPort {address}:{OR_PORT}\nOutboundBindAddress {address}\n"
            + more,
        )

    def _start_onion_service(self) -> None:
        folder = self._data("onion")
        self._start(
            "onion", f'HiddenServiceDir "{folder / "service"}"\nHiddenServicePort 80 127.0.0.1:{self._site_port}\n'
        )

    def _start(self, name: str, more: str) -> None:
        folder = self._data(name)
        torrc = folder / "torrc"
        torrc.write_text(f'{self._common}DataDirectory "{folder}"\nSocksPort 0\nLog notice file {folder}/log\n{more}')
        self._processes.append(subprocess.Popen(["tor", "--quiet", "-f", torrc, "--defaults-torrc", self._empty]))

    def _wait(self) -> None:
        """Until all relays are in the consensus, and the onion service is published."""
        until = time.monotonic() + _START_TIMEOUT
        name = self.folder / "onion" / "service" / "hostname"
        while not (name.exists() and all(self._is_complete(number) for number in AUTHORITIES)):
            ended = [process.args for process in self._processes if process.poll() is not None]
            assert not ended, f"a relay ended: {ended}"
            assert time.monotonic() < until, f"no Tor network after {_START_TIMEOUT:g} s, see {self.folder}"
            time.sleep(0.2)
        self.onion = name.read_text().strip()

    def _is_complete(self, number: int) -> bool:
        consensus = self.folder / f"relay{number}" / "cached-microdesc-consensus"
        if not consensus.exists():
            return False
        return consensus.read_text().count("\nr ") == len(AUTHORITIES) + len(EXITS)


@contextmanager
def tor_network(site_port: int) -> Iterator[TorNetwork]:
    """A network for as long as the block runs."""
    folder = Path(mkdtemp(prefix="shoal-network-"))
    made = TorNetwork(folder, site_port)
    try:
        made.start()
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


def daemons_below(folder: Path) -> dict[int, int]:
    """The Tor daemons whose data is below a folder: each with its parent."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        is_daemon = os.path.basename(words[0]) == "tor" and fields[0] != "Z" and "--verify-config" not in words
        if is_daemon and any(str(folder) in word for word in words[1:]):
            found[int(entry.name)] = int(fields[1])
    return found
