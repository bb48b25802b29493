"""Mail through an SMTP server."""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from pathlib import Path
from typing import TypeVar

from shoal.errors import ConfigError
from shoal.notifications.messages import Message
from shoal.notifications.secret import Secret, without_secrets
from shoal.notifications.settings import SmtpChannel
from shoal.printable import printable

_threads = ThreadPoolExecutor(4, thread_name_prefix="shoal-notify")
_PORTS = {"starttls": 587, "tls": 465, "none": 25}
_MAX_SUBJECT = 200
T = TypeVar("T")


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """Run a call that blocks, in a thread for notifications: one that waits for a name server for minutes must not keep
    outputs from being written."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *args)


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
                told = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
                reason = f"it responded {code} {told}"
            case OSError(strerror=str(text)):
                reason = text
            case _:
                reason = str(exc) or type(exc).__name__
        secrets = [] if self._password is None else [self._password]
        return printable(without_secrets(f"mail through {where}: {reason}", secrets))[:500]
