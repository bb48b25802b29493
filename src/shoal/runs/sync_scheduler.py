"""A `Scheduler` for scripts without an event loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from shoal.config import Config
from shoal.crawling.scheduler import Scheduler
from shoal.errors import LeaseLostError
from shoal.http import Request
from shoal.runs.loop_thread import LoopThread
from shoal.spider import Spider

log = logging.getLogger("shoal.scheduler")

_PATIENCE, _PAUSE = 1.0, 0.02  # seconds


class SyncScheduler:
    """The queue and the filter of a spider's run, without ``await``. It runs a `Scheduler` in a thread of its own.

    ``next_request`` completes the request that it returned before, unless the script has settled it itself. So a
    request counts as done when the script asks for the next one, or closes the scheduler.
    """

    def __init__(
        self,
        spider: type[Spider] | Spider,
        config: Config | Mapping[str, object] | None = None,
        *,
        new_run: bool = False,
        settle: bool = True,
    ) -> None:
        """For ``spider``, ``config`` and ``new_run`` see `Scheduler.open`. ``settle=False``: the script completes,
        fails or releases each request itself."""
        self._settles = settle
        self._last: Request | None = None
        self._thread = LoopThread("shoal-scheduler", "the scheduler")
        try:
            self._scheduler = self._thread.wait(Scheduler.open(spider, config, new_run=new_run))
        except BaseException:
            self._thread.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._last = None  # it is released, not done
        self.close()

    def enqueue_request(self, request: Request) -> bool:
        return self._thread.wait(self._scheduler.enqueue_request(request))

    _schedule_request = enqueue_request

    def enqueue_requests(self, requests: Sequence[Request]) -> int:
        return self._thread.wait(self._scheduler.enqueue_requests(requests))

    def next_request(self) -> Request | None:
        """Lease the best request whose host is due. While hosts must wait, or other processes have the last requests,
        wait up to a second; then return None."""
        self._settle()
        until = time.monotonic() + _PATIENCE
        while True:
            request = self._thread.wait(self._scheduler.next_request())
            if request is not None or time.monotonic() > until or not self._thread.wait(self._scheduler.may_get_more()):
                self._last = request if self._settles else None
                return request
            time.sleep(_PAUSE)

    def complete(self, request: Request, *, items: Sequence[bytes] = (), children: Sequence[Request] = ()) -> int:
        self._forget(request)
        return self._thread.wait(self._scheduler.complete(request, items=items, children=children))

    def fail(self, request: Request, reason: str, *, retry_in: float | None = None) -> str:
        self._forget(request)
        return self._thread.wait(self._scheduler.fail(request, reason, retry_in=retry_in))

    def release(self, request: Request) -> None:
        self._forget(request)
        self._thread.wait(self._scheduler.release(request))

    def has_pending_requests(self) -> bool:
        """Whether any request is ready, waiting, or leased. The one that ``next_request`` completes later is not."""
        stats = self._thread.wait(self._scheduler.frontier.stats())
        return stats.remaining > (self._last is not None)

    def idle(self) -> bool:
        return not self.has_pending_requests()

    def size(self) -> int:
        return self._thread.wait(self._scheduler.size())

    def is_duplicate(self, request: Request) -> bool:
        return self._thread.wait(self._scheduler.is_duplicate(request))

    check_duplicate = _is_duplicate = is_duplicate

    @property
    def settings(self) -> Config:
        assert self._scheduler.settings is not None
        return self._scheduler.settings

    @property
    def logger(self) -> logging.Logger:
        return self._scheduler.logger

    @property
    def queue_manager(self) -> Self:
        return self

    @property
    def filter(self) -> Self:
        return self

    def close(self) -> None:
        """Complete the last request, release the others, close the store, and end the thread."""
        if self._thread.is_running:
            try:
                self._settle()
            finally:
                self._thread.wait(self._scheduler.close())
                self._thread.stop()

    def _settle(self) -> None:
        request, self._last = self._last, None
        if request is not None:
            try:
                self._thread.wait(self._scheduler.complete(request))
            except LeaseLostError as error:
                log.warning("%s", error)

    def _forget(self, request: Request) -> None:
        if request is self._last:
            self._last = None
