"""Rendered pages go the way of their identity, and passwords that Chromium could not send reach the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from shoal import Response, Spider, crawl
from tests.acceptance.blocking import BlockingSite
from tests.support.servers import ProxyServer
from tests.support.socks_server import SocksServer

SETTINGS = {
    "browser.sandbox": False,
    "browser.page_timeout": 60,
    "download_delay": 0,
    "robots.obey": False,
    "concurrency": 2,
    "identities.rest": 60,  # longer than a page takes on a busy machine: an identity that has rested is used again
    "identities.max_rest": 60,
    "identities.give_up_after": 50,
}


class Rendered(Spider):
    name = "rendered"
    render = True

    def parse(self, response: Response) -> Any:
        yield {"h1": response.css("h1::text").get()}
        yield response.follow_all("a")


@pytest.mark.usefixtures("in_order")
async def test_rendered_pages_go_the_way_of_their_identity(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        # Seven pages: the first identity is blocked after four, and nothing waits for its return.
        BlockingSite(6, ban=0.5, patience=4, forbidden=frozenset({"/favicon.ico"})) as site,
        ProxyServer("127.0.0.11", "ann:s3cret") as first,
        SocksServer({"bob": "s3cret"}, "127.0.0.12") as second,
        ProxyServer("127.0.0.14", "eve:right") as wrong,
    ):
        bad = wrong.url.replace("//", "//eve:wrong-pass@")
        proxies = [bad, first.address, second.address("bob")]
        done = await crawl(Rendered, {**SETTINGS, "proxies": proxies}, arguments={"start_urls": [site.url + "/"]})
    assert done.summary is not None
    assert (done.summary.state, done.summary.stats.dead) == ("finished", 0)
    assert {item["h1"] for item in done.items} == site.paths
    assert {visit.address for visit in site.log} == {"127.0.0.11", "127.0.0.12"}
    assert "s3cret" not in caplog.text
    assert "wrong-pass" not in caplog.text
    assert f"the identity {bad.replace(':wrong-pass', '')} is removed" in caplog.text


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first proxy that is available is the next one, not any of them."""
    monkeypatch.setattr("shoal.system.chance.shuffle", lambda names: None)
