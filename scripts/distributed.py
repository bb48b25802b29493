"""What `scripts/start-distributed` runs: starts the parts of distributed crawling, looks after them, stops them."""

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
from parts import Part, Signals, say

from shoal.config import find_config_file, load_config, mask
from shoal.errors import ShoalError
from shoal.tasks.settings import celery_settings

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
FLOWER_USER = "shoal"
UP_WITHIN = 60.0  # seconds that a part has to answer for the first time
LEAVE_WITHIN = 30.0  # and to leave: workers finish the pages that they have begun
LEAVE_AT_ONCE = 1.0  # the same after a second signal


class StartError(Exception):
    """Why it can't go on, for the user."""


class Stopped(Exception):
    """A signal came before all parts were up."""


class Fleet:
    """All parts. The broker's Redis is one of them only if nobody else has started it."""

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
            # On the same server, also where that is not the default one.
            self._environment["CELERY_RESULT_BACKEND"] = urlsplit(self._broker)._replace(path="/1").geturl()
        self._parts: list[Part] = []
        self._redis: Part | None = None
        self._trouble = ""
        """What the last look at a part has found."""

    def start(self) -> None:
        """Until all of them answer."""
        options = self._options
        if _is_redis(self._broker):
            self._need_redis()
        workers = [self._start_worker(number) for number in range(1, options.workers + 1)]
        api = self._start("api", [BIN / "shoal", "serve", "--host", HOST, "--port", str(options.api_port)])
        self._wait(api, lambda: _answers(f"{self.api}/health"))
        for worker in workers:
            self._wait(worker, partial(self._hears, worker))
        flower = self._start(  # it asks the workers what they are when it comes up, so they come first
            "flower",
            [BIN / "celery", "-A", "shoal.celery", "flower", f"--address={HOST}", f"--port={options.flower_port}"],
            # Without a password every web page in a browser of this machine could stop workers through its API. By the
            # environment: command lines can be read by all users.
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
            say(f"redis: the one at {where} is used")
            return
        url = urlsplit(self._broker)
        if url.scheme != "redis" or url.hostname not in ("localhost", "127.0.0.1") or url.password:
            raise StartError(f"no Redis answers at {where} (CELERY_BROKER_URL), and one like that is not started here")
        port = url.port or 6379
        _check_free(port, "what listens there is not a Redis that answers; set CELERY_BROKER_URL to another place")
        _need_redis_server()
        data = self._options.folder / "redis"
        data.mkdir(exist_ok=True)
        words = {"bind": HOST, "port": str(port), "dir": str(data), "appendonly": "yes", "save": "", "daemonize": "no"}
        command = ["redis-server", *(word for name, value in words.items() for word in (f"--{name}", value))]
        self._redis = self._start("redis", command)
        self._wait(self._redis, lambda: _redis_answers(self._broker))

    def _hears(self, worker: Part) -> bool:
        name = f"{worker.name}@{socket.gethostname()}"
        try:
            with Celery(broker=self._broker) as client:
                return bool(client.control.ping(destination=[name], timeout=1.0))
        except OperationalError as exc:
            self._trouble = f"the broker does not answer: {exc}"
            return False

    def _is_available(self) -> bool:
        """What a caller is told, from the API through to the workers."""
        answer = _answers(f"{self.api}/api/crawl/distributed/status", token=_token())
        if answer is None:
            return False
        status = json.loads(answer)
        self._trouble = status["message"]
        return bool(status["distributed_available"])

    def _wait(self, part: Part, holds: Callable[[], object], what: str = "") -> None:
        what = what or part.name
        self._trouble = ""
        say(f"{what}: starting", end=" ... ")
        until = time.monotonic() + UP_WITHIN
        while not holds():
            ended = next((each for each in self._parts if each.has_ended), None)
            if ended is not None:
                raise StartError(f"{ended.name} {ended.end}\n{ended.tail()}")
            if time.monotonic() > until:
                raise StartError(f"{what} was not up in {UP_WITHIN:g} seconds\n{self._trouble}\n{part.tail()}")
            if self._signals.stop.wait(0.2):
                raise Stopped
        say(f"ready (process {part.process.pid})")

    def tell(self) -> None:
        token = ' -H "Authorization: Bearer $SHOAL_SERVE__TOKEN"' if _token() else ""
        password = self._flower_password if self._flower_password_is_new else "as SHOAL_FLOWER_PASSWORD says"
        say(f"""
API     {self.api} (described at {self.api}/docs)
Flower  http://{HOST}:{self._options.flower_port} (user {FLOWER_USER}, password {password})
logs    {self._logs}

curl -X POST {self.api}/api/crawl/batch{token} -H "Content-Type: application/json" \\
  -d '{{"urls": ["https://example.com"], "distributed": true}}'

Ctrl-C stops all of it.""")

    def look_after(self) -> None:
        """Until a signal asks to stop."""
        while not self._signals.stop.wait(0.2):
            for part in self._parts:
                part.look()

    def stop(self) -> None:
        """Redis last: the others still have to give back what they hold."""
        others = [part for part in self._parts if part is not self._redis]
        if any(not part.has_ended for part in others):
            say(f"stopping: pages in work are finished, for {LEAVE_WITHIN:g} s at most; Ctrl-C ends it at once")
        self._leave(others)
        if self._redis is not None:
            self._leave([self._redis])
        say("stopped")

    def _leave(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.terminate()
        asked = time.monotonic()
        while not all(part.has_ended for part in parts):
            if time.monotonic() - asked > (LEAVE_AT_ONCE if self._signals.hurry.is_set() else LEAVE_WITHIN):
                late = ", ".join(part.name for part in parts if not part.has_ended)
                say(f"killed, as it did not leave in time: {late}")
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
        raise StartError(f"the Redis at {mask(url)} (CELERY_BROKER_URL) does not let us in: {exc}") from exc
    except (redis.ConnectionError, redis.TimeoutError):
        return False
    return True


def _need_redis_server() -> None:
    if shutil.which("redis-server") is not None:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise StartError("no Redis answers, and there is no redis-server here: install it, or set CELERY_BROKER_URL")
    installing = ["bash", "-c", "set -e; . scripts/lib.sh; need_command redis-server redis-server; install_missing"]
    if subprocess.run(installing, cwd=ROOT, check=False).returncode:
        raise StartError("redis-server could not be installed")


def _token() -> str | None:
    """The API's, if it has one."""
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
    parser.add_argument("workers", nargs="?", type=count, default=2, metavar="N", help="how many workers (default 2)")
    parser.add_argument(
        "--api-port", type=port, default=environ.get("API_PORT", "8000"), metavar="PORT", help="or API_PORT (8000)"
    )
    parser.add_argument(
        "--flower-port", type=port, default=environ.get("FLOWER_PORT", "5555"), metavar="PORT",
        help="or FLOWER_PORT (5555)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".distributed", metavar="FOLDER",
        help="for logs and the data of Redis (default: .distributed; a relative one is in the repository)",
    )  # fmt: skip
    return parser.parse_args()


def _lock(folder: Path) -> Any:
    """Two Redis servers on one folder would spoil its data. Held as long as the file is open."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # logs, and the queue with the cookies of requests
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        raise StartError(f"another start-distributed uses {folder}; stop it, or choose another --folder") from exc
    return file


def _run(options: argparse.Namespace, signals: Signals) -> int:
    """The exit code."""
    options.folder = options.folder.absolute()
    _check_free(options.api_port, "choose another for the API with --api-port or API_PORT")
    _check_free(options.flower_port, "choose another for Flower with --flower-port or FLOWER_PORT")
    with _lock(options.folder):
        fleet = Fleet(options, signals)
        try:
            fleet.start()
            fleet.tell()
            fleet.look_after()
        except Stopped:
            say("")
        except StartError as exc:
            return _complain(exc)
        finally:
            fleet.stop()
    return 0


def _complain(error: Exception) -> int:
    print(f"\nstart-distributed: {error}", file=sys.stderr, flush=True)
    return 1


def main() -> int:
    os.umask(0o077)  # what it and its parts write is for this user alone
    signals = Signals()
    try:
        return _run(_parse(), signals)
    except (StartError, ShoalError) as exc:
        return _complain(exc)


if __name__ == "__main__":
    sys.exit(main())
