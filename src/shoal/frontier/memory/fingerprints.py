"""The fingerprints of the requests of a run in memory. Each has a number, in the order in which they were added.

A dictionary takes about 90 bytes per URL, this takes less than 30. All fingerprints are in one piece of memory, by
number. They are found through groups of a few: a ``bytes`` object with the first four bytes of each fingerprint and its
number. There is always about one group for `_LOAD` fingerprints: when there are too few groups, the next one is split
in two (linear hashing). So no call takes long.
"""

from __future__ import annotations

_SIZE = 16
_PIECE = 4
_ENTRY = 8
"""A piece of a fingerprint, and its number."""
_LOAD = 16


class Fingerprints:
    """Numbers for fingerprints, and fingerprints for numbers."""

    def __init__(self) -> None:
        self._all = bytearray()
        self._groups = [b""]
        self._mask = 0
        """The bits of a piece that choose its group. The groups before `_next` are split already: one more bit."""
        self._next = 0

    def __getitem__(self, number: int) -> bytes:
        return bytes(self._all[_SIZE * number : _SIZE * (number + 1)])

    def find(self, fingerprint: bytes) -> int | None:
        """The number of a fingerprint. None if it was not added."""
        piece, mask = fingerprint[:_PIECE], self._mask
        bits = int.from_bytes(piece, "little")
        place = bits & mask
        group = self._groups[place if place >= self._next else bits & (2 * mask + 1)]
        at = group.find(piece)
        while at >= 0:
            if at % _ENTRY == 0:
                number = int.from_bytes(group[at + _PIECE : at + _ENTRY], "little")
                if self._all[_SIZE * number : _SIZE * (number + 1)] == fingerprint:
                    return number
            at = group.find(piece, at + 1)
        return None

    def add(self, fingerprint: bytes) -> int:
        """The number of a fingerprint that was not added yet."""
        number = len(self._all) // _SIZE
        self._all += fingerprint
        piece, mask = fingerprint[:_PIECE], self._mask
        bits = int.from_bytes(piece, "little")
        place = bits & mask
        entry = piece + number.to_bytes(_ENTRY - _PIECE, "little")
        self._groups[place if place >= self._next else bits & (2 * mask + 1)] += entry
        if number >= _LOAD * len(self._groups):
            self._split()
        return number

    def _split(self) -> None:
        """Move the entries of a group that have one more bit to a new group."""
        group, bit = self._groups[self._next], self._mask + 1
        stays, moves = list[bytes](), list[bytes]()
        for at in range(0, len(group), _ENTRY):
            entry = group[at : at + _ENTRY]
            (moves if int.from_bytes(entry[:_PIECE], "little") & bit else stays).append(entry)
        self._groups[self._next] = b"".join(stays)
        self._groups.append(b"".join(moves))
        self._next += 1
        if self._next > self._mask:
            self._mask, self._next = 2 * self._mask + 1, 0
