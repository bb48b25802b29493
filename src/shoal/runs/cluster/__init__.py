"""Clusters of nodes: Runners crawl, Backup Runners stand by and take over when a Runner dies.

`open_coordinator` chooses the coordinator of a cluster by the scheme of its URL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import (
    CoordinatorAwayError,
    CoordinatorError,
    FrontierError,
    NameTakenError,
    SessionLostError,
    StoreAwayError,
)
from shoal.frontier import needs_extra
from shoal.ports import Coordinator

SESSION = 10.0
"""Seconds without a heartbeat after which a member is lost."""


def call_timeout(ttl: float) -> float:
    """Seconds that a call to a coordinator may take. It is a fraction of the session, so that a call that hangs on a
    dead connection does not cost the session. (With a session of two seconds it does.)"""
    return max(1.0, 0.4 * ttl)


@contextmanager
def coordinator_errors() -> Iterator[None]:
    """Turn errors of a store into errors of a coordinator."""
    try:
        yield
    except StoreAwayError as exc:
        raise CoordinatorAwayError(str(exc)) from exc
    except FrontierError as exc:
        raise CoordinatorError(str(exc)) from exc


def name_taken(cluster: str, name: str) -> NameTakenError:
    return NameTakenError(f"the cluster {cluster} already has a member named {name}; choose another name")


def membership_lost(cluster: str, name: str, ttl: float) -> SessionLostError:
    return SessionLostError(
        f"{name or 'this node'} is not a member of the cluster {cluster} any more: it has left, or sent no heartbeat "
        f"for {ttl:g} seconds"
    )


def unknown_cluster(server: str, cluster: str) -> CoordinatorError:
    return CoordinatorError(f"{server} knows no cluster {cluster}")


async def open_coordinator(url: str, cluster: str, *, ttl: float = SESSION) -> Coordinator:
    """``zookeeper://host:2181,host:2181/chroot``, ``redis://host`` or ``postgresql://host/database``.

    CoordinatorError if the URL or the server cannot be used, CoordinatorAwayError if the server cannot be reached.
    """
    scheme = url.partition(":")[0]
    if scheme == "zookeeper":
        with needs_extra("zookeeper", scheme):
            from shoal.runs.cluster.zookeeper import ZookeeperCoordinator
        return await ZookeeperCoordinator.open(url, cluster, ttl)
    if scheme.partition("+")[0] in ("redis", "rediss"):
        with needs_extra("redis", scheme):
            from shoal.runs.cluster.redis import RedisCoordinator
        return await RedisCoordinator.open(url, cluster, ttl)
    if scheme == "postgresql":
        with needs_extra("postgres", scheme):
            from shoal.runs.cluster.postgres import PostgresCoordinator
        return await PostgresCoordinator.open(url, cluster, ttl)
    raise CoordinatorError(
        f"unknown coordinator {scheme!r}; use zookeeper://host:2181, redis://host or postgresql://host/database"
    )
