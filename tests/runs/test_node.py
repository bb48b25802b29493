"""Options of a node, and how long it considers its session valid."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal import Config, Node, Spider, ZookeeperCrawler
from shoal.errors import ConfigError, CoordinatorError
from shoal.runs.cluster import open_coordinator
from shoal.runs.cluster.slots import NodeSession

REDIS = Config(frontier="redis://127.0.0.1:1/0")


class Pages(Spider):
    name = "pages"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"runner": 0}, "runner"),
        ({"runner": 1, "backup": -1}, "backup"),
        ({"name": ""}, "name of a node"),
        ({"name": "  "}, "name of a node"),
        ({"name": "x" * 201}, "name of a node"),
        ({"name": "a\0b"}, "name of a node"),
        ({"cluster": "\t"}, "name of a cluster"),
        ({"session": 0}, "session"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Node(Pages, REDIS, **options)
    with pytest.raises(TypeError, match="runners"):
        Node(Pages, REDIS, runners=3)  # type: ignore[call-arg]


def test_a_frontier_that_nodes_cant_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory"):
        Node(Pages, Config())
    with pytest.raises(ConfigError, match="no coordinator configured"):
        Node(Pages, Config(frontier="sqlite:///x.db"))
    with pytest.raises(ConfigError, match="zk_hosts"):
        ZookeeperCrawler(Pages, REDIS, runner=1, backup=0, name="a", zk_hosts="zookeeper://localhost:2181")


def test_what_is_not_said_comes_from_the_configuration() -> None:
    config = REDIS.with_settings({"cluster.runner": 3, "cluster.backup": 2, "cluster.session": 4.0})
    node = Node(Pages, config, name="crawler_1")
    assert (node.counts.runner, node.counts.backup, node.session) == (3, 2, 4.0)
    assert (node.run_id, node.cluster, node.coordinator) == ("pages", "pages", "redis://127.0.0.1:1/0")
    assert node.role is None
    assert not node.event_counts
    named = Node(Pages(), config, runner=1, name="a", run_id="monday", coordinator="zookeeper://h1:1,h2:2")
    assert (named.cluster, named.coordinator, named.counts.runner) == ("monday", "zookeeper://h1:1,h2:2", 1)
    assert Node(Pages, config).name != Node(Pages, config).name


def test_a_spider_can_be_registered_later() -> None:
    node = Node(config=REDIS.with_settings({"project_name": "p"}))
    assert (node.cluster, node.run_id) == ("p", "")
    with pytest.raises(ConfigError, match=r"no spider: pass a Spider class to run\(\) or register\(\)"):
        node.run()
    node.register(Pages)
    assert (node.cluster, node.run_id, node.spider.name) == ("p", "p.pages", "pages")
    unshared = Node(config=Config().with_settings({"cluster.coordinator": "zookeeper://127.0.0.1:1"}))
    with pytest.raises(ConfigError, match="memory"):
        unshared.register(Pages)


@pytest.mark.parametrize("url", ["ftp://host", "zookeeper:", "zookeeper:///chroot", "memory:", "sqlite:///x.db"])
def test_coordinators_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.coordinator"):
        Config().with_settings({"cluster.coordinator": url})


@pytest.mark.asyncio
async def test_no_coordinator_of_that_kind() -> None:
    with pytest.raises(CoordinatorError, match="zookeeper://"):
        await open_coordinator("ftp://host", "c")


def test_a_session_ends_before_its_end() -> None:
    session = NodeSession(8.0)
    assert not session.is_good
    session.renewed(time.monotonic() - 6.5)
    assert session.is_good
    assert 0 < session.left < 0.6
    session.renewed(time.monotonic() - 7.1)
    assert not session.is_good
    session.renewed(time.monotonic())
    session.lost()
    assert not session.is_good
    assert session.interval == pytest.approx(8 / 3)
