# ruff: noqa: E402 - modules must be registered before they are imported, so that pytest explains their assertions
"""Contract suites: tests that every frontier, coordinator and sink must pass, for people who write a backend.

They check the laws of ``docs/architecture.md`` on any backend. They need pytest, pytest-asyncio and hypothesis. To test
a frontier, write one `Harness` and a few lines::

    from shoal.testing import FrontierContract, Harness
    from shoal.testing.machine import check_machine

    class MyHarness(Harness): ...                    # how to open an empty store, and how to advance its clock

    class TestMyFrontier(FrontierContract):          # one test or more for each law
        @pytest.fixture
        def harness(self) -> Harness:
            return MyHarness()

    def test_random_steps() -> None:                 # random calls, each compared with a simple model
        check_machine(MyHarness)

A frontier on a server must also pass `ServerFaultContract`, and `shoal.testing.driving.drive`, which checks histories
of concurrent clients. A coordinator must pass `CoordinatorContract`, a sink `SinkContract` (see `shoal.testing.sinks`).

This room may import `sinks` and what is below it; no room imports it. Start with `FrontierContract` below, then
`leasing` and `model`.
"""

from __future__ import annotations

import pytest

for _module in (
    "coordination", "documents", "fencing", "large_pages", "leasing", "ledger", "machine", "pair", "politeness",
    "pushing", "reissuing", "roles", "server_faults", "sharing", "sinks", "steps", "workers",
):  # fmt: skip
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from shoal.testing.coordination import CoordinatorContract, CoordinatorHarness
from shoal.testing.documents import DocumentsContract
from shoal.testing.fencing import FencingContract, RepeatingContract
from shoal.testing.large_pages import LargePagesContract, OverflowContract
from shoal.testing.leasing import LeasingContract
from shoal.testing.ledger import LedgerContract
from shoal.testing.politeness import PolitenessContract
from shoal.testing.pushing import PushingContract
from shoal.testing.reissuing import ReissuingContract, SendingContract
from shoal.testing.roles import RolesContract
from shoal.testing.server_faults import ServerFaultContract, ServerFaultHarness
from shoal.testing.sharing import OptionsContract, SharingContract
from shoal.testing.sinks import SinkContract, SinkHarness
from shoal.testing.steps import FakeClock, Harness
from shoal.testing.workers import WaitingContract, WorkersContract

__all__ = [
    "CoordinatorContract",
    "CoordinatorHarness",
    "FakeClock",
    "FrontierContract",
    "Harness",
    "ServerFaultContract",
    "ServerFaultHarness",
    "SinkContract",
    "SinkHarness",
]


class FrontierContract(
    PushingContract,
    LeasingContract,
    ReissuingContract,
    SendingContract,
    PolitenessContract,
    OptionsContract,
    SharingContract,
    LedgerContract,
    LargePagesContract,
    OverflowContract,
    RolesContract,
    RepeatingContract,
    FencingContract,
    WorkersContract,
    WaitingContract,
    DocumentsContract,
):
    """The contract of `shoal.ports.Frontier` and `shoal.ports.Store` as tests, one or more for each law.

    Subclass it, and give it a ``harness`` fixture that returns a `shoal.testing.Harness`.

    All durations are whole seconds, and the tests stay at least one second away from each limit. So the clock of a
    store may advance a little by itself (`Harness.drift`) while a test runs.
    """
