"""``pydispatch.dispatcher``: functions that are connected to the signals of every crawl of the process."""

from __future__ import annotations

from shoal.scrapy.shared_types import Function
from shoal.scrapy.signals import SignalManager

_EVERY = object()
Any = _EVERY
"""Every sender, or every signal."""
Anonymous = object()


def connect(receiver: Function, signal: object = _EVERY, sender: object = _EVERY, weak: bool = True) -> None:
    """Call ``receiver`` when the signal is sent, in every crawl."""
    SignalManager.of_all_crawls.connect(receiver, signal)


def disconnect(receiver: Function, signal: object = _EVERY, sender: object = _EVERY, weak: bool = True) -> None:
    SignalManager.of_all_crawls.disconnect(receiver, signal)
