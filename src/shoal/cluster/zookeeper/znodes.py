"""The znodes of a cluster: small JSON records under ``/shoal/<cluster>``.

::

    config             wanted numbers of Runners and Backup Runners
    members/<name>     ephemeral: a member. Its mtime is the time of its last heartbeat
    roster/<name>      a member that joined and did not leave. Without members/<name> it was lost, and no event is
                       recorded yet
    slots/<index>      ephemeral: the slot is held
    last/<index>       the holder or last holder of the slot, and its epoch. It changes together with slots/<index>, and
                       stays when its holder is lost
    events/<number>    the latest events
    clock              written to learn the server's time

ZooKeeper deletes all ephemeral znodes of a lost member in one step, so nobody sees a slot of a lost member.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from msgspec import Struct

from shoal.errors import CoordinatorError
from shoal.ports import ClusterStep


class MemberRecord(Struct, frozen=True):
    """The state of a member."""

    doing: str = ""
    fit: bool = True
    where: str = ""


class SlotRecord(Struct, frozen=True):
    """The holder of a slot, for people who look at the znodes. ``last`` has it too."""

    name: str


class LastRecord(Struct, frozen=True):
    """The last holder of a slot. ``name`` is empty if it released the slot, and stays if it was lost."""

    name: str
    epoch: int


class EventRecord(Struct, frozen=True, omit_defaults=True):
    """An event. Its time is the creation time of its znode."""

    what: ClusterStep
    member: str
    slot: int | None = None
    epoch: int = 0
    detail: str = ""


class Paths:
    """The paths of the znodes of one cluster."""

    def __init__(self, chroot: str, cluster: str) -> None:
        root = f"{chroot}/shoal/{as_element(cluster)}"
        self.config = f"{root}/config"
        self.clock = f"{root}/clock"
        self.members = f"{root}/members"
        self.roster = f"{root}/roster"
        self.slots = f"{root}/slots"
        self.last = f"{root}/last"
        self.events = f"{root}/events"
        self.folders = (self.clock, self.members, self.roster, self.slots, self.last, self.events)
        """The znodes to create before the config."""

    def member(self, name: str) -> str:
        return f"{self.members}/{as_element(name)}"

    def enrolled(self, name: str) -> str:
        return f"{self.roster}/{as_element(name)}"

    def slot(self, index: int) -> str:
        return f"{self.slots}/{index}"

    def last_of(self, index: int) -> str:
        return f"{self.last}/{index}"


def as_element(name: str) -> str:
    """Encode any name as one element of a path."""
    if not name:
        raise CoordinatorError("clusters and members need a name")
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def as_name(element: str) -> str:
    return unquote(element)
