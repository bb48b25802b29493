"""Real servers for the tests: started on free ports in a temporary folder, and stopped, frozen or killed on request."""

from __future__ import annotations

import atexit
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar, TypeVar

Server = TypeVar("Server", bound="DatabaseServer")

_START_SECONDS = 60.0


_PORTS = random.SystemRandom().sample(range(10_000, 32_768), 20_000)
"""Below those that the system gives to clients: a connection of another test never has the port of a server."""


def free_port() -> int:
    """One that this process has not used yet: what is remembered of a server is not taken for another's."""
    while True:
        port = _PORTS.pop()
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class DatabaseServer(ABC):
    """A server process of its own. ``start`` after ``kill`` goes on with the same data on the same port."""

    user: ClassVar[str | None] = None
    """Who it runs as when the tests run as root, if the server refuses to be root."""

    def __init__(self, **settings: str) -> None:
        """``settings`` are the server's own, with underscores; they are put before its defaults for tests."""
        self.settings = settings
        self.port = free_port()
        self.folder = Path(mkdtemp(prefix=f"shoal-{type(self).__name__.lower()}-"))
        self._user = self.user if os.getuid() == 0 else None
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None
        self._prepare()
        self.start()

    def _prepare(self) -> None:  # noqa: B027 (not all have to)
        """Make an empty database."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it takes commands by now."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    def start(self) -> None:
        """Until it answers."""
        log = self.folder / "server.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder,
                user=self._user, group=self._user, extra_groups=[] if self._user else None, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self._command()[0]} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.02)

    def _run(self, *command: str) -> None:
        """A command of the server's, as its user."""
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, check=False,
            user=self._user, group=self._user, extra_groups=[] if self._user else None,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout.decode()}\n{done.stderr.decode()}")

    # -- faults

    def signal(self, number: signal.Signals) -> None:
        """To the server and all processes that it started."""
        assert self._process is not None
        for pid in _family(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """It is there, but does not answer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)  # first it alone: it must start no more while they are looked for
        self.signal(signal.SIGSTOP)
        # Other threads go on until the one that has got the signal has a core, which takes a while on a busy machine.
        while not all(_is_stopped(pid) for pid in _family(self._process.pid)):
            time.sleep(0.001)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def kill(self) -> None:
        """Like a power cut of the process: no time to write anything."""
        self.freeze()
        assert self._process is not None
        family = _family(self._process.pid)
        self.signal(signal.SIGKILL)
        self._process.wait()
        while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in family):
            time.sleep(0.01)

    def close(self) -> None:
        """Stop it and forget its data."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _family(pid: int) -> list[int]:
    """A process and all its children, the parent first, so that it starts no more when it is stopped."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = (entry / "stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found.extend(parents.get(each, ()))
    return found


def _is_stopped(pid: int) -> bool:
    """All its threads, or it is gone."""
    with suppress(OSError):
        states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in _threads(pid)]
        return all(state in "TtZX" for state in states)
    return True


def _threads(pid: int) -> Iterator[Path]:
    return Path(f"/proc/{pid}/task").iterdir()


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


class RedisServer(DatabaseServer):
    """Redis that writes every change to its append-only file before it answers."""

    def _command(self) -> list[str]:
        defaults = {
            "port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), "save": "", "appendonly": "yes",
            "appendfsync": "everysec", "daemonize": "no",
        }  # fmt: skip
        options = defaults | {name.replace("_", "-"): value for name, value in self.settings.items()}
        return ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as client:
            client.settimeout(1.0)
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-DENIED"))
        return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


class PostgresServer(DatabaseServer):
    """PostgreSQL. What it has committed survives a kill of its processes; ``fsync`` matters to that of the machine."""

    user = "postgres"

    @staticmethod
    def _binary(name: str) -> str:
        """Debian keeps them beside each other, by version, and not on the path."""
        places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
        return str(places[-1]) if places else name

    def _prepare(self) -> None:
        self._run(
            self._binary("initdb"), "-D", str(self.folder / "data"), "-U", "shoal", "--auth=trust", "--no-sync",
            "--no-locale", "--encoding=UTF8",
        )  # fmt: skip

    def _command(self) -> list[str]:
        defaults = {
            "port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off",
            "shared_buffers": "128MB", "max_connections": "200",
        }  # fmt: skip
        options = defaults | self.settings
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        return [self._binary("postgres"), "-D", str(self.folder / "data"), *words]

    def _answers(self) -> bool:
        done = subprocess.run(
            [self._binary("pg_isready"), "-h", "127.0.0.1", "-p", str(self.port), "-t", "1"],
            capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode == 0

    @property
    def url(self) -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/postgres"

    def save(self) -> None:
        """A backup of this moment, in place of an earlier one."""
        saved = self.folder / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        self._run(
            self._binary("pg_basebackup"), "-h", "127.0.0.1", "-p", str(self.port), "-U", "shoal", "-D", str(saved),
            "--checkpoint=fast", "--wal-method=stream", "--no-sync",
        )  # fmt: skip

    def rewind(self) -> None:
        """Lose its machine, and start from the backup on the same port. The backup is used up."""
        self.kill()
        shutil.rmtree(self.folder / "data")
        (self.folder / "saved").rename(self.folder / "data")
        self.start()


class PgBouncer(DatabaseServer):
    """A pooler before a PostgreSQL server: each transaction may run on another of its few connections."""

    user = "postgres"

    def __init__(self, server: PostgresServer, **settings: str) -> None:
        self._server = server
        super().__init__(**settings)

    def _prepare(self) -> None:
        defaults = {
            "listen_addr": "127.0.0.1", "listen_port": str(self.port), "unix_socket_dir": "", "auth_type": "any",
            "pool_mode": "transaction", "default_pool_size": "2", "max_client_conn": "100", "logfile": "",
            "pidfile": str(self.folder / "pgbouncer.pid"),
        }  # fmt: skip
        lines = [f"{name} = {value}\n" for name, value in (defaults | self.settings).items()]
        target = f"* = host=127.0.0.1 port={self._server.port} user=shoal\n"
        config = self.folder / "pgbouncer.ini"
        config.write_text(f"[databases]\n{target}[pgbouncer]\n{''.join(lines)}")
        config.chmod(0o644)

    def _command(self) -> list[str]:
        return ["pgbouncer", str(self.folder / "pgbouncer.ini")]

    def _answers(self) -> bool:
        return _listens(self.port)

    @property
    def url(self) -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/postgres"


class MariaServer(DatabaseServer):
    """MariaDB, for those who write their items to MySQL."""

    user = "mysql"

    def _prepare(self) -> None:
        self._run(
            "mariadb-install-db", "--no-defaults", f"--datadir={self.folder / 'data'}", "--skip-test-db",
            "--auth-root-authentication-method=normal",
        )  # fmt: skip
        (self.folder / "init.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS shoal CHARACTER SET utf8mb4;\n"
            "CREATE USER IF NOT EXISTS 'shoal'@'127.0.0.1' IDENTIFIED BY 'secret';\n"
            "GRANT ALL ON *.* TO 'shoal'@'127.0.0.1';\n"
        )
        (self.folder / "init.sql").chmod(0o644)

    def _command(self) -> list[str]:
        defaults = {
            "datadir": str(self.folder / "data"), "socket": str(self.folder / "maria.sock"), "port": str(self.port),
            "bind-address": "127.0.0.1", "pid-file": str(self.folder / "maria.pid"),
            "init-file": str(self.folder / "init.sql"), "skip-name-resolve": "1",
            "innodb-flush-log-at-trx-commit": "2", "innodb-buffer-pool-size": "64M",
        }  # fmt: skip
        options = defaults | {name.replace("_", "-"): value for name, value in self.settings.items()}
        return ["mariadbd", "--no-defaults", *(f"--{name}={value}" for name, value in options.items())]

    def _answers(self) -> bool:
        return _listens(self.port)

    @property
    def url(self) -> str:
        return f"mysql://shoal:secret@127.0.0.1:{self.port}/shoal"


class ZookeeperServer(DatabaseServer):
    """ZooKeeper without an ensemble. Sessions survive a kill of it."""

    def _prepare(self) -> None:
        defaults = {
            "tickTime": "200", "minSessionTimeout": "400", "maxSessionTimeout": "60000", "clientPort": str(self.port),
            "clientPortAddress": "127.0.0.1", "dataDir": str(self.folder / "data"), "admin.enableServer": "false",
            "4lw.commands.whitelist": "*", "maxClientCnxns": "0",
        }  # fmt: skip
        lines = [f"{name}={value}\n" for name, value in (defaults | self.settings).items()]
        (self.folder / "zoo.cfg").write_text("".join(lines))

    def _command(self) -> list[str]:
        return [
            "java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no",
            "-Dzookeeper.jmx.log4j.disable=true", "-cp", "/usr/share/java/zookeeper.jar",
            "org.apache.zookeeper.server.quorum.QuorumPeerMain", str(self.folder / "zoo.cfg"),
        ]  # fmt: skip

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as client:
            client.settimeout(1.0)
            client.sendall(b"srvr")
            return client.recv(64).startswith(b"Zookeeper version")
        return False

    @property
    def url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"


_SHARED: list[DatabaseServer] = []


@cache
def shared(kind: type[Server]) -> Server:
    """The one server of its kind that the tests which do it no harm share, each with a name of its own on it."""
    server = kind()
    _SHARED.append(server)
    return server


def close_shared() -> None:
    """At the end of all tests."""
    while _SHARED:
        _SHARED.pop().close()
    shared.cache_clear()


atexit.register(close_shared)  # for programs that are no tests
