"""A crawl with `shoal run --render` in a network namespace with a public and a private network, and what it reached.

Run it as a program inside the namespace (`tests.acceptance.rebinding.said_apart`). Addresses of the public network
exist only there. It prints what each page could read, and which private addresses were contacted meanwhile, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from tests.acceptance.rebinding import PUBLIC, NameServer
from tests.support.forking import SHOAL
from tests.support.servers import answer, read_head

OTHER_PUBLIC = "9.9.9.9"
PRIVATE, OTHER_PRIVATE = "127.0.0.1", "127.0.0.2"
MIXED = "http://mixed.test:81/"
CHANGING = "http://changing.test:82/"
MOVING = "http://moving.test:84/"
WAYS = "http://ways.test/"
INTRANET = f"http://{PRIVATE}:83/"
PAGES = (MIXED, CHANGING, MOVING, WAYS, INTRANET)
SCRIPTS = {
    # Each stops being at its first address as soon as its page was served.
    MIXED: "await read('rebound', '/secret'); await read('frame', frame('/secret'));",
    CHANGING: "await read('rebound', '/secret'); await read('frame', frame('/secret'));",
    MOVING: "await read('moved', '/data');",
    WAYS: f"""
        await read('public', 'http://{OTHER_PUBLIC}/data');
        await read('address', 'http://{PRIVATE}/secret');
        await read('IPv6', 'http://[::1]/secret');
        await read('mapped', 'http://[::ffff:7f00:1]/secret');
        await read('localhost', 'http://localhost/secret');
        await read('name', 'http://private.test/secret');
        await read('tunnel', 'https://private.test:443/secret');
        await read('redirect', '/redirect?to=http://{PRIVATE}/secret');
        await read('worker', worker('http://{PRIVATE}/secret'));
        await read('socket', socket('ws://{PRIVATE}/secret'));
        await read('secure socket', socket('wss://{PRIVATE}:443/secret'));
        await read('frame', frame('http://{PRIVATE}/secret'));
        await read('redirected frame', frame('/redirect?to=http://{PRIVATE}/secret'));
        add('link', {{rel: 'preconnect', href: 'http://{PRIVATE}/'}});
        add('link', {{rel: 'prefetch', href: 'http://{PRIVATE}/secret'}});
        add('link', {{rel: 'stylesheet', href: 'http://{PRIVATE}/secret'}});
        add('script', {{src: 'http://{PRIVATE}/secret'}});
        navigator.sendBeacon('http://{PRIVATE}/secret', 'x');
    """,
    INTRANET: f"""
        await read('own', '/data');
        await read('private', 'http://{OTHER_PRIVATE}:83/data');
        await read('public', 'http://{OTHER_PUBLIC}/data');
        await read('fickle', 'http://fickle.test:83/first');
        await read('fickle again', 'http://fickle.test:83/second');
    """,
}
PAGE = """<!doctype html><body><script>
const found = {};
const read = async (name, what) => {
  const late = new Promise(done => setTimeout(() => done('late'), 5000));
  const reading = typeof what == 'string' ? fetch(what).then(answer => answer.ok ? answer.text() : 'refused') : what;
  found[name] = await Promise.race([reading.catch(() => 'refused'), late]);
};
const add = (name, properties) => document.head.append(Object.assign(document.createElement(name), properties));
const frame = url => new Promise(done => {
  const made = document.createElement('iframe');
  made.onload = () => { try { done(made.contentDocument.body.textContent); } catch { done('unreadable'); } };
  made.src = url;
  document.body.append(made);
});
const worker = url => new Promise(done => {
  const code = `fetch('${url}').then(a => a.text()).then(postMessage, () => postMessage('refused'))`;
  new Worker(URL.createObjectURL(new Blob([code]))).onmessage = event => done(event.data);
});
const socket = url => new Promise((done, fail) => {
  const made = new WebSocket(url);
  made.onopen = () => done('open');
  made.onerror = fail;
});
(async () => { SCRIPT
  const end = document.createElement('pre');
  end.id = 'end';
  end.textContent = JSON.stringify(found);
  document.body.append(end);
})();
</script>"""
SPIDER = f"""
from shoal import Render, Request, Spider

class Pages(Spider):
    name = "pages"
    settings = {{
        "browser.sandbox": False, "browser.page_timeout": 60, "browser.max_pages": 5, "robots.obey": False,
        "http.dns_cache_seconds": 0, "http.connect_timeout": 3, "retry.max_attempts": 1,
    }}

    def start(self):
        return [Request(url, render=Render(wait_for="#end")) for url in {PAGES!r}]

    def parse(self, response):
        yield {{"url": response.url, "found": response.css("#end::text").get()}}
"""


class Names(NameServer):
    """Asks a function for the addresses of a name, for each look-up."""

    def __init__(self, addresses: Callable[[str], list[str]]) -> None:
        super().__init__([])
        self._addresses = addresses

    def datagram_received(self, data: bytes, addr: Any) -> None:
        labels, at = [], 12
        while size := data[at]:
            labels.append(data[at + 1 : at + 1 + size].decode())
            at += 1 + size
        self._answers = {kind: iter([self._addresses(".".join(labels))]) for kind in (1, 28)}
        super().datagram_received(data, addr)


class Networks:
    """Serves all addresses. Pages are at ``/``; other paths return the address that served them."""

    def __init__(self) -> None:
        self.contacted: list[str] = []
        """Private addresses with their ports, for each connection; and with the path, for each request."""
        self._served: set[str] = set()
        self._servers: dict[str, asyncio.Server] = {}

    async def start(self) -> None:
        for port in (80, 81, 82, 83, 84, 443):
            for address in (PUBLIC, OTHER_PUBLIC, PRIVATE, OTHER_PRIVATE, "::1"):
                self._servers[f"{address} {port}"] = await asyncio.start_server(self._converse, address, port)
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: Names(self._addresses), (PRIVATE, 53))

    def _addresses(self, name: str) -> list[str]:
        """The zone. Some names change when their page was served."""
        later = name.split(".")[0] in self._served
        return {
            "mixed.test": [PUBLIC, PRIVATE],
            "changing.test": [PRIVATE] if later else [PUBLIC],
            "moving.test": [OTHER_PUBLIC] if later else [PUBLIC],
            "ways.test": [PUBLIC],
            "private.test": [PRIVATE],
            "localhost": [PRIVATE],
            "fickle.test": [OTHER_PRIVATE] if later else [PUBLIC],
        }.get(name, [])

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("sockname")[:2]
        is_private = address not in (PUBLIC, OTHER_PUBLIC)
        if is_private:
            self.contacted.append(f"{address} {port}")
        try:
            request = await read_head(reader)
        except (asyncio.IncompleteReadError, ValueError, ConnectionError):  # TLS, or only a connection
            writer.close()
            return
        if is_private:
            self.contacted.append(f"{address} {port} {request.target}")
        writer.write(self._answer(address, request.target, request.header("host")))
        writer.close()

    def _answer(self, address: str, target: str, host: str) -> bytes:
        open_to_all = ("Access-Control-Allow-Origin", "*"), ("Connection", "close")
        self._served.add(host.split(".")[0])
        if target == "/" and f"http://{host}/" in SCRIPTS:
            if host == urlsplit(MIXED).netloc:
                self._servers[f"{PUBLIC} 81"].close()
            return answer(PAGE.replace("SCRIPT", SCRIPTS[f"http://{host}/"]), *open_to_all)
        if target.startswith("/redirect?to="):
            return answer("", ("Location", target.partition("=")[2]), *open_to_all, status=302)
        return answer(address, *open_to_all)


async def main() -> None:
    networks = Networks()
    await networks.start()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "spider.py").write_text(SPIDER)
        words = [*SHOAL, "run", "spider.py", "--render", "-o", "-"]
        process = await asyncio.create_subprocess_exec(
            *words, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, log = await process.communicate()
    items = [json.loads(line) for line in said.splitlines()]
    found = {item["url"]: json.loads(item["found"]) for item in items}
    print(json.dumps({"found": found, "contacted": networks.contacted, "log": log.decode()}))


if __name__ == "__main__":
    subprocess.run(["ip", "address", "add", f"{OTHER_PUBLIC}/32", "dev", "lo"], check=True)
    uvloop.run(main())
