"""Iterates over the result of a callback: nothing, one output, or many."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.scrapy.item import Item

_SINGLE = (dict, Item, str, bytes)


def each_result(result: object) -> Iterable[object]:
    """Return the outputs in the result of a callback. A dict and an item are one output each."""
    if result is None:
        return ()
    return (result,) if isinstance(result, _SINGLE) or not hasattr(result, "__iter__") else result
