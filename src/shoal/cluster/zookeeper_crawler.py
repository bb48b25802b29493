"""A node whose coordinator is ZooKeeper, and that has its role from the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from shoal.cluster.node import Node, NodeOptions
from shoal.config import Config, Resolved
from shoal.errors import ConfigError
from shoal.spider import Spider


class ZookeeperCrawler(Node):
    """A node of a cluster on ZooKeeper. It takes part in the election when it is created::

    crawler = ZookeeperCrawler(runner=3, backup=2, name="crawler_<index>", zk_hosts="localhost:2181")
    print(crawler.name, crawler.role)
    crawler.run(Books)
    """

    def __init__(
        self,
        spider: Spider | type[Spider] | None = None,
        config: Config | Resolved | Mapping[str, object] | None = None,
        *,
        runner: int,
        backup: int,
        name: str = "crawler_<index>",
        zk_hosts: str = "localhost:2181",
        **options: Unpack[NodeOptions],
    ) -> None:
        """``zk_hosts``: ``host:port``, several separated by commas. The other arguments are those of `Node`. It joins
        the cluster: see `Node.join` for errors."""
        if "://" in zk_hosts:
            raise ConfigError(f"zk_hosts must be host:port, several separated by commas, not {zk_hosts!r}")
        super().__init__(
            spider, config, runner=runner, backup=backup, name=name, coordinator=f"zookeeper://{zk_hosts}", **options
        )
        self.join()
