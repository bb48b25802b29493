"""Parsers for parts of two protocols, to see which call a client makes: Redis (RESP) and PostgreSQL (version 3).

A parser is fed with the bytes of one connection, and returns the complete calls.
"""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import ClassVar

from shoal.clients.redis import load_script
from shoal.frontier.redis.records import SCRIPTS


class Call(str):
    """The kind of a call: the name of the script or function. For roles and items, also the operation."""


class Calls(ABC):
    """The calls that a client sends on one connection."""

    empty_lease: ClassVar[int]
    """A response to ``lease`` with fewer bytes contains no request."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[Call]:
        """Add data, and return the calls that are now complete."""
        self._buffer += data
        return list(self._read())

    @abstractmethod
    def _read(self) -> Iterator[Call]: ...

    @abstractmethod
    def is_refused(self, answer: bytes) -> bool:
        """Whether the response says that nothing was done."""

    @abstractmethod
    def is_complete(self, answer: bytes) -> bool:
        """Whether the response is complete."""

    def refined(self, call: Call, answer: bytes) -> Call:
        """Rename a lease that got no request: losing its response loses nothing."""
        return Call("lease of nothing") if call == "lease" and len(answer) < self.empty_lease else call


# -- Redis

_SUB_KINDS = {"role": {b"claim", b"advance", b"relinquish", b"forget", b"list"}, "items": {b"read", b"trim"}}


@cache
def _names() -> dict[bytes, str]:
    """Names of scripts by SHA, without `lease`: its SHA differs in each store."""
    folder = files(SCRIPTS.package) / "lua"
    names = [each.name.removesuffix(".lua") for each in folder.iterdir() if each.name.endswith(".lua")]
    return {load_script(SCRIPTS, name).sha.encode(): name for name in names}


class RedisCalls(Calls):
    """Calls of scripts, by text or by SHA."""

    empty_lease = 120

    def _read(self) -> Iterator[Call]:
        while (command := self._command()) is not None:
            verb = command[0].upper()
            if verb in (b"EVAL", b"EVALSHA"):
                sha = sha1(command[1], usedforsecurity=False).hexdigest().encode() if verb == b"EVAL" else command[1]
                yield self._call(_names().get(sha, "lease"), command)

    @staticmethod
    def _call(name: str, command: list[bytes]) -> Call:
        words = _SUB_KINDS.get(name, set())
        found = next((word for word in command[4:12] if word in words), None)
        return Call(f"{name} {found.decode()}" if found else name)

    def _command(self) -> list[bytes] | None:
        """Remove the next complete command from the buffer, and return it."""
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return None
        if self._buffer[:1] != b"*":  # an inline command, as a probe sends it
            line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
            return line.split() or [b""]
        count, position, words = int(self._buffer[1:end]), end + 2, []
        for _ in range(count):
            end = self._buffer.find(b"\r\n", position)
            if end < 0:
                return None
            size = int(self._buffer[position + 1 : end])
            word = self._buffer[end + 2 : end + 2 + size]
            position = end + 4 + size
            if len(self._buffer) < position:
                return None
            words.append(word)
        self._buffer = self._buffer[position:]
        return words

    def is_refused(self, answer: bytes) -> bool:
        return answer.startswith(b"-")

    def is_complete(self, answer: bytes) -> bool:
        return len(answer) > 0


# -- PostgreSQL

_STARTUP, _ASKS_FOR_TLS, _ASKS_FOR_GSS = 196608, 80877103, 80877104
_FUNCTION = re.compile(rb'FROM "[^"]+"\.(\w+)\(')


class PostgresCalls(Calls):
    """Calls of functions in a schema, by named or unnamed prepared statements."""

    empty_lease = 200

    def __init__(self) -> None:
        super().__init__()
        self._started = False
        self._statements: dict[bytes, Call | None] = {}
        self._bound: Call | None = None

    def _read(self) -> Iterator[Call]:
        while (message := self._message()) is not None:
            kind, body = message
            if kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                found = _FUNCTION.search(text)
                self._statements[name] = Call(found[1].decode()) if found else None
            elif kind == b"B":
                self._bound = self._statements.get(body.split(b"\0", 2)[1])
            elif kind == b"S" and self._bound is not None:
                bound, self._bound = self._bound, None
                yield bound

    def _message(self) -> tuple[bytes, bytes] | None:
        head = 1 if self._started else 0
        if len(self._buffer) < head + 4:
            return None
        (size,) = struct.unpack_from(">I", self._buffer, head)
        if len(self._buffer) < head + size:
            return None
        kind, body = self._buffer[:head], self._buffer[head + 4 : head + size]
        self._buffer = self._buffer[head + size :]
        if not self._started:
            self._started = struct.unpack_from(">I", body)[0] not in (_ASKS_FOR_TLS, _ASKS_FOR_GSS)
        return kind, body

    def is_refused(self, answer: bytes) -> bool:
        return b"E" in self._kinds(answer)

    def is_complete(self, answer: bytes) -> bool:
        """Whether the server is ready for the next statement: then the transaction has ended."""
        return b"Z" in self._kinds(answer)

    @staticmethod
    def _kinds(answer: bytes) -> set[bytes]:
        """The types of all complete messages."""
        position, kinds = 0, set()
        while len(answer) >= position + 5:
            (size,) = struct.unpack_from(">I", answer, position + 1)
            if len(answer) < position + 1 + size:
                break
            kinds.add(answer[position : position + 1])
            position += 1 + size
        return kinds


FORMATS: dict[str, type[Calls]] = {"redis": RedisCalls, "postgres": PostgresCalls}
