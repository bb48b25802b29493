"""What is said about a browser that has no room, and where its temporary files are."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest

from shoal.config import BrowserSettings
from shoal.fetch.browser import process

Usage = namedtuple("Usage", "total used free")
CLOSED = "BrowserType.launch: Target page, context or browser has been closed\nBrowser logs:\n<launching> chromium"


def test_room_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 30, 0, 1 << 30))
    assert process.shortage() == ""
    said = process._explain(CLOSED, "/usr/bin/chromium", sandbox=False)
    assert said.startswith("/usr/bin/chromium does not start: BrowserType.launch: Target page")


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.tempfile, "gettempdir", lambda: "/full")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(4 << 20, 2 << 20, 2 << 20))
    assert process._explain(CLOSED, "/usr/bin/chromium", sandbox=False) == (
        "/usr/bin/chromium does not start. The disk is full: /full, where Chromium keeps its profile and its shared "
        "memory, has 2 MB left. Make room there, or set TMPDIR to another folder"
    )


@pytest.mark.parametrize(
    "line",
    [
        'Check failed: sys_chroot("/proc/self/fdinfo/") == 0',  # the default profile of Podman
        "Failed to move to new namespace: PID namespaces supported, but failed: errno = Operation not permitted",
        "FATAL:content/browser/zygote_host/zygote_host_impl_linux.cc:132] No usable sandbox!",
    ],
)
def test_a_system_without_user_namespaces_is_named(line: str) -> None:
    said = process._explain(f"{CLOSED}\n  - [pid=19][err] {line}", "/usr/bin/chromium", sandbox=True)
    assert said.startswith("the sandbox of /usr/bin/chromium cannot start here. Allow unprivileged user namespaces;")
    assert "deploy/chromium-seccomp.json" in said


@pytest.mark.parametrize(
    ("given", "folder", "used"),
    [
        ("/short", "/short/shoal-browser-x", "/short/shoal-browser-x"),
        ("/" + "s" * 50, "/" + "s" * 50 + "/shoal-browser-x", "/" + "s" * 50),
        ("/" + "l" * 70, "/" + "l" * 70 + "/shoal-browser-x", None),  # Chromium uses /tmp
    ],
)
def test_its_socket_has_a_short_path(
    given: str, folder: str, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", given)
    assert process.BrowserProcess(BrowserSettings())._environment(folder).get("TMPDIR") == used
