"""Checks that a type cannot express, and masks that hide secrets.

A check returns the rest of a sentence that begins with the key, or None if the value is valid.
"""

from __future__ import annotations

import re
from ipaddress import ip_network
from urllib.parse import urlsplit

from shoal import plugins
from shoal.suggestions import did_you_mean_scheme

# The kind of store behind each scheme of a frontier URL.
FRONTIER_KINDS = {
    **{kind: kind for kind in ("memory", "sqlite", "redis", "postgresql", "local")},
    **dict.fromkeys(("rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"), "redis"),
}

MIN_TOKEN = 16
"""Characters of a token of the API."""


def mask(url: str) -> str:
    """Replace the password of a URL by ``***``. A password may contain any character, so this may hide too much."""
    url = re.sub(r"^((?>(?:[\w+.-]+://)?)[^:]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)(pass\w*=)('[^']*'|[^&\s]+)", r"\1***", url)


def mask_headers(headers: dict[str, str]) -> dict[str, str]:
    return {name: "***" if re.search("(?i)auth|cookie|token|key|secret", name) else headers[name] for name in headers}


def mask_secret(secret: str | None) -> str | None:
    return None if secret is None else "***"


def frontier_kind(frontier: object) -> str | None:
    """Return ``memory``, ``sqlite``, ``redis``, ``postgresql`` or ``local``; None for anything else."""
    return FRONTIER_KINDS.get(frontier.partition(":")[0]) if isinstance(frontier, str) else None


def check_domains(domains: tuple[str, ...]) -> str | None:
    wrong = [domain for domain in domains if "/" in domain or domain.split() != [domain]]
    return f'must contain host names such as "example.com", not {wrong[0]!r}' if wrong else None


def check_one_line(text: str) -> str | None:
    return "must be one line" if "\r" in text or "\n" in text else None


def check_contact(contact: str | None) -> str | None:
    if not contact or re.fullmatch(r"(https?://|mailto:)[^\s()<>\x00-\x20\x7f-\U0010ffff]{3,200}", contact):
        return None
    return f"must be a URL such as https://example.com/bot or mailto:bot@example.com, not {contact!r:.100}"


def check_headers(headers: dict[str, str]) -> str | None:
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~\w-]+", name, re.ASCII):
            return f"must contain valid header names, not {name!r}"
        if check_one_line(value):
            return f"must contain values of one line; the value of {name!r} has several"
    return None


def check_proxy(proxy: str | None) -> str | None:
    if proxy is None:
        return None
    try:
        url = urlsplit(proxy)
        valid = url.scheme in ("http", "https", "socks5", "socks5h") and bool(url.hostname) and url.port != 0
    except ValueError:  # invalid port or IPv6 address
        valid = False
    return None if valid else f"must be http://, https:// or socks5:// with a host, not {mask(proxy)!r}"


def check_proxies(proxies: tuple[str, ...]) -> str | None:
    return next((problem for proxy in proxies if (problem := check_proxy(proxy))), None)


def check_tor(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        place = urlsplit(url)
        valid = place.scheme in ("socks5", "socks5h") and bool(place.hostname) and bool(place.port)
        valid = valid and place.username is None and not place.path.strip("/") and not place.query
    except ValueError:  # invalid port or IPv6 address
        valid = False
    known = "must be the SOCKS port of a Tor daemon without user and password, such as socks5://127.0.0.1:9050"
    return None if valid else f"{known}, not {mask(url)!r}"


def check_proxy_list(entries: tuple[str, ...]) -> str | None:
    """Proxies, and files of proxies: ``@proxies.txt``. The files are read when a crawl starts."""
    if "@" in entries:
        return 'must name a file after the @, such as "@proxies.txt"'
    return check_proxies(tuple(entry for entry in entries if not entry.startswith("@")))


def check_header_sets(sets: tuple[dict[str, str], ...]) -> str | None:
    return next((problem for headers in sets if (problem := check_headers(headers))), None)


def check_networks(networks: tuple[str, ...]) -> str | None:
    for network in networks:
        try:
            ip_network(network)
        except ValueError:
            return f'must contain networks or addresses such as "10.0.0.0/8", not {network!r}'
    return None


def check_tokens(tokens: dict[str, str]) -> str | None:
    return "must have a token for each name" if not all(tokens.values()) else None


def check_token(token: str | None) -> str | None:
    short = f"must have at least {MIN_TOKEN} characters; make one with `openssl rand -hex 32`"
    return short if token and len(token) < MIN_TOKEN else None


def find_short_tokens(token: str | None, tokens: dict[str, str]) -> str | None:
    """What is wrong with the tokens of the API, or None. One that can be guessed protects nothing."""
    every = {"serve.token": token or None, **{f"serve.tokens.{name}": value for name, value in tokens.items()}}
    short = [key for key, value in every.items() if value is not None and len(value) < MIN_TOKEN]
    if not short:
        return None
    return (
        f"{', '.join(short)}: shorter than {MIN_TOKEN} characters, so that it could be guessed. Make a new one with "
        "`openssl rand -hex 32`"
    )


def check_shared_outputs(outputs: tuple[str, ...]) -> str | None:
    for output in outputs:
        try:
            url = urlsplit(output)
            known = ("postgresql", "postgres", "mysql", "mariadb", "s3", "gs", "az")
            valid = (url.scheme in known or url.scheme in plugins.names("sinks")) and url.hostname and url.port != 0
        except ValueError:
            valid = False
        if not valid:
            return f"must contain URLs such as postgresql://db.example/crawl or s3://bucket/path, not {mask(output)!r}"
    return None


def check_file_store(store: str) -> str | None:
    scheme, mark, rest = store.partition("://")
    if mark and (scheme not in ("s3", "gs", "az") or not rest.partition("/")[0] or "@" in rest):
        return f"must be a folder, or a URL such as s3://bucket/path, not {mask(store)!r}"
    return None


def check_sizes(sizes: tuple[str, ...]) -> str | None:
    for size in sizes:
        if not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", size):
            return f"must contain sizes such as 120x120, not {size!r}"
    return None


def check_frontier(frontier: str) -> str | None:
    several = "," in frontier  # several Sentinel hosts: each is checked when it is used
    try:
        url = urlsplit(frontier)
        valid = several or (url.port != 0 and url.hostname != "")
    except ValueError:
        return _bad_frontier(frontier)
    match frontier_kind(frontier):
        case "memory":
            valid = valid and frontier in ("memory:", "memory://")
        case "sqlite":
            valid = valid and re.fullmatch("sqlite:///.+", frontier) is not None
        case "redis":
            path = "/[^/]+(/[0-9]*)?" if "+sentinel" in url.scheme else "(/[0-9]*)?"
            valid = valid and bool(several or url.hostname) and re.fullmatch(path, url.path) is not None
        case "postgresql":
            valid = valid and frontier.startswith("postgresql://")
        case "local":
            valid = valid and not frontier.startswith("local://")
        case _:
            valid = frontier.partition(":")[0] in plugins.names("frontiers")
    return None if valid else _bad_frontier(frontier)


def _bad_frontier(frontier: str) -> str:
    known = "memory:, sqlite:///file, redis://host:port/number, rediss://host:port/number or postgresql://host/database"
    plugged = plugins.names("frontiers")
    hint = plugins.hint("frontiers") if plugged and frontier_kind(frontier) is None else ""
    if file := re.fullmatch(r"(?:sqlite:(?://)?)?([^:?#]+\.(?:db|sqlite3?))", frontier):
        hint += f"; did you mean sqlite:///{file[1]}?"
    return f"must be {known}, not {mask(frontier)!r}{hint}{did_you_mean_scheme(frontier, (*FRONTIER_KINDS, *plugged))}"


def check_coordinator(coordinator: str | None) -> str | None:
    if coordinator is None or re.match("zookeeper://[^/?]", coordinator):
        return None
    if frontier_kind(coordinator) in ("redis", "postgresql"):
        return check_frontier(coordinator)
    known = "zookeeper://host:2181, redis://host:port/number or postgresql://host/database"
    hint = did_you_mean_scheme(coordinator, ("zookeeper", *FRONTIER_KINDS))
    return f"must be {known}, not {mask(coordinator)!r}{hint}"
