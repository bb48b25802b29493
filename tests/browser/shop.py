"""A shop built by JavaScript: lists loaded by fetch, infinite scroll, client-side routing. Run as a script.

It records the documents and the data that were asked for. The pages have no content without scripts.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tests.support import forking

PER_PAGE = 10

SHELL = """<!doctype html><html><head><title>Shop</title><link rel="icon" href="data:,"></head>
<body><div id="app"></div><script src="/app.js"></script></body></html>"""

APP = """
const app = document.getElementById("app");
async function show() {
  const path = location.pathname;
  if (path.startsWith("/product/")) {
    const product = await (await fetch("/api/product/" + path.split("/")[2])).json();
    app.innerHTML = `<h1>${product.name}</h1><p class="price">${product.price}</p><a href="/">home</a>`;
  } else if (path.startsWith("/scroll")) {
    let next = 0, busy = false;
    const more = async () => {
      if (busy || next === null) return;
      busy = true;
      const list = await (await fetch("/api/scroll?from=" + next)).json();
      for (const id of list.ids) {
        const row = document.createElement("div");
        row.style.height = "300px"; row.className = "row"; row.textContent = "row " + id;
        app.appendChild(row);
      }
      next = list.next; busy = false;
    };
    window.addEventListener("scroll", more);
    await more();
  } else {
    const page = new URLSearchParams(location.search).get("page") || "0";
    const list = await (await fetch("/api/list?page=" + page)).json();
    app.innerHTML = list.ids.map(id => `<a class="product" href="/product/${id}">product ${id}</a>`).join(" ")
      + (list.next !== null ? ` <a class="next" href="/?page=${list.next}">more</a>` : "");
  }
}
document.addEventListener("click", event => {
  const link = event.target.closest("a[data-route]");
  if (link) { event.preventDefault(); history.pushState({}, "", link.href); show(); }
});
show();
"""


class Shop:
    """The tests' view of the shop."""

    def __init__(self, url: str, products: int, *, mixed: bool = False) -> None:
        self.url = url
        self.products = products
        self._mixed = mixed

    def asked(self) -> list[str]:
        """The paths that were asked for, in order."""
        with urllib.request.urlopen(f"{self.url}/-/log") as found:
            paths: list[str] = json.loads(found.read())
            return paths

    def expected(self) -> set[str]:
        paths = (place(number) if self._mixed else f"/product/{number}" for number in range(self.products))
        return {self.url + path for path in paths}


@contextmanager
def serve(products: int, wait: float = 0.0, *, mixed: bool = False) -> Iterator[Shop]:
    """Run the shop in a process of its own. ``mixed``: only every tenth product needs scripts."""
    command = [sys.executable, "-m", "tests.browser.shop", str(products), str(wait), *(["mixed"] if mixed else [])]
    with forking.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Shop(process.stdout.readline().strip(), products, mixed=mixed)
        finally:
            process.kill()


def static_page(path: str, page: int, products: int) -> str:
    """A page of the mixed shop that needs no scripts."""
    if path == "/":
        ids = range(page * PER_PAGE, min((page + 1) * PER_PAGE, products))
        more = f'<a class="next" href="/?page={page + 1}">more</a>' if (page + 1) * PER_PAGE < products else ""
        body = "".join(f'<a class="product" href="{place(i)}">product {i}</a> ' for i in ids) + more
    else:
        number = path.rpartition("/")[2]
        words = "A fine thing that lasts for years, made of good wood by people who know their craft. " * 5
        body = f'<h1>Product {number}</h1><p class="price">{number}.99</p><p>{words}</p><a href="/">home</a>'
    return f"<!doctype html><html><head><title>Shop</title></head><body>{body}</body></html>"


def place(number: int) -> str:
    """Where a product of the mixed shop is: those that need scripts have a folder of their own."""
    return f"/product/{number}" if number % 10 == 0 else f"/plain/{number}"


def make_app(products: int, wait: float, *, mixed: bool = False) -> web.Application:
    log: list[str] = []

    @web.middleware
    async def record(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
        if not request.path.startswith("/-/"):
            log.append(request.path_qs)
            await asyncio.sleep(wait)
        return await handler(request)  # type: ignore[no-any-return]

    async def shell(request: web.Request) -> web.Response:
        if mixed and not request.path.startswith("/product/"):
            page = int(request.query.get("page", "0"))
            return web.Response(text=static_page(request.path, page, products), content_type="text/html")
        return web.Response(text=SHELL, content_type="text/html")

    async def app_js(request: web.Request) -> web.Response:
        headers = {"Cache-Control": "max-age=3600"}
        return web.Response(text=APP, content_type="text/javascript", headers=headers)

    async def listing(request: web.Request) -> web.Response:
        page = int(request.query["page"])
        ids = list(range(page * PER_PAGE, min((page + 1) * PER_PAGE, products)))
        return web.json_response({"ids": ids, "next": page + 1 if (page + 1) * PER_PAGE < products else None})

    async def product(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.json_response({"name": f"Product {number}", "price": f"{number}.99"})

    async def scroll(request: web.Request) -> web.Response:
        begin = int(request.query["from"])
        end = min(begin + PER_PAGE, products)
        return web.json_response({"ids": list(range(begin, end)), "next": end if end < products else None})

    async def show_log(request: web.Request) -> web.Response:
        return web.json_response(log)

    async def robots(request: web.Request) -> web.Response:
        return web.Response(text="User-agent: *\nDisallow: /secret\n")

    app = web.Application(middlewares=[record])
    app.add_routes(
        [
            web.get("/", shell), web.get("/product/{number}", shell), web.get("/plain/{number}", shell),
            web.get("/scroll", shell),
            web.get("/app.js", app_js), web.get("/api/list", listing), web.get("/api/product/{number}", product),
            web.get("/api/scroll", scroll), web.get("/-/log", show_log), web.get("/robots.txt", robots),
        ]
    )  # fmt: skip
    return app


async def main() -> None:
    runner = web.AppRunner(make_app(int(sys.argv[1]), float(sys.argv[2]), mixed="mixed" in sys.argv))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print("http://{}:{}".format(*runner.addresses[0]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
