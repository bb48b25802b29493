"""`shoal doctor`: whether this machine can run Shoal."""

from __future__ import annotations

import sys

from shoal.cli.help import Commands
from shoal.cli.options import Setting, resolve

app = Commands()

_MARKS = {True: "ok  ", False: "BAD ", None: "-   "}


@app.add(
    examples="""
    shoal doctor
    shoal doctor --set browser.executable=/opt/chromium/chrome
    """
)
def doctor(setting: Setting = []) -> None:
    """Check libraries, settings, servers, the browser and Tor.

    It connects to the servers that the configuration names, and starts Chromium and Tor. The exit code is 1 if
    something that is required or configured does not work. A dash marks optional parts that are missing.
    """
    from shoal.cli.diagnosis import examine

    has_problems = False
    for found in examine(lambda: resolve(None, {}, setting)):
        hint = "" if found.passed or not found.hint else f": {found.hint}"
        print(f"{_MARKS[found.passed]}{found.what}{hint}", flush=True)
        has_problems |= found.passed is False
    sys.exit(1 if has_problems else 0)
