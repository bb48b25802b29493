"""Who owns the other end of a connection: the kernel's answer, and the table that says the same."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shoal.fetch.browser import gateway
from shoal.fetch.browser.gateway import is_own

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The client's end and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with closing(accepted):
            yield client, accepted


def owners(accepted: socket.socket) -> tuple[int | None, int | None]:
    """By the kernel, and by the table."""
    peer, local = accepted.getpeername(), accepted.getsockname()
    table = Path("/proc/net/tcp").read_text()
    return gateway._ask_kernel(peer, local), gateway._search_table(table, peer, local)


def test_an_own_connection(ends: Ends) -> None:
    _, accepted = ends
    assert owners(accepted) == (os.geteuid(), os.geteuid())
    assert is_own(accepted.getpeername(), accepted.getsockname())


def test_a_connection_that_was_closed_belongs_to_nobody(ends: Ends) -> None:
    """The kernel says that it belongs to root: somebody could send a request and leave."""
    client, accepted = ends
    client.sendall(b"CONNECT a.example:80 HTTP/1.1\r\n\r\n")
    client.close()
    assert owners(accepted) == (None, None)
    assert not is_own(accepted.getpeername(), accepted.getsockname())


def test_a_connection_that_does_not_exist(ends: Ends) -> None:
    _, accepted = ends
    host, port = accepted.getsockname()
    assert not is_own((host, port), (host, port))


def test_another_user(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    _, accepted = ends
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert not is_own(accepted.getpeername(), accepted.getsockname())


def test_a_system_whose_kernel_does_not_answer(ends: Ends, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, accepted = ends
    addresses = accepted.getpeername(), accepted.getsockname()

    def refuse(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(gateway, "_ask_kernel", refuse)
    assert is_own(*addresses)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert not is_own(*addresses)
    monkeypatch.setattr(gateway, "_TABLE", tmp_path / "none")
    assert is_own(*addresses)  # nobody knows
