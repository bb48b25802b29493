"""Clusters that heal: Runners work, Backup Runners stand by, and take over from the dead.

The coordinator of a cluster is opened by the scheme of its URL.
"""

from __future__ import annotations

from shoal.errors import CoordinatorError
from shoal.frontier import needs_extra
from shoal.ports import Coordinator

SESSION = 10.0
"""Seconds after which a member that is not heard of is lost."""


def call_timeout(ttl: float) -> float:
    """Seconds that a call to a coordinator may take at most: so little of a session that one which hangs, on a dead
    connection, does not cost it. (A session of two seconds it does.)"""
    return max(1.0, 0.4 * ttl)


async def open_coordinator(url: str, cluster: str, *, ttl: float = SESSION) -> Coordinator:
    """``zookeeper://host:2181,host:2181/chroot``, ``redis://host`` or ``postgresql://host/database``."""
    scheme = url.partition(":")[0]
    if scheme == "zookeeper":
        with needs_extra("zookeeper", scheme):
            from shoal.cluster.zookeeper import ZookeeperCoordinator
        return await ZookeeperCoordinator.open(url, cluster, ttl)
    if scheme.partition("+")[0] in ("redis", "rediss"):
        with needs_extra("redis", scheme):
            from shoal.cluster.redis import RedisCoordinator
        return await RedisCoordinator.open(url, cluster, ttl)
    if scheme == "postgresql":
        with needs_extra("postgres", scheme):
            from shoal.cluster.postgres import PostgresCoordinator
        return await PostgresCoordinator.open(url, cluster, ttl)
    raise CoordinatorError(
        f"no coordinator for {scheme!r}; use zookeeper://host:2181, redis://host or postgresql://host/database"
    )
