"""Crawlee's ParselCrawler on memory storage.

Items are written straight to the file: cheaper than push_data with an export at the end, which has no JSON Lines.
The concurrency is held fixed, because the autoscaled pool would take a busy core for an overload and lower it.
"""

import asyncio
import json
import logging
import os

from crawlee import ConcurrencySettings
from crawlee.crawlers import ParselCrawler, ParselCrawlingContext
from crawlee.http_clients import ImpitHttpClient
from crawlee.storage_clients import MemoryStorageClient


async def main() -> None:
    limit = int(os.environ.get("BENCH_LIMIT", "0"))
    concurrency = int(os.environ["BENCH_CONCURRENCY"])
    crawler = ParselCrawler(
        storage_client=MemoryStorageClient(),
        respect_robots_txt_file=True,
        max_requests_per_crawl=limit or None,
        concurrency_settings=ConcurrencySettings(
            min_concurrency=concurrency, max_concurrency=concurrency, desired_concurrency=concurrency
        ),
        http_client=ImpitHttpClient(verify=False),  # it does not read SSL_CERT_FILE
        configure_logging=False,
    )
    with open(os.environ["BENCH_OUTPUT"], "w") as output:  # noqa: ASYNC230 - a buffered append does not wait

        @crawler.router.default_handler
        async def handle(context: ParselCrawlingContext) -> None:
            page = context.selector
            item = {
                "url": context.request.loaded_url or context.request.url,
                "title": page.css("title::text").get(),
                "h1": page.css("h1::text").get(),
                "links": len(page.css("a[href]")),
            }
            output.write(json.dumps(item) + "\n")
            await context.enqueue_links(strategy="all")

        await crawler.run([os.environ["BENCH_URL"]])


logging.basicConfig(level=logging.WARNING)
asyncio.run(main())
