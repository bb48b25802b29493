"""`shoal batch`, and commands on the store of a server that has it in memory or in a file."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.acceptance.serving import FAST, Celery, serving, until
from tests.acceptance.target import Target, target
from tests.support import forking
from tests.support.forking import SHOAL

Shoal: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as made:
        yield made


@pytest.fixture
def runtime() -> Iterator[str]:
    """A place for sockets of its own: other tests run crawls too."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


@pytest.fixture
def shoal(tmp_path: Path, runtime: str) -> Shoal:
    def run(*words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        done = forking.run(
            [*SHOAL, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
            env={**os.environ, "XDG_RUNTIME_DIR": runtime, **FAST, **environ},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


def test_a_url_is_tried_without_a_server(shoal: Shoal, site: Target) -> None:
    url = f"{site.url}/?link=/next"
    text = shoal(
        "batch", "try", url, "--field", "link=a::attr(href)", "--field", "none=.none", "--show", "links"
    ).stdout
    assert "status    success, HTTP 200" in text
    assert "field     link = /next" in text
    assert "field     none = (no match)" in text
    assert text.splitlines()[-1] == f"{site.url}/next"
    result = json.loads(shoal("batch", "try", url, "--json", "--no-robots").stdout)
    assert (result["status"], result["http_status"], set(result["also"])) == ("success", 200, {"markdown"})
    assert [visit.path for visit in site.visits()] == ["/robots.txt", "/?link=/next", "/?link=/next"]


def test_a_url_that_fails_and_bad_options(shoal: Shoal, site: Target) -> None:
    done = shoal("batch", "try", f"{site.url}/?status=404", code=1)
    assert "error     http 404" in done.stdout
    assert "--show: Input should be" in shoal("batch", "try", site.url, "--show", "pdf", code=2).stderr
    assert "--field 'x': write it as key=value" in shoal("batch", "try", site.url, "--field", "x", code=2).stderr


@pytest.mark.parametrize("frontier", ["memory:", "sqlite:///api.db"])
def test_sessions_of_a_server_in_memory_or_in_a_file(
    frontier: str, shoal: Shoal, site: Target, tmp_path: Path, runtime: str
) -> None:
    """The server has the store. Commands use it through the server."""
    where = ["--frontier", "local:server" if frontier == "memory:" else frontier]
    with serving(tmp_path, {"XDG_RUNTIME_DIR": runtime}, "--frontier", frontier) as api:
        assert "no batches" in shoal("batch", "list", *where).stdout
        assert "there is no batch 'x'" in shoal("batch", "cancel", "x", *where, code=2).stderr
        urls = [f"{site.url}/a", f"{site.url}/hang?gate=1"]
        session_id = api.batch(urls, wait=False, options={"robots": False})["session_id"]
        until(lambda: api.get(f"/api/crawl/{session_id}")[1]["progress"]["done"] == 1, what="the first page")
        (listed,) = [json.loads(line) for line in shoal("batch", "list", "--json", *where).stdout.splitlines()]
        assert (listed["session_id"], listed["state"], listed["progress"]["done"]) == (session_id, "running", 1)
        assert session_id in shoal("batch", "list", *where).stdout
        shown = shoal("batch", "show", session_id, *where).stdout
        assert "is running: 2 total" in shown
        assert f"success   200  {site.url}/a" in shown
        assert "is cancelled" in shoal("batch", "cancel", session_id, *where).stdout
        assert api.wait(session_id)["state"] == "cancelled"
        assert json.loads(shoal("batch", "show", session_id, "--json", *where).stdout)["url"] == urls[0]
        site.open_gate()
        shoal("schedule", "list", *where)
        shoal("runs", *where)


def test_sessions_and_workers_of_celery(shoal: Shoal, site: Target, tmp_path: Path) -> None:
    celery = Celery(tmp_path)
    try:
        environ = {**celery.environ, "SHOAL_FRONTIER": celery.store.url}
        assert "no Celery worker answers" in shoal("batch", "workers", **environ).stdout
        celery.start_workers(1)
        worker = json.loads(shoal("batch", "workers", "--json", **environ).stdout)
        assert worker["answers"]
        result = json.loads(shoal("batch", "try", f"{site.url}/a", "--celery", "--json", **environ).stdout)
        assert result["status"] == "success"
        assert "worker-1" in str(result["worker_id"])
        (listed,) = [json.loads(line) for line in shoal("batch", "list", "--json", **environ).stdout.splitlines()]
        assert (listed["distributed"], listed["state"]) == (True, "finished")
    finally:
        celery.close()
