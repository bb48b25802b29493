"""Histories of requests, from rows of PostgreSQL."""

from __future__ import annotations

import asyncpg

from shoal.errors import DECODING_ERRORS
from shoal.frontier.postgres.columns import read_request
from shoal.frontier.rules import STATE_NAMES, read_event
from shoal.frontier.staging import incoming_history
from shoal.http import Request
from shoal.ports import Event, History


def _read(url: str, payload: bytes) -> Request | None:
    try:
        return read_request(url, payload)
    except (ValueError, *DECODING_ERRORS):
        return None


def incoming(url: str, payload: bytes, parent: str | None) -> History | None:
    """The history of a link that is not in the queue yet."""
    request = _read(url, payload)
    return None if request is None else incoming_history(request, parent)


def history_of(row: asyncpg.Record) -> History:
    """The history of a request, from a row of `histories`."""
    state, attempts, status, items, at, kind, reason, worker, fingerprint, url, payload, parent, *columns = row
    request = _read(url, payload)
    events = zip(*(column or () for column in columns), strict=True)
    return History(
        url=url, state=STATE_NAMES[state], depth=request.depth if request else 0,
        priority=request.priority if request else 0.0, attempts=attempts, status=status, items=items, parent=parent,
        reason=reason, events=(*(read_event(*event) for event in events), Event(at, STATE_NAMES[state], worker=worker)),
        worker=worker, fingerprint=fingerprint, kind=kind or "",
    )  # fmt: skip
