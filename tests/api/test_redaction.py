"""Information that the API does not reveal to its callers."""

from __future__ import annotations

import time

import pytest

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.spider import BatchSpider
from shoal.api.batch.urls import REFUSED_ADDRESS, redacted
from shoal.errors import FetchError, SpiderError
from shoal.http import Request


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("10.1.2.3 is a private address, which may not be contacted (serve.allow)", REFUSED_ADDRESS),
        ("address: ::1 is a loopback address, which may not be contacted (serve.allow)",
         f"address: {REFUSED_ADDRESS}"),
        ("a.example is a link-local address, which may not replace a public one (browser.public_networks)",
         REFUSED_ADDRESS),
        ("::1 is a loopback address, which only pages from local addresses may contact (browser.public_networks)",
         REFUSED_ADDRESS),
        ("redis://:***@cache.internal:6379/0 can't be reached", "redis://... can't be reached"),
        ("a fleet cannot share \"sqlite:////srv/x.db\"; no", "a fleet cannot share \"sqlite://...\"; no"),
        ("the cluster at rediss+cluster://a,b can't", "the cluster at rediss://...,b can't"),
        ("/srv/crawls/shoal.toml: unknown key", "shoal.toml: unknown key"),
        ("SelectorError: too large (/usr/lib/shoal/fields.py, line 3)", "SelectorError: too large (fields.py, line 3)"),
        ("no connection: Connect call failed ('10.0.0.7', 80)", "no connection: Connect call failed (an address)"),
        ("http://example.com/a/b could not be found", "http://example.com/a/b could not be found"),
        ("redirects to https://a.example/b/c/d, which is out of scope",
         "redirects to https://a.example/b/c/d, which is out of scope"),
        ("the server answered 404", "the server answered 404"),
    ],
)  # fmt: skip
def test_redacted(message: str, told: str) -> None:
    assert redacted(message) == told


@pytest.mark.parametrize(
    "unit", ["x", "x ", "/x", "/", " is a", "a public address, which x ", "('", "the proxy :", "redis://"]
)
def test_a_long_message_is_cheap(unit: str) -> None:
    """A server decides how long some of them are."""
    message = unit * (200_000 // len(unit))
    began = time.process_time()
    redacted(message)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FetchError("192.168.0.9 is odd", kind="address", retryable=False), REFUSED_ADDRESS),
        (SpiderError("it broke (/opt/shoal/batch/fields.py, line 7)"), "it broke (fields.py, line 7)"),
    ],
)
def test_results_tell_neither_addresses_nor_paths(error: Exception, told: str) -> None:
    (result,) = BatchSpider(BatchOptions(), "").failed(Request("http://intranet.example/"), error)
    assert result["error"]["message"] == told
