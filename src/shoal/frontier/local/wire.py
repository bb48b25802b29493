"""The messages between the process that owns a frontier and its clients.

A message is a length of four bytes and msgpack. A call names a method from a fixed table, which is made from the ports:
`STORE` and `FRONTIER`. Each method has decoders for its arguments and its result, so a message can only become the
values that the port declares. Errors are sent as the name of a class of `shoal.errors` and a text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import msgspec

from shoal import errors
from shoal.errors import FrontierError
from shoal.ports import Frontier, FrontierOptions, History, Holder, Store

MAX_BYTES = 512 * 2**20
"""The longest message. A longer one is an error, not a reason to allocate memory."""
ITEM_BYTES = 16 * 2**20
"""How many bytes of items one answer may have. At least one item is always sent."""
HELLO = "hello"
"""The first call of a connection. Arguments and result: `Hello` and `Welcome`."""
DEAD = "dead"
"""A page of dead requests: the number of a cursor (0 for a new one) in; the number (0 at the end) and histories out."""

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        FrontierError,
        errors.QueueFullError,
        errors.LeaseLostError,
        errors.FencedError,
        errors.StoreBusyError,
        errors.StoreAwayError,
        errors.StoreFullError,
        errors.StoreRewoundError,
        errors.StoreError,
        errors.RunError,
        errors.RequestError,
        ValueError,
    )
}
_LENGTH = 4
encode = msgspec.msgpack.Encoder().encode


class Method(NamedTuple):
    """A method of a port: how to bind and decode its arguments, and how to decode its result."""

    name: str
    signature: inspect.Signature
    keywords: tuple[str, ...]
    """The arguments that must be named. They are the last ones."""
    decode_arguments: Callable[[Any], tuple[Any, ...]]
    decode_result: Callable[[Any], Any]

    def bind(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in the order of the port. TypeError as in a direct call."""
        bound = self.signature.bind(*arguments, **named)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def call(self, target: object, arguments: msgspec.Raw) -> Any:
        """The coroutine of this call on an object that implements the port. MsgspecError for bad arguments."""
        values = self.decode_arguments(arguments)
        split = len(values) - len(self.keywords)
        return getattr(target, self.name)(*values[:split], **dict(zip(self.keywords, values[split:], strict=True)))


def _methods_of(port: type) -> dict[str, Method]:
    """All coroutine methods of a port, but ``close``."""
    methods = {}
    for name, function in inspect.getmembers(port, inspect.iscoroutinefunction):
        if name == "close":
            continue
        hints = get_type_hints(function)
        signature = inspect.signature(function)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
        arguments = tuple[tuple(hints[parameter.name] for parameter in own)] if own else tuple[()]  # type: ignore[misc]
        methods[name] = Method(
            name,
            signature.replace(parameters=own),
            tuple(parameter.name for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY),
            msgspec.msgpack.Decoder(arguments).decode,
            msgspec.msgpack.Decoder(hints["return"]).decode,
        )
    return methods


FRONTIER: dict[str, Method]
STORE: dict[str, Method]


def __getattr__(name: str) -> object:
    """Make the tables when they are first used. A crawl that nobody asks does not need them, and they take time."""
    if name not in ("FRONTIER", "STORE"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    methods = _methods_of(Frontier if name == "FRONTIER" else Store)
    methods.pop("frontier", None)
    globals()[name] = methods
    return methods


class RunKey(msgspec.Struct, frozen=True, array_like=True):
    """The frontier that a call is for, as `Store.frontier` opens it. It is in every call, so that a client which
    connects to the next owner has nothing to open again."""

    run_id: str
    options: FrontierOptions | None
    holder: Holder | None


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call. ``run`` is an encoded `RunKey`, or empty for a call to the store."""

    number: int
    not_after: float
    """When the client gives up, on the clock of `shoal.system.clock`, which is the same in all processes of a machine.
    The owner ignores a call that it finds later: it may have been frozen."""
    method: str
    run: bytes
    arguments: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the call of this number: a result, or an error as the name of its class and its text."""

    number: int
    error: tuple[str, str] | None
    result: msgspec.Raw


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a client."""

    version: str
    """The version of Shoal. Both sides must have the same one."""
    client: str
    """Random; the same for all connections of one client."""
    pid: int


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The owner's answer to `Hello`."""

    version: str
    store: str
    """Random, for each owner."""
    durable: bool
    """Whether the store survives its owner."""


class DeadPage(msgspec.Struct, frozen=True, array_like=True):
    """Some dead requests. ``cursor`` continues; 0 at the end."""

    cursor: int
    histories: list[History]


decode_call = msgspec.msgpack.Decoder(Call).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_run_key = msgspec.msgpack.Decoder(RunKey).decode


def error_of(error: BaseException) -> tuple[str, str]:
    """An error as it is sent: the nearest class that clients know, and the text."""
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS:
            return kind.__name__, str(error)
    return FrontierError.__name__, f"the process that owns the frontier failed: {type(error).__name__}: {error}"


def raise_error(error: tuple[str, str]) -> None:
    """Raise an error that was received."""
    kind, text = error
    raise _ERRORS.get(kind, FrontierError)(text)


def frame(payload: bytes) -> bytes:
    """A message as it is sent. FrontierError if it is too long."""
    if len(payload) > MAX_BYTES:
        raise FrontierError(f"a message of {len(payload)} bytes is longer than the limit of {MAX_BYTES}")
    return len(payload).to_bytes(_LENGTH, "big") + payload


class Messages:
    """Cuts the bytes that arrive on a connection into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The beginning of a message."""
        self._wanted = _LENGTH
        """How many bytes `_rest` must have before its message or the length of it is complete."""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that end with these bytes. FrontierError for one that is too long."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
        messages, start = list[bytes](), 0
        while (end := start + self._size(data, start)) <= len(data):
            messages.append(data[start + _LENGTH : end])
            start = end
        self._rest, self._wanted = bytearray(data[start:]), end - start
        return messages

    @staticmethod
    def _size(data: bytes, start: int) -> int:
        """The size of the message that begins here, including its length prefix; the size of the prefix alone while it
        is incomplete."""
        if len(data) - start < _LENGTH:
            return _LENGTH
        length = int.from_bytes(data[start : start + _LENGTH], "big")
        if length > MAX_BYTES:
            raise FrontierError(f"a message of {length} bytes is longer than the limit of {MAX_BYTES}")
        return _LENGTH + length
