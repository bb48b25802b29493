"""Real database servers for the tests, on free ports and in temporary folders. Tests can freeze and kill them."""

from __future__ import annotations

import atexit
import fcntl
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar, TypeVar

Server = TypeVar("Server", bound="DatabaseServer")

_START_SECONDS = 60.0


@cache
def _ports(_pid: int) -> list[int]:
    """Below the ephemeral ports, so that no outgoing connection takes the port of a server. Each process has its own,
    also those that are forked."""
    return random.SystemRandom().sample(range(10_000, 32_768), 20_000)


def free_port() -> int:
    """A port that this process has not used before, so that no cached state of another server applies."""
    while True:
        port = _ports(os.getpid()).pop()
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


_RUN_FOLDER = "TESTS_RUN_FOLDER"


def run_folder() -> Path:
    """A folder that all processes of this run of the tests share."""
    if _RUN_FOLDER not in os.environ:  # the other processes inherit it
        os.environ[_RUN_FOLDER] = mkdtemp(prefix="shoal-tests-")
        Path(os.environ[_RUN_FOLDER]).chmod(0o755)
    return Path(os.environ[_RUN_FOLDER])


def remove_run_folder() -> None:
    shutil.rmtree(os.environ.pop(_RUN_FOLDER, ""), ignore_errors=True)


class DatabaseServer(ABC):
    """A server process. ``start`` after ``kill`` keeps the data and the port."""

    user: ClassVar[str | None] = None
    """The user of the server when the tests run as root, if it refuses to run as root."""

    def __init__(self, **settings: str) -> None:
        """``settings`` are options of the server, with underscores. They override the defaults for tests."""
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
        """Create an empty database."""

    def _prepare_once(self, create: Callable[[], None]) -> None:
        """Create an empty database in the folder ``data``. Only the first process of all does it: the others copy its
        database, which is much cheaper."""
        data, kept = self.folder / "data", run_folder() / type(self).__name__
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                create()
                half = kept.with_suffix(".half")
                subprocess.run(["cp", "--archive", data, half], check=True)
                half.rename(kept)
                return
        self._run("cp", "--archive", "--reflink=auto", str(kept), str(data))

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server accepts commands."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    def start(self) -> None:
        """Start the server, and wait until it answers."""
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
        """Run a program of the server, as its user."""
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, check=False,
            user=self._user, group=self._user, extra_groups=[] if self._user else None,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout.decode()}\n{done.stderr.decode()}")

    # -- faults

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and all its child processes."""
        assert self._process is not None
        for pid in _family(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """Stop all its processes. Connections stay open, but the server does not answer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)  # first the parent, so that it starts no more children
        self.signal(signal.SIGSTOP)
        # On a busy machine it takes a while until all threads have stopped.
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
        """Kill all its processes with SIGKILL. They get no time to write anything."""
        self.freeze()
        assert self._process is not None
        family = _family(self._process.pid)
        self.signal(signal.SIGKILL)
        self._process.wait()
        while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in family):
            time.sleep(0.01)

    def close(self) -> None:
        """Stop the server and remove its data."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _family(pid: int) -> list[int]:
    """A process and all its descendants, parents first."""
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
    """Whether all threads have stopped, or the process has ended."""
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


def listens(port: int) -> bool:
    """Whether a server accepts connections on this port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


class RedisServer(DatabaseServer):
    """Redis with an append-only file."""

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
    """PostgreSQL without ``fsync``: commits survive a kill of its processes, but not a power cut."""

    user = "postgres"

    @staticmethod
    def program(name: str) -> str:
        """The path of a program. Debian keeps them in a folder per version, outside PATH."""
        places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
        return str(places[-1]) if places else name

    def _prepare(self) -> None:
        self._prepare_once(
            lambda: self._run(
                self.program("initdb"), "-D", str(self.folder / "data"), "-U", "shoal", "--auth=trust", "--no-sync",
                "--no-locale", "--encoding=UTF8",
            )
        )  # fmt: skip

    def _command(self) -> list[str]:
        defaults = {
            "port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off",
            "shared_buffers": "128MB", "max_connections": "200",
            "dynamic_shared_memory_type": "mmap",  # in its folder: in /dev/shm, a killed server would leave it behind
        }  # fmt: skip
        options = defaults | self.settings
        words = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        return [self.program("postgres"), "-D", str(self.folder / "data"), *words]

    def _answers(self) -> bool:
        done = subprocess.run(
            [self.program("pg_isready"), "-h", "127.0.0.1", "-p", str(self.port), "-t", "1"],
            capture_output=True, check=False,
        )  # fmt: skip
        return done.returncode == 0

    @property
    def url(self) -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/postgres"

    def save(self) -> None:
        """Take a backup. It replaces an earlier one."""
        saved = self.folder / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        self._run(
            self.program("pg_basebackup"), "-h", "127.0.0.1", "-p", str(self.port), "-U", "shoal", "-D", str(saved),
            "--checkpoint=fast", "--wal-method=stream", "--no-sync",
        )  # fmt: skip

    def rewind(self) -> None:
        """Kill the server, and start it from the backup on the same port. This consumes the backup."""
        self.kill()
        shutil.rmtree(self.folder / "data")
        (self.folder / "saved").rename(self.folder / "data")
        self.start()


class PgBouncer(DatabaseServer):
    """A connection pooler for a PostgreSQL server: each transaction may use another connection."""

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
        return listens(self.port)

    @property
    def url(self) -> str:
        return f"postgresql://shoal@127.0.0.1:{self.port}/postgres"


class MariaServer(DatabaseServer):
    """MariaDB, for the MySQL sink."""

    user = "mysql"

    def _prepare(self) -> None:
        self._prepare_once(
            lambda: self._run(
                "mariadb-install-db", "--no-defaults", f"--datadir={self.folder / 'data'}", "--skip-test-db",
                "--auth-root-authentication-method=normal",
            )
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
        return listens(self.port)

    @property
    def url(self) -> str:
        return f"mysql://shoal:secret@127.0.0.1:{self.port}/shoal"


class ZookeeperServer(DatabaseServer):
    """A single ZooKeeper server. Sessions survive its kill."""

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
    """The shared server of this kind, for tests that do not harm it. Each test uses its own names on it."""
    server = kind()
    _SHARED.append(server)
    return server


def close_shared() -> None:
    """Stop all shared servers."""
    while _SHARED:
        _SHARED.pop().close()
    shared.cache_clear()


if _RUN_FOLDER not in os.environ:  # the process that makes the folder removes it
    atexit.register(remove_run_folder)
atexit.register(close_shared)  # for programs that are not tests
