"""A node whose coordinator is ZooKeeper, and that has its role from the beginning."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Unpack

from shoal.cluster.node import Node, NodeOptions
from shoal.config import Config, Resolved
from shoal.errors import ConfigError
from shoal.runs.worker_session import machine_of, new_worker_id
from shoal.spider import Spider

log = logging.getLogger("shoal.cluster")


class ZookeeperCrawler(Node):
    """A node of a cluster on ZooKeeper. It takes part in the election when it is created::

    crawler = ZookeeperCrawler(runner=3, backup=2, name="crawler_<index>", zk_hosts="localhost:2181")
    print(crawler.name, crawler.role)
    crawler.run(Books)
    """

    _has_own_file = False

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
        the cluster: see `Node.join` for errors. If no frontier is configured, the nodes of one machine share a SQLite
        file in the working directory, named like the cluster."""
        if "://" in zk_hosts:
            raise ConfigError(f"zk_hosts must be host:port, several separated by commas, not {zk_hosts!r}")
        super().__init__(
            spider, config, runner=runner, backup=backup, name=name, coordinator=f"zookeeper://{zk_hosts}", **options
        )
        self.join()

    def join(self) -> None:
        super().join()
        self._check_machines()

    def _check_frontier(self) -> None:
        """Without a frontier, use a file: ZooKeeper alone is enough for the nodes of one machine."""
        if self.config.frontier == Config().frontier:
            self.config = self.config.with_settings({"frontier": f"sqlite:///{_as_file(self.cluster)}.db"})
            self._has_own_file = True
            log.warning("no frontier is configured: the nodes of this machine share %s", self.config.frontier)
            self._check_machines()
        super()._check_frontier()

    def _check_machines(self) -> None:
        """ConfigError if a member is on another machine, where it has another file."""
        if not self._has_own_file or self._candidate is None:
            return
        here = machine_of(new_worker_id())
        others = [member for member in self._candidate.members if machine_of(member.where) != here]
        if others:
            self.close()
            raise ConfigError(
                f"{others[0].name} runs on another machine ({others[0].where}), which cannot use the file of this one; "
                "set the frontier to redis://host or postgresql://host/database"
            )


def _as_file(name: str) -> str:
    """The name of a cluster without characters that mean something in a path or a URL."""
    return re.sub(r"[^\w.-]", "_", name)
