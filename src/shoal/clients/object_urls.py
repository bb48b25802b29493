"""Places in object storage: ``s3://bucket/path``, ``gs://bucket/path`` and ``az://container/path``.

Credentials never stand in such a URL. They come from the environment (``AWS_*``, ``GOOGLE_*``, ``AZURE_*``), like the
endpoint and the region, unless the URL names these. `shoal.clients.objects` has the connection.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Literal, TypeAlias, cast, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from shoal.errors import ConfigError

Scheme: TypeAlias = Literal["s3", "gs", "az"]

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
CREDENTIALS: Mapping[Scheme, str] = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The variables that hold the credentials, for messages."""
_OPTIONS: Mapping[Scheme, tuple[str, ...]] = {
    "s3": ("endpoint", "region", "timeout", "conditional"),
    "gs": ("timeout", "conditional"),
    "az": ("endpoint", "account", "timeout", "conditional"),
}
FORMS = {
    "endpoint": "endpoint=https://host",
    "region": "region=name",
    "account": "account=name",
    "timeout": "timeout=seconds",
    "conditional": "conditional=no",
}
"""The options of a place, and how to write them."""
_ENDPOINTS: Mapping[Scheme, tuple[str, ...]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._-]{0,221}")
_TIMEOUT = 30.0


class ObjectPlace(Struct, frozen=True):
    """A bucket (a container in Azure) and a path in it."""

    scheme: Scheme
    bucket: str
    path: str
    """Without a slash at either end; may be empty."""
    options: dict[str, str] = {}
    """``endpoint``, ``region`` and ``account``, as far as the URL names them."""
    timeout: float = _TIMEOUT
    """Seconds for one call."""
    conditional: bool = True
    """Whether the server can write an object on the condition that no other process wrote it."""

    @property
    def name(self) -> str:
        """The place as messages show it. It has no secrets."""
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")

    @property
    def endpoint(self) -> str:
        """The endpoint of the URL or the environment; empty for that of the provider."""
        endpoints = (os.environ.get(name, "") for name in _ENDPOINTS[self.scheme])
        return self.options.get("endpoint") or next((endpoint for endpoint in endpoints if endpoint), "")


def is_object_url(text: str) -> bool:
    return text.partition("://")[0] in SCHEMES and "://" in text


def parse_place(url: str, others: Mapping[str, str] | None = None) -> tuple[ObjectPlace, dict[str, str]]:
    """Read a URL. Return the place, and the options that belong to the caller.

    ``others``: the names of these options, and how to write them. ConfigError if the URL is invalid."""
    scheme = cast("Scheme", url.partition("://")[0])
    form = f"{scheme}://{'container' if scheme == 'az' else 'bucket'}/path"
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(f"invalid {scheme}:// URL; write {form}") from None
    if "@" in parts.netloc or ":" in parts.netloc:  # do not show it: it may be a secret
        raise ConfigError(f"a {scheme}:// URL has no user, password or port: write {form}, and set {_where(scheme)}")
    path = unquote(parts.path).strip("/")
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment or not _is_path(path):
        raise ConfigError(f"invalid {scheme}:// URL; write {form}, with ? as %3F and # as %23")
    own = {name: options.pop(name) for name in _OPTIONS[scheme] if name in options}
    try:
        timeout = float(own.pop("timeout", _TIMEOUT))
        conditional = own.pop("conditional", "yes")
        endpoint = own.get("endpoint", "https://")
        if not 0.0 < timeout <= 3600.0 or conditional not in ("yes", "no") or not all(own.values()):
            raise ValueError
        if not endpoint.startswith(("http://", "https://")) or "@" in endpoint or options.keys() - (others or {}):
            raise ValueError
    except ValueError:
        allowed = [*(others or {}).values(), *(FORMS[name] for name in _OPTIONS[scheme])]
        raise ConfigError(f"{scheme}://{parts.netloc}: invalid option; allowed: ?{'&'.join(allowed)}") from None
    return ObjectPlace(scheme, parts.netloc, path, own, timeout, conditional == "yes"), options


def _where(scheme: Scheme) -> str:
    return f"{CREDENTIALS[scheme]} in the environment"


def _is_path(path: str) -> bool:
    """Whether each part of a path is a name. The client of the storage would change others."""
    return not path or all(part not in ("", ".", "..") and part.isprintable() for part in path.split("/"))
