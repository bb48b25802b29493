"""Record which modules of Shoal a process enters while a page is processed. `scripts/paths` loads it into each process.

A module is entered when one of its functions is called or resumed. Calls during an import do not count, nor do tasks
that carry no page.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_IS_FUNCTION = 1  # CO_OPTIMIZED: neither a module nor the body of a class
_CARRY_NO_PAGE = {
    "LeaseKeeper.run", "LeaseKeeper._fence", "ItemLogKeeper.run", "RunLifecycle._watch", "Admission.watch",
    "Ownership.keep", "CeleryWatch.run", "RunRecorder.run", "LoopWatch._note_beat", "LoopWatch._watch",
}  # fmt: skip


def _install(folder: str) -> None:
    with open(os.path.join(folder, "travels"), "r+b") as file:
        travels = mmap.mmap(file.fileno(), 1)  # 1 while a page is on its way, for all processes
    begins, ends = os.environ.get("PATHS_BEGINS"), os.environ.get("PATHS_ENDS")
    entered: set[str] = set()
    done: set[CodeType] = set()
    out = os.open(os.path.join(folder, "entered"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_qualname == ends and argument is None and frame.f_lasti >= 10:
            travels[0] = 0
        if event != "call":
            return
        if code.co_qualname == begins:
            travels[0] = 1
        if not travels[0] or code in done:
            return
        name = frame.f_globals.get("__name__") or ""
        if not name.startswith("shoal.") or name in entered or not code.co_flags & _IS_FUNCTION:
            done.add(code)
        elif _counts(frame):
            entered.add(name)
            os.write(out, f"{name}\n".encode())

    threading.setprofile(profile)
    sys.setprofile(profile)


def _counts(frame: FrameType) -> bool:
    back: FrameType | None = frame
    while back is not None:
        name = back.f_globals.get("__name__") or ""
        if back.f_code.co_name == "<module>" and name != "__main__":
            return False  # an import
        if name.startswith("shoal.") and back.f_code.co_qualname in _CARRY_NO_PAGE:
            return False  # not only at the bottom: below a task are the frames that run the event loop
        back = back.f_back
    return True


if "PATHS_FOLDER" in os.environ:
    _install(os.environ["PATHS_FOLDER"])
