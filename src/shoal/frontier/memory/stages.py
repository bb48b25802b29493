"""The links of large pages in memory that are not in the queue yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from shoal.frontier.memory.records import decode_request
from shoal.frontier.memory.requests import Requests
from shoal.frontier.staging import Moved, Portion, first_of_each, incoming_history
from shoal.ports import History


class MemoryStages:
    """The staged links of a run, by the numbers of their pages, in order. See `shoal.frontier.staging`."""

    def __init__(self, requests: Requests, clock: Callable[[], float]) -> None:
        self.incoming = 0
        """How many links are staged."""
        self._requests = requests
        self._clock = clock
        self._portions: dict[int, deque[Portion]] = {}
        self._movers = 0

    def add(self, parent: int, portions: Sequence[Portion]) -> None:
        """Stage the links of a page."""
        self._portions.setdefault(parent, deque()).extend(portions)
        self.incoming += sum(map(len, portions))

    async def move(self, parent: int) -> Moved:
        """Move all links of a page into the queue. Other tasks take their turn in between; if the caller is cancelled,
        `help` continues."""
        moved = Moved(0, 0)
        self._movers += 1
        try:
            while parent in self._portions:
                moved = moved.plus(self._move_portion(parent))
                await asyncio.sleep(0)
        finally:
            self._movers -= 1
        return moved

    def help(self) -> None:
        """Move a portion of the first page, unless the calls that ended large pages do that themselves."""
        if self.incoming and not self._movers:
            self._move_portion(next(iter(self._portions)))

    def _move_portion(self, parent: int) -> Moved:
        portions, requests = self._portions[parent], self._requests
        portion = portions.popleft()
        if not portions:
            del self._portions[parent]
        new = {
            fingerprint: (decode_request(payload), payload)
            for fingerprint, payload in first_of_each(portion).items()
            if requests.fingerprints.find(fingerprint) is None
        }
        requests.measure_room()
        refused = requests.add_links(new, parent, len(portion), self._clock())
        self.incoming -= len(portion)
        return Moved(len(new) - refused, refused)

    def find(self, fingerprint: bytes) -> History | None:
        """The history of a staged link. It reads all staged links, so it is only for inspection."""
        for parent, portions in self._portions.items():
            for name, payload in (link for portion in portions for link in portion):
                if name == fingerprint:
                    return incoming_history(decode_request(payload), self._requests.records.request(parent).url)
        return None

    def count(self) -> int:
        """The number of staged links, recounted."""
        return sum(len(portion) for portions in self._portions.values() for portion in portions)

    def clear(self) -> None:
        self._portions.clear()
        self.incoming = 0
