"""The server of sites c and d: nginx with TLS on the addresses of many hosts. Site d waits before it answers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from crawl.certificates import certify
from crawl.content import Content
from crawl.server import Serving, configured, free_port, running, wait_for
from crawl.web import HEADERS, PORT

SHARED = """\
    log_not_found off;
    ssl_certificate_key {certificates}/key.pem;
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_session_cache shared:tls:10m;
    upstream waiting {{ server 127.0.0.1:{waiting}; keepalive 512; }}
"""
LINE = "$status $msec $request_time $connection_requests https://$server_addr:$server_port$request_uri"
SERVER = """\
    server {{
        listen {host}:{port} ssl backlog=512;
        ssl_certificate {certificates}/{host}.pem;
        root {root}/{host};
        include {work}/{places};
    }}"""

# `{inside}` is empty, or marks locations that only the waiting server leads to.
PLACES = """\
location = {inside}/robots.txt {{ {internal} }}
location {inside}/ {{ {internal} {files} }}
location ~ ^{inside}/old(/.*)$ {{ {internal} return 301 $1$is_args$args; }}
location ~ ^{inside}/away/([0-9.]+)(/.*)$ {{ {internal} return 302 https://$1:{port}$2$is_args$args; }}
location ~ ^{inside}/gone- {{ {internal} return 410; }}
location = {inside}/shop/item {{ {internal} {files} try_files /shop/item-$arg_id.html =404; }}
"""
CHARSET = "location {inside}/{folder}/ {{ {internal} {files} charset {encoding}; }}\n"
WAIT = """\
location = /robots.txt { }
location / { proxy_pass http://waiting; proxy_http_version 1.1; proxy_set_header Connection ""; }
"""
INSIDE = "/-files"


def places(slow: bool) -> str:
    """The locations of each host."""
    inside = INSIDE if slow else ""
    words = {
        "inside": inside,
        "internal": "internal;" if slow else "",
        "files": f"rewrite ^{inside}(/.*)$ $1 break;" if slow else "",
        "port": PORT,
    }
    rows = [CHARSET.format(folder=folder, encoding=encoding, **words) for folder, encoding in HEADERS.items()]
    return (WAIT if slow else "") + PLACES.format(**words) + "".join(rows)


@contextmanager
def serve_web(
    nginx: str, content: Content, work: Path, pin: list[str], *, log: bool, slow: bool, delay: float
) -> Iterator[Serving]:
    """Serve the hosts until the block ends. `delay` is what the crawler should keep between requests to a host."""
    work.mkdir(parents=True, exist_ok=True)
    check_port(content.hosts[0])
    certificates = certify(content.hosts, work.parent / f"certificates-{len(content.hosts)}").parent
    waiting = free_port()
    (work / "places.conf").write_text(places(slow))
    words = {"work": work, "certificates": certificates, "port": PORT, "root": content.root, "places": "places.conf"}
    hosts = [SERVER.format(host=host, **words) for host in content.hosts]
    shared = SHARED.format(certificates=certificates, waiting=waiting)
    config = configured(work, shared + "\n".join(hosts), LINE, log=log, connections=8192)
    with ExitStack() as stack:
        if slow:
            stack.enter_context(waiting_server(waiting, pin))
        url = f"https://{content.hosts[0]}:{PORT}/"
        serving = stack.enter_context(running(nginx, config, work, pin, url))
        yield serving
    if log:
        read_log(work / "access.log", serving, content, delay)


@contextmanager
def waiting_server(port: int, pin: list[str]) -> Iterator[None]:
    program = Path(__file__).with_name("waiting_server.py")
    process = subprocess.Popen([*pin, sys.executable, str(program), str(port), INSIDE])
    try:
        wait_for(f"http://127.0.0.1:{port}/", process)
        yield
    finally:
        process.terminate()
        process.wait()


def check_port(host: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were just closed do not matter
        try:
            probe.bind((host, PORT))
        except OSError as exc:
            raise SystemExit(f"sites c and d need port {PORT}, but {host}:{PORT} is not free: {exc.strerror}") from None


def authority_of(content: Content, work: Path) -> Path:
    return certify(content.hosts, work / f"certificates-{len(content.hosts)}")


def read_log(access: Path, serving: Serving, content: Content, delay: float) -> None:
    """Count requests and statuses by page, and the requests that came too soon after the last one of their host."""
    starts: dict[str, list[float]] = {}
    with access.open() as lines:
        for line in lines:
            status, ended, took, nth, url = line.rstrip("\n").split(" ", 4)
            key = content.key_of(url)
            serving.connections += nth == "1"
            serving.statuses[int(status)] += 1
            if key.endswith("/robots.txt"):
                serving.robots += 1
                continue
            (serving.pages if status == "200" else serving.refused)[key] += 1
            starts.setdefault(key.partition("/")[0], []).append(float(ended) - float(took))
    for times in starts.values():
        times.sort()
        gaps = (after - before for before, after in zip(times, times[1:], strict=False))
        serving.hurried += sum(gap < 0.95 * delay for gap in gaps)
