"""What a run may ask of a worker.

A worker reads the settings of a run, and its requests, from a store. Whoever can write there could otherwise have it
write any file, send pages through any proxy, or configure its spider anew. So a worker takes as little from the store
as the HTTP API takes from a stranger, and does the rest only if it was told so itself: by its own command line, file
or environment. See ``docs/security.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_network
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from shoal.config import Config, mask
from shoal.errors import FetchError, RunError, SinkError
from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.sinks import is_shared, sink_id
from shoal.spider import Spider

MOST_OUTPUTS = 20
_MOST_ARGUMENTS = 100
_LONGEST_NAME = 200
_LARGEST_ARGUMENTS = 256 * 1024  # bytes of all of them, as they are stored
_WHERE_TO_CRAWL = frozenset({"start_urls", "allowed_domains", "handle_statuses"})
_FILE_OPTIONS = frozenset({"sslrootcert", "sslcert", "sslkey", "ssl_ca", "ssl_cert", "ssl_key"})


def check_arguments(run_id: str, arguments: Mapping[str, Any]) -> None:
    """RunError for arguments that would change what the spider is: they become its attributes."""
    if len(arguments) > _MOST_ARGUMENTS or len(msgspec.msgpack.encode(arguments)) > _LARGEST_ARGUMENTS:
        raise RunError(
            f"run {run_id} has more arguments for its spider than a worker takes: at most {_MOST_ARGUMENTS}, and "
            f"{_LARGEST_ARGUMENTS} bytes"
        )
    for name in arguments:
        own = name.startswith("_") or (hasattr(Spider, name) and name not in _WHERE_TO_CRAWL)
        if own or not name.isidentifier() or len(name) > _LONGEST_NAME:
            raise RunError(
                f"run {run_id} has the argument {name!r:.80} for its spider, which is the spider's own. A worker does "
                "not take it from a run: set it in the spider's file, or as a setting of the worker"
            )


def check_networks(run_id: str, networks: Iterable[str]) -> None:
    """RunError for what is no network."""
    for network in networks:
        try:
            ip_network(network)
        except ValueError as exc:
            raise RunError(f"run {run_id} has settings that can't be read: {network!r:.80} is no network") from exc


def check_outputs(run_id: str, asked: Sequence[str], own: Sequence[str], config: Config) -> None:
    """RunError for outputs that a run may not have a worker write. Those that the worker was given itself are ``own``.

    A run may ask for databases on servers: any, or those that ``worker.outputs`` lists. It may never ask for a file,
    nor have a file of this machine read as a certificate.
    """
    if len(asked) > MOST_OUTPUTS:
        raise RunError(f"run {run_id} asks for {len(asked)} outputs; a worker writes {MOST_OUTPUTS} at most")
    given = {sink_id(spec) for spec in own}
    for spec in asked:
        try:
            identity, shared = sink_id(spec), is_shared(spec)
        except SinkError as exc:
            raise RunError(f"run {run_id} asks for an output that there is not: {exc}") from exc
        if identity in given:
            continue
        if not shared:
            raise RunError(
                f"run {run_id} asks this worker to write {identity!r:.200}. A worker writes only files that it is "
                "given itself: if you want this one, pass it with -o"
            )
        if _FILE_OPTIONS & dict(parse_qsl(urlsplit(spec).query, keep_blank_values=True)).keys():
            raise RunError(
                f"run {run_id} asks for the output {mask(spec)} with files of this machine as certificates. If you "
                "want this, pass it to the worker with -o"
            )
        if config.worker.outputs and not any(_is_within(spec, allowed) for allowed in config.worker.outputs):
            raise RunError(
                f"run {run_id} asks this worker to write to {mask(spec)}, which worker.outputs does not list. Add it "
                "there (or to SHOAL_WORKER__OUTPUTS), or pass it with -o"
            )


def _is_within(spec: str, allowed: str) -> bool:
    """Whether an output is on the server, and in the database if one is named, that is allowed."""
    asked, rule = urlsplit(spec), urlsplit(allowed)
    same = (asked.scheme, asked.hostname, asked.port) == (rule.scheme, rule.hostname, rule.port)
    return same and rule.path.strip("/") in ("", asked.path.strip("/"))


class ProxyCheck:
    """A layer around the fetcher: requests from a store use only proxies that this worker was told of."""

    def __init__(self, config: Config) -> None:
        known = (config.http.proxy, *config.worker.proxies)
        self._known = {_place(proxy) for proxy in known if proxy is not None}

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        if request.proxy is not None and _place(request.proxy) not in self._known:
            raise FetchError(
                f"the request asks for the proxy {mask(request.proxy)}, which this worker was not told of: add it to "
                "worker.proxies (or SHOAL_WORKER__PROXIES)",
                kind="proxy", retryable=False, contacted=False,
            )  # fmt: skip
        return await fetch(request)


def _place(proxy: str) -> tuple[str, str | None, int | None]:
    """Where a proxy is, whatever user and password it is asked with."""
    try:
        url = urlsplit(proxy)
        return url.scheme, url.hostname, url.port
    except ValueError:
        return proxy, None, None


def guarded_spider(spider: Spider, config: Config) -> Spider:
    """The spider with the check in front of its own layers: those may choose a proxy, as they are this machine's."""
    own = tuple(layer for layer in spider.middlewares if not isinstance(layer, ProxyCheck))
    spider.middlewares = (ProxyCheck(config), *own)  # type: ignore[misc]
    return spider
