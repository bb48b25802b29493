"""`python -m shoal.runs.child ...` runs `shoal ...` as a child process, without secrets on its command line.

Every user of a machine can read the command lines of all processes. Only the owner of a process can read its
environment. So words that may hold a password (URLs, settings, arguments) are passed there, and `ps` shows ``***``.

A tethered child stops when its standard input ends. Its parent holds the other end of the pipe, so the child stops
whenever the parent ends, even if it is killed.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Sequence

_WORDS = "_SHOAL_WORDS"
_TETHERED = "_SHOAL_TETHERED"
_HARMLESS = re.compile(r"[\w./:@%+-]*", re.ASCII)
_FIRST_PAUSE = 0.5
_STEADY = 60.0  # seconds after which the end of a child has nothing to do with the one before
_BEFORE_SECRETS = ("--set", "-a", "--argument", "-o", "--output", "--frontier", "--coordinator", "--proxy")


class RestartBackoff:
    """Seconds to wait before a child that ended is started again: longer each time, as the next one may end too."""

    longest = 30.0

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE

    def pause_after(self, lived: float) -> float:
        """``lived``: seconds that the child has run. After a long life the pauses begin anew."""
        if lived > _STEADY:
            self._next = _FIRST_PAUSE
        pause, self._next = self._next, min(self.longest, 2 * self._next)
        return pause


def command(words: Sequence[str], *, tethered: bool = False) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that run `shoal` with these words."""
    shown = [_shown(word, before) for before, word in zip(("", *words), words, strict=False)]
    environ = {**os.environ, _WORDS: json.dumps(list(words)), **({_TETHERED: "1"} if tethered else {})}
    return [sys.executable, "-m", "shoal.runs.child", *shown], environ


def _shown(word: str, before: str) -> str:
    harmless = before not in _BEFORE_SECRETS and _HARMLESS.fullmatch(word) and "://" not in word
    return word if harmless else "***"


def _reveal() -> None:
    """Put the hidden words back into ``sys.argv``."""
    words = os.environ.pop(_WORDS, None)
    if words is not None:
        sys.argv[1:] = json.loads(words)


def _stop_at_end_of_input(main: int) -> None:
    while os.read(0, 4096):
        pass
    signal.pthread_kill(main, signal.SIGTERM)


if __name__ == "__main__":
    _reveal()
    if os.environ.pop(_TETHERED, None):
        threading.Thread(target=_stop_at_end_of_input, args=(threading.get_ident(),), daemon=True).start()
    runpy.run_module("shoal.cli.main", run_name="__main__")
