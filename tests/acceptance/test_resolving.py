"""Host names without an answer do not delay other hosts."""

from __future__ import annotations

import pytest

from tests.acceptance.rebinding import said_apart

LOOK_UP = """
import asyncio, os, uvloop
from shoal.fetch.resolving import allow_many_lookups
from tests.acceptance.rebinding import NameServer

os.environ.pop("UV_THREADPOOL_SIZE", None)  # another test may have set it

class Silent(NameServer):
    def datagram_received(self, data, addr):
        if b"silent" not in data:
            super().datagram_received(data, addr)

async def main():
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: Silent([["8.8.8.8"]]), ("127.0.0.1", 53))
    for number in range(8):
        asyncio.create_task(loop.getaddrinfo(f"silent{number}.test", 80))
    await asyncio.sleep(0.2)
    try:
        found = await asyncio.wait_for(loop.getaddrinfo("good.test", 80), 3)
    except TimeoutError:
        found = [[[None]]]
    print(found[0][-1][0], flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(("prepared", "found"), [("allow_many_lookups(); ", "8.8.8.8"), ("", "None")])
def test_eight_names_that_nobody_answers_for(prepared: str, found: str) -> None:
    """Also without what is tested, so that this could fail."""
    assert said_apart("-c", f"{LOOK_UP}\n{prepared}uvloop.run(main())").strip() == found
