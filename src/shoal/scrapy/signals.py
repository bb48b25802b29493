"""The signals of a crawl, and the functions that are connected to them."""

from __future__ import annotations

import logging
from inspect import Parameter, isawaitable, signature
from typing import ClassVar

from shoal.scrapy.values import Function

log = logging.getLogger("shoal.scrapy")


class Signal:
    """Something that happens during a crawl."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<signal {self.name}>"


engine_started = Signal("engine_started")
engine_stopped = Signal("engine_stopped")
spider_opened = Signal("spider_opened")
spider_idle = Signal("spider_idle")
spider_closed = Signal("spider_closed")
spider_error = Signal("spider_error")
request_scheduled = Signal("request_scheduled")
request_dropped = Signal("request_dropped")
request_reached_downloader = Signal("request_reached_downloader")
request_left_downloader = Signal("request_left_downloader")
response_received = Signal("response_received")
response_downloaded = Signal("response_downloaded")
headers_received = Signal("headers_received")
bytes_received = Signal("bytes_received")
item_scraped = Signal("item_scraped")
item_dropped = Signal("item_dropped")
item_error = Signal("item_error")
feed_slot_closed = Signal("feed_slot_closed")
feed_exporter_closed = Signal("feed_exporter_closed")
scheduler_empty = Signal("scheduler_empty")

SENT = frozenset(
    {engine_started, engine_stopped, spider_opened, spider_idle, spider_closed, spider_error, request_scheduled,
     request_reached_downloader, response_received, response_downloaded, item_scraped, item_dropped, item_error}
)  # fmt: skip
"""The signals that Shoal sends. Handlers of other signals are never called."""


class SignalManager:
    """Calls the functions that are connected to a signal."""

    of_all_crawls: ClassVar[SignalManager]
    """The functions that are connected with ``pydispatch``. All managers of the process call them."""

    def __init__(self) -> None:
        self._receivers: dict[object, list[Function]] = {}

    def connect(self, receiver: Function, signal: object, **options: object) -> None:
        """Call ``receiver`` when the signal is sent, with those of its arguments that it declares."""
        if isinstance(signal, Signal) and signal not in SENT:
            log.warning("%s is connected to the signal %s, which Shoal does not send", receiver, signal.name)
        receivers = self._receivers.setdefault(signal, [])
        if receiver not in receivers:
            receivers.append(receiver)

    def disconnect(self, receiver: Function, signal: object, **options: object) -> None:
        if receiver in self._receivers.get(signal, ()):
            self._receivers[signal].remove(receiver)

    def disconnect_all(self, signal: object, **options: object) -> None:
        self._receivers.pop(signal, None)

    def has_receivers(self, signal: object) -> bool:
        return bool(self._receivers.get(signal) or self.of_all_crawls._receivers.get(signal))

    def _receivers_of(self, signal: object) -> tuple[Function, ...]:
        return (*self._receivers.get(signal, ()), *self.of_all_crawls._receivers.get(signal, ()))

    def send_catch_log(self, signal: object, **arguments: object) -> list[tuple[object, object]]:
        """Call the receivers. If one raises an error, it is logged and becomes the receiver's result."""
        results: list[tuple[object, object]] = []
        for receiver in self._receivers_of(signal):
            try:
                results.append((receiver, _call(receiver, arguments | {"signal": signal})))
            except Exception as exc:
                log.exception("a handler of %s failed: %s", signal, receiver)
                results.append((receiver, exc))
        return results

    async def send(self, signal: object, *passing: type[Exception], **arguments: object) -> None:
        """Call the receivers, and await those that are coroutines. Errors are logged. The first error of the types
        ``passing`` is raised after all were called."""
        raised: Exception | None = None
        for receiver in self._receivers_of(signal):
            try:
                result = _call(receiver, arguments | {"signal": signal})
                if isawaitable(result):
                    await result
            except passing as exc:
                raised = raised or exc
            except Exception:
                log.exception("a handler of %s failed: %s", signal, receiver)
        if raised is not None:
            raise raised


SignalManager.of_all_crawls = SignalManager()


def _call(receiver: Function, arguments: dict[str, object]) -> object:
    try:
        parameters = signature(receiver).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return receiver(**arguments)
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        declared = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in arguments.items() if name in declared}
    return receiver(**arguments)


# ``pydispatch.dispatcher``: functions that are connected to the signals of every crawl of the process.


_EVERY = object()
Any = _EVERY
"""Every sender, or every signal."""
Anonymous = object()


def connect(receiver: Function, signal: object = _EVERY, sender: object = _EVERY, weak: bool = True) -> None:
    """Call ``receiver`` when the signal is sent, in every crawl."""
    SignalManager.of_all_crawls.connect(receiver, signal)


def disconnect(receiver: Function, signal: object = _EVERY, sender: object = _EVERY, weak: bool = True) -> None:
    SignalManager.of_all_crawls.disconnect(receiver, signal)
