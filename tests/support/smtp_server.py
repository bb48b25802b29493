"""An SMTP server for the tests: it speaks the real protocol, with STARTTLS and AUTH, and keeps the mails."""

from __future__ import annotations

import asyncio
import base64
import ssl
from dataclasses import dataclass
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import cast

from tests.support.servers import StreamServer


@dataclass
class Received:
    """A mail, its envelope, and how it came."""

    sender: str
    recipients: list[str]
    mail: EmailMessage
    encrypted: bool
    user: str


class SmtpServer(StreamServer):
    """Accepts mails. ``starttls``: a context to offer it; ``password``: then AUTH is required, for any user."""

    def __init__(
        self, port: int = 0, *, starttls: ssl.SSLContext | None = None, tls: ssl.SSLContext | None = None,
        password: str = "",
    ) -> None:  # fmt: skip
        super().__init__(port, tls=tls)
        self.mails: list[Received] = []
        self.refuses = ""
        """The answer to RCPT, if it is not accepted."""
        self._starttls = starttls
        self._password = password

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        encrypted, user, sender = self._tls is not None, "", ""
        recipients: list[str] = []
        writer.write(b"220 test ESMTP\r\n")
        while line := (await reader.readline()).decode().rstrip("\r\n"):
            verb, _, rest = line.partition(" ")
            answer = "250 OK"
            match verb.upper():
                case "EHLO":
                    offers = ["test"] + ["STARTTLS"] * (self._starttls is not None and not encrypted) + ["AUTH PLAIN"]
                    answer = "".join(f"250-{offer}\r\n" for offer in offers) + "250 SMTPUTF8"
                case "STARTTLS" if self._starttls is not None:
                    writer.write(b"220 go ahead\r\n")
                    await writer.start_tls(self._starttls)
                    encrypted = True
                    continue
                case "AUTH":
                    _, user, password = base64.b64decode(rest.partition(" ")[2]).decode().split("\0")
                    if password != self._password:
                        user, answer = "", f"535 5.7.8 wrong password {password}"
                    else:
                        answer = "235 welcome"
                case "MAIL" if self._password and not user:
                    answer = "530 authentication required"
                case "MAIL":
                    sender, recipients = rest.partition("<")[2].partition(">")[0], []
                case "RCPT":
                    recipients.append(rest.partition("<")[2].partition(">")[0])
                    answer = self.refuses or answer
                case "DATA":
                    writer.write(b"354 send it\r\n")
                    content = (await reader.readuntil(b"\r\n.\r\n"))[:-3].replace(b"\r\n..", b"\r\n.")
                    mail = cast(EmailMessage, message_from_bytes(content, policy=default))
                    self.mails.append(Received(sender, recipients, mail, encrypted, user))
                case "QUIT":
                    writer.write(b"221 bye\r\n")
                    return
            writer.write(f"{answer}\r\n".encode())
            await writer.drain()
