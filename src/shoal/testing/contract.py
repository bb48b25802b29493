"""The contract of `shoal.ports.Frontier` and `shoal.ports.Store` as tests, one or more for each law."""

from __future__ import annotations

from shoal.testing.documents import DocumentsContract
from shoal.testing.fencing import FencingContract
from shoal.testing.large_pages import LargePagesContract
from shoal.testing.leasing import LeasingContract
from shoal.testing.ledger import LedgerContract
from shoal.testing.options import OptionsContract
from shoal.testing.overflow import OverflowContract
from shoal.testing.politeness import PolitenessContract
from shoal.testing.pushing import PushingContract
from shoal.testing.reissuing import ReissuingContract
from shoal.testing.repeating import RepeatingContract
from shoal.testing.roles import RolesContract
from shoal.testing.sending import SendingContract
from shoal.testing.sharing import SharingContract
from shoal.testing.waiting import WaitingContract
from shoal.testing.workers import WorkersContract


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
    """Subclass it, and give it a ``harness`` fixture that returns a `shoal.testing.Harness`.

    All durations are whole seconds, and the tests stay at least one second away from each limit. So the clock of a
    store may advance a little by itself (`Harness.drift`) while a test runs.
    """
