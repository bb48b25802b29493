"""The code in the documents runs: spiders, programs and commands, in order, against the demo shop."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.clusters import coordinator_url
from tests.acceptance.fleets import frontier_url
from tests.acceptance.test_cli import ROOT
from tests.support import forking
from tests.support.databases import shared
from tests.support.forking import SHOAL
from tests.support.object_storage import S3Server

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AWAITS = re.compile(r"^(?:\w+ = )?await ", re.MULTILINE)
NOTEBOOK = """
import ast, asyncio, inspect, sys
cell = eval(compile(sys.argv[1], "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names := {})
asyncio.run(cell) if inspect.iscoroutine(cell) else None
"""
"""Runs the code in its argument as a notebook does: inside an event loop."""
FRONTIERS = {"redis://127.0.0.1:6379/0": "redis", "postgresql://127.0.0.1:5432/crawl": "postgresql"}
ZOOKEEPER = "127.0.0.1:2181"
BUCKET = "s3://my-bucket/"
QUICK = {
    **os.environ, "SHOAL_DOWNLOAD_DELAY": "0.05", "SHOAL_BROWSER__SANDBOX": "false", "SHOP_PASSWORD": "open-sesame"
}  # fmt: skip
"""The shop is on this machine, and the documents crawl it many times. The tests may run as root."""
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(document: Path) -> list[tuple[str, str]]:
    kinds = ("python", "console", "toml", "ini")
    return [(kind, text) for kind, text in BLOCK.findall(document.read_text()) if kind in kinds]


RUNNABLE = [document for document in DOCUMENTS if blocks(document) and document.name not in ("api.md", "tor.md")]
"""The API's guide needs a running server: see test_api_guide. The guide to Tor needs a Tor network: see test_tor."""


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda d: str(d.relative_to(ROOT)))
def test_the_code_of_a_document_runs(
    document: Path, shop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = {url: frontier_url(kind) for url, kind in FRONTIERS.items() if url in document.read_text()}
    if ZOOKEEPER in document.read_text():
        servers[ZOOKEEPER] = coordinator_url("zookeeper").removeprefix("zookeeper://")
    if BUCKET in document.read_text():
        storage = shared(S3Server)
        servers[BUCKET] = f"s3://{storage.bucket()}/"
        for name, value in storage.variables.items():
            monkeypatch.setitem(QUICK, name, value)
    host = shop.removeprefix("http://").rstrip("/")
    for kind, text in blocks(document):
        text = text.replace("http://127.0.0.1:8000/", shop).replace("127.0.0.1:8000", host)
        for url, server in servers.items():
            text = text.replace(url, server)
        named = re.match(r"# (\S+\.(?:py|toml|cfg))\n", text)
        if named:
            (tmp_path / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / named[1]).write_text(text)
        elif kind == "python":
            run([sys.executable, "-c", *([NOTEBOOK] if AWAITS.search(text) else []), text], tmp_path)
        elif kind == "console":
            run_all(re.findall(r"^\$ ((?:shoal|python) .*)$", text, re.MULTILINE), tmp_path)


def run_all(commands: list[str], folder: Path) -> None:
    """In order; those with an & at the end beside each other, to the end of their block."""
    beside: list[subprocess.Popen[str]] = []
    for command in commands:
        program, *arguments = shlex.split(command.removesuffix("&"))
        words = [*SHOAL, *arguments] if program == "shoal" else [sys.executable, *arguments]
        if command.endswith("&"):
            beside.append(forking.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True, env=QUICK))
        else:
            run(words, folder)
    for process in beside:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors


def run(command: list[str], folder: Path) -> None:
    done = forking.run(command, cwd=folder, capture_output=True, text=True, timeout=110, env=QUICK)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", document.read_text()):
        found = document.parent / target if target else document
        assert found.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{document.name} links to {target}#{anchor}"


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_setting_is_documented_with_its_default() -> None:
    from shoal.config import Config, flatten

    text = (ROOT / "docs" / "settings.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE))
    settings = flatten(Config())
    assert set(rows) == set(settings)
    for key, value in settings.items():
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        shown = "none" if value in (None, (), {}) else f"{value:.10g}" if isinstance(value, float) else shown
        assert rows[key] == shown, key
