"""Limits on what a run may ask of a worker.

A worker reads the settings and requests of a run from a store. Without these limits, anyone who can write to the store
could make the worker write any file, use any proxy, or change its spider. So a worker trusts the store as little as the
HTTP API trusts a stranger. Everything else must come from the worker's own command line, file or environment. See
``docs/security.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_network
from urllib.parse import parse_qsl, urlsplit

import msgspec

from shoal.config import Config, mask
from shoal.config.checks import linear
from shoal.errors import ConfigError, FetchError, RunError, SinkError
from shoal.http import Request, Response
from shoal.ports import Fetch
from shoal.sinks import is_object_storage, is_of_plugin, is_shared, sink_id
from shoal.spider import Spider

MAX_OUTPUTS = 20
_MAX_ARGUMENTS = 100
_MAX_NAME = 200
_MAX_ARGUMENT_BYTES = 256 * 1024  # of all arguments together
_WHERE_TO_CRAWL = frozenset({"start_urls", "allowed_domains", "handle_statuses"})
_FILE_OPTIONS = frozenset({"sslrootcert", "sslcert", "sslkey", "ssl_ca", "ssl_cert", "ssl_key"})


def check_arguments(run_id: str, arguments: Mapping[str, object]) -> None:
    """RunError for arguments that would replace attributes of the spider, or that are too large."""
    if len(arguments) > _MAX_ARGUMENTS or len(msgspec.msgpack.encode(arguments)) > _MAX_ARGUMENT_BYTES:
        raise RunError(
            f"run {run_id} has too many arguments for its spider: the limit is {_MAX_ARGUMENTS} arguments and "
            f"{_MAX_ARGUMENT_BYTES} bytes"
        )
    for name in arguments:
        own = name.startswith("_") or (hasattr(Spider, name) and name not in _WHERE_TO_CRAWL)
        if own or not name.isidentifier() or len(name) > _MAX_NAME:
            raise RunError(
                f"run {run_id} has the argument {name!r:.80}, which would replace an attribute of the spider. A worker "
                "does not accept it from a run: set it in the spider's file, or in the settings of the worker"
            )


def check_networks(run_id: str, networks: Iterable[str]) -> None:
    """RunError for an invalid network."""
    for network in networks:
        try:
            ip_network(network)
        except ValueError as exc:
            raise RunError(f"run {run_id} has invalid settings: {network!r:.80} is not a network") from exc


def check_outputs(run_id: str, requested: Sequence[str], own: Sequence[str], config: Config) -> None:
    """RunError for outputs that a run may not ask for. ``own``: outputs of the worker's own command line.

    A run may ask for databases on servers: any, or only those in ``worker.outputs`` if that is set. Object storage and
    outputs of plugins must be listed there: the worker's own credentials write to the former, and only a plugin knows
    what its URLs can do. A run may never ask for a file, use a file of this machine as a certificate, or send
    credentials to an endpoint of its choice."""
    if len(requested) > MAX_OUTPUTS:
        raise RunError(f"run {run_id} asks for {len(requested)} outputs; the limit is {MAX_OUTPUTS}")
    own_identities = {sink_id(spec) for spec in own}
    for spec in requested:
        try:
            identity, shared = sink_id(spec), is_shared(spec)
        except SinkError as exc:
            raise RunError(f"run {run_id} asks for an invalid output: {exc}") from exc
        if identity in own_identities:
            continue
        if not shared:
            raise RunError(
                f"run {run_id} asks this worker to write {identity!r:.200}. A worker writes only files that you "
                "pass to it: if you want this one, pass it with -o"
            )
        options = dict(parse_qsl(urlsplit(spec).query, keep_blank_values=True)).keys()
        if is_object_storage(spec):
            _check_objects(run_id, spec, "endpoint" in options, config)
            continue
        if _FILE_OPTIONS & options:
            raise RunError(
                f"run {run_id} asks for the output {mask(spec)} with files of this machine as certificates. If you "
                "want this, pass it with -o"
            )
        if (config.worker.outputs or is_of_plugin(spec)) and not any(
            _is_within(spec, allowed) for allowed in config.worker.outputs
        ):
            raise RunError(
                f"run {run_id} asks this worker to write to {mask(spec)}, which worker.outputs does not list. Add it "
                "there (or to SHOAL_WORKER__OUTPUTS), or pass it with -o"
            )


def _check_objects(run_id: str, spec: str, has_endpoint: bool, config: Config) -> None:
    what = f"run {run_id} asks this worker to write to {mask(spec)}"
    if has_endpoint:
        raise RunError(
            f"{what}. A worker sends its credentials only to an endpoint of its own environment: leave out endpoint=, "
            "or pass the output with -o"
        )
    if not any(_is_inside(spec, allowed) for allowed in config.worker.outputs):
        raise RunError(
            f"{what} with the worker's own credentials, but worker.outputs does not list it. Add "
            f"{spec.partition('?')[0]} there (or to SHOAL_WORKER__OUTPUTS), or pass it with -o"
        )


def _is_inside(spec: str, allowed: str) -> bool:
    """Whether an output in object storage is in the allowed bucket, and below the allowed path."""
    output, rule = urlsplit(spec), urlsplit(allowed)
    if (output.scheme, output.netloc) != (rule.scheme, rule.netloc):
        return False
    path = rule.path.rstrip("/")
    return output.path == path or output.path.startswith(path + "/")


def _is_within(spec: str, allowed: str) -> bool:
    """Whether an output is on the allowed server, and in the allowed database if the rule names one."""
    output, rule = urlsplit(spec), urlsplit(allowed)
    same = (output.scheme, output.hostname, output.port) == (rule.scheme, rule.hostname, rule.port)
    return same and rule.path.strip("/") in ("", output.path.strip("/"))


def with_run_settings(run_id: str, settings: Mapping[str, object], config: Config) -> Config:
    """The worker's configuration with the settings of a run. RunError if they are invalid.

    Regular expressions are searched in linear time, unless the worker's own configuration has the same ones."""
    own = {*config.scope.allow, *config.scope.deny}
    changed = dict(settings)
    for key in ("scope.allow", "scope.deny"):
        patterns = settings.get(key)
        if isinstance(patterns, list | tuple) and all(isinstance(text, str) for text in patterns):
            changed[key] = linear(patterns, own)
    try:
        return config.with_settings(changed)
    except ConfigError as exc:
        raise RunError(f"run {run_id} has invalid settings: {exc}") from exc


class ProxyCheck:
    """A layer around the fetcher. Requests from a store may use only proxies of the worker's own configuration."""

    def __init__(self, config: Config) -> None:
        proxies = (config.http.proxy, *config.worker.proxies)
        self._known = {_address_of(proxy) for proxy in proxies if proxy is not None}

    async def __call__(self, request: Request, fetch: Fetch) -> Response:
        if request.proxy is not None and _address_of(request.proxy) not in self._known:
            raise FetchError(
                f"the request asks for the proxy {mask(request.proxy)}, which the worker does not allow: add it to "
                "worker.proxies (or SHOAL_WORKER__PROXIES)",
                kind="proxy", retryable=False, contacted=False,
            )  # fmt: skip
        return await fetch(request)


def _address_of(proxy: str) -> tuple[str, str | None, int | None]:
    """The address of a proxy, without user and password."""
    try:
        url = urlsplit(proxy)
        return url.scheme, url.hostname, url.port
    except ValueError:
        return proxy, None, None


def check_proxies(spider: Spider, config: Config) -> None:
    """Put the proxy check before the layers of the spider. Those are trusted, and may choose any proxy."""
    own = tuple(layer for layer in spider.middlewares if not isinstance(layer, ProxyCheck))
    spider.middlewares = (ProxyCheck(config), *own)
