"""Slack, Telegram and all other services that apprise knows."""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType

from shoal.errors import ConfigError
from shoal.notifications.channels.mail import in_thread
from shoal.notifications.messages import Message
from shoal.notifications.secret import Secret, without_secrets
from shoal.printable import printable
from shoal.suggestions import pip_install

_TYPES = {"info": "info", "warning": "warning", "critical": "failure"}
_one_at_a_time = threading.Lock()
"""apprise has one logger for all services."""


class AppriseService:
    """Sends messages through apprise, in a thread: its services block."""

    def __init__(self, where: str, url: Secret, timeout: float, hidden: Sequence[Secret] = ()) -> None:
        """``hidden``: more secrets that no error may show."""
        apprise = _import_apprise(where)
        self._secrets = [url, *hidden]
        self._timeout = timeout
        asset = apprise.AppriseAsset(
            app_id="Shoal", app_desc="Shoal", app_url="", async_mode=False, secure_logging=True,
            interpret_escapes=False, interpret_emojis=False,
        )  # fmt: skip
        self._service = apprise.Apprise(asset=asset)
        with _one_at_a_time, _Captured(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of modules that its plugins import
            if not self._service.add(url.reveal()):
                raise ConfigError(
                    f"{where}: apprise does not know this URL. See its list of services for how to write it"
                )
        self._text = apprise.NotifyFormat.TEXT

    async def send(self, message: Message) -> str:
        try:
            async with asyncio.timeout(4 * self._timeout):
                error = await in_thread(self._send, message)
        except TimeoutError:
            error = "the service did not respond in time"
        return printable(without_secrets(error, self._secrets))[:500]

    async def close(self) -> None:
        """Nothing is kept open."""

    def _send(self, message: Message) -> str:
        kind = "success" if message.event in ("resolved", "test") else _TYPES[message.severity]
        with _one_at_a_time, _Captured() as captured:
            delivered = self._service.notify(
                title=printable(message.title), body=printable(message.text, lines=True), notify_type=kind,
                body_format=self._text,
            )  # fmt: skip
        return "" if delivered else captured.text or "the service did not accept the message"


class _Captured(logging.Handler):
    """Collects the warnings of apprise. What it and its HTTP library log does not reach the log, because URLs are
    secrets."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._loggers = [logging.getLogger(name) for name in ("apprise", "urllib3")]
        self._propagated = [logger.propagate for logger in self._loggers]

    def __enter__(self) -> _Captured:
        for logger in self._loggers:
            logger.propagate = False
            logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for logger, propagated in zip(self._loggers, self._propagated, strict=True):
            logger.removeHandler(self)
            logger.propagate = propagated

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("apprise"):
            self.text = record.getMessage()


def _import_apprise(where: str) -> ModuleType:
    try:
        import apprise
    except ModuleNotFoundError:
        raise ConfigError(f"{where}: this channel needs apprise; install it with: {pip_install('notify')}") from None
    return apprise
