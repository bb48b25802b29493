"""Crawl the demo shop in a terminal and in front of the dashboard, and save the screens. Run by `scripts/pictures`."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
SHOAL = str(Path(sys.executable).with_name("shoal"))
WIDTH = 112
TIMEOUT = 60.0  # seconds until the screen must be complete
SESSION = 3.0
SHOWN_AFTER = 45.0  # seconds: then there is some history to show
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|[\r\n]")
WEB_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich adds web fonts; pictures must work without a network

SPIDER = """from shoal import Spider


class Books(Spider):
    name = "books"
    start_urls = {urls}
    settings = {{"download_delay": 0.1, "scope": {{"deny": ["/calendar/"]}}}}

    def parse(self, response):
        yield {{"title": response.css("title::text").get()}}
        yield response.follow_all()
"""


def main() -> None:
    draw("terminal-crawl", "shoal run books.py -o books.jsonl", crawl_panel())
    draw("terminal-cluster", "shoal cluster status books", cluster_status())
    photograph_dashboard()


def draw(name: str, command: str, shown: str) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text.from_ansi(shown), soft_wrap=True)
        picture = console.export_svg(title="shoal", unique_id=name)
    picture = WEB_FONTS.sub("", picture).replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    (FIGURES / f"{name}.svg").write_text(picture)
    print(f"docs/figures/{name}.svg")


def crawl_panel() -> str:
    """The panel in the middle of a crawl of two shops, one of which asks for a Crawl-delay."""
    with ExitStack() as stack:
        urls = [stack.enter_context(shop()), stack.enter_context(shop("--crawl-delay", "1"))]
        folder = stack.enter_context(spider_folder(urls))
        screen = stack.enter_context(terminal([SHOAL, "run", "books.py", "-o", "books.jsonl"], folder))
        return next(text for text in screen if (pages := re.search(r"(\d+) pages ", text)) and int(pages[1]) >= 40)


def cluster_status() -> str:
    """A cluster just after its Runner was killed and a Backup Runner took over. The crawl is slow enough to last."""
    with ExitStack() as stack:
        folder = stack.enter_context(spider_folder([stack.enter_context(shop())]))
        environ = {**os.environ, "SHOAL_FRONTIER": stack.enter_context(redis(folder)), "SHOAL_DOWNLOAD_DELAY": "1"}

        def status() -> str:
            command = [SHOAL, "cluster", "status", "books", "--events", "6"]
            return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout

        nodes = []
        for number in (1, 2, 3):
            command = [SHOAL, "node", "books.py", "--name", f"crawler_{number}", "--quiet"]
            command += ["--runner", "1", "--backup", "2", "--session-timeout", str(SESSION)]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            nodes.append(stack.enter_context(running(subprocess.Popen(command, cwd=folder, env=environ, **quiet))))
            wait_for(lambda name=f"crawler_{number}": re.search(rf"^{name} ", status(), re.MULTILINE))
        nodes[0].kill()
        return wait_for(lambda: text if "took over" in (text := status()) else "")


def photograph_dashboard() -> None:
    """The dashboard of two shops that two workers crawl, one of them with a Crawl-delay."""
    from playwright.sync_api import sync_playwright

    with ExitStack() as stack:
        urls = [stack.enter_context(shop()), stack.enter_context(shop("--crawl-delay", "1"))]
        folder = stack.enter_context(spider_folder(urls))
        environ = {**os.environ, "SHOAL_FRONTIER": stack.enter_context(redis(folder))}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        start = [SHOAL, "start", "books.py", "--run-id", "books_monday", "--set", "download_delay=0.5"]
        subprocess.run(start, cwd=folder, env=environ, check=True, **quiet)
        for _ in range(2):
            work = [SHOAL, "worker", "books.py", "--run-id", "books_monday", "-o", "books.jsonl", "--quiet"]
            stack.enter_context(running(subprocess.Popen(work, cwd=folder, env=environ, **quiet)))
        port = free_port()
        stack.enter_context(
            running(subprocess.Popen([SHOAL, "ui", "--port", str(port)], cwd=folder, env=environ, **quiet))
        )
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        time.sleep(SHOWN_AFTER)
        chromium = shutil.which("chromium") or sys.exit("pictures: chromium is not installed")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            for name, path in (("overview", "/"), ("run", "/ui/runs/books_monday")):
                page.goto(f"http://127.0.0.1:{port}{path}")
                page.wait_for_selector(".chart canvas")
                page.screenshot(path=FIGURES / f"dashboard-{name}.png")
                print(f"docs/figures/dashboard-{name}.png")
            browser.close()


def wait_for(condition):  # type: ignore[no-untyped-def]
    """Call the function until its result is true, and return that."""
    end = time.monotonic() + TIMEOUT
    while not (value := condition()):
        if time.monotonic() > end:
            sys.exit(f"pictures: nothing to show after {TIMEOUT:g} s")
        time.sleep(0.1)
    return value


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


@contextmanager
def shop(*options: str) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "examples.bookshop", "--port", "0", *options]
    with running(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("bookshop: ").strip()


@contextmanager
def spider_folder(urls: list[str]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "books.py").write_text(SPIDER.format(urls=urls))
        yield folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def redis(folder: str) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        sys.exit("pictures: redis-server is not installed")
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
    with running(subprocess.Popen([*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL, text=True)):
        wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield f"redis://127.0.0.1:{port}/0"


@contextmanager
def terminal(command: list[str], folder: str) -> Iterator[Iterator[str]]:
    """Run a command in a terminal, and yield its screen each time it changes."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(WIDTH), LINES="30")
        os.execv(command[0], command)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, WIDTH, 0, 0))
    try:
        yield screens(fd)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(fd)


def screens(fd: int) -> Iterator[str]:
    written, end = "", time.monotonic() + TIMEOUT
    while time.monotonic() < end:
        written += os.read(fd, 65536).decode(errors="ignore")
        yield screen_of(written)
    sys.exit(f"pictures: nothing to show after {TIMEOUT:g} s")


def screen_of(written: str) -> str:
    """The lines of a terminal after this output. Understands the control sequences that rich writes; keeps colours."""
    lines, row, at = [""], 0, 0
    for control in CONTROL.finditer(written):
        lines[row] += written[at : control.start()]
        at = control.end()
        if control[0] == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif control[2] == "A":
            row = max(0, row - int(control[1] or 1))
        elif control[2] == "K":
            lines[row] = ""
        elif control[2] == "m":
            lines[row] += control[0]
    return "\n".join(line.rstrip() for line in lines).strip("\n")


if __name__ == "__main__":
    main()
