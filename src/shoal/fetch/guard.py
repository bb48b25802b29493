"""Decides which addresses may be contacted: for callers of the API, and by pages in the browser. It does no I/O."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from shoal.errors import ConfigError, FetchError

# Special networks that some or all versions of Python treat as public.
_RESERVED = tuple(
    ip_network(network)
    for network in (
        "168.63.129.16",  # services that Azure provides to each of its machines
        "192.0.0.0/24",  # IETF protocols, and the metadata service of Oracle's cloud
        "192.88.99.0/24",  # 6to4 relays
        "2001::/23",  # IETF protocols; Teredo, which leads to an IPv4 address
        "2002::/16",  # 6to4, which leads to an IPv4 address
        "3fff::/20",  # documentation
        "fec0::/10",  # site-local: deprecated, but still used in some networks
    )
)
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
# The endings of names that no public name server knows.
_LOCAL_ENDINGS = frozenset(
    ("corp", "home", "internal", "intranet", "lan", "local", "localdomain", "localhost", "private")
)
_LOCAL_NAME = "a name of a local network"
_NAT64 = IPv6Network("64:ff9b::/96")
_MAX_HOSTS = 4096  # whose kind is remembered for one browser context


def not_sent(message: str, kind: str) -> FetchError:
    """The error of a request that may not be sent, now or later."""
    return FetchError(message, kind=kind, retryable=False, contacted=False)


def check_upstream(proxy: str, upstreams: Collection[str]) -> None:
    """FetchError if the operator does not trust this proxy, for which no guard decides about addresses."""
    if proxy not in upstreams:
        raise not_sent("a proxy can't be used here: it would bypass the address guard (serve.allow)", "proxy")


class AddressGuard:
    """Refuses every address that is not public, unless it is in ``allowed``.

    An IPv6 address that contains an IPv4 address (mapped, or for NAT64) is treated as that one. Tunnels (6to4, Teredo)
    and IPv4-compatible addresses are always refused: no public site has one. The guard does not know NAT64 prefixes
    that a network chose for itself.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        """``allowed`` has networks, such as ``10.0.0.0/8``, and single addresses."""
        self._allowed = tuple(map(_network, allowed))

    def refuses(self, address: str) -> str | None:
        """Why the address may not be contacted (``a loopback address``); None if it may."""
        try:
            literal = ip_address(address)
        except ValueError:
            return "not an IP address"  # but the system may read it as one: 127.1
        target = _target(literal)
        if any(literal in network or target in network for network in self._allowed):
            return None
        return _reason(target)

    def select(self, addresses: Sequence[str]) -> list[str]:
        """The addresses of a name that may be contacted. If one of them is public, only public ones."""
        allowed = [address for address in addresses if self.refuses(address) is None]
        return [address for address in allowed if _PUBLIC.refuses(address) is None] or allowed

    def refuses_host(self, host: str) -> str | None:
        """Why a proxy, which resolves names by itself, may not be asked for this host; None if it may.

        Addresses are refused as in `refuses`, and if they are not in the usual spelling: proxies read ``127.1`` and
        ``0x7f.1`` in different ways. So are names that mean something only in the proxy's own network. What a public
        name leads to is known to the proxy alone.
        """
        try:
            return self.refuses(str(ip_address(host)))
        except ValueError:
            name = host.rstrip(".").lower()
        labels = name.split(".")
        if not _NAME.fullmatch(name) or _NUMBER.fullmatch(labels[-1]) or any(map(_hides_ascii, labels)):
            return "not a host name"  # a name never ends with a number, an address in an odd spelling does
        if len(labels) == 1 or labels[-1] in _LOCAL_ENDINGS or name.endswith(".home.arpa"):
            return _LOCAL_NAME
        return None

    def check_host(self, host: str) -> None:
        """FetchError if a proxy may not be asked for this host."""
        if (reason := self.refuses_host(host)) is not None:
            raise not_sent(f"{host} {_refusal(reason, _REFUSED)}", "address")


def _hides_ascii(label: str) -> bool:
    """Whether a label of an internationalized name stands for ASCII: digits of another script, for example."""
    if not label.startswith("xn--"):
        return False
    try:
        decoded = label[4:].encode("ascii").decode("punycode")
    except (UnicodeError, ValueError, OverflowError):
        return True
    return unicodedata.normalize("NFKC", decoded).isascii()


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as exc:
        raise ConfigError(
            f'"serve.allow" must have addresses and networks such as "10.0.0.0/8", not {text!r} ({exc})'
        ) from exc


def _target(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The address that a connection reaches."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return getattr(address, "ipv4_mapped", None) or address


def _reason(address: IPv4Address | IPv6Address) -> str | None:
    if address.is_unspecified:
        return "the unspecified address"
    if address.is_loopback:
        return "a loopback address"
    if address.is_link_local:
        return "a link-local address"
    if address.is_multicast:
        return "a multicast address"
    if address.is_reserved or any(address in network for network in _RESERVED):
        return "a reserved address"
    if not address.is_global:
        return "a private address"
    return None


_PUBLIC = AddressGuard(())
_REFUSED = "may not be contacted (serve.allow)"
_SETTING = "(browser.public_networks)"
_LOCAL = tuple(
    ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.168.0.0/16", "::/127", "fc00::/7", "fe80::/10", "fec0::/10"),
    )
)
"""Networks whose addresses nobody else can have. The other special ones may lead to a stranger: tunnels, NAT64."""


class _Kind(IntEnum):
    """Of an address. If a name has several, the first of these counts."""

    PUBLIC = 0
    SPECIAL = 1
    LOCAL = 2


class ReachableAddresses(NamedTuple):
    """What a page may contact of a host."""

    addresses: list[str]
    refusal: str
    """If there is no address: why not, as the end of a sentence that begins with the host."""


class PageReach:
    """Decides which addresses the pages of one browser context may contact. All of them have the same host.

    The first host that is asked for is the one of the pages: without a page, nothing else is. Only pages from a local
    address reach addresses that are not public, so that a page of a stranger can't use services of this network. A host
    keeps its kind (public, local, or special: the rest) as long as the context exists; its address may change. Of a
    name with addresses of several kinds, those that anybody could have are used.

    So a name that leads elsewhere later (DNS rebinding) gives a page nothing that it could not reach before. What
    ``guard`` refuses is refused in any case. What ``public`` does not refuse is public.
    """

    def __init__(self, guard: AddressGuard | None, public: AddressGuard = _PUBLIC) -> None:
        self._guard = guard
        self._public = public
        self._page: str | None = None
        self._kinds: dict[str, _Kind] = {}
        """Of hosts. All others have to be public, if the page is not local or there are too many of them."""

    def select(self, host: str, addresses: Sequence[str]) -> ReachableAddresses:
        """Choose among the addresses that a name has now, at least one. An address in a URL has itself."""
        allowed = [address for address in addresses if self._guard is None or self._guard.refuses(address) is None]
        if self._guard is not None and not allowed:
            return ReachableAddresses([], _refusal(self._guard.refuses(addresses[0]), _REFUSED))
        kinds = {address: self._kind_of(address) for address in allowed}
        now = min(kinds.values())
        kind = self._required(host, now)
        selected = [address for address in allowed if kinds[address] is kind]
        what = self._public.refuses(allowed[0]) or "a public address"
        return ReachableAddresses(selected, _refusal(what, self._why_not(host, kind)))

    def refuses_host(self, host: str) -> str | None:
        """Why a proxy, which resolves names by itself, may not be asked for this host; None if it may. The text of the
        host decides, as in `AddressGuard.refuses_host`."""
        reason = None if self._guard is None else self._guard.refuses_host(host)
        if reason is not None:
            return _refusal(reason, _REFUSED)
        reason = self._public.refuses_host(host)
        now = _Kind.LOCAL if reason == _LOCAL_NAME else _Kind.PUBLIC if reason is None else self._kind_of(host)
        kind = self._required(host, now)
        return None if now is kind else _refusal(reason, self._why_not(host, kind))

    def is_page(self, host: str) -> bool:
        """Whether this is the host of the pages."""
        return _name(host) == self._page

    def _kind_of(self, address: str) -> _Kind:
        if self._public.refuses(address) is None:
            return _Kind.PUBLIC
        try:
            target = _target(ip_address(address))
        except ValueError:
            return _Kind.SPECIAL
        return _Kind.LOCAL if any(target in network for network in _LOCAL) else _Kind.SPECIAL

    def _required(self, host: str, now: _Kind) -> _Kind:
        """The kind that a host has to have. ``now``: what it has. Remembers that, if it matters later."""
        name = _name(host)
        if self._page is None:
            self._page = name
            self._kinds[name] = now
        if name in self._kinds:
            return self._kinds[name]
        if self._kinds[self._page] is not _Kind.LOCAL or len(self._kinds) >= _MAX_HOSTS:
            return _Kind.PUBLIC
        self._kinds[name] = now
        return now

    def _why_not(self, host: str, kind: _Kind) -> str:
        if _name(host) not in self._kinds:
            return f"only pages from local addresses may contact {_SETTING}"
        return f"may not replace a {kind.name.lower()} one {_SETTING}"


def _refusal(what: str | None, why: str) -> str:
    return f"is {what}, which {why}"


def _name(host: str) -> str:
    return host.lower().rstrip(".")
