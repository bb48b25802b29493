"""Tor that is missing, wrong or cannot connect, and commands that do not use it. No network is needed."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.fleets import SHOAL
from tests.support import forking
from tests.support.socks_server import SocksServer
from tests.support.tor_network import daemons_below

SPIDER = """
from shoal import Spider

class Pages(Spider):
    name = "pages"
    start_urls = ["http://shop0.test/"]
"""
RUN = ["run", "spider.py", "--tor", "--frontier", "sqlite:///crawl.db"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a spider, and a torrc of a daemon that never connects to anything."""
    (tmp_path / "spider.py").write_text(SPIDER)
    (tmp_path / "torrc").write_text("DisableNetwork 1\n")
    return tmp_path


def shoal(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return forking.run(
        [*SHOAL, *words], cwd=folder, env={**os.environ, "TMPDIR": str(folder), **environ}, capture_output=True,
        timeout=60,
    )  # fmt: skip


def assert_nothing_left(folder: Path) -> None:
    assert not daemons_below(folder)
    assert not list(folder.glob("shoal-tor-*"))


def test_no_tor(folder: Path) -> None:
    done = shoal(folder, *RUN, "--set=tor.executable=no-tor")
    assert done.returncode == 2
    assert "there is no program no-tor. Install it (Debian: apt-get install tor" in done.stderr
    assert_nothing_left(folder)


def test_a_torrc_that_is_wrong(folder: Path) -> None:
    wrong = folder / "wrong.torrc"
    wrong.write_text("SocksPrt 1\n")
    done = shoal(folder, *RUN, f"--set=tor.torrc={wrong}")
    assert done.returncode == 2
    assert f"tor.torrc ({wrong}) is wrong" in done.stderr
    assert "Unknown option 'SocksPrt'" in done.stderr
    done = shoal(folder, *RUN, "--set=tor.torrc=missing.torrc")
    assert done.returncode == 2
    assert "cannot read tor.torrc (missing.torrc): No such file or directory" in done.stderr
    wrong.chmod(0o666)
    done = shoal(folder, *RUN, f"--set=tor.torrc={wrong}")
    assert done.returncode == 2
    assert "every user can write to it" in done.stderr
    assert_nothing_left(folder)


def test_tor_that_never_connects(folder: Path) -> None:
    """The URLs stay in the frontier."""
    never = [*RUN, "--set=tor.torrc=torrc", "--set=tor.bootstrap_timeout=2"]
    done = shoal(folder, *never)
    assert done.returncode == 1
    assert "Tor did not get ready: the daemon is at 0 %" in done.stderr
    assert "Check that this machine can reach the Tor network, or set bridges in tor.torrc" in done.stderr
    assert "0 done, 1 left" in shoal(folder, *never).stderr
    assert_nothing_left(folder)


_WITH_TEMPORARY_FOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv.pop(1)  # Python itself would choose another folder when this one is full
from shoal.cli.main import main
main()
"""


@pytest.mark.parametrize(("size", "message"), [("0", "cannot create a folder for Tor"), ("12k", "ended with code 1")])
def test_a_full_disk(folder: Path, size: str, message: str) -> None:
    """There is no room for the data of the daemon, or not enough."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        why = "this test needs root, for a small file system"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    small = folder / "small"
    small.mkdir()
    mount = f'mount -t tmpfs -o size={size},nr_inodes={1 if size == "0" else 100} none "{small}" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", _WITH_TEMPORARY_FOLDER, small, *RUN,
         "--set=tor.torrc=torrc"],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "No space left on device" in done.stderr
    assert "Make room there, or set TMPDIR" in done.stderr


async def test_a_proxy_that_is_not_tor(folder: Path) -> None:
    """It would show the address of this machine."""
    async with SocksServer() as proxy:
        done = await asyncio.to_thread(shoal, folder, *RUN, f"--set=tor.url={proxy.address()}")
        assert done.returncode == 1
        assert "(tor.url) is not Tor" in done.stderr
        assert "shop0.test" not in {each.host for each in proxy.connects}


def test_an_existing_daemon_that_does_not_answer(folder: Path) -> None:
    done = shoal(folder, *RUN, "--set=tor.url=socks5://127.0.0.1:1", "--set=tor.bootstrap_timeout=1")
    assert done.returncode == 1
    assert "does not answer: Connection refused. Is it running?" in done.stderr


def test_the_doctor_starts_tor(folder: Path) -> None:
    done = shoal(folder, "doctor")
    assert re.search(r"^ok  Tor 0\.4\.\S+ \(/\S+/tor\) starts$", done.stdout, re.MULTILINE)
    (folder / "shoal.toml").write_text('[tor]\nenabled = true\nexecutable = "no-tor"\n')
    done = shoal(folder, "doctor")
    assert done.returncode == 1
    assert "BAD Tor: tor.executable: there is no program no-tor. Install it" in done.stdout
    assert_nothing_left(folder)


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["celery-worker"], ["shell", "http://shop0.test/"]])
def test_other_commands_refuse(folder: Path, command: list[str]) -> None:
    """They would send pages directly."""
    done = shoal(folder, *command, SHOAL_TOR__ENABLED="1")
    assert done.returncode == 2
    assert '"tor.enabled" is set, but' in done.stderr
