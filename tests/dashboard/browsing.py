"""Chromium for the tests of the dashboard. A page must log no errors, and ask no other server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, Request, Response, sync_playwright

from shoal.config import BrowserSettings
from shoal.fetch.browser.process import find_executable
from tests.acceptance.serving import PATIENCE
from tests.dashboard.stage import TOKENS, Stage

Theme: TypeAlias = Literal["light", "dark"]
OpenPage: TypeAlias = Callable[..., "WatchedPage"]

WIDE, NARROW = 1440, 390
AXE = Path(__file__).with_name("axe.min.js")
COLOURS = ("color-contrast", "link-in-text-block")
"""The rules of axe-core that depend on the theme."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The Chromium of the system. While it runs, `asyncio.run` does not work in this thread."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_executable(BrowserSettings()), chromium_sandbox=False, args=["--disable-gpu"]
        )
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """A page of the dashboard. ``check`` fails if something went wrong in it."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.console: list[str] = []
        self.strays: list[str] = []
        self.expected: tuple[str, ...] = ()
        """Parts of console messages that the test expects, such as a status of 403."""
        self._listeners: dict[str, Callable[..., None]] = {
            "console": self._note_message, "pageerror": self._note_error, "request": self._note_request,
        }  # fmt: skip
        for event, listener in self._listeners.items():
            page.on(event, listener)  # type: ignore[call-overload]

    def leave(self) -> None:
        """Listen no longer: another test uses the page next."""
        for event, listener in self._listeners.items():
            self.page.remove_listener(event, listener)

    def _note_error(self, error: Error) -> None:
        self.console.append(str(error))

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.console.append(f"{message.text} {message.location.get('url', '')}")

    def _note_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme != "data" and f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.strays.append(request.url)

    def open(self, path: str) -> Response:
        """Open a page, and wait until it shows its first live update."""
        response = self.page.goto(self.origin + path, wait_until="load")
        assert response is not None
        return response

    def check(self) -> None:
        wrong = [text for text in self.console if not any(part in text for part in self.expected)]
        assert not wrong, wrong
        assert not self.strays, self.strays

    def see(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.page.get_by_text(text).first.wait_for()

    def click(self, name: str, *, confirm: bool = False) -> None:
        """Click a button, and confirm it if the page asks."""
        if confirm:
            self.page.once("dialog", lambda dialog: dialog.accept())
        self.page.get_by_role("button", name=name, exact=True).click()

    def toast(self, text: str) -> None:
        """Wait for a message about an action, and remove it."""
        self.page.locator("#toasts", has_text=text).wait_for()
        self.page.evaluate("document.getElementById('toasts').replaceChildren()")

    def mark(self) -> None:
        """Remember this document: see `is_same`."""
        self.page.evaluate("window.marked = true")

    @property
    def is_same(self) -> bool:
        """Whether it was not loaded again since `mark`."""
        return bool(self.page.evaluate("window.marked === true"))

    @property
    def is_hacked(self) -> bool:
        """Whether content from strangers was run."""
        return bool(self.page.evaluate("window.hacked !== undefined"))

    def appear(self, width: int, theme: Theme) -> None:
        """Continue in a window of this width, with this theme."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=theme)
        # The page hears of its new width with the next frame.
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def findings(self, *rules: str) -> list[str]:
        """Serious and critical findings of axe-core, by default of all its rules."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text())  # as a script of the page, the policy would refuse it
        options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
        found: dict[str, Any] = self.page.evaluate("options => axe.run(document, options)", options)
        return [
            f"{each['id']}: {each['help']} {[node['html'][:150] for node in each['nodes'][:3]]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]


class Browsers:
    """One browser context per user and appearance, logged in. Contexts are shared by the tests. A page is used by one
    test after the other, if they are the same user: a new one takes a third of a second of CPU time."""

    def __init__(self, browser: Browser, stage: Stage) -> None:
        self._browser = browser
        self._stage = stage
        self._contexts: dict[tuple[str, int, Theme], BrowserContext] = {}
        self._cookies: dict[str, Any] = {}
        self._idle: dict[tuple[str, int, Theme], Page] = {}

    def new_context(self, width: int = WIDE, theme: Theme = "light") -> BrowserContext:
        """A context of someone who is not logged in."""
        context = self._browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, locale="en-GB", timezone_id="UTC"
        )
        context.set_default_timeout(1000 * PATIENCE)
        return context

    def context(self, user: str, width: int, theme: Theme) -> BrowserContext:
        key = (user, width, theme)
        if key not in self._contexts:
            context = self._contexts[key] = self.new_context(width, theme)
            if user not in self._cookies:
                form: dict[str, str | float | bool] = {"token": TOKENS[user], "next": "/ui/login"}
                context.request.post(f"{self._stage.url}/ui/login", form=form, max_redirects=0)
                self._cookies[user] = context.cookies()
            context.add_cookies(self._cookies[user])
        return self._contexts[key]

    @contextmanager
    def open(self, path: str, user: str = "anna", width: int = WIDE, theme: Theme = "light") -> Iterator[WatchedPage]:
        key = (user, width, theme)
        page = self._idle.pop(key, None) or self.context(*key).new_page()
        watched = WatchedPage(page, self._stage.url)
        try:
            watched.open(path)
            yield watched
            watched.leave()
            page.evaluate("sessionStorage.clear()")
            watched.appear(width, theme)
        except BaseException:
            page.close()
            raise
        for other in (*self._idle.values(),):  # an idle page is updated, too
            other.close()
        self._idle = {key: page}
