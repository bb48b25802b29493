"""Serve the bookshop on the loopback until SIGINT or SIGTERM."""

import argparse
import asyncio
import os
import signal
import sys

from examples.bookshop.site import Bookshop


async def serve(port: int, crawl_delay: float | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    async with Bookshop(port, crawl_delay=crawl_delay) as shop:
        print(f"bookshop: {shop.url}/", flush=True)
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.bookshop", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--crawl-delay", type=float, metavar="SECONDS", help="ask for it in robots.txt (default: none)")
    args = parser.parse_args()
    try:
        asyncio.run(serve(args.port, args.crawl_delay))
    except OSError as exc:
        reason = os.strerror(exc.errno or 0)
        sys.exit(f"bookshop: can't listen on port {args.port}: {reason}. Choose another port with --port")


if __name__ == "__main__":
    main()
