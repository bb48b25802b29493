"""The items of one URL. The item log has no index, so the history of the run says where to search."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from shoal.errors import ItemError
from shoal.item import decode_item
from shoal.monitoring.samples import SKEW, RunSample, read_history
from shoal.ports import Documents, Frontier, History, LoggedItem

MAX_ITEMS = 5
MAX_TEXT = 2000
"""How much of an item is shown, in characters."""
_MAX_SEARCHED = 5000
_MAX_BYTES = 8 << 20
_READ = (8, 200)
"""How many items one call reads, at first and at most."""

_encode = msgspec.json.Encoder().encode


async def read_url_items(documents: Documents, frontier: Frontier, run_id: str, history: History) -> list[str]:
    """The first items of a URL as JSON, as far as a short search finds them: the item log may be trimmed, or the crawl
    too fast for its history. Long ones are cut."""
    if not history.items or not history.fingerprint:
        return []
    last = (await frontier.stats()).items
    first, end = find_range(await read_history(documents, run_id), _ended_at(history), last)
    wanted = min(MAX_ITEMS, history.items)
    found: list[LoggedItem] = []
    size, count = 0, _READ[0]
    while first < end and size < _MAX_BYTES and len(found) < wanted:
        items = await frontier.read_items(first, min(count, end - first), max_bytes=_MAX_BYTES)
        if not items:
            break
        found += [item for item in items if item.fingerprint == history.fingerprint]
        size += sum(len(item.payload) for item in items)
        first, count = items[-1].seq, min(_READ[1], 4 * count)
    return [_as_json(item) for item in found[:wanted]]


def find_range(samples: Sequence[RunSample], at: float | None, last: int) -> tuple[int, int]:
    """The range of items that were logged around a time: after the first number, up to and including the second."""
    if at is None:
        return max(0, last - _MAX_SEARCHED), last
    times = [sample.at for sample in samples]
    before, after = bisect_left(times, at - SKEW) - 1, bisect_left(times, at + SKEW)
    first = samples[before].items if before >= 0 else 0
    end = samples[after].items if after < len(samples) else last
    if end - first <= _MAX_SEARCHED:
        return first, end
    middle = _items_at(samples, at, last)
    return max(first, middle - _MAX_SEARCHED // 2), min(end, middle + _MAX_SEARCHED // 2)


def _items_at(samples: Sequence[RunSample], at: float, last: int) -> int:
    """Estimate how many items there were at a time, from the samples before and after it."""
    after = bisect_left([sample.at for sample in samples], at)
    if after == len(samples):
        return last
    if after == 0:
        return samples[0].items
    a, b = samples[after - 1], samples[after]
    return a.items + int((b.items - a.items) * (at - a.at) / (b.at - a.at))


def _ended_at(history: History) -> float | None:
    """When its items were logged: in the step that ended it."""
    return next((event.at for event in reversed(history.events) if event.kind in ("done", "dead")), None)


def _as_json(item: LoggedItem) -> str:
    try:
        text = _encode(decode_item(item.payload)[1]).decode()
    except ItemError as exc:
        return str(exc)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
