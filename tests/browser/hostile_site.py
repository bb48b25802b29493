"""Pages that try to hang, flood or escape a browser, and a trap that records who reaches a private address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

TRAP_HOST = "127.0.0.2"  # not allowed by the guard of the tests

FOREVER = "while (true) {}"

SCRIPTS: dict[str, str] = {
    "endless loop": FOREVER,
    "endless loop later": f"setTimeout(() => {{ {FOREVER} }}, 50)",
    "endless promises": "const go = () => Promise.resolve().then(go); go();",
    "endless timers": "const go = () => { for (let i = 0; i < 100; i++) setTimeout(go, 0); }; go();",
    "arrays of 4 GB": "const all = []; for (let i = 0; i < 4096; i++) all.push(new Uint8Array(1 << 20).fill(1));",
    "strings without end": "let s = 'x'; while (true) s += s;",
    "a deep tree": "let e = document.body; for (let i = 0; i < 200000; i++) { const d = document.createElement('div'); "
    "e.appendChild(d); e = d; }",
    "a million elements": "document.body.innerHTML = '<i>x</i>'.repeat(3e6);",
    "alerts": "for (let i = 0; i < 50; i++) alert(i); prompt('x'); confirm('y');",
    "beforeunload": "window.addEventListener('beforeunload', e => { e.preventDefault(); e.returnValue = 'stay'; });",
    "beforeunload loop": f"window.addEventListener('beforeunload', () => {{ {FOREVER} }});",
    "print": "print();",
    "windows": "for (let i = 0; i < 50; i++) window.open('/leaf?' + i);",
    "windows to the trap": "window.open('TRAP/window'); const a = document.createElement('a'); a.href = 'TRAP/blank'; "
    "a.target = '_blank'; document.body.appendChild(a); a.click();",
    "fetch to the trap": "fetch('TRAP/fetch', {mode: 'no-cors'}); navigator.sendBeacon('TRAP/beacon', 'x');",
    "frame to the trap": "document.body.innerHTML = '<iframe src=TRAP/frame></iframe><object data=TRAP/object></object>"
    "<embed src=TRAP/embed>';",
    "WebSocket to the trap": "new WebSocket('TRAP/socket'.replace('http', 'ws'));",
    "worker to the trap": "new Worker(URL.createObjectURL(new Blob([`fetch('TRAP/worker', {mode: 'no-cors'})`])));",
    "event source to the trap": "new EventSource('TRAP/events');",
    "preload of the trap": "document.head.innerHTML += '<link rel=preload as=script href=TRAP/preload>"
    "<link rel=preconnect href=TRAP><link rel=dns-prefetch href=TRAP><link rel=stylesheet href=TRAP/style>';",
    "form to the trap": "document.body.innerHTML = '<form action=TRAP/form method=post></form>'; "
    "document.forms[0].submit();",
    "script goes to the trap": "location = 'TRAP/location';",
    "WebRTC": "const c = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.2:TRAPPORT'}]}); "
    "c.createDataChannel('x'); c.createOffer().then(o => c.setLocalDescription(o));",
    "service worker": "navigator.serviceWorker.register('/worker.js').catch(() => {});",
    "history": "for (let i = 0; i < 5000; i++) history.pushState({}, '', '/h' + i);",
    "location changes": "setInterval(() => { location.hash = Math.random(); }, 1);",
    "requests without end": "setInterval(() => { for (let i = 0; i < 50; i++) fetch('/leaf?' + Math.random()); }, 1);",
    "console": "for (let i = 0; i < 3000; i++) console.log('x'.repeat(1000));",
    "download": "const a = document.createElement('a'); a.href = '/file'; a.download = 'x'; "
    "document.body.appendChild(a); a.click();",
    "permissions": "navigator.geolocation.getCurrentPosition(() => {}); Notification.requestPermission();",
    "storage": "for (let i = 0; i < 1000; i++) { try { localStorage.setItem('k' + i, 'x'.repeat(1e6)); } catch {} }",
    "crash URLs": "document.body.innerHTML = '<iframe src=chrome://crash></iframe>'; window.open('chrome://kill'); "
    "location = 'chrome://crash';",
    "debugger": "debugger; document.title = 'after';",
}
"""Scripts of pages. TRAP is the URL of the trap."""


def page(script: str) -> str:
    return f"<!doctype html><html><head></head><body><h1>hostile</h1><script>{script}</script></body></html>"


@asynccontextmanager
async def serve() -> AsyncIterator[tuple[str, str, list[str]]]:
    """The URL of the site, the URL of the trap, and what the trap recorded."""
    trapped: list[str] = []

    async def trap(request: web.Request) -> web.Response:
        trapped.append(request.path)
        return web.Response(text="secret", headers={"Access-Control-Allow-Origin": "*"})

    trap_app = web.Application()
    trap_app.router.add_route("*", "/{path:.*}", trap)
    trap_url = await _start(trap_app, TRAP_HOST)
    datagrams, _ = await asyncio.get_running_loop().create_datagram_endpoint(  # WebRTC sends datagrams to the same port
        lambda: _DatagramTrap(trapped), (TRAP_HOST, int(trap_url.rpartition(":")[2]))
    )

    async def hostile(request: web.Request) -> web.Response:
        script = SCRIPTS[request.query["name"]]
        script = script.replace("TRAPPORT", trap_url.rpartition(":")[2]).replace("TRAP", trap_url)
        return web.Response(text=page(script), content_type="text/html")

    async def leaf(request: web.Request) -> web.Response:
        return web.Response(text="<html><body><h1>leaf</h1></body></html>", content_type="text/html")

    async def never(request: web.Request) -> web.StreamResponse:
        """A page whose last byte never comes."""
        answer = web.StreamResponse(headers={"Content-Type": "text/html"})
        await answer.prepare(request)
        await answer.write(b"<html><body><h1>never</h1>" + b" " * 2048)
        await asyncio.sleep(120)
        return answer

    async def no_load(request: web.Request) -> web.Response:
        """A page with a script that never comes."""
        body = "<html><body><h1>no load</h1><script async src=/hangs></script></body></html>"
        return web.Response(text=body, content_type="text/html")

    async def hangs(request: web.Request) -> web.Response:
        await asyncio.sleep(120)
        return web.Response()

    async def to_trap(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"{trap_url}/redirect")

    async def script_redirected(request: web.Request) -> web.Response:
        body = "<html><body><h1>x</h1><script src=/to-trap></script></body></html>"
        return web.Response(text=body, content_type="text/html")

    async def file(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 100, headers={"Content-Disposition": 'attachment; filename="x.bin"'})

    async def huge(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/html"})
        await answer.prepare(request)
        for _ in range(4000):
            await answer.write(b"<p>" + b"x" * 65536)
        return answer

    app = web.Application()
    app.add_routes(
        [
            web.get("/hostile", hostile), web.get("/leaf", leaf), web.get("/never", never),
            web.get("/no-load", no_load), web.get("/hangs", hangs), web.get("/to-trap", to_trap),
            web.get("/script-redirected", script_redirected),
            web.get("/file", file), web.get("/huge", huge),
        ]
    )  # fmt: skip
    yield await _start(app, "127.0.0.1"), trap_url, trapped
    datagrams.close()
    await asyncio.gather(*(runner.cleanup() for runner in (app["runner"], trap_app["runner"])))


class _DatagramTrap(asyncio.DatagramProtocol):
    def __init__(self, trapped: list[str]) -> None:
        self._trapped = trapped

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._trapped.append("a datagram")


async def _start(app: web.Application, host: str) -> str:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    app._state["runner"] = runner
    return "http://{}:{}".format(*runner.addresses[0][:2])
