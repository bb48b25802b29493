"""The example of a plugin, as its users get it: built as a wheel, installed, tested, and used with `shoal run`.

There is no MongoDB server in Debian, PyPI or npm. The tests use the small server of the example, and the real PyMongo.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import sysconfig
from asyncio.subprocess import PIPE
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.acceptance.fleets import frontier_url
from tests.acceptance.mapped_site import MappedSite, urlset
from tests.acceptance.test_cli import ROOT

EXAMPLE = ROOT / "examples" / "shoal-mongodb"
PAGES = 200
SPIDER = """
from shoal import SitemapSpider

class Pages(SitemapSpider):
    settings = {"download_delay": 0, "robots.obey": False, "concurrency": 4, "throttle.enabled": False}

    def parse(self, response):
        yield {"path": response.css("h1::text").get(), "number": int(response.url.rpartition("/")[2])}
"""
DOCTOR = """
from shoal.cli.commands.doctor import check_plugins
from shoal.config import Config, Resolved
print(*check_plugins(Resolved(Config(), {})), sep="\\n")
"""


def run(*words: str | Path) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel. It sees the packages of the tests, but not the other way round."""
    folder = tmp_path_factory.mktemp("plugin")
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*wheel, "--wheel-dir", folder, EXAMPLE)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (built,) = folder.glob("*.whl")
    assert built.name == "shoal_mongodb-0.1.0-py3-none-any.whl"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", built)
    return python


def mongo_server() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mongo_server", EXAMPLE / "tests" / "mongo_server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_own_tests_pass(python: Path) -> None:
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", EXAMPLE / "pyproject.toml", EXAMPLE)
    assert " passed" in said
    assert "skipped" not in said


def test_the_doctor_lists_it(python: Path) -> None:
    said = run(python, "-c", DOCTOR)
    assert "CheckResult(passed=True, what='plugin: output mongodb:// (shoal-mongodb 0.1.0)'" in said


async def shoal(python: Path, folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    command = [str(python), "-m", "shoal.cli.main", *arguments]
    return await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=PIPE, stderr=PIPE)


async def ended(process: asyncio.subprocess.Process) -> str:
    output, errors = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 0, errors.decode()
    return output.decode()


def numbers(server: Any) -> Counter[int]:
    return Counter(document["number"] for document in server.documents("shop.pages"))


@pytest.mark.timeout(240)
async def test_every_item_once_after_kills_and_lost_answers(python: Path, tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(SPIDER)
    async with mongo_server().MongoServer() as server, MappedSite(site_of_pages(), delay=0.02) as site:
        command = [
            "run", "pages.py", "-a", f"sitemap_urls={site.url}/map.xml", "-o", f"{server.url}/shop?collection=pages",
            "--frontier", "sqlite:///crawl.db", "-q",
        ]  # fmt: skip
        for documents in (1, 60):
            crawling = await shoal(python, tmp_path, *command)
            while len(server.documents("shop.pages")) < documents:
                assert crawling.returncode is None
                await asyncio.sleep(0.005)
            crawling.send_signal(signal.SIGKILL)
            await crawling.wait()
        crawling = await shoal(python, tmp_path, *command)
        while len(server.documents("shop.pages")) < 120:
            assert crawling.returncode is None
            await asyncio.sleep(0.005)
        server.lose_answers = 2
        await ended(crawling)
        assert server.lose_answers == 0
        assert numbers(server) == Counter(range(PAGES))


@pytest.mark.timeout(240)
async def test_a_fleet_writes_to_it_if_its_workers_allow_it(python: Path, tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(SPIDER)
    async with mongo_server().MongoServer() as server, MappedSite(site_of_pages()) as site:
        at = ["pages.py", "--frontier", frontier_url("redis")]
        arguments = ["-a", f"sitemap_urls={site.url}/map.xml", "-o", f"{server.url}/shop?collection=pages"]
        started = json.loads(await ended(await shoal(python, tmp_path, "start", *at, *arguments)))
        at += ["--run-id", started["run_id"]]
        refused = await shoal(python, tmp_path, "worker", *at)
        assert refused.stderr is not None
        assert b"which worker.outputs does not list" in await refused.stderr.read()
        assert await refused.wait() == 2
        allowed = ["--set", f"worker.outputs={server.url}/shop"]
        await asyncio.gather(*[ended(await shoal(python, tmp_path, "worker", "-q", *at, *allowed)) for _ in range(2)])
        assert numbers(server) == Counter(range(PAGES))


async def test_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(SPIDER)
    process = await shoal(Path(sys.executable), tmp_path, "run", "pages.py", "-o", "mongodb://localhost/shop")
    assert process.stderr is not None
    said = (await process.stderr.read()).decode()
    assert await process.wait() == 2
    assert said.startswith("shoal: unknown output mongodb://; use file.jsonl")
    assert "no plugin is installed for it" in said


def site_of_pages() -> dict[str, bytes | str | None]:
    return {"/map.xml": urlset(*(f"/p/{n}" for n in range(PAGES)))}
