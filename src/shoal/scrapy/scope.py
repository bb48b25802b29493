"""Which hosts a spider may visit: ``allowed_domains`` with the meaning that Scrapy gives it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

log = logging.getLogger("shoal.scrapy")

_MAX_HOSTS = 100_000


class OffsiteFilter:
    """Allows the domains and their subdomains, or everything if there are none. A domain with a scheme, a path or a
    port matches no host, as in Scrapy. A warning says what to write."""

    def __init__(self, domains: object) -> None:
        if isinstance(domains, str):
            domains = [domains]
        self.domains = [str(domain) for domain in _members(domains) if domain is not None]
        self._pattern = re.compile(rf"(?:.*\.)?(?:{'|'.join(map(re.escape, self.domains))})") if self.domains else None
        self._known: dict[str, bool] = {}

    def warn(self, name: str) -> None:
        """Log the entries that match no host."""
        for domain in self.domains:
            host = urlsplit(domain if "://" in domain else f"//{domain}").hostname or ""
            if host.lower() != domain.lower():
                log.warning(
                    "%s: allowed_domains has %r, which matches no host, so no link to it is followed: write %r",
                    name, domain, host or "a host name",
                )  # fmt: skip

    def allows(self, url: str) -> bool:
        if self._pattern is None:
            return True
        start = url.find("//") + 2
        end = url.find("/", start)
        authority = url[start:] if end < 0 else url[start:end]
        is_allowed = self._known.get(authority)
        if is_allowed is None:
            is_allowed = self._pattern.fullmatch(urlsplit(url).hostname or "") is not None
            if len(self._known) < _MAX_HOSTS:
                self._known[authority] = is_allowed
        return is_allowed


def _members(domains: object) -> Iterable[object]:
    return domains if isinstance(domains, Iterable) else ()
