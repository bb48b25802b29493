"""What is kept of a cluster in ZooKeeper: small facts in JSON, under ``/shoal/<cluster>``.

::

    config             how many Runners and Backup Runners there are to be
    members/<name>     ephemeral: a living member. Its mtime is when it was last heard of
    roster/<name>      who has joined and not left: without its member, it was lost and nobody has told so yet
    slots/<index>      ephemeral: somebody has the slot
    last/<index>       who has it, or had it last, and under which epoch. Changes only together with slots/<index>, or
                       stays behind when its holder was lost
    events/<number>    the last that happened
    clock              written by whoever looks, to know the server's time

The ephemeral ones end with the session of their member. They end in one step: nobody sees a slot of a lost member.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from msgspec import Struct

from shoal.errors import CoordinatorError
from shoal.ports import ClusterStep


class MemberRecord(Struct, frozen=True):
    """What a member says of itself."""

    doing: str = ""
    fit: bool = True
    where: str = ""


class SlotRecord(Struct, frozen=True):
    """Who has a slot; for people who look at the znodes, since ``last`` says the same."""

    name: str


class LastRecord(Struct, frozen=True):
    """The last holder of a slot. ``name`` is empty if it gave the slot back, and stays if it was lost."""

    name: str
    epoch: int


class EventRecord(Struct, frozen=True, omit_defaults=True):
    """Something that happened, at the time at which its znode was made."""

    what: ClusterStep
    member: str
    slot: int | None = None
    epoch: int = 0
    detail: str = ""


class Paths:
    """Where the znodes of one cluster are."""

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
        """All that must be there before the cluster has its config."""

    def member(self, name: str) -> str:
        return f"{self.members}/{as_element(name)}"

    def enrolled(self, name: str) -> str:
        return f"{self.roster}/{as_element(name)}"

    def slot(self, index: int) -> str:
        return f"{self.slots}/{index}"

    def last_of(self, index: int) -> str:
        return f"{self.last}/{index}"


def as_element(name: str) -> str:
    """Any name as one element of a path."""
    if not name:
        raise CoordinatorError("clusters and members need a name")
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


def as_name(element: str) -> str:
    return unquote(element)
