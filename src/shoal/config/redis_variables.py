"""The Redis server that the environment names, for a fleet without a frontier URL."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from shoal.errors import ConfigError

REDIS_VARIABLES = ("REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD", "REDIS_DB")


def redis_url(host: str = "127.0.0.1", port: int = 6379, password: str | None = None, db: int = 0) -> str:
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{secret}{f'[{host}]' if ':' in host else host}:{port}/{db}"


def redis_from_environ(environ: Mapping[str, str]) -> str:
    """The URL that the variables give; what is not set has its default.

    In Kubernetes, a service named ``redis`` sets REDIS_PORT to ``tcp://10.0.0.1:6379``.
    """
    host, port = environ.get("REDIS_HOST", ""), environ.get("REDIS_PORT", "")
    if port.startswith("tcp://"):
        try:
            service = urlsplit(port)
            host, port = host or service.hostname or "", str(service.port or "")
        except ValueError:
            raise ConfigError(f'REDIS_PORT must be a port or "tcp://host:port", not {port!r}') from None
    password, db = environ.get("REDIS_PASSWORD") or None, environ.get("REDIS_DB", "")
    return redis_url(host or "127.0.0.1", _number("REDIS_PORT", port, 6379), password, _number("REDIS_DB", db, 0))


def _number(name: str, text: str, default: int) -> int:
    if text and not (text.isdecimal() and len(text) < 6):
        raise ConfigError(f"{name} must be a whole number, not {text!r}")
    return int(text) if text else default
