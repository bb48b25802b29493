"""Normalize, join and fingerprint URLs, and decide which of them a run may crawl.

A URL has two forms. As *written*, it is what goes over the wire: absolute, without a fragment, and only what is not
allowed in a URL is quoted. Nothing that was quoted is unquoted, so signed URLs stay valid. The *normal* form is equal
for all spellings of a URL. Fingerprints, scope and robots.txt use it; nobody sends it.

Links are most of the cost of a page: it has dozens, and nearly all were seen before. So the common forms need only one
regular expression and one concatenation.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from socket import AF_INET6, inet_aton, inet_ntoa, inet_pton
from urllib.parse import unquote

from yarl import URL

from shoal.config import ScopeSettings
from shoal.config.checks import compile_pattern
from shoal.errors import ConfigError, RequestError, TooComplexError

# Internationalized host names: ``bücher.example`` is ``xn--bcher-kva.example`` on the wire.
#
# Encoding one name takes 0.1 ms, and a malicious name took 30 ms. So names that are too long for the DNS are
# refused before they are encoded, and the result is cached.

MAX_PER_PAGE = 100

_MAX_NAME = 253  # of the DNS
_MAX_LABEL = 63
_PREFIX = len("xn--")
_CACHE_SIZE = 16_384
_DOTS = re.compile("[.\u3002\uff0e\uff61]")
_NAME = re.compile(r"(?:https?:[/\\]*|[/\\]{2,})(?:[^/?#\\]*@)?([^/?#\\@]*)", re.IGNORECASE)
_FORBIDDEN = re.compile(r'[\0-\x20"#%/:<>?@\[\\\]^`{|}\x7f]')
_IGNORED_LETTERS = str.maketrans("", "", "".join(map(chr, range(33))))


def ascii_host(host: str) -> str:
    """Encode a host (without a port) as it is sent; it may be quoted. ValueError if it is invalid."""
    encoded, reason = _encode(host)
    if reason:
        raise ValueError(reason)
    return encoded


@lru_cache(maxsize=_CACHE_SIZE)
def _encode(host: str) -> tuple[str, str]:
    """Return the encoded name and an empty reason, or an empty name and why it is invalid."""
    # Every character takes at least one byte, so these are minimum sizes of the encoded labels.
    if "%" in host:
        try:
            host = unquote(host, errors="strict")
        except UnicodeDecodeError as exc:
            return "", str(exc)
        if _FORBIDDEN.search(host):
            return "", "a character that a host name cannot have is quoted"
    labels = _DOTS.split(unicodedata.normalize("NFKC", host))
    sizes = [len(label) if label.isascii() else len(label) + _PREFIX for label in labels]
    if max(sizes) > _MAX_LABEL or sum(sizes) + len(sizes) - 1 > _MAX_NAME + 1:
        return "", f"a host name has at most {_MAX_NAME} characters, and at most {_MAX_LABEL} between dots"
    try:
        return URL(f"http://{host}/").raw_host or "", ""
    except (ValueError, TypeError) as exc:
        return "", str(exc)


def non_ascii_host(url: str) -> str:
    """Return the host of a URL or link if it is not ASCII, or quoted, unchanged; or else an empty string."""
    if url.isascii() and "%" not in url:
        return ""
    match = _NAME.match(url.translate(_IGNORED_LETTERS))
    return match[1] if match is not None and not (match[1].isascii() and "%" not in match[1]) else ""


log = logging.getLogger("shoal.urls")

# Already as it is sent: lower-case host, no user, no fragment, nothing to quote. A "/." may start a dot segment, so it
# is checked again; so may "%2e". A default port and a host that ends like an unusual IP address are looked at closely.
_IN_PATH = r"!$&-;=@-\[\]_a-z|~"
_IN_QUERY = r"!$-;=?-~"
_QUERY = rf"(?:\?[{_IN_QUERY}]*)?"
_ESCAPE = r"%(?!2[eE])"
_PATH = rf"/(?!/)[{_IN_PATH}]*(?:{_ESCAPE}[{_IN_PATH}]*)*"
_IN_RELATIVE = _IN_PATH.replace("&-;", "&-9;")  # without the colon, which may end a scheme
_RELATIVE_PATH = rf"[{_IN_RELATIVE}]*(?:{_ESCAPE}[{_IN_RELATIVE}]*)*"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HOST = rf"(?:{_BYTE}(?:\.{_BYTE}){{3}}|(?:[a-z0-9._\-]*\.)?[a-z]+)"
_ORIGIN = rf"https?://{_HOST}(?::(?!80/|443/)(?:[1-9]\d{{0,3}}|[1-5]\d{{4}}))?"
_WRITTEN_PATH = re.compile(_PATH + _QUERY, re.ASCII)
_WRITTEN_URL = re.compile(_ORIGIN + _PATH + _QUERY, re.ASCII)
_RELATIVE = re.compile(rf"(?!/){_RELATIVE_PATH}{_QUERY}", re.ASCII)
# "../" only at the start, and something after it. Few of them, because a page keeps the folders that they lead to.
_MAX_UP = 8
_UP = re.compile(rf"((?:\.\./){{1,{_MAX_UP}}})((?![./?]|\Z)(?!.*/\.){_RELATIVE_PATH}{_QUERY})", re.ASCII)
# In normal form: nothing to quote, and nothing to unquote.
_UNQUOTED = r"A-Za-z0-9_\-~!$&'()*+,;=@./:"
_QUOTED = r"%(?:2[0235B]|3[CE]|5[B-E]|60|7[BCDF]|[89A-F][0-9A-F])"
_NORMAL_URL = re.compile(
    rf"{_ORIGIN}/(?!/)[{_UNQUOTED}]*(?:{_QUOTED}[{_UNQUOTED}]*)*"
    rf"(?:\?(?!\Z)[{_UNQUOTED}?]*(?:{_QUOTED}[{_UNQUOTED}?]*)*)?",
    re.ASCII,
)
# What is not allowed in a URL. Browsers quote "'" in a query, too, but it is allowed.
_UNSAFE_IN_PATH = re.compile(r"[^!$-;=@-\[\]_a-z|~]+")
_UNSAFE_IN_QUERY = re.compile(rf"[^{_IN_QUERY}]+")
_ABSOLUTE = re.compile(r"(https?)://([\w.\-]+)(:\d+)?(/.*|(?![^?])\??.*)", re.ASCII | re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_OTHER_SCHEME = re.compile(r"(?!(?i:https?:))[a-zA-Z][a-zA-Z0-9+.\-]*:")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*):")
_PARTS = re.compile(r"/*((?:[^/?]*@)?([^/?@]*))([^?]*)(?:\?(.*))?", re.DOTALL)
_PLAIN_ORIGIN = re.compile(_ORIGIN + "/", re.ASCII)
_ANY_NAME = re.compile(r"[a-z0-9._\-]+", re.ASCII)
_ADDRESS = re.compile(r"(?:.*\.)?(?:\d+|0x[0-9a-f]*)\.?", re.ASCII)
_DOT = re.compile("%2e", re.IGNORECASE)
_ESCAPES = [f"%{byte:02X}" for byte in range(256)]
_SURROGATE = re.compile("[\ud800-\udfff]")
_IGNORED = str.maketrans("", "", "\n\r\t")
_AROUND = "".join(map(chr, range(33)))

# Limits for untrusted pages.
_MAX_LENGTH = 65536
_MAX_HOST = 261  # 255 and a port
_MAX_CHARACTERS = 48 << 20  # of all joined links of one page; the base counts for each link
_MAX_SLOW = 20_000  # links of one page that take the slow path: up to 60 microseconds each


def written_url(url: str) -> str:
    """Return an http(s) URL as it is sent: nothing is unquoted, and only what is not allowed in a URL is quoted. The
    host is in lower case, dot segments are resolved, and the fragment and a default port are dropped.

    RequestError says what is wrong with an invalid URL.
    """
    try:
        if _WRITTEN_URL.fullmatch(url) and "/." not in url:
            return url
    except TypeError:
        raise RequestError(f"invalid URL: {url!r:.200} is not text") from None
    return _write(_clean(url))


def normalize_url(url: str) -> str:
    """Return the normal form of an http(s) URL: one for all its spellings. RequestError as from `written_url`."""
    try:
        if _NORMAL_URL.fullmatch(url) and "/." not in url:
            return url
    except TypeError:
        pass
    return str(URL(written_url(url)))


def typed_url(text: str) -> str:
    """Return a URL that a user typed, with or without a scheme, as it is sent."""
    has_scheme = re.match(r"\s*(?:https?:|[a-zA-Z][\w+.-]*://)", text, re.IGNORECASE)
    return written_url(text if has_scheme else "http://" + text.strip())


def _clean(url: str) -> str:
    """Clean up as browsers do: drop outer spaces, line breaks and the fragment, and turn backslashes into slashes."""
    url = url.strip(_AROUND).translate(_IGNORED).partition("#")[0]
    if len(url) > _MAX_LENGTH:
        raise _too_long(url)
    if "\\" in url:
        path, mark, query = url.partition("?")
        url = path.replace("\\", "/") + mark + query
    return url if url.isascii() else _SURROGATE.sub(_unescape, url)


def _too_long(url: str) -> RequestError:
    return RequestError(f"invalid URL: {url[:100]!r}... is longer than {_MAX_LENGTH} characters")


def _unescape(surrogate: re.Match[str]) -> str:
    """Quote a surrogate that stands for a non-UTF-8 byte of a header; replace any other surrogate."""
    byte = ord(surrogate[0]) - 0xDC00
    return f"%{byte:02X}" if 0x80 <= byte <= 0xFF else "\ufffd"


def _write(url: str) -> str:
    """The slow way to the written form of a clean, absolute URL. Browsers accept any number of slashes before the
    host, even none."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        hint = "add http:// or https://"
        if url.startswith(("/", "?", ".")):
            hint = "for a link of a page, use response.follow(link) or response.urljoin(link)"
        raise RequestError(f"invalid URL: {url[:200]!r} has no scheme; {hint}")
    if scheme[1].lower() not in ("http", "https"):
        raise RequestError(f"cannot fetch {url[:200]!r}: only http and https URLs can be crawled")
    parts = _PARTS.fullmatch(url, scheme.end())
    assert parts is not None
    authority, host, path, query = parts.groups()
    if not 0 < len(host) <= _MAX_HOST:
        raise RequestError(f"invalid URL: {url[:200]!r} has no host, or its host is too long")
    origin = f"{scheme[1].lower()}://{authority}"
    if not _PLAIN_ORIGIN.fullmatch(origin + "/"):
        origin = _origin(origin, host, url)
    path = _UNSAFE_IN_PATH.sub(_quoted, path) or "/"
    if "/." in path or "%2" in path:
        path = _without_dots(path)
    text = origin + path if query is None else f"{origin}{path}?{_UNSAFE_IN_QUERY.sub(_quoted, query)}"
    if len(text) > _MAX_LENGTH:  # quoting makes it up to nine times as long
        raise _too_long(url)
    return text


def _quoted(unsafe: re.Match[str]) -> str:
    return "".join(map(_ESCAPES.__getitem__, unsafe[0].encode()))


def _origin(origin: str, host: str, url: str) -> str:
    """The normal form of ``scheme://user:password@host:port``."""
    try:
        if not host.isascii() or ("%" in host and host[0] != "["):
            name, colon, number = host.partition(":")
            origin = origin[: len(origin) - len(host)] + ascii_host(name) + colon + number
        parsed = URL(origin.replace(" ", "%20"))
        name, port = parsed.raw_host or "", parsed.port
        if ":" in name:
            inet_pton(AF_INET6, name)
        elif _ADDRESS.fullmatch(name):
            parsed = parsed.with_host(inet_ntoa(inet_aton(name.removesuffix("."))))
    except (ValueError, TypeError, OSError) as exc:
        raise RequestError(f"invalid URL: {url[:200]!r} ({exc})") from exc
    if not port or not (":" in name or _ANY_NAME.fullmatch(name)):
        raise RequestError(f"invalid host or port in URL {url[:200]!r}")
    return str(parsed).removesuffix("/")


def join_url(base: str, href: str) -> str:
    """Return the URL of a link on the page ``base`` as it is sent. RequestError if it is not an http(s) URL."""
    try:
        if "/." not in href:
            if _WRITTEN_PATH.fullmatch(href):
                return base[: base.index("/", 8)] + href
            if _WRITTEN_URL.fullmatch(href):
                return href
        return _Base(base).quick(href) or _write(_join(base, _clean(href)))
    except TypeError:
        raise RequestError(f"invalid URL: {href!r:.200} is not text") from None


class _Base:
    """The page of some links. Its URL is in written form."""

    __slots__ = ("_folder", "_is_plain", "_parents", "_path", "origin", "url")

    def __init__(self, url: str) -> None:
        self.url = url
        self.origin = origin_of(url)
        self._path = ""  # the rest is for links that are not paths in normal form: many pages have none

    def _read_path(self) -> None:
        url = self.url
        self._path = url.partition("?")[0]
        self._folder = folder_of(self._path)
        self._parents: list[str] = []
        self._is_plain = _WRITTEN_URL.fullmatch(url) is not None and "/." not in url

    def quick(self, href: str) -> str:
        """Return the URL of a link that needs no quoting and no check of its host; or an empty string."""
        if not self._path:
            self._read_path()
        href = href.strip(_AROUND)
        if "#" in href:
            href = href[: href.index("#")]
        if self._is_plain and (up := _UP.fullmatch(href)):
            return self._parent(len(up[1]) // 3) + up[2]
        if _RELATIVE.fullmatch(href):
            if not self._is_plain or not href:
                return ""
            url = (self._path if href[0] == "?" else self._folder) + href
        elif _WRITTEN_PATH.fullmatch(href):
            url = self.origin + href
        else:
            url = self.url[: self.url.index("/")] + href if href.startswith("//") else href
            if not _WRITTEN_URL.fullmatch(url) and not (url := _with_lower_host(url)):
                return ""
        if "/." not in url:
            return url
        path, mark, query = url.partition("?")
        origin = path[: path.index("/", 8)]
        url = origin + _without_dots(path[len(origin) :]) + mark + query
        return url if _WRITTEN_URL.fullmatch(url) else ""

    def _parent(self, levels: int) -> str:
        """The folder so many levels above that of the page, or the root."""
        parents = self._parents
        if not parents:
            top, parent = len(self.origin) + 1, self._folder
            for _ in range(_MAX_UP):
                if len(parent) > top:
                    parent = parent[: parent.rindex("/", 0, -1) + 1]
                parents.append(parent)
        return parents[levels - 1]


def _with_lower_host(url: str) -> str:
    """Return the written form of a URL that has only capitals, a default port or no path; or else an empty string."""
    parts = _ABSOLUTE.fullmatch(url)
    if parts is None:
        return ""
    scheme, host, port, rest = parts.groups("")
    scheme = scheme.lower()
    port = "" if port == _DEFAULT_PORTS[scheme] else port
    url = f"{scheme}://{host.lower()}{port}{rest if rest[:1] == '/' else '/' + rest}"
    return url if _WRITTEN_URL.fullmatch(url) else ""


def _without_dots(path: str) -> str:
    """Resolve the segments ``.`` and ``..`` of a path, quoted or not."""
    segments: list[str] = []
    segment = ""
    for written in path[1:].split("/"):
        segment = _DOT.sub(".", written) if "%" in written else written
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(written)
    if segment in (".", ".."):
        segments.append("")
    return "/" + "/".join(segments)


def _join(base: str, href: str) -> str:
    if scheme := _SCHEME.match(href):
        name, rest = scheme[1].lower(), href[scheme.end() :]
        if name not in ("http", "https"):
            raise RequestError(f"cannot follow {href[:200]!r}: only http and https URLs can be crawled")
        if rest.startswith("//") or not base.startswith(f"{name}:"):
            return f"{name}://{rest.lstrip('/')}"
        href = rest  # browsers treat "http:page" on an http page as relative
    if href.startswith("//"):
        return f"{base[: base.index('/')]}//{href.lstrip('/')}"
    if href.startswith("/"):
        return origin_of(base) + href
    if not href:
        return base
    path = base.partition("?")[0]
    return path + href if href.startswith("?") else path[: path.rindex("/") + 1] + href


def folder_of(url: str) -> str:
    """Return a URL up to the last slash of its path. Relative links start there."""
    path = url.partition("?")[0]
    return path[: path.rindex("/") + 1]


def host_of(url: str) -> str:
    """Return ``host`` or ``host:port`` of a URL. Delays and limits apply to it."""
    host = url.split("/", 3)[2]
    return host.rpartition("@")[2] if "@" in host else host


def origin_of(url: str) -> str:
    """Return ``scheme://host:port`` of a URL."""
    return url[: url.index("/", 8)]


def url_fingerprint(url: str, method: str = "GET", body: bytes = b"") -> bytes:
    """Return 16 bytes that identify a request: its method, URL and body. The URL is in written form. Its spelling and
    the order of its query do not matter."""
    # Without these, a written URL is in normal form. This costs a quarter of a regular expression.
    if (
        "%" in url or "[" in url or "]" in url or "{" in url or "}" in url or "|" in url or "\\" in url
        or "^" in url or "`" in url or url[-1] == "?"
    ):  # fmt: skip
        url = normalize_url(url)
    path, mark, query = url.partition("?")
    if mark and "&" in query:
        url = path + "?" + "&".join(sorted(query.split("&")))
    if method == "GET" and not body:
        return blake2b(url.encode(), digest_size=16).digest()
    return blake2b(b"\0".join((method.encode(), url.encode(), body)), digest_size=16).digest()


def derived_fingerprint(fingerprint: bytes, *parts: bytes) -> bytes:
    """Return a fingerprint for another request of the same URL. Equal parts return an equal fingerprint."""
    return blake2b(b"\0".join((fingerprint, *parts)), digest_size=16).digest()


def resolve(base: str, hrefs: Iterable[str]) -> list[str]:
    """Return the URLs as they are sent, in order, without duplicates and links like ``mailto:`` or ``#top``.

    The number of links that take the slow path is limited for each page, and so is the total length of all joined
    links: a page may have a base of 60,000 characters and 100,000 short links. Paths that need no quoting have no
    limit.
    """
    return resolve_within_limits(base, hrefs)[0]


def resolve_within_limits(base: str, hrefs: Iterable[str]) -> tuple[list[str], bool]:
    """Return what ``resolve`` does, and whether no link was ignored because of a limit."""
    joiner = LinkJoiner(base)
    origin, quick = joiner.page.origin, joiner.page.quick
    urls: dict[str, None] = {}
    match = _WRITTEN_PATH.fullmatch
    complete = True
    for href in hrefs:
        if "/." not in href and match(href):
            urls[origin + href] = None
        elif href and href[0] != "#":
            if joiner.room > 0 and href.isascii() and (url := quick(href)):  # as `join_other` does, without the call
                joiner.room -= len(url)
                urls[url] = None
                continue
            if _OTHER_SCHEME.match(href):
                continue
            try:
                urls[joiner.join_other(href)] = None
            except RequestError:
                pass
            except TooComplexError:
                complete = False
    if joiner.is_exhausted:
        log.warning(
            "too many links, ignored the rest url=%s: more than %d need quoting, or they have more than %d characters",
            base[:200],
            _MAX_SLOW,
            _MAX_CHARACTERS,
        )
    return list(urls), complete


class LinkJoiner:
    """Joins the links of one page, with limits for all of them together: names to encode, links that take the slow
    path, and characters. A page may have a base of 60,000 characters and 100,000 short links."""

    __slots__ = ("_foreign", "_max_foreign", "_max_slow", "_slow", "page", "room")

    def __init__(self, base: str, *, max_foreign: int = MAX_PER_PAGE, max_slow: int = _MAX_SLOW) -> None:
        """``max_foreign``: how many internationalized host names are encoded. ``max_slow``:
        how many links may take the slow path."""
        self.page = _Base(base)
        self.room = _MAX_CHARACTERS
        """The characters that are left."""
        self._max_foreign, self._max_slow = max_foreign, max_slow
        self._foreign: set[str] = set()
        self._slow = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether links were refused because there were too many."""
        return self._slow > self._max_slow or self.room < 0

    def join(self, href: str) -> str:
        """Return the URL of a link. RequestError if it is not an http(s) URL. TooComplexError if the links of
        the page exceed a limit."""
        try:
            if "/." not in href and _WRITTEN_PATH.fullmatch(href):
                return self.page.origin + href
            if not href or href[0] == "#":
                return self.page.url
        except TypeError:
            raise RequestError(f"invalid URL: {href!r:.200} is not text") from None
        return self.join_other(href)

    def join_other(self, href: str) -> str:
        """The same for a link that is not a path in written form."""
        page = self.page
        if not href.isascii():
            self._count_name(href)
        if self.room > 0 and (url := page.quick(href)):
            self.room -= len(url)
            return url
        # Invalid and duplicate links cost the same.
        self._slow += 1
        self.room -= 4 * (len(page.url) + len(href))  # up to 0.2 microseconds a character
        if "%" in href and href.isascii():
            self._count_name(href)
        if self.is_exhausted:
            raise TooComplexError(
                f"the page is too complex: more than {self._max_slow} of its links need quoting, or its links have "
                f"more than {_MAX_CHARACTERS} characters"
            )
        return _write(_join(page.url, _clean(href)))

    def charge(self, href: str) -> None:
        """Count a link that other code joins. TooComplexError if the links of the page exceed a limit."""
        if not href.isascii():
            self._count_name(href)
        self.room -= len(self.page.url) + len(href)
        if self.room < 0:
            raise TooComplexError(f"the page is too complex: its links have more than {_MAX_CHARACTERS} characters")

    def _count_name(self, href: str) -> None:
        host = non_ascii_host(href)
        if not host or host in self._foreign:
            return
        if len(self._foreign) >= self._max_foreign:
            raise TooComplexError(
                f"the page is too complex: its links have more than {self._max_foreign} internationalized host names"
            )
        self._foreign.add(host)


# Decide which URLs a run may crawl.


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
