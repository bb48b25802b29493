"""``pydispatch.dispatcher``: functions that are connected to the signals of every crawl of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any as AnyValue
from typing import TypeAlias

from shoal.scrapy.signals import SignalManager

Receiver: TypeAlias = Callable[..., AnyValue]

Any = object()
"""Any sender, or any signal."""
Anonymous = object()


def connect(receiver: Receiver, signal: object = Any, sender: object = Any, weak: bool = True) -> None:
    """Call ``receiver`` when the signal is sent, in every crawl."""
    SignalManager.of_all_crawls.connect(receiver, signal)


def disconnect(receiver: Receiver, signal: object = Any, sender: object = Any, weak: bool = True) -> None:
    SignalManager.of_all_crawls.disconnect(receiver, signal)
