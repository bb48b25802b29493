"""Finds the caller of a token, and slows those who guess.

An address may try `BURST` wrong tokens at once and then one each second; beyond that, its tokens are not checked. Users
behind one proxy share an address, so a token that worked from there lately always works, and so does whoever waits a
second after the guessing ended. A wrong token that is repeated is no guess: it is a client with an old token.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from ipaddress import IPv6Address, ip_address

from shoal import clock
from shoal.config import ServerSettings
from shoal.server.errors import ProblemError

log = logging.getLogger("shoal.server")

BURST = 20
"""Wrong tokens that an address may try at once."""
_PER_SECOND = 1.0
_MAX_ADDRESSES = 10_000  # that are remembered; about 15 MB
_OLD_TOKENS = 8  # wrong tokens that an address may repeat
_WARN_EVERY = 60.0  # seconds between two warnings about an address


class _Visitor:
    """What is known of an address."""

    __slots__ = ("callers", "credit", "seen_at", "warned_at", "wrong")

    def __init__(self, now: float) -> None:
        self.callers: set[str] = set()
        """Whose tokens worked from there."""
        self.wrong: deque[int] = deque(maxlen=_OLD_TOKENS)
        """Hashes of wrong tokens."""
        self.credit = float(BURST)
        self.seen_at = now
        self.warned_at = -_WARN_EVERY


class CallerTokens:
    """The tokens of the callers."""

    def __init__(self, config: ServerSettings, now: Callable[[], float] = clock.now) -> None:
        """``now``: a clock that never goes back."""
        self.by_name: Mapping[str, str] = {**config.tokens, **({"": config.token} if config.token else {})}
        """The tokens by the name of their callers; the main token's name is empty."""
        self._encoded = {name: token.encode() for name, token in self.by_name.items()}
        self._visitors: OrderedDict[str, _Visitor] = OrderedDict()
        self._now = now

    def find(self, sent: bytes, address: str) -> str | None:
        """The name of the caller with this token; None: nobody. A ProblemError (429) if the address must wait."""
        visitor = self._visit(address)
        found = None
        for name, token in self._encoded.items():  # compare with all, so that the time reveals nothing
            if hmac.compare_digest(sent, token):
                found = name
        guess = hash(sent)
        if visitor.credit < 1 and found not in visitor.callers and guess not in visitor.wrong:
            self._warn(visitor, address)
            message = "too many wrong tokens came from your address; try again in a second"
            raise ProblemError(429, "too many guesses", message)
        if found is not None:
            visitor.callers.add(found)
        elif guess not in visitor.wrong:
            visitor.wrong.append(guess)
            visitor.credit -= 1
        return found

    def _visit(self, address: str) -> _Visitor:
        key, now = _network(address), self._now()
        visitor = self._visitors.get(key)
        if visitor is None:
            visitor = self._visitors[key] = _Visitor(now)
            if len(self._visitors) > _MAX_ADDRESSES:
                self._visitors.popitem(last=False)
        self._visitors.move_to_end(key)
        visitor.credit = min(BURST, visitor.credit + (now - visitor.seen_at) * _PER_SECOND)
        visitor.seen_at = now
        return visitor

    def _warn(self, visitor: _Visitor, address: str) -> None:
        if self._now() - visitor.warned_at >= _WARN_EVERY:
            visitor.warned_at = self._now()
            log.warning("%s tries many wrong tokens; it may try one each second", address or "a client")


def _network(address: str) -> str:
    """What counts as one address: one IPv4 address, or the 2**64 IPv6 addresses that anybody gets."""
    try:
        parsed = ip_address(address)
    except ValueError:  # a Unix socket
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    mapped = parsed.ipv4_mapped
    return parsed.exploded[:19] if mapped is None else str(mapped)
