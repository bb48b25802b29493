"""The contact that the user agent shows to the owners of sites."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest

from shoal.config import Config
from shoal.errors import ConfigError
from tests.acceptance.fleets import SHOAL
from tests.acceptance.serving import PATIENCE, beside, serving
from tests.acceptance.target import target
from tests.support import forking
from tests.support.servers import MisbehavingServer

CONTACT = "https://operator.example/googlebot"
ROBOTS = "User-agent: googlebot\nDisallow: /\nUser-agent: operator\nDisallow: /\nUser-agent: shoal\nDisallow: /private"


def test_sites_see_the_contact(tmp_path: Path) -> None:
    """The name in robots.txt is still that of the crawler alone."""
    with (
        serving(tmp_path, {"SHOAL_CONTACT": CONTACT}) as api,
        beside(MisbehavingServer()) as odd,
        target(ROBOTS) as site,
    ):
        (result,) = api.batch([odd.url + "/echo"])["results"]
        heard = dict(json.loads(result["content"])["headers"])
        assert heard["User-Agent"] == f"shoal/0.1 (+{CONTACT})"
        results = api.batch([f"{site.url}/a", f"{site.url}/private"])["results"]
        assert [result["status"] for result in results] == ["success", "failed"]


def test_without_a_contact_the_user_agent_is_as_it_was() -> None:
    assert Config().sent_user_agent == Config(contact="").sent_user_agent == "shoal/0.1"
    assert Config(user_agent="me", contact="mailto:me@site.example").sent_user_agent == "me (+mailto:me@site.example)"
    assert Config().with_settings({"contact": CONTACT, "tor.enabled": True}).sent_user_agent == "shoal/0.1"


@pytest.mark.parametrize(
    "contact", ["me", "https://", "ftp://host/", "https://a b/", "https://x/)", "https://x/\r\nA: b", "https://x/é"]
)
def test_what_is_no_contact(contact: str) -> None:
    with pytest.raises(ConfigError, match="contact"):
        Config(contact=contact)


def shoal(folder: Path, *words: str, **environ: str) -> tuple[int, str]:
    done = forking.run(
        [*SHOAL, *words], cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_new_spider_has_the_contact(tmp_path: Path) -> None:
    assert shoal(tmp_path, "new", "plain")[0] == 0  # nobody to ask
    assert "contact" not in (tmp_path / "plain.py").read_text()
    assert shoal(tmp_path, "new", "named", "--contact", CONTACT)[0] == 0
    assert f'settings = {{"contact": "{CONTACT}", "download_delay"' in (tmp_path / "named.py").read_text()
    code, said = shoal(tmp_path, "new", "wrong", "--contact", 'x"y')
    assert (code, "--contact must be a URL such as" in said) == (2, True)
    assert not (tmp_path / "wrong.py").exists()
    code, said = shoal(tmp_path, "config", "named.py")
    assert f"{CONTACT}" in said


@pytest.mark.parametrize(("typed", "environ", "is_asked"), [
    (CONTACT, {}, True), ("", {}, True), ("", {"SHOAL_CONTACT": CONTACT}, False),
])  # fmt: skip
def test_it_is_asked_for_on_a_terminal(tmp_path: Path, typed: str, environ: dict[str, str], is_asked: bool) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(SHOAL[0], [*SHOAL, "new", "asked"], {**os.environ, **environ})
    os.write(terminal, f"{typed}\n".encode())
    said = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the end of a terminal on Linux
            break
        if not part:
            break
        said += part
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said
    os.close(terminal)
    assert (b"How can the owners of sites reach you?" in said) is is_asked
    assert (CONTACT in (tmp_path / "asked.py").read_text()) is bool(typed)


def test_the_doctor_mentions_it(tmp_path: Path) -> None:
    assert "-   contact in the user agent: not set" in shoal(tmp_path, "doctor")[1]
    assert f"ok  user agent shoal/0.1 (+{CONTACT})" in shoal(tmp_path, "doctor", SHOAL_CONTACT=CONTACT)[1]
