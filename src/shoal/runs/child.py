"""`python -m shoal.runs.child ...` is `shoal ...` started by Shoal itself, without secrets on its command line.

Every user of a machine can read the command lines of all processes, but only a process's own user its environment. So
the words that may hold a password (URLs, settings, arguments) travel there, and `ps` shows ``***``.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Sequence

_WORDS = "_SHOAL_WORDS"
_HARMLESS = re.compile(r"[\w./:@%+-]*", re.ASCII)
_BEFORE_SECRETS = ("--set", "-a", "--argument", "-o", "--output", "--frontier", "--coordinator")


def command(words: Sequence[str], module: str = "shoal.runs.child") -> tuple[list[str], dict[str, str]]:
    """How to start `shoal` with these words: a command line that everybody may read, and the environment."""
    shown = [_shown(word, before) for before, word in zip(("", *words), words, strict=False)]
    return [sys.executable, "-m", module, *shown], {**os.environ, _WORDS: json.dumps(list(words))}


def _shown(word: str, before: str) -> str:
    harmless = before not in _BEFORE_SECRETS and _HARMLESS.fullmatch(word) and "://" not in word
    return word if harmless else "***"


def reveal() -> None:
    """The command line as it was meant."""
    words = os.environ.pop(_WORDS, None)
    if words is not None:
        sys.argv[1:] = json.loads(words)


if __name__ == "__main__":
    reveal()
    runpy.run_module("shoal.cli.main", run_name="__main__")
