"""Channels: each sends one message, and says why it could not."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import smtplib
import ssl
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from shoal.config import Config
from shoal.crawling.onion import make_http_fetcher
from shoal.errors import ConfigError, FetchError, RequestError
from shoal.fetch.guard import AddressGuard
from shoal.http import Request
from shoal.messages import pip_install, printable
from shoal.operations.notifications.messages import Message
from shoal.operations.notifications.settings import (
    AppriseChannel,
    ChannelTable,
    LoadedSettings,
    Secret,
    SlackChannel,
    SmtpChannel,
    TelegramChannel,
    WebhookChannel,
    read_secret,
    without_secrets,
)
from shoal.ports import Fetcher
from shoal.system import clock, threads

# Mail through an SMTP server.


_threads = threads.Pool(4, "shoal-notify")
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_MAX_SUBJECT = 200
T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run a call that blocks, in a thread for notifications: one that waits for a name server for minutes must not keep
    outputs from being written."""
    return await _threads.call(work, *args)


class Mail:
    """Sends messages by SMTP, each over its own connection, in a thread: `smtplib` blocks."""

    def __init__(self, where: str, settings: SmtpChannel, password: Secret | None, folder: Path) -> None:
        """``folder``: where a relative ``ca_file`` begins."""
        if password is not None and settings.security == "none":
            raise ConfigError(f'{where}: a password is not sent without encryption; set security = "starttls" or "tls"')
        self._settings = settings
        self._password = password
        self._port = settings.port or _PORTS[settings.security]
        self._context: ssl.SSLContext | None = None
        if settings.security != "none":
            ca_file = None if settings.ca_file is None else folder / settings.ca_file
            try:
                self._context = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(f"{where}: cannot read ca_file {ca_file}: {exc.strerror or exc}") from exc

    async def send(self, message: Message) -> str:
        try:
            # Each step has the timeout of the socket, and a conversation has few steps.
            async with asyncio.timeout(4 * self._settings.timeout):
                await in_thread(self._send, self._mail(message))
        except TimeoutError:
            return f"{self._settings.host}:{self._port} did not respond in time"
        except (OSError, smtplib.SMTPException, ssl.SSLError) as exc:
            return self._explain(exc)
        return ""

    async def close(self) -> None:
        """Nothing is kept open."""

    def _mail(self, message: Message) -> EmailMessage:
        """The mail. Its texts are escaped, so they cannot add a header or end the body."""
        mail = EmailMessage(policy=SMTP)
        mail["From"] = self._settings.sender
        mail["To"] = ", ".join(self._settings.to)
        mail["Subject"] = printable(message.title)[:_MAX_SUBJECT]
        mail["Date"] = format_datetime(datetime.fromtimestamp(message.at, UTC))
        domain = self._settings.sender.rpartition("@")[2]
        mail["Message-ID"] = f"<{message.message_id}@{domain}>"  # a repeat is the same mail
        mail["Auto-Submitted"] = "auto-generated"
        mail["X-Shoal-Message"] = message.message_id
        mail.set_content(printable(message.text, lines=True) + "\n")
        return mail

    def _send(self, mail: EmailMessage) -> None:
        settings = self._settings
        with self._connect() as server:
            if settings.security == "starttls":
                server.starttls(context=self._context)
            if settings.username is not None and self._password is not None:
                server.login(settings.username, self._password.reveal())
            refused = server.send_message(mail)
            if refused:
                raise smtplib.SMTPRecipientsRefused(refused)

    def _connect(self) -> smtplib.SMTP:
        settings = self._settings
        if settings.security == "tls":
            return smtplib.SMTP_SSL(settings.host, self._port, timeout=settings.timeout, context=self._context)
        return smtplib.SMTP(settings.host, self._port, timeout=settings.timeout)

    def _explain(self, exc: Exception) -> str:
        where = f"{self._settings.host}:{self._port}"
        match exc:
            case smtplib.SMTPRecipientsRefused(recipients=refused):
                reason = f"it refuses {', '.join(refused)}"
            case smtplib.SMTPResponseException(smtp_code=code, smtp_error=text):
                answer = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
                reason = f"it responded {code} {answer}"
            case OSError(strerror=str(text)):
                reason = text
            case _:
                reason = str(exc) or type(exc).__name__
        secrets = [] if self._password is None else [self._password]
        return printable(without_secrets(f"mail through {where}: {reason}", secrets))[:500]


# Slack, Telegram and all other services that apprise knows.


_TYPES = {"info": "info", "warning": "warning", "critical": "failure"}
_one_at_a_time = threading.Lock()
"""apprise has one logger for all services."""


class AppriseService:
    """Sends messages through apprise, in a thread: its services block."""

    def __init__(self, where: str, url: Secret, timeout: float, hidden: Sequence[Secret] = ()) -> None:
        """``hidden``: more secrets that no error may show."""
        try:
            import apprise
        except ModuleNotFoundError:
            message = f"{where}: this channel needs apprise; install it with: {pip_install('notify')}"
            raise ConfigError(message) from None
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
        kind = "success" if message.event in ("resolved", "test") else _TYPES[message.problem.severity]
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


# Sends a signed message to a webhook.


SIGNATURE = "X-Shoal-Signature"


class Undelivered(Struct, frozen=True):
    """Why a message was not delivered, and whether a retry can help."""

    reason: str
    retryable: bool


def sign(secret: str, at: int, body: bytes) -> str:
    """``t=TIME,v1=HEX``: HMAC-SHA256 of the time, a dot and the body. The receiver can refuse old messages by the
    time."""
    return f"t={at},v1={hmac.new(secret.encode(), b'%d.' % at + body, hashlib.sha256).hexdigest()}"


async def post_signed(
    fetcher: Fetcher, url: str, secret: str, body: bytes, *, timeout: float, headers: Mapping[str, str] | None = None
) -> Undelivered | None:
    """Send a JSON body once. None if the receiver accepted it. The address guard is that of the fetcher."""
    signed = {
        "Content-Type": "application/json",
        SIGNATURE: sign(secret, int(clock.time()), body),
        **(headers or {}),
    }
    try:
        response = await fetcher.fetch(Request(url, method="POST", body=body, headers=signed, timeout=timeout))
    except RequestError as exc:
        return Undelivered(str(exc), retryable=False)
    except FetchError as exc:
        return Undelivered(str(exc), exc.retryable)
    if response.ok:
        return None
    return Undelivered(f"the receiver responded with HTTP {response.status}", retryable=True)


# A signed POST to a URL.


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


class Channel(Protocol):
    """A way to reach people."""

    async def send(self, message: Message) -> str:
        """Send a message once. Returns why it was not delivered, without secrets; an empty string if it was. It takes
        bounded time."""
        ...

    async def close(self) -> None: ...


def open_channels(
    loaded: LoadedSettings, config: Config, environ: Mapping[str, str] | None = None
) -> dict[str, Channel]:
    """All channels of the settings. ConfigError if one of them lacks a secret or a library. Nothing is contacted."""
    environ = os.environ if environ is None else environ
    return {name: _open(name, table, loaded, config, environ) for name, table in loaded.settings.channels.items()}


def _open(
    name: str, table: ChannelTable, loaded: LoadedSettings, config: Config, environ: Mapping[str, str]
) -> Channel:
    where = f"{loaded.source}: [notifications.channels.{name}]"

    def secret(key: str) -> Secret:
        variable, file = getattr(table, f"{key}_env"), getattr(table, f"{key}_file")
        text = read_secret(where, key, variable, file, environ, loaded.folder)
        if text is None:
            raise ConfigError(f'{where}: set {key}_env = "VARIABLE" or {key}_file = "PATH"')
        return text

    match table:
        case WebhookChannel():
            url = Secret(table.url) if table.url is not None else secret("url")
            return SignedWebhook(config, url, secret("key"), (*config.serve.allow, *table.allow), table.timeout)
        case SmtpChannel():
            password = None if table.username is None else secret("password")
            if table.username is None and (table.password_env or table.password_file):
                raise ConfigError(f"{where}: the password has no username")
            return Mail(where, table, password, loaded.folder)
        case SlackChannel() | AppriseChannel():
            return AppriseService(where, secret("url"), table.timeout)
        case TelegramChannel():
            token = secret("token")
            url = Secret(f"tgram://{token.reveal()}/{table.chat}/")
            return AppriseService(where, url, table.timeout, hidden=[token])
