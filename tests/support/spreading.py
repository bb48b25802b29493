"""A scheduler for pytest-xdist. Tests that share expensive servers run in one process; slow tests start first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.workermanage import WorkerController

TOGETHER = (
    "acceptance/test_tor.py",
    "acceptance/test_clusters.py",
    "acceptance/test_api.py",
    "acceptance/test_rendering_api.py",
    "acceptance/test_cluster_outages.py",
    "acceptance/test_celery.py",
    "acceptance/test_packages.py",
    "acceptance/test_object_storage.py",
    "acceptance/test_zookeeper_crawler.py",
    "scrapy/differential/test_projects.py",
)
"""Files whose tests share servers that take long to start or packages that take long to download, or of which many at
once would starve each other: five nodes with short sessions. The slowest comes first: it starts first."""
FOLDERS = ("dashboard/",)
"""Folders whose tests share servers."""
BY_BACKEND = ("test_killed_between_two_steps[",)
"""Tests that share a fixture per backend. The backend is the last of their parameters."""
ALONE = ("acceptance/", "scrapy/differential/test_fleet.py", "contracts/test_frontier.py::test_random_steps")


def group_of(nodeid: str) -> str:
    """The group of a test. Tests of one group run in one process, one after the other."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    if file in TOGETHER:
        return file
    if file.startswith(FOLDERS):
        return file.partition("/")[0]
    if test.startswith(BY_BACKEND):
        return f"{file}::{test.partition('[')[0]}-{test.rpartition('-')[2]}"
    return nodeid if f"{file}::{test}".startswith(ALONE) else file


def turn_of(nodeid: str) -> int:
    """The rank of a test. Lower ranks start first, so that short tests fill the gaps at the end."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    if file in TOGETHER:
        return TOGETHER.index(file)
    if file.startswith(FOLDERS) or test.startswith(BY_BACKEND):
        return len(TOGETHER)
    starts = (*ALONE, "browser/", "contracts/", "")
    return next(len(TOGETHER) + 1 + turn for turn, start in enumerate(starts) if f"{file}::{test}".startswith(start))


class Spreading(LoadScopeScheduling):
    """xdist's scheduler of groups, with the groups and the order of this module."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # otherwise it starts with the largest groups, not with the slowest

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand out the tests of a process that died. The one that it died of has failed, and does not run again."""
        workload = self.assigned_work[node]
        for group, tests in list(workload.items()):
            workload[group] = {test: False for test, is_done in tests.items() if not is_done}
            if not workload[group]:  # a process that gets nothing to do reports nothing, and never gets more
                del workload[group]
        died_of = next((test for tests in workload.values() for test in tests), None)
        if died_of is not None:
            del workload[group_of(died_of)][died_of]
            if not workload[group_of(died_of)]:
                del workload[group_of(died_of)]
        super().remove_node(node)
        return died_of

    def _reschedule(self, node: WorkerController) -> None:
        """A process begins a test only when it knows the next one, or that there is none. So it needs two."""
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)
