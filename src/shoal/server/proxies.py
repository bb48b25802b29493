"""What a proxy in front of the server says about its clients. Only proxies that the operator trusts are believed."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope


def client_address(scope: Scope) -> str:
    """The address of the client, or an empty string if it has none."""
    return scope["client"][0] if scope.get("client") else ""


class TrustedProxies:
    """Proxies whose headers ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._networks = [ip_network(network) for network in networks]

    def apply(self, scope: Scope, headers: Headers) -> None:
        """Replace the address and the scheme of a request by those of the proxy's client. Each proxy adds the address
        of its own client at the end, so the last one that is no trusted proxy is the client's."""
        if not self._networks or not self._trusts(client_address(scope)):
            return
        chain = [_without_port(part.strip()) for part in ",".join(headers.getlist("x-forwarded-for")).split(",")]
        for address in reversed(chain):
            if not address:  # a word that is no address: what is before it may be invented
                break
            scope["client"] = (address, 0)
            if not self._trusts(address):
                break
        if schemes := headers.getlist("x-forwarded-proto"):
            scope["scheme"] = "https" if schemes[-1].partition(",")[0].strip().lower() == "https" else "http"

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:  # a Unix socket
            return False
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(parsed in network for network in self._networks)


def _without_port(text: str) -> str:
    """The address in ``1.2.3.4``, ``1.2.3.4:80``, ``::1`` or ``[::1]:80``; empty if there is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return ""
