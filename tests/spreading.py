"""How the tests are spread over processes: tests that use the same costly things stay together, all others move freely,
and what takes long begins first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest

TOGETHER = (
    "acceptance/test_clusters.py",
    "acceptance/test_cluster_outages.py",
    "acceptance/test_api.py",
    "acceptance/test_celery.py",
    "acceptance/test_packages.py",
)
"""Files whose tests share servers that take long to start or packages that take long to download, or of which many at
once would starve each other: five nodes with short sessions."""
BY_BACKEND = ("test_killed_between_two_steps[",)
"""Tests that look at what was done once for each backend, the last of their parameters."""
ALONE = ("acceptance/", "contracts/test_frontier.py::test_random_steps")


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, one after the other."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    if file in TOGETHER:
        return file
    if test.startswith(BY_BACKEND):
        return f"{file}::{test.partition('[')[0]}-{test.rpartition('-')[2]}"
    return nodeid if f"{file}::{test}".startswith(ALONE) else file


def turn_of(nodeid: str) -> int:
    """Lower ones come first, so that the short ones fill the gaps at the end."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    if file in TOGETHER or test.startswith(BY_BACKEND):
        return 0
    return next(turn for turn, start in enumerate((*ALONE, "contracts/", ""), 1) if f"{file}::{test}".startswith(start))


class Spreading(LoadScopeScheduling):
    """xdist's scheduler of groups, with the groups and the order from above."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # it would begin with those of the most tests, not of the longest

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
