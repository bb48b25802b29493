"""RenderedResponse: a page as a browser shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from shoal.http.rendering import Captured, Render
from shoal.http.response import Response

if TYPE_CHECKING:
    from playwright.async_api import Page


class RenderedResponse(Response):
    """A page as a browser shows it: ``body`` is the HTML after its scripts have run."""

    __slots__ = (
        "captured", "console", "next_post", "next_render", "on_release", "page", "pdf", "screenshot", "shown_url",
    )  # fmt: skip

    def rendered(
        self,
        *,
        screenshot: bytes | None = None,
        pdf: bytes | None = None,
        captured: list[Captured] | None = None,
        console: list[str] | None = None,
        shown_url: str = "",
    ) -> RenderedResponse:
        """Set what the browser returned besides the page."""
        self.screenshot = screenshot
        self.pdf = pdf
        self.captured = captured or []
        self.console = console or []
        self.shown_url = shown_url
        self.next_render: Render | None = None
        self.next_post: tuple[bytes, str] | None = None
        self.page: Page | None = None
        self.on_release: Callable[[], Awaitable[None]] | None = None
        return self

    async def release(self) -> None:
        """Return the page to its browser. The engine calls it after the callback."""
        release, self.on_release, self.page = self.on_release, None, None
        if release is not None:
            await release()
