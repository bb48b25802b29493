"""Every setting, with its type, default and check: a class for each part of the system, and `Config` with all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import quote

from msgspec import Meta
from msgspec.structs import force_setattr

from shoal.config.checks import (
    check_contact,
    check_coordinator,
    check_domain,
    check_file_store,
    check_frontier,
    check_headers,
    check_network,
    check_one_line,
    check_proxy,
    check_proxy_list,
    check_regexes,
    check_shared_output,
    check_size,
    check_token,
    check_tokens,
    check_tor,
    each,
    frontier_kind,
    linear,
    mask,
    mask_headers,
    mask_secret,
)
from shoal.config.layers import Section, changed, read_settings, unmark_explicit
from shoal.errors import ConfigError

USER_AGENT = "shoal/0.1"

ANY_REDIS = "any redis"
"""Recorded for a Config that wants a frontier in Redis, but names no server."""

UNUSABLE = {"standalone": ("redis", "postgresql"), "distributed": ("memory", "sqlite")}
"""By mode, the kinds of frontiers that it cannot use."""

NewRunPolicy: TypeAlias = Literal["never", "after_finish", "always"]

# 1e9 seconds are 31 years. A larger value is a typing error, and a timedelta must be able to hold it.
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Timeout: TypeAlias = Annotated[float, Meta(gt=0, le=1e9)]
Factor: TypeAlias = Annotated[float, Meta(ge=1, le=100)]
Weight: TypeAlias = Annotated[float, Meta(gt=0, le=1000)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]
CountFromZero: TypeAlias = Annotated[int, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Status: TypeAlias = Annotated[int, Meta(ge=100, le=599)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]


class ScopeSettings(Section, frozen=True, kw_only=True):
    """Which URLs a run may crawl."""

    checks = {"allowed_domains": each(check_domain), "allow": check_regexes, "deny": check_regexes}
    of_others = {"allow": linear, "deny": linear}

    allowed_domains: tuple[str, ...] = ()  # with their subdomains; empty: all
    allow: tuple[str, ...] = ()  # regexes; at least one must match the URL; empty: all URLs are allowed
    deny: tuple[str, ...] = ()  # regexes; a URL that matches one is skipped
    max_depth: CountFromZero | None = None  # links away from a start URL
    max_pages: Count | None = None  # fetched by the whole run
    max_items: Count | None = None  # stored by the whole run; it ends soon after
    max_seconds: Timeout | None = None  # that a process works on the run; then the run ends
    max_bytes: Count | None = None  # of the pages that a process fetches; then the run ends
    max_url_length: Count = 2083  # longer URLs are mostly crawler traps
    max_links: Count = 100_000  # new links taken from one page; the page's history says how many were left out


class HttpSettings(Section, frozen=True, kw_only=True):
    """How pages are fetched."""

    checks = {"proxy": check_proxy, "headers": check_headers}
    masks = {"proxy": mask, "headers": mask_headers}

    connect_timeout: Timeout = 10.0  # includes the TLS handshake
    read_timeout: Timeout = 30.0  # between two bytes from the server
    total_timeout: Timeout = 120.0  # one request with its body
    max_body_bytes: Count = 32 * 1024 * 1024  # decompressed
    max_header_bytes: Count = 64 * 1024  # one header of a response
    max_redirects: CountFromZero = 10  # in a row
    client: Text = "auto"  # auto: Shoal's own client, like aiohttp, which once was another; or the name of a plugin
    verify_tls: bool = True  # False accepts any certificate
    proxy: str | None = None  # http://, https:// or socks5://, with user:password@ if the proxy needs it
    headers: dict[str, str] = {}  # sent with every request that does not set them itself
    dns_cache_seconds: Seconds = 300.0  # how long a resolved address is cached
    keep_alive_seconds: Seconds = 30.0  # how long an idle connection stays open


class DnsSettings(Section, frozen=True, kw_only=True):
    """How host names are resolved."""

    # c-ares asks the name servers of the system itself. system: the resolver of the system, in a thread for each name.
    resolver: Literal["c-ares", "system"] = "c-ares"
    deadline: Timeout = 5.0  # for one name
    max_lookups: Count = 256  # at the same time: of a run, of a session of the API, of a browser context
    failure_seconds: Seconds = 5.0  # how long a name without an address is remembered at most


class RobotsSettings(Section, frozen=True, kw_only=True):
    """How robots.txt is used."""

    obey: bool = True  # False: robots.txt is not fetched
    cache_seconds: Seconds = 86400.0  # how long a robots.txt is cached
    max_crawl_delay: Seconds = 60.0  # a longer Crawl-delay counts as this
    nofollow: bool = False  # do not follow links that a page marks with nofollow, ugc or sponsored
    noindex: bool = False  # do not store items of pages that say noindex


class RetrySettings(Section, frozen=True, kw_only=True):
    """When a failed request is retried."""

    max_attempts: Count = 4  # including the first
    max_retries: CountFromZero | None = None  # the same as max_attempts, without the first: set one of the two
    base_delay: Seconds = 1.0  # before the second attempt; doubles with each further attempt
    max_delay: Seconds = 300.0  # the longest delay
    statuses: tuple[Status, ...] = (408, 425, 429, 500, 502, 503, 504, 522, 524)  # responses that are retried

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.max_retries is None:
            force_setattr(self, "max_retries", self.max_attempts - 1)
        elif self.max_attempts == type(self).__struct_defaults__[0]:  # the default, so probably not set
            force_setattr(self, "max_attempts", self.max_retries + 1)
        _check_retries(self.max_attempts, self.max_retries)

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, object]:
        attempts, retries = given.get("max_attempts"), given.get("max_retries")
        if attempts is None:
            if retries is None:
                return {}
            attempts = retries + 1
        _check_retries(attempts, retries)
        return {"max_attempts": attempts, "max_retries": attempts - 1}


def _check_retries(attempts: int, retries: int | None) -> None:
    if retries is not None and attempts != retries + 1:
        raise ConfigError(
            f'"retry.max_attempts" {attempts} and "retry.max_retries" {retries} contradict each other: attempts '
            "include the first one. Set only one of them"
        )


class ThrottleSettings(Section, frozen=True, kw_only=True):
    """Slow down for an overloaded host."""

    enabled: bool = True  # False: only download_delay counts
    max_delay: Seconds = 60.0  # the longest delay
    slow_after: Timeout = 0.5  # a host with a higher latency may be overloaded
    backoff_factor: Factor = 2.0  # multiplies the delay of an overloaded host
    max_retry_after: Seconds = 3600.0  # a longer Retry-After counts as this: then one request tries the host


class LoginSettings(Section, frozen=True, kw_only=True):
    """Logins of spiders that have ``log_in``."""

    attempts: Count = 3  # failed ones in a row, after which the run stops
    retry_after: Seconds = 2.0  # before the second attempt; the time doubles with each further one


class OutcomeSettings(Section, frozen=True, kw_only=True):
    """When a run counts as failed."""

    max_failed: Share = 0.1  # of the pages that ended; beyond it the outcome of the run is "failed"


class CacheSettings(Section, frozen=True, kw_only=True):
    """Responses cached on disk, for spider development."""

    enabled: bool = False  # read pages from the cache, and store them there
    folder: Text = ".shoal-cache"  # relative to the working directory
    ttl: Seconds | None = None  # how long a response is valid; none: forever


class WarcSettings(Section, frozen=True, kw_only=True):
    """WARC files with what was sent and received for each page (`--warc FOLDER`)."""

    folder: Text | None = None  # where each process writes files of its own; none: no WARC files
    max_file_bytes: Count = 1024**3  # a file that has reached this size is finished, and a new one begun


class LeaseSettings(Section, frozen=True, kw_only=True):
    """The leases of requests."""

    ttl: Timeout = 300.0  # another worker may take the request when its lease was not renewed for this long
    batch: Count = 50  # how many requests a fleet worker leases in advance


class QueueSettings(Section, frozen=True, kw_only=True):
    """The size of the frontier."""

    max_size: Count | None = None  # an explicit push beyond it raises QueueFullError
    # Links of pages beyond max_size are accepted all the same, or fail with the kind "queue full".
    overflow: Literal["accept", "refuse"] = "accept"
    in_memory: Count = 100_000  # how many requests the memory frontier holds before it spills to disk


class ItemSettings(Section, frozen=True, kw_only=True):
    """The item log, and the way of items into outputs."""

    keep: bool = True  # keep items after all sinks have written them
    patience: Seconds = 300.0  # how long an output, or the store of files, that is down is waited for


class FileSettings(Section, frozen=True, kw_only=True):
    """Files that spiders download (`yield File(...)`, `response.save()`)."""

    checks = {"store": check_file_store}

    store: Text = "files"  # a folder, or s3://bucket/path, gs://bucket/path or az://container/path
    max_bytes: Count = 64 * 1024 * 1024  # of one file, instead of http.max_body_bytes
    max_age: Seconds = 90 * 86400.0  # a URL that was stored less than this long ago is not fetched again


class ImageSettings(Section, frozen=True, kw_only=True):
    """Thumbnails of images among the files."""

    checks = {"thumbs": each(check_size)}

    thumbs: tuple[str, ...] = ()  # the largest width and height of each, such as 120x120
    # An image with more pixels gets no thumbnail. Pillow itself refuses more than 178 million.
    max_pixels: Annotated[int, Meta(ge=1, le=178_000_000)] = 50_000_000


class ClusterSettings(Section, frozen=True, kw_only=True):
    """Runners and Backup Runners."""

    checks = {"coordinator": check_coordinator}
    masks = {"coordinator": mask}

    coordinator: str | None = None  # zookeeper://, redis:// or postgresql://; none: the frontier's own server
    runner: Count = 1  # how many nodes crawl
    backup: CountFromZero = 0  # how many nodes stand by
    session: Timeout = 10.0  # a node without a heartbeat for this long is dead, and a standby takes its slot


class WorkerSettings(Section, frozen=True, kw_only=True):
    """A worker on a shared store: how long it may be silent, and what a run may ask of it."""

    checks = {"proxies": each(check_proxy), "outputs": each(check_shared_output), "metrics_token": check_token}
    masks = {
        "metrics_token": mask_secret,
        "proxies": lambda proxies: tuple(map(mask, proxies)),
        "outputs": lambda outputs: tuple(map(mask, outputs)),
    }

    metrics_token: str | None = None  # that /metrics of --metrics-port needs; /health needs none
    session: Timeout = 15.0  # a worker without a heartbeat for this long is dead, and its pages go to others
    proxies: tuple[str, ...] = ()  # that requests of a run may use, in addition to http.proxy
    # Databases and object storage that a run may write to: postgresql://host/db, s3://bucket/path. Empty: any database.
    outputs: tuple[str, ...] = ()


class IdentitySettings(Section, frozen=True, kw_only=True):
    """How the proxies in `proxies` are assigned to hosts, rest and are removed."""

    checks = {"headers": each(check_headers)}
    masks = {"headers": lambda sets: tuple(map(mask_headers, sets))}

    hold: Timeout = 600.0  # how long an identity is assigned to a host, unless it is blocked before
    rest: Timeout = 60.0  # how long an identity rests on a host that blocked it; doubles with each block in a row
    max_rest: Timeout = 3600.0  # the longest rest, also if the host asks for a longer one
    give_up_after: Count = 8  # blocks in a row after which an identity is not used for a host for a day
    max_blocks: CountFromZero = 5  # blocks and failed proxies of a page that cost it no attempt
    max_failures: Count = 3  # in a row; an identity with so many of them
    remove_after: Seconds = 30.0  # over so many seconds is removed
    headers: tuple[dict[str, str], ...] = ()  # sets of headers; each identity gets one of them, in turn


class BrowserSettings(Section, frozen=True, kw_only=True):
    """How pages are rendered in Chromium (`Request(url, render=True)`)."""

    checks = {"public_networks": each(check_network)}

    executable: str | None = None  # of Chromium; none: the one of Playwright, or of the system
    sandbox: bool = True  # Chromium's own sandbox; it cannot start as root
    max_pages: Count = 4  # rendered at the same time in one worker
    page_timeout: Timeout = 30.0  # one page, from its navigation to its result
    settle: Timeout = 10.0  # how long a page without `wait_for` may load, make requests or stay empty; then it is taken
    block: tuple[Literal["image", "media", "font"], ...] = ("image", "media", "font")  # not loaded
    block_urls: tuple[str, ...] = ()  # patterns with * of URLs that are not loaded, such as *://*.tracker.example/*
    max_requests: Count = 500  # of one page
    max_bytes: Count = 64 * 1024 * 1024  # of one page with everything that it loads
    max_memory: Count = 1024**3  # bytes of a browser with its processes; beyond it, a new one replaces it
    recycle_pages: Count = 500  # a browser is replaced after so many pages
    recycle_after: Timeout = 3600.0  # seconds; a browser is replaced after this time
    downloads: Literal["refuse", "save"] = "refuse"  # save: as the body of the response
    public_networks: tuple[str, ...] = ()  # that count as public: pages from public addresses may reach them


class TorSettings(Section, frozen=True, kw_only=True):
    """Pages through Tor (`--tor`). Each worker process starts a daemon of its own."""

    checks = {"url": check_tor}

    enabled: bool = False  # send every page of a run through Tor
    url: str | None = None  # a daemon that runs already, such as socks5://127.0.0.1:9050; none: start one
    executable: Text | None = None  # the program; none: `tor` in PATH
    torrc: Text | None = None  # a file with more lines for the daemon's configuration, such as bridges
    bootstrap_timeout: Timeout = 180.0  # for the daemon to connect to the Tor network
    probe_timeout: Timeout = 15.0  # a daemon that does not answer for this long is replaced
    connect_timeout: Timeout = 60.0  # instead of http.connect_timeout: a circuit takes long
    pages_per_circuit: Count | None = None  # a host gets another circuit after so many pages; none: Tor decides
    renew_statuses: tuple[Status, ...] = (403, 429)  # a host that answers with one of them gets another circuit


class ServerSettings(Section, frozen=True, kw_only=True):
    """The HTTP API."""

    checks = {"allow": each(check_network), "tokens": check_tokens, "trusted_proxies": each(check_network)}
    masks = {
        "token": mask_secret,
        "tokens": lambda tokens: dict.fromkeys(tokens, "***"),
        "webhook_key": mask_secret,
    }

    host: Text = "127.0.0.1"  # any other address requires a token
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000  # 0 picks a free port
    token: str | None = None  # that every request must send
    tokens: dict[str, str] = {}  # one for each caller, by name; each caller of batches gets a fair share
    roles: dict[str, Literal["batch", "viewer", "operator", "admin"]] = {}  # of named tokens; others are for batches
    trusted_proxies: tuple[str, ...] = ()  # networks whose X-Forwarded-For and X-Forwarded-Proto are believed
    allow: tuple[str, ...] = ()  # private networks that may be crawled, such as 10.0.0.0/8
    render: bool = True  # callers may have pages rendered, if Chromium is installed
    max_in_flight: Count = 64  # pages being fetched, over all sessions
    max_urls: Count = 10_000  # in one batch
    max_request_bytes: Count = 8 * 1024 * 1024  # in the body of one request
    request_timeout: Timeout = 30.0  # for a request to arrive completely; and how long a client may stop reading
    max_connections: Count = 1000  # open at the same time; half of them from one address
    max_answer_bytes: Count = 64 * 1024 * 1024  # of results in one answer
    max_session_bytes: Count = 1024**3  # of results in one session; beyond it, its other pages fail
    max_kept_bytes: Count = 4 * 1024**3  # of results with a frontier in memory; beyond it, the server refuses batches
    max_body_memory: Count = 48 * 1024 * 1024  # of large pages that are handled at the same time; others wait
    max_tree_memory: Count = 128 * 1024 * 1024  # for parsing one page; a page that needs more fails
    max_memory_bytes: Count = 64 * 1024 * 1024  # of them that are in memory; the others are in temporary files
    max_sessions: Count = 200  # running at the same time
    max_sessions_per_caller: Count = 100  # running at the same time
    keep_results: Timeout = 3600.0  # how long the results of a session stay available
    max_block: Timeout = 60.0  # how long an answer to one caller keeps the others from a host
    webhook_key: str | None = None  # signs the messages for callers that set no key of their own


class Config(Section, frozen=True, kw_only=True):
    """All settings of a run. A dotted key names one of them: ``concurrency``, ``http.proxy``.

    A program that passes a Config to a crawl has the last word about the values that were set in it, also if they are
    the defaults. The other ones come from the environment, the file and the spider.
    """

    checks = {
        "frontier": check_frontier,
        "user_agent": check_one_line,
        "contact": check_contact,
        "proxies": check_proxy_list,
    }
    masks = {"frontier": mask, "proxies": lambda proxies: tuple(map(mask, proxies))}
    aliases = {  # the names in Scrapy and in other crawlers
        name: key
        for key, names in {
            "throttle.enabled": "autothrottle_enabled",
            "throttle.max_delay": "autothrottle_max_delay",
            "scope.max_items": "closespider_itemcount",
            "scope.max_pages": "closespider_pagecount",
            "scope.max_seconds": "closespider_timeout",
            "concurrency": "concurrent_requests",
            "concurrency_per_host": "concurrent_requests_per_domain",
            "cookies": "cookies_enabled",
            "http.headers": "default_request_headers",
            "scope.max_depth": "depth_limit",
            "frontier": "dupefilter_class filter_class filter_type job_dir jobdir "
            "queue_type redis_host redis_port redis_password redis_url scheduler",
            "retry.max_attempts": "max_retry_times retry_times",
            "project_name": "project",
            "mode": "run_mode",
            "queue.max_size": "scheduler_max_queue_size",
            "dns.deadline": "dns_timeout",
            "http.max_body_bytes": "download_maxsize",
            "http.total_timeout": "download_timeout",
            "files.max_age": "files_expires images_expires",
            "files.store": "files_store images_store",
            "images.thumbs": "images_thumbs",
            "cache.folder": "httpcache_dir",
            "cache.enabled": "httpcache_enabled",
            "cache.ttl": "httpcache_expiration_secs",
            "proxies": "proxies_file proxy_list rotating_proxy_list rotating_proxy_list_path",
            "http.max_redirects": "redirect_max_times",
            "retry.statuses": "retry_http_codes",
            "robots.obey": "robotstxt_obey",
            "scope.max_url_length": "urllength_limit",
        }.items()
        for name in names.split()
    }

    elsewhere = {  # what is not a setting here
        "custom_settings": "settings of a spider are in its attribute `settings`",
        "downloader_middlewares": "list them in the spider's attribute `middlewares`",
        "extensions": "use a pipeline or a middleware",
        "feeds": "name the output with -o FILE, or in the spider's attribute `outputs`",
        "item_pipelines": "list them in the spider's attribute `pipelines`",
        "pipelines": "list them in the spider's attribute `pipelines`",
        "middlewares": "list them in the spider's attribute `middlewares`",
        "spider_middlewares": "use a pipeline or a middleware",
        "spider_modules": "list spiders in shoal.toml: [spiders.NAME]",
    }

    project_name: Text = "shoal"  # groups the runs of one project
    mode: Literal["standalone", "distributed"] = "standalone"  # one process, or a fleet with a shared frontier
    frontier: str = "memory:"  # or sqlite:///file, redis://, rediss://, postgresql://
    # When starting a crawl begins a new run: only with --new-run, also after a finished run, or always.
    new_run: NewRunPolicy = "never"
    concurrency: Count = 32  # requests in flight in one worker
    concurrency_per_host: Count = 8  # requests in flight to one host, over all workers
    # From the end of one fetch to the start of the next on the same host. With a delay, a host has one request in
    # flight. With 0 it has up to concurrency_per_host.
    download_delay: Seconds = 0.5
    weight: Weight = 1.0  # share of the turns at a host that other runs on the same frontier want too
    user_agent: Text = USER_AGENT  # robots.txt rules for this name apply
    contact: str | None = None  # a URL that the user agent shows to the owners of sites
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"  # the lowest level that is logged
    cookies: bool = True  # store cookies and send them back
    shutdown_grace: Seconds = 10.0  # for requests in flight to finish at shutdown
    # Proxies (http://, https:// or socks5://). Each host is assigned one of them. @FILE has one in each line.
    proxies: tuple[str, ...] = ()
    scope: ScopeSettings = ScopeSettings()
    http: HttpSettings = HttpSettings()
    dns: DnsSettings = DnsSettings()
    identities: IdentitySettings = IdentitySettings()
    browser: BrowserSettings = BrowserSettings()
    tor: TorSettings = TorSettings()
    robots: RobotsSettings = RobotsSettings()
    retry: RetrySettings = RetrySettings()
    throttle: ThrottleSettings = ThrottleSettings()
    login: LoginSettings = LoginSettings()
    outcome: OutcomeSettings = OutcomeSettings()
    cache: CacheSettings = CacheSettings()
    warc: WarcSettings = WarcSettings()
    lease: LeaseSettings = LeaseSettings()
    queue: QueueSettings = QueueSettings()
    items: ItemSettings = ItemSettings()
    files: FileSettings = FileSettings()
    images: ImageSettings = ImageSettings()
    cluster: ClusterSettings = ClusterSettings()
    worker: WorkerSettings = WorkerSettings()
    serve: ServerSettings = ServerSettings()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.mode == "distributed" and frontier_kind(self.frontier) in UNUSABLE[self.mode]:
            raise ConfigError(
                f'"mode" is "distributed", but a fleet cannot share the frontier "{self.frontier}"; '
                'set "frontier" to redis://host:port/number or postgresql://host/database'
            )
        if self.proxies and self.http.proxy is not None:
            raise ConfigError(
                '"proxies" and "http.proxy" contradict each other: pages go through several proxies, or all through '
                "one. Remove one of the settings"
            )
        if self.queue.overflow == "refuse" and self.queue.max_size is None:
            raise ConfigError('"queue.overflow" is "refuse", but the queue has no maximum; set "queue.max_size"')
        if self.tor.enabled and (self.http.proxy is not None or self.proxies):
            key = "proxies" if self.proxies else "http.proxy"
            raise ConfigError(
                f'"{key}" and "tor.enabled" contradict each other: pages go through one of them. Remove one'
            )

    @property
    def sent_user_agent(self) -> str:
        """The header that sites see. Tor is for those who do not want to be known."""
        return f"{self.user_agent} (+{self.contact})" if self.contact and not self.tor.enabled else self.user_agent

    @classmethod
    def standalone(
        cls,
        *,
        queue_type: str | None = None,
        filter_type: str | None = None,
        max_queue_size: int | None = None,
        **settings: object,
    ) -> Config:
        """Configure one process with its queue in memory, or in a file: ``frontier="sqlite:///crawl.db"``.

        ``settings`` are keys of Config: ``concurrency=10``, ``http={"proxy": ...}``. ``queue_type`` and
        ``filter_type`` are optional; if given, they must equal the kind of the frontier, such as "memory".
        """
        settings.setdefault("frontier", "memory:")
        return _of_mode("standalone", queue_type, filter_type, max_queue_size, settings)

    @classmethod
    def distributed(
        cls,
        *,
        redis_host: str | None = None,
        redis_port: int | None = None,
        redis_password: str | None = None,
        redis_db: int | None = None,
        queue_type: str | None = None,
        filter_type: str | None = None,
        max_queue_size: int | None = None,
        **settings: object,
    ) -> Config:
        """Configure a fleet whose frontier is in Redis, or in PostgreSQL: ``frontier="postgresql://..."``.

        If no server is given, a crawl uses the one that its other settings name, or else Redis on this machine. With
        ``queue_type="redis"``, only a Redis server counts. The other arguments are those of ``standalone``.
        """
        server: dict[str, Any] = {"host": redis_host, "port": redis_port, "password": redis_password, "db": redis_db}
        server = {name: value for name, value in server.items() if value is not None}
        if "frontier" in settings and server:
            raise ConfigError("give either frontier or redis_host, redis_port, redis_password and redis_db, not both")
        is_named = bool(server) or "frontier" in settings
        settings.setdefault("frontier", redis_url(**server))
        config = _of_mode("distributed", queue_type, filter_type, max_queue_size, settings)
        if not is_named:
            wants_redis = {ANY_REDIS} if "redis" in (queue_type, filter_type) else set()
            unmark_explicit(config, "frontier", wants_redis)
        return config

    def refuse_tor(self, what: str) -> None:
        """ConfigError if pages should go through Tor: ``what`` would send them past it."""
        if self.tor.enabled:
            raise ConfigError(
                f'"tor.enabled" is set, but {what} cannot send pages through Tor. `shoal run`, `crawl`, `worker` and '
                "`node` can. Remove the setting here, so that you know which way the pages go"
            )

    def with_settings(self, settings: Mapping[str, object]) -> Config:
        """Return a copy with these settings changed. Keys are dotted or nested. ConfigError lists every problem."""
        values, problems = read_settings(Config, settings)
        if problems:
            raise ConfigError("\n".join(problems))
        return changed(self, values)


def _of_mode(
    mode: str, queue_type: str | None, filter_type: str | None, max_size: int | None, settings: dict[str, object]
) -> Config:
    other = "distributed" if mode == "standalone" else "standalone"
    for what, kind in (("queue_type", queue_type), ("a frontier of the kind", frontier_kind(settings["frontier"]))):
        if kind in UNUSABLE[mode]:
            raise ConfigError(f'Config.{mode} does not support {what} "{kind}"; use Config.{other}')
    if settings.setdefault("mode", mode) != mode:
        raise ConfigError(f'"mode" is always "{mode}" here; remove it')
    if max_size is not None:
        settings["queue.max_size"] = max_size
    config = Config().with_settings(settings)
    kind = frontier_kind(config.frontier)
    if queue_type not in (None, kind):
        raise ConfigError(
            f'queue_type "{queue_type}" does not match the frontier "{mask(config.frontier)}"; '
            'set "frontier" to a URL of that kind, such as sqlite:///crawl.db or postgresql://host/database'
        )
    if filter_type not in (None, kind):
        raise ConfigError(
            f'filter_type "{filter_type}" does not match queue_type "{kind}": '
            "seen and queued requests are in the same store; remove filter_type"
        )
    return config


def redis_url(host: str = "127.0.0.1", port: int = 6379, password: str | None = None, db: int = 0) -> str:
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{secret}{f'[{host}]' if ':' in host else host}:{port}/{db}"
