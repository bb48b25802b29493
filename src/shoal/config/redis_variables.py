"""Settings under the names of other crawlers: a file or the environment may use them.

``QUEUE_TYPE`` and ``FILTER_TYPE`` choose the frontier, ``SCHEDULER_MAX_QUEUE_SIZE`` is ``queue.max_size``, and
``REDIS_HOST`` and the others name the Redis server of a frontier without a URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from shoal.config.checks import frontier_kind, mask
from shoal.errors import ConfigError

REDIS_VARIABLES = ("REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD", "REDIS_DB")
OTHER_NAMES = ("QUEUE_TYPE", "FILTER_TYPE", "SCHEDULER_MAX_QUEUE_SIZE", *REDIS_VARIABLES)


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


def own_names(
    named: Mapping[str, object], layer: Mapping[str, object], redis: Mapping[str, str]
) -> dict[str, tuple[str, object]]:
    """The settings that `OTHER_NAMES` of one layer set: by dotted key, the other name and the value.

    ``layer``: its settings under their own names. ``redis``: the `REDIS_VARIABLES` in force. ConfigError names what
    contradicts each other.
    """
    found: dict[str, tuple[str, object]] = {}
    if "SCHEDULER_MAX_QUEUE_SIZE" in named:
        table, size = layer.get("queue"), named["SCHEDULER_MAX_QUEUE_SIZE"]
        own = table.get("max_size") if isinstance(table, Mapping) else layer.get("queue.max_size")
        if own not in (None, size):
            raise ConfigError(
                f'SCHEDULER_MAX_QUEUE_SIZE {size} and "queue.max_size" {own} contradict each other. Remove one of them'
            )
        if own is None:
            found["queue.max_size"] = ("SCHEDULER_MAX_QUEUE_SIZE", size)
    frontier = layer.get("frontier")
    kinds = {name: str(named[name]).lower() for name in ("QUEUE_TYPE", "FILTER_TYPE") if name in named}
    if len(set(kinds.values())) > 1:
        words = " and ".join(f'{name} "{kind}"' for name, kind in kinds.items())
        raise ConfigError(f"{words} contradict each other: seen and queued URLs are in one store. Set only QUEUE_TYPE")
    for name, kind in kinds.items():
        if frontier is not None:
            if frontier_kind(frontier) != kind:
                raise ConfigError(
                    f'{name} "{kind}" contradicts the frontier "{mask(str(frontier))}". Remove one of them'
                )
        elif kind in ("memory", "redis"):
            found["frontier"] = (name, "memory:" if kind == "memory" else redis_from_environ(redis))
        else:
            url = {"sqlite": "sqlite:///file.db", "postgresql": "postgresql://host/database"}.get(kind)
            hint = f"name the frontier instead: {url}" if url else "use memory or redis"
            raise ConfigError(f'{name} "{kind}" does not say where the queue is; {hint}')
    return found
