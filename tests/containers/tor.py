"""A crawl through Tor in a container. The Tor network and the site are on this machine, outside the container."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from tests.containers.checks import Failed
from tests.containers.engine import Podman
from tests.support.tor_network import NAMES, TorNetwork, tor_network
from tests.support.tor_site import TorSite, tor_site

PAGES = 2
Network: TypeAlias = tuple[TorSite, TorNetwork]


@contextmanager
def starting_network() -> Iterator[Future[Network]]:
    """A site and a Tor network, which starts while the block runs: that takes half a minute."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:

        def start() -> Network:
            site = stack.enter_context(tor_site())
            return site, stack.enter_context(tor_network(site.port))

        yield pool.submit(start)


def check_tor(podman: Podman, confined: list[str], image: str, site: TorSite, network: TorNetwork) -> None:
    """Crawl a list and its pages. All requests must come from exits of the network."""
    files = [f"--volume={path}:{path}:ro" for path in (network.torrc, network.folder / "empty")]
    said = podman(
        *confined, "--network=host", "--tmpfs=/tmp:size=512m,mode=1777", *files, image, "crawl",
        f"http://{NAMES[0]}:{site.port}/list?count={PAGES}", "--tor", f"--set=tor.torrc={network.torrc}",
        "--delay=0", "-o", "-",
    )  # fmt: skip
    found = sorted(json.loads(line)["url"].partition(str(site.port))[2] for line in said.splitlines())
    if found != ["/list?count=2", *(f"/page/{number}?wait=0" for number in range(PAGES))]:
        raise Failed(said)
    visits = site.visits("/")
    if others := {visit.address for visit in visits} - network.exits:
        raise Failed(f"requests came from {sorted(others)}, which are no exits")
