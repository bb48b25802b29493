"""Count the modules of Shoal that one page passes through. Run by `scripts/paths`.

``local``: from `shoal run` to a file, with the frontier in memory. ``distributed``: a batch of one URL, from the API
through a Celery worker to its result.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMITS = {"local": 47, "distributed": 70}
"""The current numbers, 45 and 66, and a few more: tasks in the background may run at the same time. Lower them when a
module leaves the path."""
SPIDER = """from shoal import Spider


class Titles(Spider):
    name = "titles"
    start_urls = ["{url}/1"]

    def parse(self, response):
        yield {{"title": response.css("h1::text").get()}}
        yield response.follow_all()
"""


class Trace:
    """The modules that traced processes entered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "travels").write_bytes(b"\0")
        (folder / "entered").touch()
        (folder / "sitecustomize.py").write_bytes((Path(__file__).with_name("tracing.py")).read_bytes())
        paths = (str(folder), os.environ.get("PYTHONPATH", ""))
        self.environ = {"PATHS_FOLDER": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    @contextmanager
    def travelling(self) -> Iterator[None]:
        """Trace while the block runs."""
        self._set(b"\1")
        try:
            yield
        finally:
            self._set(b"\0")

    def _set(self, value: bytes) -> None:
        with (self._folder / "travels").open("r+b") as file:
            file.write(value)

    def modules(self) -> list[str]:
        return sorted(set((self._folder / "entered").read_text().split()))


def local(folder: Path) -> list[str]:
    """The modules between the first start request and the end of the output."""
    from tests.acceptance.target import target

    trace = Trace(folder)
    with target() as site:
        (folder / "titles.py").write_text(SPIDER.format(url=site.url))
        command = [sys.executable, "-m", "shoal.cli.main", "run", "titles.py", "-o", "titles.jsonl", "--quiet"]
        marks = {"PATHS_BEGINS": "RunQueue.next_requests", "PATHS_ENDS": "Drainer.finish"}
        environ = {**os.environ, **trace.environ, **marks, "SHOAL_DOWNLOAD_DELAY": "0", "SHOAL_SCOPE__MAX_PAGES": "1"}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert (folder / "titles.jsonl").stat().st_size, done.stdout + done.stderr
    return trace.modules()


def distributed(folder: Path) -> list[str]:
    """The modules between the request to the API and the end of its response, in all processes."""
    from tests.acceptance.serving import celery
    from tests.acceptance.target import target

    trace = Trace(folder)
    with target() as site, celery(folder, 1, **trace.environ) as fleet:
        fleet.api.batch([f"{site.url}/0"], distributed=True, timeout=60)  # a warm-up: imports are not counted
        with trace.travelling():
            answer = fleet.api.batch([f"{site.url}/1"], distributed=True, timeout=60)
    assert [result["status"] for result in answer["results"]] == ["success"], answer
    return trace.modules()


def main() -> None:
    too_many = 0
    for name in sys.argv[1:] or ["local", "distributed"]:
        with tempfile.TemporaryDirectory() as folder:
            modules = globals()[name](Path(folder))
        print(f"{name}: {len(modules)} modules (at most {LIMITS[name]})")
        for module in modules:
            print(f"  {module}")
        too_many += len(modules) > LIMITS[name]
    sys.exit(min(1, too_many))


if __name__ == "__main__":
    main()
