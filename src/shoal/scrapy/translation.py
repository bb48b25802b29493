"""Translates Scrapy's settings to Shoal's, and finds those that Shoal does not use."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from shoal.errors import ConfigError
from shoal.scrapy.settings import Settings

_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "NOTSET": "DEBUG"}
_NUMBERED_LEVELS = {10: "DEBUG", 20: "INFO", 30: "WARNING", 40: "ERROR", 50: "CRITICAL"}
_ANY_LENGTH = 1 << 30
Convert: TypeAlias = Callable[[Any], object]
"""Makes a value of Shoal's settings from what a project wrote. A wrong value raises TypeError, ValueError or
AttributeError."""


class Translated(Struct):
    """A project's settings as Shoal's."""

    settings: dict[str, object]
    """By dotted key."""
    sources: dict[str, str]
    """By the same key, the setting of Scrapy that it comes from, and where that is set."""
    outputs: list[str]
    notes: list[str]
    """What Shoal does differently, for the log."""
    warnings: list[str] = []
    """The same, if it may surprise."""


def _count(value: str | float) -> object:
    return max(1, int(value))


def _or_none(value: str | float) -> object:
    return int(value) if int(value) > 0 else None


def _statuses(value: str | Iterable[str | int]) -> object:
    members = value.split(",") if isinstance(value, str) else value
    return tuple(sorted({int(status) for status in members}))


def _headers(value: Mapping[object, object] | None) -> object:
    return {_text(name): _text(content) for name, content in dict(value or {}).items() if content is not None}


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _level(value: str | int) -> object:
    if isinstance(value, int):
        return _NUMBERED_LEVELS.get(value, "INFO")
    return _LEVELS.get(str(value).upper(), str(value).upper())


def _bool(value: object) -> object:
    return Settings({"VALUE": value}).getbool("VALUE")


_ALWAYS: dict[str, tuple[str, Convert]] = {
    "DOWNLOAD_DELAY": ("download_delay", float),
    "CONCURRENT_REQUESTS": ("concurrency", _count),
    "CONCURRENT_REQUESTS_PER_DOMAIN": ("concurrency_per_host", _count),
    "ROBOTSTXT_OBEY": ("robots.obey", _bool),
    "RETRY_TIMES": ("retry.max_attempts", lambda value: int(value) + 1),
    "RETRY_HTTP_CODES": ("retry.statuses", _statuses),
    "DOWNLOAD_TIMEOUT": ("http.total_timeout", float),
    "REDIRECT_MAX_TIMES": ("http.max_redirects", int),
    "DEFAULT_REQUEST_HEADERS": ("http.headers", _headers),
    "AUTOTHROTTLE_ENABLED": ("throttle.enabled", _bool),
    "URLLENGTH_LIMIT": ("scope.max_url_length", lambda value: int(value) or _ANY_LENGTH),
}
"""Settings that are used even if nobody sets them: then with Scrapy's default."""
_IF_SET: dict[str, tuple[str, Convert]] = {
    "USER_AGENT": ("user_agent", str),
    "DEPTH_LIMIT": ("scope.max_depth", _or_none),
    "CLOSESPIDER_PAGECOUNT": ("scope.max_pages", _or_none),
    "AUTOTHROTTLE_MAX_DELAY": ("throttle.max_delay", float),
    "HTTPCACHE_ENABLED": ("cache.enabled", _bool),
    "HTTPCACHE_DIR": ("cache.folder", str),
    "HTTPCACHE_EXPIRATION_SECS": ("cache.ttl", lambda value: float(value) or None),
    "DOWNLOAD_MAXSIZE": ("http.max_body_bytes", lambda value: int(value) or 1 << 40),
    "DOWNLOAD_VERIFY_CERTIFICATES": ("http.verify_tls", _bool),
    "LOG_LEVEL": ("log_level", _level),
    "FILES_STORE": ("files.store", str),
    "IMAGES_STORE": ("files.store", str),
    "FILES_EXPIRES": ("files.max_age", lambda value: float(value) * 86400),
    "IMAGES_EXPIRES": ("files.max_age", lambda value: float(value) * 86400),
    "IMAGES_THUMBS": ("images.thumbs", lambda value: tuple(f"{int(w)}x{int(h)}" for w, h in dict(value).values())),
}
"""Settings that are used only if the project or the spider sets them."""

USED_BY_ADAPTER = frozenset(
    {"ITEM_PIPELINES", "DOWNLOADER_MIDDLEWARES", "SPIDER_MIDDLEWARES", "EXTENSIONS", "CLOSESPIDER_ITEMCOUNT",
     "CLOSESPIDER_TIMEOUT", "CLOSESPIDER_ERRORCOUNT", "COOKIES_ENABLED", "RETRY_ENABLED", "REDIRECT_ENABLED",
     "METAREFRESH_ENABLED", "METAREFRESH_MAXDELAY", "HTTPERROR_ALLOWED_CODES", "HTTPERROR_ALLOW_ALL", "DEPTH_PRIORITY",
     "REFERER_ENABLED", "FEEDS", "FEED_URI", "FEED_FORMAT", "FEED_EXPORT_FIELDS", "JOBDIR", "DUPEFILTER_CLASS",
     "CONCURRENT_REQUESTS_PER_IP", "HTTPAUTH_USER", "HTTPAUTH_PASS", "HTTPAUTH_DOMAIN", "RETRY_PRIORITY_ADJUST",
     "FILES_URLS_FIELD", "FILES_RESULT_FIELD", "IMAGES_URLS_FIELD", "IMAGES_RESULT_FIELD",
     "BOT_NAME", "SPIDER_MODULES", "NEWSPIDER_MODULE", "CRAWLSPIDER_FOLLOW_LINKS", "LOG_ENABLED"}
)  # fmt: skip
"""Settings that the adapter uses itself, or that say where the spiders are."""
_NO_FILTER = ("scrapy.dupefilters.BaseDupeFilter", "scrapy.dupefilter.BaseDupeFilter")


def translate(settings: Settings, user_agent: str | None = None) -> Translated:
    """Translate the settings of a spider. ``user_agent`` is the spider's own. ConfigError names a setting with an
    invalid value."""
    translated = Translated({"cookies": False}, {"cookies": "the spider's own jars (COOKIES_ENABLED)"}, [], [])
    for table, needs_value in ((_ALWAYS, False), (_IF_SET, True)):
        for name, (key, convert) in table.items():
            if settings.get(name) is None or (needs_value and not settings.source(name)):
                continue
            _put(translated, settings, name, key, convert)
    if settings.getint("CONCURRENT_REQUESTS_PER_IP"):
        _put(translated, settings, "CONCURRENT_REQUESTS_PER_IP", "concurrency_per_host", _count)
    translated.sources["retry.max_retries"] = translated.sources["retry.max_attempts"]
    if user_agent:
        translated.settings["user_agent"], translated.sources["user_agent"] = user_agent, "user_agent of the spider"
    translated.settings["http.read_timeout"] = translated.settings["http.total_timeout"]
    translated.sources["http.read_timeout"] = translated.sources["http.total_timeout"]
    if settings.get("JOBDIR"):
        translated.settings["frontier"] = f"sqlite:///{os.path.join(str(settings['JOBDIR']), 'shoal.db')}"
        translated.sources["frontier"] = _source(settings, "JOBDIR")
    _translate_feeds(settings, translated)
    if not translated.settings["robots.obey"]:
        translated.notes.append("robots.txt is not obeyed: ROBOTSTXT_OBEY is " + (
            "False" if settings.source("ROBOTSTXT_OBEY") else "not set, which means False in Scrapy"
        ))  # fmt: skip
    return translated


def _put(translated: Translated, settings: Settings, name: str, key: str, convert: Convert) -> None:
    try:
        value = convert(settings[name])
    except (TypeError, ValueError, AttributeError) as exc:
        where = settings.source(name)
        raise ConfigError(f"{name} = {settings[name]!r} is not a valid value ({where}): {exc}") from exc
    translated.settings[key] = value
    translated.sources[key] = _source(settings, name)


def _source(settings: Settings, name: str) -> str:
    where = settings.source(name)
    return f"{name} in {where}" if where else f"{name}, default of Scrapy"


def unused_settings(settings: Settings) -> list[tuple[str, str]]:
    """The settings of the project that Shoal does not use, each with where it is set. The spider can read them from
    ``self.settings``."""
    used = _ALWAYS.keys() | _IF_SET.keys() | USED_BY_ADAPTER
    return [(name, settings.source(name)) for name in settings if settings.source(name) and name not in used]


def filters_nothing(settings: Settings) -> bool:
    """Whether the project has switched off the filter of duplicates."""
    chosen = settings.get("DUPEFILTER_CLASS")
    return chosen in _NO_FILTER or getattr(chosen, "__name__", "") == "BaseDupeFilter"


# -- outputs

_AS_IN_SCRAPY = "formulas=keep"
"""Scrapy writes text to CSV as it is."""


def _translate_feeds(settings: Settings, translated: Translated) -> None:
    feeds = settings.getdict("FEEDS")
    if settings.get("FEED_URI"):
        feeds = {settings["FEED_URI"]: {"format": settings.get("FEED_FORMAT")}, **feeds}
    for uri, options in feeds.items():
        translated.outputs.append(_output(str(uri), dict(options or {}), settings, translated.warnings))


def _output(uri: str, options: Mapping[str, object], settings: Settings, warnings: list[str]) -> str:
    """The output of a feed. ConfigError if Shoal cannot write it."""
    text = _filled(uri, settings)
    if text in ("stdout:", "-"):
        return "-"
    parts = urlsplit(text)
    if len(parts.scheme) > 1 and parts.scheme != "file":
        if Path(parts.path).suffix.lower() != ".csv" or "formulas=" in parts.query:
            return text  # object storage or a database
        return f"{text}{'&' if parts.query else '?'}{_AS_IN_SCRAPY}"
    path = unquote(parts.path) if parts.scheme == "file" else text
    kind = str(options.get("format") or Path(path).suffix.lstrip(".") or "jsonlines").lower()
    if kind in ("json", "jsonlines", "jsonl", "jl", "ndjson"):
        written = (
            path if Path(path).suffix in (".jsonl", ".ndjson", ".jsonlines") else str(Path(path).with_suffix(".jsonl"))
        )
        if written != path:
            warnings.append(f"the feed {path} is written as JSON Lines, so that a crash loses nothing: {written}")
    elif kind in ("csv", "parquet"):
        written = path if Path(path).suffix == f".{kind}" else str(Path(path).with_suffix(f".{kind}"))
    else:
        raise ConfigError(f"FEEDS: Shoal does not write {kind!r} ({uri}): use jsonlines, csv or parquet")
    query = [_AS_IN_SCRAPY] * (kind == "csv") + ["replace=yes"] * (options.get("overwrite") is True)
    return f"{written}?{'&'.join(query)}" if query else written


def _filled(uri: str, settings: Settings) -> str:
    """The URI with the values of ``%(name)s`` and ``%(time)s``."""
    values = {
        "name": settings.get("_SPIDER_NAME") or "",
        "time": datetime.now(UTC).replace(microsecond=0, tzinfo=None).isoformat().replace(":", "-"),
        "batch_time": datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S"),
        "batch_id": "1",
    }

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ConfigError(f"FEEDS: {uri} has %({match[1]}), which Shoal does not know: use name or time")
        return str(values[match[1]])

    return re.sub(r"%\((\w+)\)0?\d*[sd]", value, uri)
