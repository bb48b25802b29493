"""Views of the dashboard that change by themselves."""

from __future__ import annotations

import asyncio

import pytest

from shoal.api.dashboard import live
from shoal.api.dashboard.live import END, LiveViews, Rendered, message_of
from shoal.errors import StoreAwayError


class Content:
    """A view that changes with each rendering, up to its last one."""

    def __init__(self, last: int) -> None:
        self.renderings = 0
        self._last = last

    async def render(self) -> Rendered:
        self.renderings += 1
        return Rendered(f"<p>{self.renderings}</p>", self.renderings == self._last)


async def test_a_view_is_sent_whenever_it_changed_until_it_is_final() -> None:
    views, content = LiveViews(interval=0.001), Content(last=3)
    sent = [message async for message in views.stream("key", content.render)]
    assert sent[0] == message_of("<p>1</p>")
    assert sent[-2:] == [message_of("<p>3</p>"), END]
    assert content.renderings == 3


async def test_a_view_that_is_final_is_rendered_once() -> None:
    views, content = LiveViews(interval=0.001), Content(last=1)
    assert [message async for message in views.stream("key", content.render)] == [message_of("<p>1</p>"), END]
    assert content.renderings == 1


async def test_a_view_that_cannot_be_refreshed_says_how_old_it_is() -> None:
    renderings = 0

    async def render() -> Rendered:
        nonlocal renderings
        renderings += 1
        if renderings == 2:
            raise StoreAwayError("redis://host: connection refused")
        return Rendered("<p>running</p>", renderings == 3)

    sent = [message async for message in LiveViews(interval=0.02).stream("key", render)]
    assert sent[0] == message_of("<p>running</p>")
    assert "ms ago:</strong> the store does not answer. What follows may be outdated." in sent[1]
    assert "<p>running</p>" in sent[1]
    assert sent[2:] == [message_of("<p>running</p>"), END]


async def test_a_view_says_how_old_it_is_while_the_store_keeps_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_SLOW", 0.02)
    answers, first = asyncio.Event(), True

    async def render() -> Rendered:
        nonlocal first
        if first:
            first = False
            return Rendered("<p>running</p>")
        await answers.wait()
        return Rendered("<p>finished</p>", is_final=True)

    sent = []
    async for message in LiveViews(interval=0.001).stream("key", render):
        sent.append(message)
        if "ago:" in message:
            answers.set()
    assert sent[-2:] == [message_of("<p>finished</p>"), END]
    assert "ms ago:</strong> the store does not answer." in sent[1]
