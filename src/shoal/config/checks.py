"""Checks that a type cannot express, and masks that hide secrets.

A check returns the rest of a sentence that begins with the key, or None if the value is valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from ipaddress import ip_network
from typing import Any, Protocol
from urllib.parse import urlsplit

from shoal.config import plugins
from shoal.errors import ConfigError
from shoal.messages import did_you_mean_scheme, pip_install

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


def each(check: Callable[[Any], str | None]) -> Callable[[Iterable[Any]], str | None]:
    """The check of a list: each of its values must pass this one."""
    return lambda values: next((problem for value in values if (problem := check(value))), None)


def check_domain(domain: str) -> str | None:
    is_valid = "/" not in domain and domain.split() == [domain]
    return None if is_valid else f'must contain host names such as "example.com", not {domain!r}'


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
    if proxy is None or (_has_server(proxy) and urlsplit(proxy).scheme in ("http", "https", "socks5", "socks5h")):
        return None
    return f"must be http://, https:// or socks5:// with a host, not {mask(proxy)!r}"


def _has_server(url: str) -> bool:
    """Whether a URL has a host, and no port or a valid one."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port or IPv6 address
        return False


def check_tor(url: str | None) -> str | None:
    if url is None:
        return None
    valid = False
    if _has_server(url):
        place = urlsplit(url)
        valid = place.scheme in ("socks5", "socks5h") and place.port is not None
        valid = valid and place.username is None and not place.path.strip("/") and not place.query
    expected = "must be the SOCKS port of a Tor daemon without user and password, such as socks5://127.0.0.1:9050"
    return None if valid else f"{expected}, not {mask(url)!r}"


def check_proxy_list(entries: tuple[str, ...]) -> str | None:
    """Proxies, and files of proxies: ``@proxies.txt``. The files are read when a crawl starts."""
    if "@" in entries:
        return 'must name a file after the @, such as "@proxies.txt"'
    return each(check_proxy)(entry for entry in entries if not entry.startswith("@"))


def check_network(network: str) -> str | None:
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


def check_shared_output(output: str) -> str | None:
    schemes = ("postgresql", "postgres", "mysql", "mariadb", "s3", "gs", "az")
    if _has_server(output) and (
        urlsplit(output).scheme in schemes or urlsplit(output).scheme in plugins.names("sinks")
    ):
        return None
    return f"must contain URLs such as postgresql://db.example/crawl or s3://bucket/path, not {mask(output)!r}"


def check_file_store(store: str) -> str | None:
    scheme, mark, rest = store.partition("://")
    if mark and (scheme not in ("s3", "gs", "az") or not rest.partition("/")[0] or "@" in rest):
        return f"must be a folder, or a URL such as s3://bucket/path, not {mask(store)!r}"
    return None


def check_size(size: str) -> str | None:
    is_valid = re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", size)
    return None if is_valid else f"must contain sizes such as 120x120, not {size!r}"


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
    forms = "memory:, sqlite:///file, redis://host:port/number, rediss://host:port/number or postgresql://host/database"
    plugged = plugins.names("frontiers")
    hint = plugins.hint("frontiers") if plugged and frontier_kind(frontier) is None else ""
    if file := re.fullmatch(r"(?:sqlite:(?://)?)?([^:?#]+\.(?:db|sqlite3?))", frontier):
        hint += f"; did you mean sqlite:///{file[1]}?"
    return f"must be {forms}, not {mask(frontier)!r}{hint}{did_you_mean_scheme(frontier, (*FRONTIER_KINDS, *plugged))}"


def check_coordinator(coordinator: str | None) -> str | None:
    if coordinator is None or re.match("zookeeper://[^/?]", coordinator):
        return None
    if frontier_kind(coordinator) in ("redis", "postgresql"):
        return check_frontier(coordinator)
    expected = "zookeeper://host:2181, redis://host:port/number or postgresql://host/database"
    hint = did_you_mean_scheme(coordinator, ("zookeeper", *FRONTIER_KINDS))
    return f"must be {expected}, not {mask(coordinator)!r}{hint}"


# Regular expressions: those of the user run with `re`, those that others may have written with RE2.
#
# `re` may need years for a URL of 50 characters. RE2 needs time in proportion to the URL, whatever the expression
# is. It is slower for ordinary ones, and refuses lookaround and backreferences. So it is only for the expressions
# of schedules, API callers and stored runs. They are marked in the text itself, because settings pass through
# layers and processes.


_MARK = "(?#linear)"
"""A comment for `re`."""
_MAX_MEMORY = 256 << 10
"""Of one expression in RE2. It refuses larger ones."""
_MAX_STEPS = 5000
"""Of all expressions of a list together: RE2 may do each of them for each character of a URL."""


class CompiledPattern(Protocol):
    @property
    def pattern(self) -> str: ...

    def search(self, string: str, /) -> object: ...


def linear(patterns: Iterable[str], own: Collection[str] = ()) -> tuple[str, ...]:
    """Mark expressions that others may have written. Those that the user has, too (``own``), stay as they are."""
    return tuple(text if text in own else _MARK + text.removeprefix(_MARK) for text in patterns)


def unmarked(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(text.removeprefix(_MARK) for text in patterns)


def compile_pattern(text: str) -> CompiledPattern:
    """ValueError says why that is not possible. ConfigError if RE2 is needed, but not installed."""
    try:
        return _compile_linear(text.removeprefix(_MARK)) if text.startswith(_MARK) else re.compile(text)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(str(exc)) from None


def _compile_linear(text: str) -> CompiledPattern:
    try:
        import re2
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "regular expressions of API callers, schedules and stored runs need RE2; install it with: "
            + pip_install("re2")
        ) from exc
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MAX_MEMORY
    try:
        pattern: CompiledPattern = re2.compile(text, options)
    except re2.error as exc:
        (reason,) = exc.args
        raise ValueError(
            f"{reason.decode(errors='replace')}. Expressions of API callers, schedules and stored runs are "
            "searched by RE2, in linear time. If you need this one, set it in the spider, or in [scope] of shoal.toml "
            "on each machine"
        ) from None
    return pattern


def check_regexes(patterns: tuple[str, ...]) -> str | None:
    """The rest of a sentence that says what is wrong. None if nothing is."""
    steps = 0
    for text in patterns:
        try:
            steps += getattr(compile_pattern(text), "programsize", 0)
        except ConfigError:
            raise
        except ValueError as exc:
            return f"must contain regular expressions; {unmarked([text])[0]!r:.200} does not compile: {exc}"
        if steps > _MAX_STEPS:
            return (
                f"has expressions that RE2 searches in more than {_MAX_STEPS} steps for each character. Use fewer or "
                "simpler ones, or set them in the spider, or in [scope] of shoal.toml on each machine"
            )
    return None
