"""Servers that can be rewound while clients use them.

Each has a ``url`` for a frontier and ``set_back(seconds)``, which returns when the server answers again without its
last seconds of data. It returns the lost span of time: from the restored moment to the death of the server.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

from tests.acceptance.faults import Wire
from tests.nemesis.judge import Span
from tests.support.databases import DatabaseServer, PostgresServer, RedisServer

_SAMPLE_EVERY = 0.05
_QUIET_SECONDS = 20.0
_FAILOVER_SECONDS = 30.0


class Rewindable(ABC):
    """A store whose server can be rewound."""

    most_rewinds: int = 1_000
    """How often it can be rewound."""

    @property
    def port(self) -> int | None:
        """The port that clients connect to; None if they discover it."""
        return None

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of an empty frontier."""

    @abstractmethod
    def set_back(self, seconds: float) -> Span:
        """Kill the server, and start it in its state of some seconds ago. This may first block for that time."""

    def keep(self) -> None:  # noqa: B027 (not all have to)
        """Never go back beyond this moment."""

    @abstractmethod
    def close(self) -> None: ...


class AofRedis(Rewindable):
    """Redis with ``appendfsync everysec`` after a power cut: its append-only file ends at an earlier moment.

    The file may end within a command or a transaction; Redis drops such a tail when it loads the file.
    """

    def __init__(self) -> None:
        self._server = RedisServer(auto_aof_rewrite_percentage="0", aof_load_truncated="yes")
        self._times: list[float] = []
        self._sizes: list[int] = []
        self._floor = self._mark = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @property
    def url(self) -> str:
        return f"{self._server.url}?prefix=nemesis"

    @property
    def _file(self) -> Path:
        return max((self._server.folder / "appendonlydir").glob("*.incr.aof"))

    def _sample(self) -> None:
        while not self._closed.wait(_SAMPLE_EVERY):
            with self._lock, suppress(OSError):
                size = self._file.stat().st_size
                self._times.append(time.monotonic())
                self._sizes.append(size)

    def _written_size(self) -> int:
        """The size of the file with all acknowledged changes: Redis postpones writes while the disk is busy."""
        until = time.monotonic() + _QUIET_SECONDS
        while b"aof_buffer_length:0\r\n" not in ask_redis(self.port, "INFO", "persistence"):
            assert time.monotonic() < until, f"Redis did not write its changes within {_QUIET_SECONDS:g} s"
            time.sleep(_SAMPLE_EVERY)
        return self._file.stat().st_size

    def keep(self) -> None:
        self._floor = self._written_size()

    @property
    def port(self) -> int:
        return self._server.port

    def mark(self) -> None:
        """Save this moment for ``back_to_mark``."""
        self._mark = self._written_size()

    def back_to_mark(self) -> None:
        with self._lock:
            self._server.kill()
            os.truncate(self._file, self._mark)
            self._times.clear()
            self._sizes.clear()
            self._server.start()

    def set_back(self, seconds: float) -> Span:
        until = time.monotonic() + _QUIET_SECONDS
        while self._file.stat().st_size == self._size_at(time.monotonic() - seconds)[0]:
            assert time.monotonic() < until, f"nothing was written for {_QUIET_SECONDS:g} s: no rewind is possible"
            time.sleep(_SAMPLE_EVERY)
        with self._lock:
            self._server.kill()
            killed = time.monotonic()
            size, then = self._size_at(killed - seconds)
            os.truncate(self._file, size)
            self._forget_after(then)
            self._server.start()
        return then, killed

    def _forget_after(self, moment: float) -> None:
        """Drop the sizes that were sampled later: the file was cut."""
        last = bisect_right(self._times, moment)
        del self._times[last:], self._sizes[last:]

    def _size_at(self, moment: float) -> tuple[int, float]:
        """The size of the file at that moment, not before ``keep``, and the moment of that size."""
        index = max(0, bisect_right(self._times, moment) - 1)
        while self._sizes[index] < self._floor:
            index += 1
        return self._sizes[index], self._times[index]

    def close(self) -> None:
        self._closed.set()
        self._sampler.join()
        self._server.close()


class _Sentinel(DatabaseServer):
    """Watches one server, called ``main``, and promotes its replica when it dies."""

    def __init__(self, master: RedisServer) -> None:
        self._master = master
        super().__init__()

    def _prepare(self) -> None:
        # With a short failover-timeout, the sentinel would connect the replica to the master without the slow proxy.
        (self.folder / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {self._master.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 180000\n"
        )

    def _command(self) -> list[str]:
        return ["redis-server", str(self.folder / "sentinel.conf"), "--sentinel"]

    _answers = RedisServer._answers

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/main/0"


def ask_redis(port: int, *words: str) -> bytes:
    """The beginning of the response of a server to a command."""
    with socket.create_connection(("127.0.0.1", port), 2.0) as client:
        client.settimeout(2.0)
        client.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        return client.recv(65536)


class SentinelRedis(Rewindable):
    """A master, a replica that falls behind, and a sentinel that promotes it when the master dies."""

    most_rewinds = 1

    def __init__(self) -> None:
        self._master = RedisServer(repl_diskless_sync_delay="0")
        self._wire = Wire(self._master.port)
        self._replica = RedisServer(
            repl_diskless_sync_delay="0", replicaof=f"127.0.0.1 {self._wire.port}", replica_serve_stale_data="yes"
        )
        self._sentinel = _Sentinel(self._master)
        # By default it polls a replica every 10 s, and promotes none whose state is older than 5 s.
        ask_redis(self._sentinel.port, "SENTINEL", "DEBUG", "info-period", "300")
        self._wait_for(lambda: b"master_link_status:up" in ask_redis(self._replica.port, "INFO", "replication"))
        self._wait_for(lambda: b"num-slaves\r\n$1\r\n1" in ask_redis(self._sentinel.port, "SENTINEL", "MASTER", "main"))

    @staticmethod
    def _wait_for(reached: object) -> None:
        until = time.monotonic() + _FAILOVER_SECONDS
        while True:
            with suppress(OSError):
                if reached():  # type: ignore[operator]
                    return
            assert time.monotonic() < until, "the sentinel did not promote the replica"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"{self._sentinel.url}?prefix=nemesis"

    def set_back(self, seconds: float) -> Span:
        self._wire.fall_silent()
        then = time.monotonic()
        time.sleep(seconds)
        killed = time.monotonic()
        self._master.kill()
        self._wait_for(lambda: b"role:master" in ask_redis(self._replica.port, "INFO", "replication"))
        promoted = b"%d" % self._replica.port
        self._wait_for(
            lambda: promoted in ask_redis(self._sentinel.port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        )
        return then, killed

    def close(self) -> None:
        for each in (self._sentinel, self._replica, self._wire, self._master):
            each.close()


class BackupPostgres(Rewindable):
    """PostgreSQL that is restored from a base backup, taken while clients use it."""

    def __init__(self) -> None:
        self._server = PostgresServer(shared_buffers="32MB", max_wal_size="256MB")

    @property
    def url(self) -> str:
        return f"{self._server.url}?schema=nemesis"

    @property
    def port(self) -> int:
        return self._server.port

    def mark(self) -> None:
        """Take a backup for ``back_to_mark``. It contains everything that was committed before this call."""
        server = self._server
        shutil.rmtree(server.folder / "backup", ignore_errors=True)
        server._run(
            server.program("pg_basebackup"), "-D", str(server.folder / "backup"), "-h", "127.0.0.1",
            "-p", str(server.port), "-U", "shoal", "-c", "fast", "-X", "stream", "--no-sync",
        )  # fmt: skip

    def back_to_mark(self) -> None:
        """Start the backup in place of the server."""
        self._server.kill()
        shutil.rmtree(self._server.folder / "data")
        (self._server.folder / "backup").rename(self._server.folder / "data")
        self._server.start()

    def set_back(self, seconds: float) -> Span:
        self.mark()
        then = time.monotonic()
        time.sleep(seconds)
        killed = time.monotonic()
        self.back_to_mark()
        return then, killed

    def close(self) -> None:
        self._server.close()


KINDS: dict[str, type[Rewindable]] = {"redis": AofRedis, "sentinel": SentinelRedis, "postgres": BackupPostgres}
