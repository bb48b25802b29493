"""``Config``: the root of all settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlsplit

from shoal.config.checks import check_contact, check_frontier, check_one_line, check_proxy_list, frontier_kind, mask
from shoal.config.layers import Section, changed, read_settings, unmark_explicit
from shoal.config.sections import (
    USER_AGENT,
    BrowserSettings,
    CacheSettings,
    ClusterSettings,
    Count,
    DnsSettings,
    FileSettings,
    HttpSettings,
    IdentitySettings,
    ImageSettings,
    ItemSettings,
    LeaseSettings,
    LoginSettings,
    OutcomeSettings,
    QueueSettings,
    RetrySettings,
    RobotsSettings,
    ScopeSettings,
    Seconds,
    ServerSettings,
    Text,
    ThrottleSettings,
    TorSettings,
    WarcSettings,
    Weight,
    WorkerSettings,
)
from shoal.errors import ConfigError

# Settings under the names of other crawlers: a file or the environment may use them.
#
# ``QUEUE_TYPE`` and ``FILTER_TYPE`` choose the frontier, ``SCHEDULER_MAX_QUEUE_SIZE`` is ``queue.max_size``, and
# ``REDIS_HOST`` and the others name the Redis server of a frontier without a URL.


REDIS_VARIABLES = ("REDIS_HOST", "REDIS_PORT", "REDIS_PASSWORD", "REDIS_DB")
OTHER_NAMES = ("QUEUE_TYPE", "FILTER_TYPE", "SCHEDULER_MAX_QUEUE_SIZE", *REDIS_VARIABLES)


def redis_url(host: str = "127.0.0.1", port: int = 6379, password: str | None = None, db: int = 0) -> str:
    secret = f":{quote(password, safe='')}@" if password else ""
    return f"redis://{secret}{f'[{host}]' if ':' in host else host}:{port}/{db}"


def redis_from_environ(environ: Mapping[str, str]) -> str:
    """The URL that the variables give; what is not set has its default.

    In Kubernetes, a service named ``redis`` sets REDIS_PORT to ``tcp://10.0.0.1:6379``.
    """
    host, port = environ.get("REDIS_HOST", ""), environ.get("REDIS_PORT", "")
    if port.startswith("tcp://"):
        try:
            service = urlsplit(port)
            host, port = host or service.hostname or "", str(service.port or "")
        except ValueError:
            raise ConfigError(f'REDIS_PORT must be a port or "tcp://host:port", not {port!r}') from None
    password, db = environ.get("REDIS_PASSWORD") or None, environ.get("REDIS_DB", "")
    return redis_url(host or "127.0.0.1", _number("REDIS_PORT", port, 6379), password, _number("REDIS_DB", db, 0))


def _number(name: str, text: str, default: int) -> int:
    if text and not (text.isdecimal() and len(text) < 6):
        raise ConfigError(f"{name} must be a whole number, not {text!r}")
    return int(text) if text else default


def own_names(
    renamed: Mapping[str, object], layer: Mapping[str, object], redis: Mapping[str, str]
) -> dict[str, tuple[str, object]]:
    """The settings that `OTHER_NAMES` of one layer set: by dotted key, the other name and the value.

    ``layer``: its settings under their own names. ``redis``: the `REDIS_VARIABLES` in force. ConfigError names what
    contradicts each other.
    """
    settings: dict[str, tuple[str, object]] = {}
    if "SCHEDULER_MAX_QUEUE_SIZE" in renamed:
        table, size = layer.get("queue"), renamed["SCHEDULER_MAX_QUEUE_SIZE"]
        own = table.get("max_size") if isinstance(table, Mapping) else layer.get("queue.max_size")
        if own not in (None, size):
            raise ConfigError(
                f'SCHEDULER_MAX_QUEUE_SIZE {size} and "queue.max_size" {own} contradict each other. Remove one of them'
            )
        if own is None:
            settings["queue.max_size"] = ("SCHEDULER_MAX_QUEUE_SIZE", size)
    frontier = layer.get("frontier")
    kinds = {name: str(renamed[name]).lower() for name in ("QUEUE_TYPE", "FILTER_TYPE") if name in renamed}
    if len(set(kinds.values())) > 1:
        words = " and ".join(f'{name} "{kind}"' for name, kind in kinds.items())
        raise ConfigError(f"{words} contradict each other: seen and queued URLs are in one store. Set only QUEUE_TYPE")
    for name, kind in kinds.items():
        if frontier is not None:
            if frontier_kind(frontier) != kind:
                raise ConfigError(
                    f'{name} "{kind}" contradicts the frontier "{mask(str(frontier))}". Remove one of them'
                )
        elif kind in ("memory", "redis"):
            settings["frontier"] = (name, "memory:" if kind == "memory" else redis_from_environ(redis))
        else:
            url = {"sqlite": "sqlite:///file.db", "postgresql": "postgresql://host/database"}.get(kind)
            hint = f"name the frontier instead: {url}" if url else "use memory or redis"
            raise ConfigError(f'{name} "{kind}" does not say where the queue is; {hint}')
    return settings


ANY_REDIS = "any redis"
"""Recorded for a Config that wants a frontier in Redis, but names no server."""

UNUSABLE = {"standalone": ("redis", "postgresql"), "distributed": ("memory", "sqlite")}
"""By mode, the kinds of frontiers that it cannot use."""

NewRunPolicy: TypeAlias = Literal["never", "after_finish", "always"]


class Config(Section, frozen=True, kw_only=True):
    """All settings of a run. A dotted key names one of them: ``concurrency``, ``http.proxy``.

    A program that passes a Config to a crawl has the last word about the values that were set in it, also if they are
    the defaults. The other ones come from the environment, the file and the spider.
    """

    checks = {
        "frontier": check_frontier, "user_agent": check_one_line, "contact": check_contact, "proxies": check_proxy_list,
    }  # fmt: skip
    masks = {"frontier": mask, "proxies": lambda proxies: tuple(map(mask, proxies))}
    aliases = {  # the names in Scrapy and in other crawlers
        "autothrottle_enabled": "throttle.enabled",
        "autothrottle_max_delay": "throttle.max_delay",
        "closespider_itemcount": "scope.max_items",
        "closespider_pagecount": "scope.max_pages",
        "closespider_timeout": "scope.max_seconds",
        "concurrent_requests": "concurrency",
        "concurrent_requests_per_domain": "concurrency_per_host",
        "cookies_enabled": "cookies",
        "default_request_headers": "http.headers",
        "depth_limit": "scope.max_depth",
        "dupefilter_class": "frontier",
        "filter_class": "frontier",
        "filter_type": "frontier",
        "job_dir": "frontier",
        "jobdir": "frontier",
        "max_retry_times": "retry.max_attempts",
        "project": "project_name",
        "queue_type": "frontier",
        "redis_host": "frontier",
        "redis_port": "frontier",
        "redis_password": "frontier",
        "redis_url": "frontier",
        "run_mode": "mode",
        "scheduler": "frontier",
        "scheduler_max_queue_size": "queue.max_size",
        "dns_timeout": "dns.deadline",
        "download_maxsize": "http.max_body_bytes",
        "download_timeout": "http.total_timeout",
        "files_expires": "files.max_age",
        "files_store": "files.store",
        "images_expires": "files.max_age",
        "images_store": "files.store",
        "images_thumbs": "images.thumbs",
        "httpcache_dir": "cache.folder",
        "httpcache_enabled": "cache.enabled",
        "httpcache_expiration_secs": "cache.ttl",
        "proxies_file": "proxies",
        "proxy_list": "proxies",
        "rotating_proxy_list": "proxies",
        "rotating_proxy_list_path": "proxies",
        "redirect_max_times": "http.max_redirects",
        "retry_http_codes": "retry.statuses",
        "retry_times": "retry.max_attempts",
        "robotstxt_obey": "robots.obey",
        "urllength_limit": "scope.max_url_length",
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
