"""Rules that tell whether a page was answered without a login."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from shoal.errors import RequestError
from shoal.http import Response
from shoal.urls.normalize import join_url


class LoggedOut(Struct, frozen=True, kw_only=True):
    """A page is logged out if one of these holds. For anything else, write ``logged_out`` as a method."""

    statuses: Collection[int] = ()
    redirect: str = ""
    """A text in the URL that the page redirects to: ``"/login"``."""
    selector: str = ""
    """A CSS query that finds something only in pages without a login: ``"form#login"``."""

    def __call__(self, response: Response) -> bool:
        if response.status in self.statuses:
            return True
        if self.redirect and any(self.redirect in url for url in _targets(response)):
            return True
        return bool(self.selector) and _is_html(response) and bool(response.css(self.selector))


def _targets(response: Response) -> list[str]:
    """Where a page led to: by a redirect, or in the browser."""
    targets = [response.shown_url] if response.shown_url else []
    if response.location is not None:
        try:
            targets.append(join_url(response.url, response.location))
        except RequestError:
            targets.append(response.location)
    return targets


def _is_html(response: Response) -> bool:
    return "html" in response.headers.get("Content-Type", "html").lower() and response.location is None
