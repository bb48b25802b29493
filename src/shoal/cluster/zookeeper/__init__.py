"""The members and slots of a cluster on a ZooKeeper server, or an ensemble of them."""

from __future__ import annotations

from shoal.cluster.zookeeper.coordinator import ZookeeperCoordinator as ZookeeperCoordinator
