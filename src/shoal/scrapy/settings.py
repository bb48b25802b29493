"""Settings, as Scrapy has them: values by name, each with a priority and with the place that set it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, Self

from shoal.scrapy.values import Given, Values

SETTINGS_PRIORITIES = {"default": 0, "command": 10, "addon": 15, "project": 20, "spider": 30, "cmdline": 40}

DEFAULTS: Values = {
    "ADDONS": {}, "AUTOTHROTTLE_ENABLED": False, "AUTOTHROTTLE_DEBUG": False, "AUTOTHROTTLE_MAX_DELAY": 60.0,
    "AUTOTHROTTLE_START_DELAY": 5.0, "AUTOTHROTTLE_TARGET_CONCURRENCY": 1.0, "BOT_NAME": "scrapybot",
    "CLOSESPIDER_ERRORCOUNT": 0, "CLOSESPIDER_ITEMCOUNT": 0, "CLOSESPIDER_PAGECOUNT": 0, "CLOSESPIDER_TIMEOUT": 0.0,
    "CONCURRENT_ITEMS": 100, "CONCURRENT_REQUESTS": 16, "CONCURRENT_REQUESTS_PER_DOMAIN": 8,
    "CONCURRENT_REQUESTS_PER_IP": 0, "COOKIES_ENABLED": True, "COOKIES_DEBUG": False, "CRAWLSPIDER_FOLLOW_LINKS": True,
    "DEFAULT_ITEM_CLASS": "scrapy.item.Item",
    "DEFAULT_REQUEST_HEADERS": {
        "Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
        "Accept-Language": "en",
    },
    "DEPTH_LIMIT": 0, "DEPTH_PRIORITY": 0, "DEPTH_STATS_VERBOSE": False, "DNS_TIMEOUT": 60, "DOWNLOAD_DELAY": 0,
    "DOWNLOAD_MAXSIZE": 1024 * 1024 * 1024, "DOWNLOAD_WARNSIZE": 32 * 1024 * 1024, "DOWNLOAD_TIMEOUT": 180,
    "DOWNLOADER_MIDDLEWARES": {}, "DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter", "DUPEFILTER_DEBUG": False,
    "EXTENSIONS": {}, "FEEDS": {}, "FEED_EXPORT_ENCODING": None, "FEED_EXPORT_FIELDS": None, "FEED_EXPORT_INDENT": 0,
    "FEED_FORMAT": "jsonlines", "FEED_URI": None, "FILES_STORE": None, "HTTPAUTH_USER": "", "HTTPAUTH_PASS": "",
    "HTTPCACHE_DIR": "httpcache", "HTTPCACHE_ENABLED": False, "HTTPCACHE_EXPIRATION_SECS": 0,
    "HTTPERROR_ALLOWED_CODES": [], "HTTPERROR_ALLOW_ALL": False, "HTTPPROXY_ENABLED": True, "IMAGES_STORE": None,
    "ITEM_PIPELINES": {}, "JOBDIR": None, "LOG_ENABLED": True, "LOG_FILE": None, "LOG_LEVEL": "DEBUG",
    "LOG_FORMAT": "%(asctime)s [%(name)s] %(levelname)s: %(message)s", "LOG_DATEFORMAT": "%Y-%m-%d %H:%M:%S",
    "MEMUSAGE_ENABLED": True, "METAREFRESH_ENABLED": True, "METAREFRESH_MAXDELAY": 100, "NEWSPIDER_MODULE": "",
    "RANDOMIZE_DOWNLOAD_DELAY": True, "REDIRECT_ENABLED": True, "REDIRECT_MAX_TIMES": 20,
    "REDIRECT_PRIORITY_ADJUST": 2, "REFERER_ENABLED": True, "RETRY_ENABLED": True, "RETRY_TIMES": 2,
    "RETRY_HTTP_CODES": [500, 502, 503, 504, 522, 524, 408, 429], "RETRY_PRIORITY_ADJUST": -1,
    "ROBOTSTXT_OBEY": False, "SPIDER_MIDDLEWARES": {}, "SPIDER_MODULES": [], "STATS_DUMP": True,
    "TELNETCONSOLE_ENABLED": True, "URLLENGTH_LIMIT": 2083, "USER_AGENT": None,
}  # fmt: skip
"""The defaults of Scrapy, for the settings that Shoal translates and for those that spiders read most."""


class BaseSettings(MutableMapping[str, Any]):
    """A mapping of settings. A value replaces another one if its priority is at least as high."""

    def __init__(self, values: Mapping[str, object] | str | None = None, priority: int | str = "project") -> None:
        self._values: dict[str, tuple[Any, int]] = {}
        self._sources: dict[str, str] = {}
        self.frozen = False
        if values:
            self.update(values, priority)

    def __getitem__(self, name: str) -> Any:
        setting = self._values.get(name)
        return None if setting is None else setting[0]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, name: str, value: object) -> None:
        self.set(name, value)

    def __delitem__(self, name: str) -> None:
        self._check_frozen()
        del self._values[name]

    def get(self, name: str, default: object = None) -> Any:
        value = self[name]
        return default if value is None else value

    def getbool(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if value in ("True", "true"):
            return True
        if value in ("False", "false"):
            return False
        try:
            return bool(int(value))
        except (TypeError, ValueError):
            raise ValueError(
                "Supported values for boolean settings are 0/1, True/False, '0'/'1', 'True'/'False' and 'true'/'false'"
            ) from None

    def getint(self, name: str, default: int = 0) -> int:
        return int(self.get(name, default))

    def getfloat(self, name: str, default: float = 0.0) -> float:
        return float(self.get(name, default))

    def getlist(self, name: str, default: list[Any] | None = None) -> list[Any]:
        value = self.get(name, default or [])
        return value.split(",") if isinstance(value, str) and value else list(value)

    def getdict(self, name: str, default: dict[Any, Any] | None = None) -> dict[Any, Any]:
        value = self.get(name, default or {})
        return dict(json.loads(value) if isinstance(value, str) else value)

    def getdictorlist(self, name: str, default: object = None) -> dict[Any, Any] | list[Any]:
        value = self.get(name, default)
        if value is None:
            return {}
        if isinstance(value, str):
            try:
                decoded: dict[Any, Any] | list[Any] = json.loads(value)
            except ValueError:
                decoded = value.split(",")
        else:
            decoded = copy.deepcopy(value)
        return decoded

    def getwithbase(self, name: str) -> BaseSettings:
        """The value of a setting that is a mapping. Shoal has no base components to add."""
        return BaseSettings(self.getdict(name), "default")

    def getpriority(self, name: str) -> int | None:
        setting = self._values.get(name)
        return None if setting is None else setting[1]

    def maxpriority(self) -> int:
        return max((priority for _, priority in self._values.values()), default=0)

    def source(self, name: str) -> str:
        """Where this value was set; empty for a default."""
        return self._sources.get(name, "")

    def set(self, name: str, value: object, priority: int | str = "project", source: str = "") -> None:
        self._check_frozen()
        level = SETTINGS_PRIORITIES[priority] if isinstance(priority, str) else priority
        setting = self._values.get(name)
        if setting is None or level >= setting[1]:
            self._values[name] = (value, level)
            self._sources[name] = source or (priority if isinstance(priority, str) and priority != "default" else "")

    def setdefault(self, name: str, default: object = None, priority: int | str = "project") -> Any:
        if name not in self._values:
            self.set(name, default, priority)
        return self[name]

    def setdict(self, values: Mapping[str, object] | str, priority: int | str = "project", source: str = "") -> None:
        decoded: Mapping[str, object] = json.loads(values) if isinstance(values, str) else values
        for name, value in decoded.items():
            level = priority
            if isinstance(decoded, BaseSettings):
                level = decoded.getpriority(name) or 0
                source = decoded.source(name)
            self.set(name, value, level, source)

    def update(self, values: Given | str, priority: int | str = "project") -> None:  # type: ignore[override]
        self.setdict(values, priority)

    def setmodule(self, module: ModuleType | str, priority: int | str = "project", source: str = "") -> None:
        """Set every name of a module that is written in capitals."""
        if isinstance(module, str):
            from importlib import import_module

            module = import_module(module)
        for name in dir(module):
            if name.isupper():
                self.set(name, getattr(module, name), priority, source)

    def add_to_list(self, name: str, item: object) -> None:
        values = self.getlist(name)
        if item not in values:
            self.set(name, [*values, item], self.getpriority(name) or 0)

    def copy(self) -> Self:
        return copy.deepcopy(self)

    def freeze(self) -> None:
        self.frozen = True

    def frozencopy(self) -> Self:
        settings = self.copy()
        settings.freeze()
        return settings

    def copy_to_dict(self) -> Values:
        return {name: value for name, (value, _) in self._values.items()}

    def _check_frozen(self) -> None:
        if self.frozen:
            raise TypeError("Trying to modify an immutable Settings object")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} values>"


class Settings(BaseSettings):
    """Settings that begin with Scrapy's defaults."""

    def __init__(self, values: Mapping[str, object] | str | None = None, priority: int | str = "project") -> None:
        super().__init__(copy.deepcopy(DEFAULTS), "default")
        if values:
            self.update(values, priority)


def iter_default_settings() -> Iterable[tuple[str, object]]:
    return DEFAULTS.items()
