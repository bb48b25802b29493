"""The values that `shoal.testing.machine` draws. There are few hosts and URLs, and times in tens of seconds, so that
many steps use the same request."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shoal.ports import FrontierOptions, HostUpdate


class Page(NamedTuple):
    """A request that the machine makes."""

    host: str
    number: int
    priority: float
    dont_filter: bool


HOSTS = st.sampled_from(["a.example", "b.example", "c.example:81"])
PAGE: SearchStrategy[Page] = st.builds(
    Page, HOSTS, st.integers(0, 7), st.sampled_from([0, 0, 0, 1, -1, 0.5]), st.sampled_from([False, False, False, True])
)
PAGES = st.lists(PAGE, max_size=3)
ITEMS = st.lists(st.binary(max_size=2), max_size=2)
PICKS = st.lists(st.integers(0, 9), min_size=1, max_size=3)
"""Positions in a list, modulo its length."""
RECENT = st.sampled_from([0, 0, 0, 1, 2, 5])
"""A position in a list, counted from its end, modulo its length."""
CURSORS = st.sampled_from([b"", b"1", b"2"])
TTLS = st.sampled_from([20.0, 50.0, 100.0])
NONCES = st.sampled_from([b"nonce-of-one", b"nonce-of-one", b"nonce-of-another"])
SLOTS = st.sampled_from([None, "s", "s", "t"])
"""A cluster slot, or none."""
AHEAD = st.sampled_from([0, 0, 0, 1, -1])
"""How far the epoch of a holder is ahead of the last fence of its slot."""
DELAYS = st.sampled_from([None, 0.0, 10.0, 20.0])
UPDATES: SearchStrategy[HostUpdate] = st.one_of(
    st.builds(HostUpdate, delay=DELAYS),
    st.builds(HostUpdate, crawl_delay=DELAYS),
    st.builds(HostUpdate, learned_delay=DELAYS),
    st.builds(HostUpdate, concurrency=st.sampled_from([None, 1, 2, 9])),
    st.builds(HostUpdate, block_for=st.sampled_from([None, 0.0, 20.0, 50.0])),
)
OPTIONS: SearchStrategy[FrontierOptions] = st.builds(
    FrontierOptions,
    max_attempts=st.integers(1, 3),
    delay=st.sampled_from([0.0, 10.0]),
    concurrency_per_host=st.sampled_from([1, 2, 8]),
    max_queue_size=st.sampled_from([None, None, 6]),
    overflow=st.sampled_from(["accept", "refuse"]),
    in_memory=st.sampled_from([1, 3, 100_000]),
)
SHORT_QUEUE: SearchStrategy[FrontierOptions] = st.builds(
    FrontierOptions,
    max_attempts=st.integers(1, 3),
    max_queue_size=st.sampled_from([1, 1, 2]),
    overflow=st.just("refuse"),
    in_memory=st.sampled_from([1, 100_000]),
)
"""A queue that is nearly always full, and refuses links."""
