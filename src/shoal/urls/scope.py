"""Decide which URLs a run may crawl."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shoal.config import ScopeSettings
from shoal.config.checks import compile_pattern
from shoal.errors import ConfigError, RequestError
from shoal.urls.normalize import host_of, normalize_url

_MAX_HOSTS = 100_000


class Scope:
    """The allowed domains, URL rules and depth of a run, compiled once."""

    def __init__(self, config: ScopeSettings, allowed_domains: Sequence[str] = ()) -> None:
        """``allowed_domains`` are the spider's own, in addition to those of the configuration."""
        if isinstance(allowed_domains, str):
            allowed_domains = [allowed_domains]
        self._domains = tuple(_domain(text) for text in (*config.allowed_domains, *allowed_domains))
        self._allow = [compile_pattern(rule) for rule in config.allow]
        self._deny = [compile_pattern(rule) for rule in config.deny]
        self._max_length = config.max_url_length
        self.max_depth = config.max_depth
        self.max_links = config.max_links
        self._hosts: dict[str, bool] = {}

    def too_deep(self, depth: int) -> bool:
        return self.max_depth is not None and depth > self.max_depth

    def refuses(self, url: str) -> str | None:
        """Return why a URL is out of scope; None if it is in scope. Check the depth with ``too_deep``."""
        if len(url) > self._max_length:
            return f"longer than {self._max_length} characters"
        if self._domains and not self._allows_host(host_of(url)):
            return "outside the allowed domains"
        if self._allow or self._deny:
            url = normalize_url(url)
        if self._allow and not any(rule.search(url) for rule in self._allow):
            return "matches no allow rule"
        for rule in self._deny:
            if rule.search(url):
                return f"denied by the rule {rule.pattern!r}"
        return None

    def _allows_host(self, host: str) -> bool:
        allowed = self._hosts.get(host)
        if allowed is None:
            name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
            allowed = any(
                domain in (name, host) or name.endswith("." + domain) or host.endswith("." + domain)
                for domain in self._domains
            )
            if len(self._hosts) < _MAX_HOSTS:
                self._hosts[host] = allowed
        return allowed


def _domain(text: str) -> str:
    """Return a domain as it appears in a URL: ``.Bücher.de`` is ``xn--bcher-kva.de``."""
    name = text.strip().removeprefix("*").removeprefix(".")
    try:
        if "/" in name:
            raise RequestError("it is a URL or has a path")
        return host_of(normalize_url(f"http://{name}/"))
    except RequestError as exc:
        raise ConfigError(
            f'"allowed_domains" must contain host names such as "example.com", not {text!r} ({exc})'
        ) from exc
