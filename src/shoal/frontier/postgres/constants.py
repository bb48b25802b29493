"""The constants and rules that the SQL functions share with Python: ``{NAME}`` in ``functions/*.sql``."""

from __future__ import annotations

from enum import IntEnum

from shoal.frontier import host_policy, rules
from shoal.stores.postgres import errors
from shoal.stores.postgres.schema import Component, Repair

ALREADY_DONE = len(rules.STATE_NAMES)
"""The state that ``finish`` returns for a request that was done under the same token before."""


LOST = -1
"""The state of a request whose lease was lost, inside ``finish``."""


_MAX_FULL_LANES = 8
"""How many of the lanes that wait for a full host are checked when it is freed."""


class Place(IntEnum):
    """Where a lane is: without requests, ready to be leased from, waiting for its time, or with a full host."""

    EMPTY, OPEN, LATER, FULL = range(4)


def _literal(text: str) -> str:
    return f"'{text}'"


_TEXTS = {
    "LOST_KIND": rules.LOST_KIND, "LOST_EVENT": rules.LOST_EVENT, "LOST_REASON": rules.LOST_REASON,
    "NOTE_EVENT": rules.NOTE_EVENT, "FAILED_EVENT": rules.FAILED_EVENT, "RETRIED_EVENT": rules.RETRIED_EVENT,
    "RETRIED_DETAIL": rules.RETRIED_DETAIL, "SEED_ROLE": rules.SEED_ROLE, "DEFAULT_HOST": host_policy.DEFAULT_HOST,
    "NO_RUN": errors.NO_RUN, "QUEUE_FULL": errors.QUEUE_FULL, "FENCED": errors.FENCED, "REWOUND": errors.REWOUND,
    "CONFLICT": errors.CONFLICT, "FULL_KIND": rules.FULL_KIND, "FULL_REASON": rules.FULL_REASON,
    "ADMITTED_DETAIL": rules.ADMITTED_DETAIL,
}  # fmt: skip
CONSTANTS = {
    **{name.upper(): str(number) for number, name in enumerate(rules.STATE_NAMES)},
    **{place.name: str(place.value) for place in Place},
    "ALREADY_DONE": str(ALREADY_DONE),
    "LOST": str(LOST),
    "MAX_LEASES": str(rules.MAX_LEASES),
    "MAX_FULL_LANES": str(_MAX_FULL_LANES),
    "HEARD_GAP": str(rules.HEARD_GAP),
    "MAX_HELD": str(rules.MAX_HELD),
    "HALTED": ", ".join(map(_literal, sorted(rules.HALTED))),
    "RESTING": ", ".join(map(_literal, sorted(rules.RESTING))),
    **{name: _literal(text) for name, text in _TEXTS.items()},
    **host_policy.sql(),
}
_GENERATED_LANES = Repair(
    1,
    (None, "ab91e726651705e8"),
    "SELECT attgenerated = 's' FROM pg_attribute WHERE attrelid = '{schema}.lane'::regclass AND attname = 'id'",
    "ALTER TABLE lane ALTER COLUMN id DROP EXPRESSION",
)
"""The key of a lane was a generated column."""
COMPONENT = Component("frontier", "shoal.frontier.postgres", tuple(CONSTANTS.items()), (_GENERATED_LANES,))
