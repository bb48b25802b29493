"""What callers of the API are not told: private addresses, names of internal servers, and paths. The log has them."""

from __future__ import annotations

import re

REFUSED_ADDRESS = "the address of the host is not to be contacted from here (serve.allow)"

_ADDRESS = re.compile(r"(?:\S+ is )?(?:a|the|not an) [\w-]+ address, which may not be contacted \(serve\.allow\)")
_CALLED = re.compile(r"\('[0-9a-fA-F.:%\w]*'(?:, \d+)+\)")
_SERVER = re.compile(r"\b((?:redis|postgres|mysql|mariadb|zookeeper|sqlite|amqp)\w*)(?:\+\w+)?://[^\s,;)\"']*")
_PATH = re.compile(r"(?<![\w:/.])/(?:[^\s/:\"',;()]+/)+")


def redacted(text: str) -> str:
    """A message without them: of a server its kind is left, of a path the last name."""
    text = _ADDRESS.sub(REFUSED_ADDRESS, text)
    text = _CALLED.sub("(an address)", text)
    text = _SERVER.sub(r"\1://...", text)
    return _PATH.sub("", text)
