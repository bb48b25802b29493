"""A forked command ends like one that was started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forking

ENDS = {
    "at its last line": "print('said')",
    "with a number": "import sys; print('said'); sys.exit(3)",
    "with a large number": "import sys; sys.exit(259)",
    "with a message": "import sys; sys.exit('what is wrong')",
    "with an error": "raise ValueError('wrong')",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "after its threads": "import threading; threading.Timer(0.2, print, ['late']).start()",
    "after its handlers": "import atexit; atexit.register(print, 'handler')",
    "without a stream": "import sys; sys.stdout.close(); sys.exit(4)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_an_interpreter_does(code: str) -> None:
    words = [sys.executable, "-c", code]
    forked = forking.run(words, capture_output=True)
    started = subprocess.run(words, capture_output=True, text=True)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_what_cannot_be_written_at_the_end_is_reported() -> None:
    code = "import sys; sys.stdout = open(1, 'w', closefd=False); print('said')"  # with a buffer, whatever the settings
    words = [sys.executable, "-c", code]
    with Path("/dev/full").open("w") as full:
        forked = forking.run(words, stdout=full, stderr=subprocess.PIPE)
        started = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert forked.returncode == started.returncode == 120
    assert "No space left on device" in forked.stderr
