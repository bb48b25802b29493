"""Views of the dashboard that change by themselves."""

from __future__ import annotations

from shoal.server.dashboard.live import END, LiveViews, Rendered, message_of


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
    assert not views.is_full
