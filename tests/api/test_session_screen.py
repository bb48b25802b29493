"""The screen of a batch reads only what is new."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.session import Session
from shoal.api.dashboard.batch_screens import _Outlines
from shoal.config import Config
from shoal.frontier.memory import MemoryStore
from shoal.item import encode_item
from shoal.ports import Completion, LoggedItem


class CountingLog:
    """Counts the items that are read."""

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        read_items = session.frontier.read_items

        async def counted(*words: Any, **more: Any) -> list[LoggedItem]:
            found = await read_items(*words, **more)
            self.read += len(found)
            return found

        monkeypatch.setattr(session.frontier, "read_items", counted)


async def complete(session: Session, count: int) -> None:
    for lease in (await session.frontier.lease(count, 60)).leases:
        result = {
            "status": "success", "url": lease.request.url, "final_url": None, "http_status": 200, "title": "x",
            "content_type": None, "worker_id": None, "depth": 0, "fetched_at": time.time(), "error": None,
            "content": "x" * 1000,
        }  # fmt: skip
        await session.frontier.complete([Completion(lease=lease, items=[encode_item(result)])])


async def test_a_page_of_results_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"http://a{number}.example/" for number in range(80)]
    config = Config().with_settings({"download_delay": 0.0})
    session = await Session.create(MemoryStore(), config, urls, BatchOptions(), caller="", distributed=False)
    log, outlines = CountingLog(session, monkeypatch), _Outlines()

    async def show() -> list[int]:
        results = (await session.progress()).results
        return [number for number, _ in await outlines.read(session, 0, results, await session.state())]

    assert await show() == []
    await complete(session, 20)
    assert await show() == list(range(1, 21))
    read = log.read
    assert 20 <= read < 60
    assert await show() == list(range(1, 21))
    assert log.read == read  # nothing new, so nothing is read
    await complete(session, 60)
    assert await show() == list(range(1, 51))
    read = log.read
    await session.finish()
    assert await show() == list(range(1, 51))
    assert log.read == read  # the page is full
