"""Commands of the real Scrapy, each in a process of its own that is forked after the imports. Runs in its environment.

Reads one JSON line for each command (its words and its folder) and writes one when all have ended: their exit codes.
Each process writes what it says to ``log.txt`` in its folder.
"""

import json
import os
import sys
import time

import scrapy.cmdline
import scrapy.commands.crawl
import scrapy.commands.runspider
import scrapy.core.downloader.handlers.http11
import scrapy.core.engine
import scrapy.extensions.feedexport
import scrapy.loader
import scrapy.spiders

AT_ONCE = 3
TIMEOUT = 100


def run(words: list[str], folder: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    scrapy.cmdline.execute(["scrapy", *words])


def main() -> None:
    left = [json.loads(line) for line in sys.stdin]
    codes: dict[str, int] = {}
    running: dict[int, str] = {}
    until = time.monotonic() + TIMEOUT
    while (left or running) and time.monotonic() < until:
        while left and len(running) < AT_ONCE:
            order = left.pop(0)
            pid = os.fork()
            if not pid:
                run(order["words"], order["folder"])
                os._exit(0)
            running[pid] = order["folder"]
        pid, status = os.wait()
        codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
