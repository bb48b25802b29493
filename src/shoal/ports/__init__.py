"""The contracts between the parts of Shoal: values, and Protocols without behaviour.

A `Frontier` is composed of `Queue`, `Roles`, `Workers`, `ItemLog`, `Hosts` and `Inspection`. Code that uses a frontier
declares only the parts that it needs. The laws that every frontier keeps are in ``docs/architecture.md``;
``shoal.testing`` checks them on a backend.
"""

from shoal.ports.cluster import ClusterEvent, ClusterStep, ClusterView, Coordinator, Counts, Member, Slot
from shoal.ports.documents import Document, Documents
from shoal.ports.fetching import Fetch, Fetcher, Middleware
from shoal.ports.hosts import Hosts, HostState, HostUpdate
from shoal.ports.inspection import (
    MAX_RETRIED,
    REPAIRED_LEASE,
    Event,
    EventKind,
    Fault,
    History,
    Inspection,
    LeaseHolder,
    LeaseKey,
    LeaseOutcome,
    Rewind,
    Stats,
    Waits,
)
from shoal.ports.items import ItemLog, LoggedItem, OutputCount, Sink, SinkOptions
from shoal.ports.queue import (
    Completion,
    CookieWrite,
    Failure,
    FrontierOptions,
    Holder,
    Lease,
    Leased,
    Overflow,
    Pushed,
    Queue,
    RequestState,
)
from shoal.ports.roles import Claim, Roles, RoleState
from shoal.ports.runs import Run, RunState
from shoal.ports.store import Frontier, ItemSource, Room, RunView, Store
from shoal.ports.workers import Heartbeat, SilentWorker, Workers, WorkerState

__all__ = [
    "MAX_RETRIED",
    "REPAIRED_LEASE",
    "Claim",
    "ClusterEvent",
    "ClusterStep",
    "ClusterView",
    "Completion",
    "CookieWrite",
    "Coordinator",
    "Counts",
    "Document",
    "Documents",
    "Event",
    "EventKind",
    "Failure",
    "Fault",
    "Fetch",
    "Fetcher",
    "Frontier",
    "FrontierOptions",
    "Heartbeat",
    "History",
    "Holder",
    "HostState",
    "HostUpdate",
    "Hosts",
    "Inspection",
    "ItemLog",
    "ItemSource",
    "Lease",
    "LeaseHolder",
    "LeaseKey",
    "LeaseOutcome",
    "Leased",
    "LoggedItem",
    "Member",
    "Middleware",
    "OutputCount",
    "Overflow",
    "Pushed",
    "Queue",
    "RequestState",
    "Rewind",
    "RoleState",
    "Roles",
    "Room",
    "Run",
    "RunState",
    "RunView",
    "SilentWorker",
    "Sink",
    "SinkOptions",
    "Slot",
    "Stats",
    "Store",
    "Waits",
    "WorkerState",
    "Workers",
]
