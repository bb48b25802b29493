"""The parts of a PostgreSQL URL."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Struct

from shoal.errors import StoreError
from shoal.stores.timeouts import timeout_seconds

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_TIMEOUT = 10.0
_FORM = "write postgresql://user:password@host:5432/database, optionally with ?schema=name and &timeout=seconds"


class PostgresAddress(Struct, frozen=True):
    """Where a database is, and in which schema Shoal's tables are."""

    dsn: str
    """The URL without Shoal's own options."""
    schema: str
    timeout: float
    """Seconds that a connection or a call may take."""
    place: str
    """A description without a password, for messages."""
    host: str | None
    """None if the URL leaves it to the driver (a socket, several hosts, the environment)."""
    port: int

    @classmethod
    def parse(cls, url: str) -> PostgresAddress:
        """Parse a PostgreSQL URL. StoreError if it is invalid; the message never shows the password."""
        try:
            parts = urlsplit(url)
            has_several = "," in parts.netloc
            host, port = (None, 0) if has_several else (parts.hostname, parts.port or 5432)
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as exc:
            raise StoreError(f"invalid PostgreSQL URL; {_FORM}") from exc
        ours = {key: value for key, value in query if key in ("schema", "timeout")}
        schema = ours.get("schema", "shoal")
        if not _NAME.fullmatch(schema) or schema.startswith("pg_"):
            raise StoreError(
                f"invalid schema name ?schema={schema}: use at most 63 lowercase letters, digits and _; "
                "it must not start with pg_"
            )
        dsn = urlunsplit(parts._replace(query=urlencode([pair for pair in query if pair[0] not in ours])))
        shown = parts.netloc.rpartition("@")[2] or dict(query).get("host", "localhost")
        return cls(
            dsn=dsn,
            schema=schema,
            timeout=_timeout(ours.get("timeout")),
            place=f"PostgreSQL at {shown}{parts.path}",
            host=None if "host" in dict(query) else host,
            port=port,
        )


def _timeout(text: str | None) -> float:
    try:
        return timeout_seconds(text, _TIMEOUT)
    except ValueError as exc:
        raise StoreError(f"invalid PostgreSQL URL: {exc}; {_FORM}") from exc
