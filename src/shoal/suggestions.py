"""Suggests the nearest known name for an unknown one, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the nearest known name, or nothing. A mapping has the spelling of each name."""
    from difflib import get_close_matches  # here, because it is only needed after an error

    near = get_close_matches(name, list(known), 1)
    if not near:
        return ""
    return f"; did you mean {known[near[0]] if isinstance(known, Mapping) else near[0]}?"


def did_you_mean_scheme(url: str, schemes: Iterable[str]) -> str:
    """The same for the scheme of a URL. Nothing if the scheme is known."""
    spelled = {scheme: f"{scheme}://" for scheme in schemes}
    scheme = url.partition(":")[0].lower()
    return "" if scheme in spelled else did_you_mean(scheme, spelled)
