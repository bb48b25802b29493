"""Start the parts of distributed crawling, restart those that end, and stop them all. Run by `start-distributed`."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import redis
from celery import Celery
from kombu.exceptions import OperationalError
from parts import Part, Signals, report

from shoal.api.celery.settings import celery_settings
from shoal.config import find_config_file, load_config, mask
from shoal.errors import ShoalError

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
FLOWER_USER = "shoal"
START_TIMEOUT = 60.0  # seconds until a part must answer for the first time
STOP_TIMEOUT = 30.0  # seconds until a part must have stopped: workers finish their pages
HURRIED_STOP_TIMEOUT = 1.0  # the same after a second signal


class StartError(Exception):
    """A part cannot be started. The message is for the user."""


class Stopped(Exception):
    """A signal arrived before all parts were ready."""


class Fleet:
    """All parts. Redis is one of them only if none answers at the URL of the broker."""

    def __init__(self, options: argparse.Namespace, signals: Signals) -> None:
        self._options = options
        self._signals = signals
        self._logs = options.folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._broker = celery_settings().broker_url
        self._environment = {**os.environ, "CELERY_BROKER_URL": self._broker}
        given = self._environment.pop("SHOAL_FLOWER_PASSWORD", "")
        self._flower_password = given or secrets.token_urlsafe(18)
        self._flower_password_is_new = not given
        if "CELERY_RESULT_BACKEND" not in os.environ and _is_redis(self._broker):
            # Keep results on the server of the broker, even if that is not the default server.
            self._environment["CELERY_RESULT_BACKEND"] = urlsplit(self._broker)._replace(path="/1").geturl()
        self._parts: list[Part] = []
        self._redis: Part | None = None
        self._trouble = ""
        """The last problem that a part reported while it started."""

    def start(self) -> None:
        """Start all parts. Returns when all of them answer."""
        options = self._options
        if _is_redis(self._broker):
            self._need_redis()
        workers = [self._start_worker(number) for number in range(1, options.workers + 1)]
        api = self._start("api", [BIN / "shoal", "serve", "--host", HOST, "--port", str(options.api_port)])
        self._wait(api, lambda: _answers(f"{self.api}/health"))
        for worker in workers:
            self._wait(worker, partial(self._answers_ping, worker))
        flower = self._start(  # it queries the workers when it starts, so they start first
            "flower",
            [BIN / "celery", "-A", "shoal.celery", "flower", f"--address={HOST}", f"--port={options.flower_port}"],
            # Without a password, any web page in a browser on this machine could stop workers through Flower's API.
            # The password is in the environment, because all users can read command lines.
            FLOWER_BASIC_AUTH=f"{FLOWER_USER}:{self._flower_password}",
            FLOWER_UNAUTHENTICATED_API="false",
        )
        self._wait(flower, lambda: _answers(f"http://{HOST}:{options.flower_port}/healthcheck"))
        self._wait(api, self._is_available, "distributed crawling")

    @property
    def api(self) -> str:
        return f"http://{HOST}:{self._options.api_port}"

    def _start(self, name: str, command: Sequence[str | Path], **more: str) -> Part:
        part = Part(name, command, {**self._environment, **more}, self._logs)
        self._parts.append(part)
        return part

    def _start_worker(self, number: int) -> Part:
        name = f"worker-{number}"
        return self._start(name, [BIN / "shoal", "celery-worker", "--name", name])

    def _need_redis(self) -> None:
        where = mask(self._broker)
        if _redis_answers(self._broker):
            report(f"redis: using the server at {where}")
            return
        url = urlsplit(self._broker)
        if url.scheme != "redis" or url.hostname not in ("localhost", "127.0.0.1") or url.password:
            raise StartError(f"no Redis answers at {where} (CELERY_BROKER_URL); this script starts only a local one")
        port = url.port or 6379
        _check_free(port, "it is not a Redis that answers. Set CELERY_BROKER_URL to another server")
        _need_redis_server()
        data = self._options.folder / "redis"
        data.mkdir(exist_ok=True)
        flags = {"bind": HOST, "port": str(port), "dir": str(data), "appendonly": "yes", "save": "", "daemonize": "no"}
        command = ["redis-server", *(word for name, value in flags.items() for word in (f"--{name}", value))]
        self._redis = self._start("redis", command)
        self._wait(self._redis, lambda: _redis_answers(self._broker))

    def _answers_ping(self, worker: Part) -> bool:
        name = f"{worker.name}@{socket.gethostname()}"
        try:
            with Celery(broker=self._broker) as client:
                return bool(client.control.ping(destination=[name], timeout=1.0))
        except OperationalError as exc:
            self._trouble = f"the broker does not answer: {exc}"
            return False

    def _is_available(self) -> bool:
        """Whether the API reports that distributed crawling is available: it reaches the broker and the workers."""
        answer = _answers(f"{self.api}/api/crawl/distributed/status", token=_token())
        if answer is None:
            return False
        status = json.loads(answer)
        self._trouble = status["message"]
        return bool(status["distributed_available"])

    def _wait(self, part: Part, holds: Callable[[], object], what: str = "") -> None:
        what = what or part.name
        self._trouble = ""
        report(f"{what}: starting", end=" ... ")
        until = time.monotonic() + START_TIMEOUT
        while not holds():
            ended = next((each for each in self._parts if each.has_ended), None)
            if ended is not None:
                raise StartError(f"{ended.name} {ended.exit_reason}\n{ended.tail()}")
            if time.monotonic() > until:
                raise StartError(f"{what} did not answer within {START_TIMEOUT:g} s\n{self._trouble}\n{part.tail()}")
            if self._signals.stop.wait(0.2):
                raise Stopped
        report(f"ready (process {part.process.pid})")

    def print_addresses(self) -> None:
        token = ' -H "Authorization: Bearer $SHOAL_SERVE__TOKEN"' if _token() else ""
        password = self._flower_password if self._flower_password_is_new else "from SHOAL_FLOWER_PASSWORD"
        report(f"""
API     {self.api} (reference: {self.api}/docs)
Flower  http://{HOST}:{self._options.flower_port} (user {FLOWER_USER}, password {password})
logs    {self._logs}

curl -X POST {self.api}/api/crawl/batch{token} -H "Content-Type: application/json" \\
  -d '{{"urls": ["https://example.com"], "distributed": true}}'

Press Ctrl-C to stop everything.""")

    def supervise(self) -> None:
        """Restart parts that end, until a signal arrives."""
        while not self._signals.stop.wait(0.2):
            for part in self._parts:
                part.restart_if_ended()

    def stop(self) -> None:
        """Stop all parts. Redis is the last: the others still release their leases."""
        others = [part for part in self._parts if part is not self._redis]
        if any(not part.has_ended for part in others):
            report(f"stopping: pages in progress have {STOP_TIMEOUT:g} s to finish; press Ctrl-C again to stop now")
        self._stop(others)
        if self._redis is not None:
            self._stop([self._redis])
        report("stopped")

    def _stop(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.terminate()
        asked = time.monotonic()
        while not all(part.has_ended for part in parts):
            if time.monotonic() - asked > (HURRIED_STOP_TIMEOUT if self._signals.hurry.is_set() else STOP_TIMEOUT):
                late = ", ".join(part.name for part in parts if not part.has_ended)
                report(f"killed because it did not stop in time: {late}")
                break
            time.sleep(0.1)
        for part in parts:
            part.kill()


def _is_redis(url: str) -> bool:
    return urlsplit(url).scheme in ("redis", "rediss")


def _redis_answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            client.ping()
    except redis.AuthenticationError as exc:
        raise StartError(f"the Redis at {mask(url)} (CELERY_BROKER_URL) refused the password: {exc}") from exc
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


def _need_redis_server() -> None:
    if shutil.which("redis-server") is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise StartError("no Redis answers, and redis-server is not installed. Install it, or set CELERY_BROKER_URL")
    installing = ["bash", "-c", "set -e; . scripts/lib.sh; need_command redis-server redis-server; install_missing"]
    if subprocess.run(installing, cwd=ROOT, check=False).returncode:
        raise StartError("cannot install redis-server; see the output above")


def _token() -> str | None:
    """A token of the API, if it needs one."""
    serve = load_config(file=find_config_file(os.environ, ROOT), environ=os.environ).config.serve
    return serve.token or next(iter(serve.tokens.values()), None)


def _answers(url: str, token: str | None = None) -> bytes | None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=10.0) as answer:
            body: bytes = answer.read()
            return body
    except (URLError, OSError):
        return None


def _check_free(port: int, advice: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as exc:
            raise StartError(f"port {port} is taken ({exc.strerror}): {advice}") from exc


def count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def port(text: str) -> int:
    if not 0 < int(text) < 65536:
        raise ValueError
    return int(text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="start-distributed",
        description="Start Redis (if none answers at CELERY_BROKER_URL), Celery workers, the HTTP API and Flower on "
        "this machine, keep them running, and stop them all at Ctrl-C. The settings of the parts come from the "
        "environment (CELERY_*, SHOAL_*) and shoal.toml. Flower's password is SHOAL_FLOWER_PASSWORD, or a new one that "
        "is printed.",
    )
    environ = os.environ
    parser.add_argument("workers", nargs="?", type=count, default=2, metavar="N", help="number of workers (default 2)")
    parser.add_argument(
        "--api-port", type=port, default=environ.get("API_PORT", "8000"), metavar="PORT",
        help="port of the API; default: API_PORT, or 8000",
    )  # fmt: skip
    parser.add_argument(
        "--flower-port", type=port, default=environ.get("FLOWER_PORT", "5555"), metavar="PORT",
        help="port of Flower; default: FLOWER_PORT, or 5555",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".distributed", metavar="FOLDER",
        help="folder for logs and Redis data, relative to the repository (default: .distributed)",
    )  # fmt: skip
    return parser.parse_args()


def _lock(folder: Path) -> Any:
    """Lock the folder while the returned file is open. Two Redis servers in one folder would damage its data."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # it holds logs, and a queue that contains cookies
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        raise StartError(f"another start-distributed uses {folder}. Stop it, or choose another --folder") from exc
    return file


def _run(options: argparse.Namespace, signals: Signals) -> int:
    """Run until a signal arrives, and return the exit code."""
    options.folder = options.folder.absolute()
    _check_free(options.api_port, "choose another for the API with --api-port or API_PORT")
    _check_free(options.flower_port, "choose another for Flower with --flower-port or FLOWER_PORT")
    with _lock(options.folder):
        fleet = Fleet(options, signals)
        try:
            fleet.start()
            fleet.print_addresses()
            fleet.supervise()
        except Stopped:
            report("")
        except StartError as exc:
            return _print_error(exc)
        finally:
            fleet.stop()
    return 0


def _print_error(error: Exception) -> int:
    print(f"\nstart-distributed: {error}", file=sys.stderr, flush=True)
    return 1


def main() -> int:
    os.umask(0o077)  # only this user can read the files
    signals = Signals()
    try:
        return _run(_parse(), signals)
    except (StartError, ShoalError) as exc:
        return _print_error(exc)


if __name__ == "__main__":
    sys.exit(main())
