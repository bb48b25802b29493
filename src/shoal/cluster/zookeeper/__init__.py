"""The coordinator of a cluster on ZooKeeper."""

from __future__ import annotations

from shoal.cluster.zookeeper.coordinator import ZookeeperCoordinator as ZookeeperCoordinator
