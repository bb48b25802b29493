"""The records of the requests of a run in memory: a fixed header, then the request as msgpack.

They are in one piece of memory, one after the other. So a record takes no more than its bytes, its header is changed in
place, and the garbage collector never has to visit one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from struct import Struct as Layout
from typing import NamedTuple

import msgspec

from shoal.frontier.rules import DONE, LEASED, READY
from shoal.http import Request

_HEAD = Layout("<BHHIHdIQ")
_LENGTH = Layout("<I")
# Parts of the header, with their places: to change one takes a third of the time of a whole header.
_STATE_ATTEMPTS = Layout("<BH")
_STATUS_ITEMS, _STATUS_AT = Layout("<HI"), 3
_WORKER_TIME, _WORKER_AT = Layout("<Hd"), 9
_TOKEN, _TOKEN_AT = Layout("<Q"), 23
_PAYLOAD_AT = _HEAD.size + _LENGTH.size

NO_PARENT = 2**32 - 1
MAX_ATTEMPTS = 2**16 - 1
"""Attempts that a record can count."""

encode_request = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode


class Head(NamedTuple):
    """The header of a record."""

    state: int
    attempts: int
    status: int
    items: int
    worker: int
    """The number of the holder of its last lease; 0: none."""
    at: float
    parent: int
    """The number of the page that has the link to it, or `NO_PARENT`."""
    token: int = 0
    """Of the lease under which it became done; 0: it is not done."""


def pack_head(head: Head) -> bytes:
    return _HEAD.pack(*head)


def make_record(head: bytes, payload: bytes) -> bytes:
    """A record of what `pack_head` returned and the msgpack of a request."""
    return head + _LENGTH.pack(len(payload)) + payload


def read_record(record: bytes) -> tuple[Head, Request]:
    return Head._make(_HEAD.unpack_from(record)), decode_request(record[_PAYLOAD_AT:])


class Records:
    """The records of a run by the numbers of their requests: 0, 1, 2 ... Some may be on disk instead."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends: array[int] = array("Q")
        """Where the header of each record ends; 0: it is on disk."""

    def append(self, record: bytes | None) -> None:
        """Add the record of the next number. None: it is on disk."""
        self._ends.append(0 if record is None else len(self._data) + _HEAD.size)
        self._data += record or b""

    def put(self, number: int, record: bytes) -> None:
        """Add a record that was on disk."""
        self._ends[number] = len(self._data) + _HEAD.size
        self._data += record

    def is_on_disk(self, number: int) -> bool:
        return not self._ends[number]

    def head(self, number: int) -> Head:
        return Head._make(_HEAD.unpack_from(self._data, self._ends[number] - _HEAD.size))

    def set_head(self, number: int, head: Head) -> None:
        _HEAD.pack_into(self._data, self._ends[number] - _HEAD.size, *head)

    def set_leased(self, number: int, worker: int, at: float) -> int:
        """Make a ready request leased. Returns the number of its attempt."""
        data, start = self._data, self._ends[number] - _HEAD.size
        attempt: int = _STATE_ATTEMPTS.unpack_from(data, start)[1] + 1
        _STATE_ATTEMPTS.pack_into(data, start, LEASED, min(MAX_ATTEMPTS, attempt))
        _WORKER_TIME.pack_into(data, start + _WORKER_AT, worker, at)
        return attempt

    def set_done(self, number: int, status: int, new_items: int, at: float, token: int) -> int:
        """Make a leased request done. Returns how many items it had before."""
        data, start = self._data, self._ends[number] - _HEAD.size
        items: int = _STATUS_ITEMS.unpack_from(data, start + _STATUS_AT)[1]
        worker: int = _WORKER_TIME.unpack_from(data, start + _WORKER_AT)[0]
        data[start] = DONE
        _STATUS_ITEMS.pack_into(data, start + _STATUS_AT, status, items + new_items)
        _WORKER_TIME.pack_into(data, start + _WORKER_AT, worker, at)
        _TOKEN.pack_into(data, start + _TOKEN_AT, token)
        return items

    def payload(self, number: int) -> bytearray:
        """The msgpack of a request."""
        end = self._ends[number]
        start = end + _LENGTH.size
        return self._data[start : start + _LENGTH.unpack_from(self._data, end)[0]]

    def request(self, number: int) -> Request:
        return decode_request(self.payload(number))

    def states(self) -> Iterator[int]:
        """The state of each request. Those on disk are ready."""
        data = self._data
        return (data[end - _HEAD.size] if end else READY for end in self._ends)

    def search(self, text: bytes) -> Iterator[int]:
        """The numbers of the requests in memory whose msgpack contains a text."""
        if text in self._data:
            for number, end in enumerate(self._ends):
                if end and text in self.payload(number):
                    yield number
