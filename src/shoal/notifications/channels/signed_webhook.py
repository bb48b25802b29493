"""A signed POST to a URL."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import Config
from shoal.crawling.onion import make_http_fetcher
from shoal.errors import ConfigError, RequestError
from shoal.fetch.guard import AddressGuard
from shoal.fetch.signed_post import post_signed
from shoal.http import Request
from shoal.notifications.messages import Message
from shoal.notifications.secret import Secret, without_secrets

MESSAGE_ID = "X-Shoal-Message"
"""The header with the id of a message. A repeat has the same one."""


class SignedWebhook:
    """Sends messages to a URL. It contacts no private address outside ``networks``."""

    def __init__(self, config: Config, url: Secret, key: Secret, networks: Sequence[str], timeout: float) -> None:
        try:
            Request(url.reveal())
        except RequestError:
            raise ConfigError("the url of a webhook channel must be http:// or https:// with a host") from None
        self._url = url
        self._key = key
        self._timeout = timeout
        self._fetcher = make_http_fetcher(config, AddressGuard(networks))

    async def send(self, message: Message) -> str:
        failure = await post_signed(
            self._fetcher, self._url.reveal(), self._key.reveal(), message.as_json(), timeout=self._timeout,
            headers={MESSAGE_ID: message.message_id},
        )  # fmt: skip
        return "" if failure is None else without_secrets(failure.reason, [self._url, self._key])

    async def close(self) -> None:
        await self._fetcher.close()
