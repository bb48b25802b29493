"""Which addresses may be contacted on behalf of a stranger: a pure decision."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from shoal.errors import ConfigError

# What some or all versions of Python take for public.
_RESERVED = tuple(
    ip_network(network)
    for network in (
        "168.63.129.16",  # a cloud's own services (Azure), for the machine that asks
        "192.0.0.0/24",  # protocols of the network itself, and a cloud's metadata (Oracle)
        "192.88.99.0/24",  # relays of 6to4
        "2001::/23",  # protocols of the network itself; Teredo, which leads to an IPv4 address
        "2002::/16",  # 6to4, which leads to an IPv4 address
        "3fff::/20",  # documentation
        "fec0::/10",  # private once, and still in some networks
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


class AddressGuard:
    """Refuses whatever is no address of the public internet, unless it was allowed.

    An IPv6 address that is another spelling of an IPv4 address (mapped, or for NAT64) is judged as that one. Tunnels
    (6to4, Teredo) and IPv4-compatible addresses, which no public site has, are refused whatever they lead to. Not to be
    known from here is a NAT64 prefix that a network chose for itself.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        """``allowed`` are networks, such as ``10.0.0.0/8``, and single addresses."""
        self._allowed = tuple(map(_network, allowed))

    def refuses(self, address: str) -> str | None:
        """What an address is that is not to be contacted (``a loopback address``); None if it may be."""
        try:
            found = ip_address(address)
        except ValueError:
            return "no IP address"  # a system may still read it as one: 127.1
        meant = _meant(found)
        if any(found in network or meant in network for network in self._allowed):
            return None
        return _why_not(meant)


def _network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as exc:
        raise ConfigError(
            f'"serve.allow" must hold addresses and networks such as "10.0.0.0/8", not {text!r} ({exc})'
        ) from exc


def _meant(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The address that is contacted in the end."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return getattr(address, "ipv4_mapped", None) or address


def _why_not(address: IPv4Address | IPv6Address) -> str | None:
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
