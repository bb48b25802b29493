"""Where a database is, as the URL of a frontier or a coordinator says it."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Struct

from shoal.errors import StoreError

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_FORM = "write postgresql://user:password@host:5432/database, with ?schema=name and ?timeout=seconds if you like"


class Address(Struct, frozen=True):
    """A database, and what is ours alone in its URL."""

    dsn: str
    schema: str
    timeout: float
    """Seconds that a connection or a call may take."""
    place: str
    """As it may be shown: without a password."""
    host: str | None
    port: int
    """What answers there, unless the URL leaves that to the driver (a socket, several hosts, the environment)."""

    @classmethod
    def of(cls, url: str) -> Address:
        """StoreError if the URL can't be read. It never shows the password."""
        try:
            parts = urlsplit(url)
            several = "," in parts.netloc
            host, port = (None, 0) if several else (parts.hostname, parts.port or 5432)
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as exc:
            raise StoreError(f"the URL can't be read; {_FORM}") from exc
        ours = {key: value for key, value in query if key in ("schema", "timeout")}
        schema = ours.get("schema", "shoal")
        if not _NAME.fullmatch(schema) or schema.startswith("pg_"):
            raise StoreError(
                f"?schema={schema} can't be the name of a schema: small letters, digits and _, at most 63, not pg_"
            )
        dsn = urlunsplit(parts._replace(query=urlencode([pair for pair in query if pair[0] not in ours])))
        shown = parts.netloc.rpartition("@")[2] or dict(query).get("host", "localhost")
        return cls(
            dsn=dsn,
            schema=schema,
            timeout=_seconds(ours.get("timeout", "10")),
            place=f"PostgreSQL at {shown}{parts.path}",
            host=None if "host" in dict(query) else host,
            port=port,
        )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise StoreError(f"?timeout={text} is no number of seconds above 0")
    return seconds
