"""`python -m shoal.runs.tethered ...` is `shoal ...` that stops in good order at the end of its standard input.

Whoever starts it holds the other end of a pipe. When that one closes it, or is gone, however it went, the pipe ends:
nobody has to be alive to send a signal, and no worker is left behind.
"""

from __future__ import annotations

import os
import runpy
import signal
import threading

from shoal.runs.child import reveal


def _stop_at_the_end_of_input(main: int) -> None:
    while os.read(0, 4096):
        pass
    signal.pthread_kill(main, signal.SIGTERM)


if __name__ == "__main__":
    reveal()
    threading.Thread(target=_stop_at_the_end_of_input, args=(threading.get_ident(),), daemon=True).start()
    runpy.run_module("shoal.cli.main", run_name="__main__")
