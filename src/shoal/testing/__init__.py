"""What proves that a frontier keeps the laws of ``docs/architecture.md``, on any backend. Needs pytest, pytest-asyncio
and hypothesis.

A backend is tested by one `Harness` and a few lines::

    from shoal.testing import FrontierContract, Harness
    from shoal.testing.machine import check_machine

    class MyHarness(Harness): ...                    # how to open an empty store, and how to make its time pass

    class TestMyFrontier(FrontierContract):          # one test or more for each law
        @pytest.fixture
        def harness(self) -> Harness:
            return MyHarness()

    def test_random_steps() -> None:                 # compared with a simple model after each
        check_machine(MyHarness)
"""

from __future__ import annotations

import pytest

for _module in (
    "steps", "pushing", "leasing", "reissuing", "politeness", "ledger", "roles", "repeating", "fencing", "machine",
    "pair", "sending", "coordination", "server_faults",
):  # fmt: skip
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from shoal.testing.contract import FrontierContract  # noqa: E402 - what it imports has to be registered before
from shoal.testing.coordination import CoordinatorContract, CoordinatorHarness  # noqa: E402
from shoal.testing.harness import FakeClock, Harness  # noqa: E402
from shoal.testing.server_faults import ServerFaultContract, ServerFaultHarness  # noqa: E402

__all__ = [
    "CoordinatorContract",
    "CoordinatorHarness",
    "FakeClock",
    "FrontierContract",
    "Harness",
    "ServerFaultContract",
    "ServerFaultHarness",
]
