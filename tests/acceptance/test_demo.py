"""`scripts/demo --ui`, the first thing that a newcomer tries."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

from tests.acceptance.serving import PATIENCE, until

ROOT = Path(__file__).parents[2]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def test_the_demo_shows_its_crawl_and_ends_with_control_c(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    log = tmp_path / "demo.log"
    with log.open("w") as out:
        demo = subprocess.Popen(
            ["scripts/demo", "--ui"], cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        found = until(lambda: re.search(r"the dashboard is at (http://\S+)/ ", log.read_text()), what="the dashboard")
        url = found[1]
        runs = json.loads(get(f"{url}/api/runs"))["runs"]
        assert [run["spider"] for run in runs] == ["books"]
        run_page = f"/ui/runs/{runs[0]['run_id']}"
        until(lambda: run_page in get(f"{url}/"), what="the crawl in the overview")
        until(lambda: "<dt>Workers</dt><dd>1</dd>" in get(f"{url}/"), what="the process that crawls in the overview")
        until(lambda: json.loads(get(f"{url}/api{run_page.removeprefix('/ui')}"))["stats"]["items"], what="an item")
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(PATIENCE) in (0, 130), log.read_text()
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
    assert "Traceback" not in log.read_text()
    assert [path.name for path in (tmp_path / "temporary").iterdir() if not path.name.startswith("shoal-")] == []
    until(lambda: not _is_alive(demo.pid), what="the end of all its processes")


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
