"""Suggestions in messages: the nearest known name for an unknown one, and how to install a missing package."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from urllib.parse import unquote, urlsplit

_LONGER = 2.4
"""Times the length of a known name: nothing that is longer is near it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the nearest known name, or nothing. A mapping has the spelling of each name."""
    from difflib import get_close_matches  # here, because it is only needed after an error

    names = list(known)
    if len(name) > _LONGER * max(map(len, names), default=0):
        return ""  # difflib would need 30 times its memory to find nothing: strangers send names of megabytes
    near = get_close_matches(name, names, 1)
    if not near:
        return ""
    return f"; did you mean {known[near[0]] if isinstance(known, Mapping) else near[0]}?"


def did_you_mean_scheme(url: str, schemes: Iterable[str]) -> str:
    """The same for the scheme of a URL. Nothing if the scheme is known."""
    spelled = {scheme: f"{scheme}://" for scheme in schemes}
    scheme = url.partition(":")[0].lower()
    return "" if scheme in spelled else did_you_mean(scheme, spelled)


def pip_install(extra: str) -> str:
    """The command that installs an extra of Shoal: from the folder that this Shoal was installed from, if it was."""
    return f"pip install {shlex.quote(f'{_origin()}[{extra}]')}"


@cache
def _origin() -> str:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("shoal").read_text("direct_url.json") or "{}")
        url = urlsplit(origin.get("url", ""))
        return unquote(url.path) if url.scheme == "file" and "dir_info" in origin else "shoal"
    except (PackageNotFoundError, ValueError, OSError):
        return "shoal"
