"""Many reads in one call, as a heartbeat of a large cluster needs dozens. ZooKeeper supports it since version 3.6, but
kazoo does not. This follows kazoo's implementation of transactions.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

from kazoo import exceptions
from kazoo.protocol.serialization import (
    GetChildren,
    GetData,
    MultiHeader,
    Transaction,
    int_struct,
    stat_struct,
)

Read: TypeAlias = GetData | GetChildren
"""Made by `data_of` and `children_of`."""
Answer: TypeAlias = Any
"""The data and stat of a znode, the names of its children, or None if it is missing."""


def data_of(path: str) -> Read:
    """A read of the data and stat of a znode."""
    return GetData(path, None)


def children_of(path: str) -> Read:
    """A read of the names of a znode's children."""
    return GetChildren(path, None)


class ReadAll(Transaction):  # type: ignore[misc]
    """The reads of ``operations``, in order. The answer is None for a missing znode."""

    type: ClassVar[int] = 22

    @classmethod
    def deserialize(cls, answer: bytes, offset: int) -> list[Answer]:
        found = []
        header, offset = MultiHeader.deserialize(answer, offset)
        while not header.done:
            one, offset = _read_one(header, answer, offset)
            found.append(one)
            header, offset = MultiHeader.deserialize(answer, offset)
        return found


def _read_one(header: MultiHeader, answer: bytes, offset: int) -> tuple[Answer, int]:
    if header.type == GetData.type:
        data, stat = GetData.deserialize(answer, offset)
        return (data, stat), offset + int_struct.size + len(data or b"") + stat_struct.size
    if header.type == GetChildren.type:
        names = GetChildren.deserialize(answer, offset)
        return names, offset + int_struct.size + sum(int_struct.size + len(name.encode()) for name in names)
    if header.err == exceptions.NoNodeError.code:
        return None, offset + int_struct.size
    raise exceptions.EXCEPTIONS[header.err]()
