"""Every setting, typed and checked: frozen values, of which each part of the system gets its slice.

A value is checked however it arrives: by hand (``Http(proxy=...)``), by ``with_settings``, or from the layers that
``load_config`` puts together. A bad one is a ``ConfigError`` that names its key. Durations are in seconds. Passwords
show neither in a ``repr`` nor in a message, and ``flatten`` masks them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit

from msgspec import Meta, Struct

from shoal.errors import ConfigError
from shoal.layers import Parse, Section, build, from_text, keys, nearest, read_settings, read_toml
from shoal.layers import flatten as flatten

USER_AGENT = "shoal/0.1"
# The kind of store behind each scheme of a frontier URL.
FRONTIER_KINDS = {
    **{kind: kind for kind in ("memory", "sqlite", "redis", "postgresql")},
    **dict.fromkeys(("rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"), "redis"),
}

# 1e9 seconds are 31 years: more is a slip, and a timedelta must hold it.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Timeout: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Factor: TypeAlias = Annotated[float, Meta(ge=1, le=100)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
CountFromZero: TypeAlias = Annotated[int, Meta(ge=0)]
Status: TypeAlias = Annotated[int, Meta(ge=100, le=599)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]


def mask(url: str) -> str:
    """The URL with ``***`` for its password. A password may hold any sign, so rather too much is hidden."""
    url = re.sub(r"^((?>(?:[\w+.-]+://)?)[^:]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"(?i)(pass\w*=)('[^']*'|[^&\s]+)", r"\1***", url)


def _mask_headers(headers: dict[str, str]) -> dict[str, str]:
    return {name: "***" if re.search("(?i)auth|cookie|token|key|secret", name) else headers[name] for name in headers}


def _check_regexes(patterns: tuple[str, ...]) -> str | None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as exc:
            return f"must hold regular expressions; {pattern!r} does not compile: {exc}"
    return None


def _check_domains(domains: tuple[str, ...]) -> str | None:
    wrong = [domain for domain in domains if "/" in domain or domain.split() != [domain]]
    return f'must hold host names such as "example.com", not {wrong[0]!r}' if wrong else None


def _check_one_line(text: str) -> str | None:
    return "must be one line" if "\r" in text or "\n" in text else None


def _check_headers(headers: dict[str, str]) -> str | None:
    for name, value in headers.items():
        if not re.fullmatch(r"[!#$%&'*+.^_`|~\w-]+", name, re.ASCII):
            return f"must hold header names, not {name!r}"
        if _check_one_line(value):
            return f"must hold values of one line; that of {name!r} has more"
    return None


def _check_proxy(proxy: str | None) -> str | None:
    if proxy is None:
        return None
    try:
        url = urlsplit(proxy)
        good = url.scheme in ("http", "https", "socks5") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        good = False
    return None if good else f"must be http://, https:// or socks5:// with a host, not {mask(proxy)!r}"


def _hide(secret: str | None) -> str | None:
    return None if secret is None else "***"


def _check_networks(networks: tuple[str, ...]) -> str | None:
    for network in networks:
        try:
            ip_network(network)
        except ValueError:
            return f'must hold networks or addresses such as "10.0.0.0/8", not {network!r}'
    return None


def _check_tokens(tokens: dict[str, str]) -> str | None:
    return "must have a token for each name" if not all(tokens.values()) else None


def _check_frontier(frontier: str) -> str | None:
    several = "," in frontier  # hosts of a sentinel: each of them is checked where it is used
    try:
        url = urlsplit(frontier)
        good = several or (url.port != 0 and url.hostname != "")
    except ValueError:
        return _bad_frontier(frontier)
    match _kind(frontier):
        case "memory":
            good = good and frontier in ("memory:", "memory://")
        case "sqlite":
            good = good and re.fullmatch("sqlite:///.+", frontier) is not None
        case "redis":
            path = "/[^/]+(/[0-9]*)?" if "+sentinel" in url.scheme else "(/[0-9]*)?"
            good = good and bool(several or url.hostname) and re.fullmatch(path, url.path) is not None
        case "postgresql":
            good = good and frontier.startswith("postgresql://")
        case _:
            good = False
    return None if good else _bad_frontier(frontier)


def _check_coordinator(coordinator: str | None) -> str | None:
    if coordinator is None or re.match("zookeeper://[^/?]", coordinator):
        return None
    if _kind(coordinator) in ("redis", "postgresql"):
        return _check_frontier(coordinator)
    known = "zookeeper://host:2181, redis://host:port/number or postgresql://host/database"
    return f"must be {known}, not {mask(coordinator)!r}"


def _bad_frontier(frontier: str) -> str:
    known = "memory:, sqlite:///file, redis://host:port/number, rediss://host:port/number or postgresql://host/database"
    return f"must be {known}, not {mask(frontier)!r}"


class Scope(Section, frozen=True, kw_only=True):
    """Which URLs belong to the crawl."""

    checks = {"allowed_domains": _check_domains, "allow": _check_regexes, "deny": _check_regexes}

    allowed_domains: tuple[str, ...] = ()  # empty: all
    allow: tuple[str, ...] = ()  # regexes, one of which must be found in the URL; empty: all
    deny: tuple[str, ...] = ()  # regexes, none of which may be found in it
    max_depth: CountFromZero | None = None  # links away from a start URL
    max_pages: Count | None = None  # fetched by the whole run
    max_url_length: Count = 2083  # longer ones are mostly traps
    max_links: Count = 100_000  # new links taken from one page; the page's history says how many were left out


class Http(Section, frozen=True, kw_only=True):
    """How a page is fetched."""

    checks = {"proxy": _check_proxy, "headers": _check_headers}
    masks = {"proxy": mask, "headers": _mask_headers}

    connect_timeout: Timeout = 10.0  # TLS included
    read_timeout: Timeout = 30.0  # without a byte from the server
    total_timeout: Timeout = 120.0  # one request with its body
    max_body_bytes: Count = 32 * 1024 * 1024  # decompressed
    max_header_bytes: Count = 64 * 1024  # one header of a response
    max_redirects: CountFromZero = 10  # in a row
    verify_tls: bool = True  # False trusts any certificate
    proxy: str | None = None  # http:// or https://, with user:password@ if need be
    headers: dict[str, str] = {}  # sent with every request that does not set them itself
    dns_cache_seconds: Seconds = 300.0  # how long an address is remembered
    keep_alive_seconds: Seconds = 30.0  # how long an idle connection stays open


class Robots(Section, frozen=True, kw_only=True):
    """What robots.txt may decide."""

    obey: bool = True  # False does not even ask for it
    cache_seconds: Seconds = 86400.0  # how long it holds
    max_crawl_delay: Seconds = 60.0  # a longer Crawl-delay counts as this


class Retry(Section, frozen=True, kw_only=True):
    """When a failed request is tried again."""

    max_attempts: Count = 3  # counting the first
    base_delay: Seconds = 1.0  # before the second; it grows from there
    max_delay: Seconds = 300.0  # up to this
    statuses: tuple[Status, ...] = (408, 425, 429, 500, 502, 503, 504, 522, 524)  # that another attempt may better


class Throttle(Section, frozen=True, kw_only=True):
    """Slowing down for a host that struggles."""

    enabled: bool = True  # False keeps to download_delay whatever the host does
    max_delay: Seconds = 60.0  # the slowest that a host is asked
    slow_after: Timeout = 0.5  # the latency past which a host may count as struggling
    backoff_factor: Factor = 2.0  # what its delay is multiplied by


class Cache(Section, frozen=True, kw_only=True):
    """Responses kept on disk, for those at work on a spider."""

    enabled: bool = False  # True answers from the folder what is in it
    folder: Text = ".shoal-cache"  # from the working directory
    ttl: Seconds | None = None  # how long a response holds; none: for ever


class LeaseConfig(Section, frozen=True, kw_only=True):
    """The leases of requests."""

    ttl: Timeout = 300.0  # after this without a renewal, another worker may take the request
    batch: Count = 50  # how many requests a worker of a fleet leases at a time, ahead of need


class Queue(Section, frozen=True, kw_only=True):
    """The size of the frontier."""

    max_size: Count | None = None  # explicit pushes past it raise QueueFullError
    in_memory: Count = 100_000  # how many requests the memory frontier holds before it spills to disk


class Items(Section, frozen=True, kw_only=True):
    """The item log."""

    keep: bool = True  # also after all sinks have it


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Runners and Backup Runners."""

    checks = {"coordinator": _check_coordinator}
    masks = {"coordinator": mask}

    coordinator: str | None = None  # zookeeper://, redis:// or postgresql://; none: the frontier's own server
    runner: Count = 1  # how many nodes work
    backup: CountFromZero = 0  # how many stand by
    session: Timeout = 10.0  # a node that is not heard of for so long is dead, and its slot is taken


def _check_proxies(proxies: tuple[str, ...]) -> str | None:
    return next((problem for proxy in proxies if (problem := _check_proxy(proxy))), None)


def _check_databases(outputs: tuple[str, ...]) -> str | None:
    for output in outputs:
        try:
            url = urlsplit(output)
            good = url.scheme in ("postgresql", "postgres", "mysql", "mariadb") and url.hostname and url.port != 0
        except ValueError:
            good = False
        if not good:
            return f"must hold databases such as postgresql://db.example/crawl, not {mask(output)!r}"
    return None


class WorkerConfig(Section, frozen=True, kw_only=True):
    """What a run in a shared store may ask of this worker."""

    checks = {"proxies": _check_proxies, "outputs": _check_databases}
    masks = {
        "proxies": lambda proxies: tuple(map(mask, proxies)),
        "outputs": lambda outputs: tuple(map(mask, outputs)),
    }

    proxies: tuple[str, ...] = ()  # that requests of a run may name, besides http.proxy
    outputs: tuple[str, ...] = ()  # databases that a run may have written, such as postgresql://host/db; empty: any


class Serve(Section, frozen=True, kw_only=True):
    """The HTTP API."""

    checks = {"allow": _check_networks, "tokens": _check_tokens}
    masks = {"token": _hide, "tokens": lambda tokens: dict.fromkeys(tokens, "***"), "webhook_key": _hide}

    host: Text = "127.0.0.1"  # any other needs a token
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # 0 picks one
    token: str | None = None  # what a request must bring
    tokens: dict[str, str] = {}  # for batches of several callers, by name: each has a fair share
    allow: tuple[str, ...] = ()  # networks of private addresses that may be crawled, such as 10.0.0.0/8
    max_in_flight: Count = 64  # pages in the server, of all its sessions
    max_urls: Count = 10_000  # of one batch
    max_request_bytes: Count = 8 * 1024 * 1024  # of one request's body
    request_timeout: Timeout = 30.0  # in which a request has to arrive whole
    max_answer_bytes: Count = 64 * 1024 * 1024  # of the content in one answer
    max_session_bytes: Count = 1024**3  # of the results of one session; then its other pages fail
    max_kept_bytes: Count = 4 * 1024**3  # of the results that a server in memory keeps; then it takes no more batches
    max_sessions: Count = 200  # running at a time
    max_sessions_per_caller: Count = 100  # of these
    keep_results: Timeout = 3600.0  # how long the results of a session can be had
    webhook_key: str | None = None  # signs the messages of callers that give none of their own


class Config(Section, frozen=True, kw_only=True):
    """All settings of a run. Their keys are dotted: ``concurrency``, ``http.proxy``."""

    checks = {"frontier": _check_frontier, "user_agent": _check_one_line}
    masks = {"frontier": mask}

    project_name: Text = "shoal"  # what the crawl belongs to
    mode: Literal["standalone", "distributed"] = "standalone"  # one process, or a fleet that shares its frontier
    frontier: str = "memory:"  # or sqlite:///file, redis://, rediss://, postgresql://
    concurrency: Count = 32  # requests in flight in one worker
    concurrency_per_host: Count = 8  # on one host, from all workers
    # From the end of one fetch to the next on the same host. With a delay a host has one request in flight; 0 means
    # concurrency_per_host at once.
    download_delay: Seconds = 0.5
    user_agent: Text = USER_AGENT  # also the name that robots.txt is read for
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"  # the least that is logged
    cookies: bool = True  # keep them and send them back
    shutdown_grace: Seconds = 10.0  # for the requests in flight when the process is asked to stop
    scope: Scope = Scope()
    http: Http = Http()
    robots: Robots = Robots()
    retry: Retry = Retry()
    throttle: Throttle = Throttle()
    cache: Cache = Cache()
    lease: LeaseConfig = LeaseConfig()
    queue: Queue = Queue()
    items: Items = Items()
    cluster: ClusterConfig = ClusterConfig()
    worker: WorkerConfig = WorkerConfig()
    serve: Serve = Serve()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.mode == "distributed" and _kind(self.frontier) in ("memory", "sqlite"):
            raise ConfigError(
                f'"mode" is "distributed", but a fleet can\'t share the frontier "{self.frontier}"; '
                'set "frontier" to redis://host:port/number or postgresql://host/database'
            )

    @classmethod
    def standalone(
        cls,
        *,
        queue_type: str | None = None,
        filter_type: str | None = None,
        max_queue_size: int | None = None,
        **settings: Any,
    ) -> Config:
        """One process with its queue in memory, or in a file: ``frontier="sqlite:///crawl.db"``.

        ``settings`` are keys of Config: ``concurrency=10``, ``http={"proxy": ...}``. ``queue_type`` and
        ``filter_type`` name the kind of the frontier; they may be left out, and must be right if they are not.
        """
        settings.setdefault("frontier", "memory:")
        for kind in (queue_type, _kind(settings["frontier"])):
            if kind in ("redis", "postgresql"):
                raise ConfigError(f'Config.standalone has no queue of type "{kind}"; use Config.distributed')
        return _of_mode("standalone", queue_type, filter_type, max_queue_size, settings)

    @classmethod
    def distributed(
        cls,
        *,
        redis_host: str = "127.0.0.1",
        redis_port: int = 6379,
        redis_password: str | None = None,
        redis_db: int = 0,
        queue_type: str | None = None,
        filter_type: str | None = None,
        max_queue_size: int | None = None,
        **settings: Any,
    ) -> Config:
        """A fleet that shares its frontier, in Redis or where ``frontier="postgresql://..."`` says.

        The rest is as in ``standalone``.
        """
        redis = (redis_host, redis_port, redis_password, redis_db)
        if "frontier" in settings and redis != ("127.0.0.1", 6379, None, 0):
            raise ConfigError("give either frontier or redis_host, redis_port, redis_password and redis_db")
        for kind in (queue_type, _kind(settings.get("frontier"))):
            if kind in ("memory", "sqlite"):
                raise ConfigError(f'Config.distributed has no queue of type "{kind}"; use Config.standalone')
        settings.setdefault("frontier", _redis_url(*redis))
        return _of_mode("distributed", queue_type, filter_type, max_queue_size, settings)

    def with_settings(self, settings: Mapping[str, Any]) -> Config:
        """A copy with these changed; keys are dotted or nested. The ConfigError names all that is wrong."""
        values, problems = read_settings(Config, settings)
        if problems:
            raise ConfigError("\n".join(problems))
        return build(Config, {**flatten(self, reveal=True), **values})


def _kind(frontier: object) -> str | None:
    return FRONTIER_KINDS.get(frontier.partition(":")[0]) if isinstance(frontier, str) else None


def _redis_url(host: str, port: int, password: str | None, db: int) -> str:
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{secret}{f'[{host}]' if ':' in host else host}:{port}/{db}"


def _of_mode(
    mode: str, queue_type: str | None, filter_type: str | None, max_size: int | None, settings: dict[str, Any]
) -> Config:
    if settings.setdefault("mode", mode) != mode:
        raise ConfigError(f'"mode" is "{mode}" here; leave it out')
    if max_size is not None:
        settings["queue.max_size"] = max_size
    config = Config().with_settings(settings)
    kind = _kind(config.frontier)
    if queue_type not in (None, kind):
        raise ConfigError(
            f'queue_type "{queue_type}" is not the kind of the frontier "{mask(config.frontier)}"; '
            'set "frontier" to a URL of that kind, such as sqlite:///crawl.db or postgresql://host/database'
        )
    if filter_type not in (None, kind):
        raise ConfigError(
            f'filter_type "{filter_type}" can\'t go with queue_type "{kind}": '
            "what is seen and what is queued are recorded in one step, in one store; leave filter_type out"
        )
    return config


class Resolved(Struct, frozen=True):
    """The effective Config, and where each of its dotted keys came from."""

    config: Config
    sources: dict[str, str]


def find_config_file(environ: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """The file that SHOAL_CONFIG names, else the first shoal.toml in the folder (the working one) or above it."""
    if environ.get("SHOAL_CONFIG"):
        return Path(environ["SHOAL_CONFIG"])
    folder = (folder or Path.cwd()).absolute()
    return next((file for place in (folder, *folder.parents) if (file := place / "shoal.toml").is_file()), None)


def env_name(key: str) -> str:
    """The environment variable of a dotted key: ``http.proxy`` is SHOAL_HTTP__PROXY."""
    return "SHOAL_" + key.upper().replace(".", "__")


def load_config(
    *,
    file: Path | None = None,
    spider: Mapping[str, Any] | None = None,
    spider_name: str = "",
    environ: Mapping[str, str] | None = None,
    command_line: Mapping[str, Any] | None = None,
    options: Mapping[str, str] | None = None,
    code: Mapping[str, Any] | Config | None = None,
) -> Resolved:
    """All layers as one Config, the stronger last: defaults, file, spider, environment, command line, code.

    Text in the environment and on the command line is converted to the type of its field. ``options`` says how a key
    of the command line was typed where that was not ``--set KEY=VALUE``. A mapping as ``code`` changes what it names;
    a Config is whole, so every key is its own. The ConfigError names all that is wrong in all layers.
    """
    in_file = read_toml(file) if file is not None else {}
    in_file.pop("spiders", None)  # the registry's table
    typed = options or {}
    in_code = flatten(code, reveal=True) if isinstance(code, Config) else code
    in_environ, problems = _from_environ(environ or {})
    layers: list[tuple[Mapping[str, Any] | None, Callable[[str], str], Parse | None]] = [
        (in_file, lambda key: str(file), None),
        (spider, lambda key: f"spider {spider_name}".strip(), None),
        (in_environ, env_name, from_text),
        (command_line, lambda key: typed.get(key, f"--set {key}"), from_text),
        (in_code, lambda key: "code", None),
    ]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(keys(Config), "default")
    for settings, source, parse in layers:
        read, wrong = read_settings(Config, settings or {}, source=source, parse=parse)
        values |= read
        sources |= {key: source(key) for key in read}
        problems += wrong
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return Resolved(build(Config, values), sources)
    except ConfigError as exc:  # each value is good by itself: only the mode can be at odds with the rest
        raise ConfigError(f"{sources['mode']}: {exc}") from exc


_NO_SETTINGS = ("SHOAL_CONFIG", "SHOAL_FLOWER_PASSWORD")
"""Variables that are no settings: where the settings are, and what `start-distributed` and Compose give to Flower."""


def _from_environ(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    known = {env_name(key): key for key in keys(Config)}
    ours = {name: text for name, text in environ.items() if name.startswith("SHOAL_") and name not in _NO_SETTINGS}
    problems = []
    for name in sorted(ours.keys() - known.keys()):
        meant = name.removeprefix("SHOAL_").lower().replace("__", ".")
        problems.append(f'{name}: unknown key "{meant}"{nearest(Config, meant, env_name)}')
    return {known[name]: text for name, text in ours.items() if name in known}, problems
