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

A frontier on a server must also pass `ServerFaultContract`, a coordinator `CoordinatorContract`,
a sink `SinkContract` (see `shoal.testing.sinks`).

This room may import `sinks` and what is below it; no room imports it. Start with `contract`, then `model`.
"""

from __future__ import annotations

import pytest

for _module in (
    "steps", "pushing", "leasing", "reissuing", "politeness", "ledger", "large_pages", "roles", "repeating", "fencing",
    "machine", "pair", "sending", "coordination", "server_faults", "sinks",
):  # fmt: skip
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from shoal.testing.contract import FrontierContract  # noqa: E402 - its imports must be registered first
from shoal.testing.coordination import CoordinatorContract, CoordinatorHarness  # noqa: E402
from shoal.testing.harness import FakeClock, Harness  # noqa: E402
from shoal.testing.server_faults import ServerFaultContract, ServerFaultHarness  # noqa: E402
from shoal.testing.sinks import SinkContract, SinkHarness  # noqa: E402

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
