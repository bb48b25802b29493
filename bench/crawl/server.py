"""nginx with one worker on one core. Each run has its own server, so the log has only that run."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

CONFIG = """\
{user}
worker_processes 1;
worker_rlimit_nofile 20000;
daemon off;
pid {work}/nginx.pid;
error_log {work}/error.log warn;
events {{ worker_connections {connections}; }}
http {{
    default_type text/html;
    types {{ text/html html; text/plain txt; }}
    sendfile on;
    tcp_nopush on;
    open_file_cache max=30000 inactive=10m;
    open_file_cache_valid 10m;
    keepalive_timeout 75s;
    keepalive_requests 10000000;
    client_body_temp_path {work}/tmp-body;
    proxy_temp_path {work}/tmp-proxy;
    fastcgi_temp_path {work}/tmp-fastcgi;
    uwsgi_temp_path {work}/tmp-uwsgi;
    scgi_temp_path {work}/tmp-scgi;
    log_format used '{line}';
    access_log {log};
{hosts}
}}
"""
HOST = """\
    charset utf-8;
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        root {root};
    }}"""


@dataclass
class Serving:
    """The server of a run. The URL and the process are set at first, the other fields when the server has stopped."""

    url: str
    pid: int
    statuses: Counter[int] = field(default_factory=Counter)
    pages: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were answered with a redirect or an error."""
    hurried: int = 0
    """Requests to a host that came too soon after the one before, if there is a delay."""
    connections: int = 0
    """Only of sites c and d, whose connections cost a TLS handshake."""
    robots: int = 0
    cpu_seconds: float = 0.0


def install() -> str:
    """Return the path of nginx. Install it with apt-get if it is missing."""
    places = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    if found := shutil.which("nginx", path=places):
        return found
    print("nginx is missing: apt-get install nginx", flush=True)
    subprocess.run(["apt-get", "update", "-q"], check=True, stdout=subprocess.DEVNULL)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "nginx"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    if found := shutil.which("nginx", path=places):
        return found
    raise SystemExit("nginx cannot be installed")


def version(nginx: str) -> str:
    return subprocess.run([nginx, "-v"], capture_output=True, text=True, check=True).stderr.rpartition("/")[2].strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(nginx: str, root: Path, work: Path, pin: list[str], *, log: bool) -> Iterator[Serving]:
    """Serve `root` until the block ends. Then count the requests and statuses of each page from the log."""
    work.mkdir(parents=True, exist_ok=True)
    port = free_port()
    access = work / "access.log"
    config = configured(work, HOST.format(port=port, root=root), "$status $request_uri", log=log)
    with running(nginx, config, work, pin, f"http://127.0.0.1:{port}/") as serving:
        yield serving
    if log:
        read_log(access, serving)


def configured(work: Path, hosts: str, line: str, *, log: bool, connections: int = 1024) -> str:
    """The configuration of nginx for these hosts. `line` is the format of the log."""
    return CONFIG.format(
        user="user root;" if os.geteuid() == 0 else "",  # the files may lie where no other account can read
        work=work,
        connections=connections,
        line=line,
        log=f"{work}/access.log used buffer=64k" if log else "off",
        hosts=hosts,
    )


@contextmanager
def running(nginx: str, config: str, work: Path, pin: list[str], url: str) -> Iterator[Serving]:
    """Run nginx with this configuration until the block ends. Its old log is removed first."""
    (work / "access.log").unlink(missing_ok=True)
    (work / "nginx.conf").write_text(config)
    command = [*pin, nginx, "-e", str(work / "error.log"), "-p", str(work), "-c", str(work / "nginx.conf")]
    process = subprocess.Popen(command)
    serving = Serving(url, process.pid)
    try:
        wait_for(url, process)
        yield serving
    finally:
        process.terminate()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it again
        serving.cpu_seconds = usage.ru_utime + usage.ru_stime


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    parts = urlsplit(url)
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((parts.hostname, parts.port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("nginx did not start: see error.log beside its configuration") from None
            time.sleep(0.02)


def read_log(access: Path, serving: Serving) -> None:
    with access.open() as lines:
        for line in lines:
            status, _, path = line.rstrip("\n").partition(" ")
            serving.statuses[int(status)] += 1
            if path == "/robots.txt":
                serving.robots += 1
            elif status == "200":
                serving.pages[path] += 1
            else:
                serving.refused[path] += 1
