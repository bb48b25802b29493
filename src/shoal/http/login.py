"""What spiders need to log in: `Login` sends the requests, and `LoggedOut` recognises pages without a login."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import NoReturn

from msgspec import Struct

from shoal.errors import LoginError, RequestError
from shoal.http.exchange import redirected_request
from shoal.http.request import Request
from shoal.http.response import Response
from shoal.urls.normalize import join_url

_MAX_REDIRECTS = 10


class Login:
    """What ``Spider.log_in`` works with. Its requests keep the delay of their host, follow redirects, and share cookies
    that become those of the run when the method returns."""

    def __init__(self, jar: str, send: Callable[[Request], Awaitable[Response]]) -> None:
        self.jar = jar
        """The name of the jar: its identity, then ``#`` and the name in ``meta["cookiejar"]``. Empty: the default."""
        self.response: Response | None = None
        """The last answer."""
        self._send = send

    async def fetch(self, request: Request | str) -> Response:
        """Fetch a page and follow its redirects. Pages with an error status are returned too. FetchError if there is no
        answer."""
        request = Request(request) if isinstance(request, str) else request
        for _ in range(_MAX_REDIRECTS):
            self.response = response = await self._send(request)
            if response.location is None:
                return response
            request = redirected_request(request, response.urljoin(response.location), response.status)
            if response.next_render is not None:
                request = request.replace(render=response.next_render)
            if response.next_post is not None:  # a page of a single sign-on
                body, kind = response.next_post
                request = request.replace(method="POST", body=body, headers={**request.headers, "Content-Type": kind})
        raise LoginError(f"the login is redirected more than {_MAX_REDIRECTS} times, to {request.url}")

    def secret(self, name: str) -> str:
        """A secret from the environment: the variable ``name``, or the file that the variable ``name_FILE`` names."""
        value = os.environ.get(name)
        if value:
            return value
        path = os.environ.get(f"{name}_FILE")
        if not path:
            raise LoginError(
                f"the secret {name} is missing: set the variable {name}, or {name}_FILE to a file with it",
                retryable=False,
            )
        try:
            return Path(path).read_text(encoding="utf-8").strip("\r\n")
        except OSError as exc:
            raise LoginError(f"the secret {name} cannot be read from {path}: {exc.strerror}", retryable=False) from exc

    def fail(self, reason: str) -> NoReturn:
        """The login failed."""
        raise LoginError(reason)


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
