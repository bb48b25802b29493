"""The coordinator of a cluster: members, slots, and events."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from msgspec import Struct


class Counts(Struct, frozen=True):
    """How many members of a cluster crawl (Runners), and how many stand by (Backup Runners)."""

    runner: int
    backup: int


class Member(Struct, frozen=True, kw_only=True):
    """A live member of a cluster."""

    name: str
    age: float
    """Seconds since its last heartbeat, by the coordinator's clock."""
    fit: bool = True
    """Whether it could crawl: it runs, and reaches the frontier."""
    doing: str = ""
    where: str = ""
    """Its machine and process."""


class Slot(Struct, frozen=True):
    """The right to crawl. ``epoch`` is that of its holder, or of its last holder if it is free. It is the time when the
    slot was taken, in microseconds since 1970, or the epoch before plus 1 if that is later."""

    index: int
    holder: str
    """The name of a member, or an empty string."""
    epoch: int

    @property
    def taken_at(self) -> float:
        """When its holder took it, in seconds since 1970."""
        return self.epoch / 1e6


class ClusterView(Struct, frozen=True, kw_only=True):
    """A cluster at one moment: its live members, and every slot that is or was held, by index."""

    counts: Counts
    members: tuple[Member, ...]
    slots: tuple[Slot, ...]


ClusterStep: TypeAlias = Literal["joined", "left", "lost", "elected", "took over", "retired", "scaled"]


class ClusterEvent(Struct, frozen=True, kw_only=True):
    """Something that happened in a cluster. For ``took over``, ``detail`` names the lost member."""

    at: float
    what: ClusterStep
    member: str
    slot: int | None = None
    epoch: int = 0
    detail: str = ""


class Coordinator(Protocol):
    """The members of one cluster and their slots. Only the server's clock counts.

    Every method may raise CoordinatorAwayError. Then it is unknown whether the call took effect. Every call can be
    repeated.
    """

    ttl: float
    """Seconds without a heartbeat after which a member is lost, with its slot. As granted by the server."""

    async def join(self, name: str, counts: Counts, where: str = "", *, again: bool = False) -> None:
        """Become a member. NameTakenError while another live member has that name.

        A cluster without members gets these counts; one with members keeps its own. A member that joins ``again`` after
        its session was lost may not know the newest counts, so an existing cluster keeps its counts."""
        ...

    async def beat(self, doing: str = "", *, fit: bool = True) -> ClusterView:
        """Send a heartbeat and return the cluster. SessionLostError if this member was lost."""
        ...

    async def take(self, index: int) -> int | None:
        """Take a slot and return its new epoch, later than all before. None if another member holds it. A repeat by the
        holder returns the same epoch. SessionLostError if this member was lost."""
        ...

    async def retire(self) -> None:
        """Release the slot that this member holds, if any."""
        ...

    async def leave(self) -> None:
        """Leave the cluster and release the slot."""
        ...

    async def scale(self, counts: Counts) -> None:
        """Change how many members should crawl and stand by."""
        ...

    async def observe(self) -> ClusterView:
        """The cluster, without being a member. CoordinatorError if it never existed."""
        ...

    async def events(self, limit: int = 20) -> list[ClusterEvent]:
        """The last events, oldest first."""
        ...

    async def wait(self, seconds: float) -> None:
        """Wait until something happens in the cluster, at most this long. It may return early."""
        ...

    async def close(self) -> None: ...
