"""Crawlee's PlaywrightCrawler: one shared context, four pages at a time. Usage: crawlee_shop.py URL OUTPUT CHROMIUM"""

import asyncio
import json
import sys
from datetime import timedelta

from crawlee import ConcurrencySettings, Request
from crawlee.crawlers import PlaywrightCrawler

url, output, chromium = sys.argv[1:]


async def main():
    crawler = PlaywrightCrawler(
        headless=True,
        browser_launch_options={"executable_path": chromium, "args": ["--no-sandbox"]},
        concurrency_settings=ConcurrencySettings(min_concurrency=4, desired_concurrency=4, max_concurrency=4),
        request_handler_timeout=timedelta(seconds=60),
        configure_logging=False,
    )
    out = open(output, "w")  # noqa: SIM115, ASYNC230

    @crawler.router.default_handler
    async def parse(context):
        await context.page.wait_for_selector("a.product")
        links = await context.page.eval_on_selector_all("a.product", "all => all.map(a => a.href)")
        await context.add_requests([Request.from_url(link, label="product") for link in links])
        more = await context.page.eval_on_selector_all("a.next", "all => all.map(a => a.href)")
        await context.add_requests(more)

    @crawler.router.handler("product")
    async def product(context):
        await context.page.wait_for_selector("h1")
        name = await context.page.text_content("h1")
        out.write(json.dumps({"url": context.request.url, "name": name}) + "\n")

    await crawler.run([url])
    out.close()


asyncio.run(main())
