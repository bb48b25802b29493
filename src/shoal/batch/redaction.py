"""Removes private addresses, internal servers and paths from messages to callers. The log keeps them."""

from __future__ import annotations

import re

REFUSED_ADDRESS = "the host has an address that may not be contacted (serve.allow)"

_ADDRESS = re.compile(
    r"(?:(?<!\S)\S+ is )?(?:a|the|not an) [\w-]+ address, which [\w ]{1,60} "
    r"\((?:serve\.allow|browser\.public_networks)\)"
)
_SOCKET_ADDRESS = re.compile(r"\('[0-9a-fA-F.:%\w]*'(?:, \d+)+\)")
_SERVER = re.compile(r"\b((?:redis|postgres|mysql|mariadb|zookeeper|sqlite|amqp)\w*)(?:\+\w+)?://[^\s,;)\"']*")
_PROXY = re.compile(r"\bthe proxy \S+:\d+")
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:\"',;()]+/)+")


def redacted(text: str) -> str:
    """The message without private addresses. Of a server URL it keeps the scheme, of a path the last part."""
    text = _ADDRESS.sub(REFUSED_ADDRESS, text)
    text = _SOCKET_ADDRESS.sub("(an address)", text)
    text = _PROXY.sub("the proxy", text)
    text = _SERVER.sub(r"\1://...", text)
    return _PATH.sub("", text)
