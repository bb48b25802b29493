"""Options that several commands share, and the settings they lead to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import ascii_letters
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Struct

from shoal.cli.help import argument, option
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config import Resolved
    from shoal.runs.orchestrator import Entry
    from shoal.spider import Spider

SpiderName = Annotated[str, argument("SPIDER", "FILE.py, FILE.py:Class, or a name from shoal.toml.")]
RunOrInProject = Annotated[
    str | None,
    argument(
        "[RUN]",
        "The ID of the run; or pass --run-id RUN. With --scrapy: the spider, if SPIDER is a project.",
        show_default=False,
    ),
]
InProject = Annotated[
    str | None,
    argument("[NAME]", "With --scrapy: the spider, if SPIDER is the folder of a project.", show_default=False),
]
OneRun = Annotated[str, argument("RUN", "The ID of the run, from `shoal runs`; or pass --run-id RUN.")]
NewestRun = Annotated[
    str | None, argument("RUN", "The ID of the run (default: the newest); or pass --run-id RUN.", show_default=False)
]
RunOption = Annotated[str | None, option("--run-id ID", "The ID of the run (default: the newest).")]
FrontierUrl = Annotated[
    str | None,
    option(
        "--frontier URL",
        "The store of URLs: memory: (default), sqlite:///file.db, redis://host or postgresql://host/db.",
    ),
]
Argument = Annotated[list[str], option("-a, --argument KEY=VALUE", "Pass an argument to the spider. Repeatable.")]
Setting = Annotated[list[str], option("--set KEY=VALUE", "Change a setting; `shoal config` lists them. Repeatable.")]
Delay = Annotated[float | None, option("--delay SECONDS", "Wait between two fetches from one host (default 0.5).")]
Concurrency = Annotated[int | None, option("--concurrency N", "Fetch up to N pages at the same time (default 32).")]
Proxy = Annotated[
    list[str],
    option(
        "--proxy URL",
        "Fetch through this proxy: http://, https:// or socks5://, with user:password@. With several, or with "
        "@FILE, each host gets one of them, and another one when it blocks. Repeatable.",
    ),
]
Replace = Annotated[list[str], option("-O, --replace FILE", "Like -o, but replace a file that another run wrote.")]
Quiet = Annotated[bool, option("-q, --quiet", "Hide progress; show only warnings and the summary.")]
Resume = Annotated[bool, option("--resume", "Resume an unfinished run. This is the default.")]
FailAbove = Annotated[
    str | None,
    option(
        "--fail-above SHARE",
        "Exit with code 5 if more than this share of the pages failed (default 10%). It sets outcome.max_failed.",
    ),
]
BatchSize = Annotated[int | None, option("--batch-size N", "Lease up to N requests at a time (default 50).")]
KeepAlive = Annotated[bool, option("--keep-alive", "Keep running when the run is finished.")]
AllowChanged = Annotated[
    bool, option("--allow-changed", "Work even if the spider's file changed since the run started.")
]
AsJson = Annotated[bool, option("--json", "Print one JSON object per line.")]
Mode = Annotated[
    str | None,
    option(
        "--mode MODE",
        "standalone (default), or distributed: share the frontier in Redis, unless --frontier names another.",
    ),
]
Tor = Annotated[bool, option("--tor", "Send all pages through Tor. Each process starts a Tor daemon of its own.")]
Warc = Annotated[str | None, option("--warc FOLDER", "Write what is sent and received to WARC files in FOLDER.")]
SessionFile = Annotated[
    str | None,
    option(
        "--session FILE",
        "Begin with the cookies of FILE: cookies.txt, or JSON of Playwright or a browser extension. A resumed run "
        "imports the file again only if it has changed.",
    ),
]
NewRun = Annotated[bool, option("--new-run", "Start a new run instead of resuming an unfinished one.")]


class Options(Struct, frozen=True, kw_only=True):
    """Options that several commands share. A command has them as one parameter."""

    def settings(self) -> dict[str, object]:
        """The settings that they set."""
        return settings_of(**{name: getattr(self, name) for name in self.__struct_fields__ if name in _SETTINGS})


class Scrapy(Options, frozen=True, kw_only=True):
    """Whether the spider is one of Scrapy."""

    used: Annotated[bool, option("--scrapy", "SPIDER is a Scrapy spider, or the folder of a Scrapy project.")] = False
    scrapy_settings: Annotated[
        list[str], option("-s NAME=VALUE", "With --scrapy: set a setting of Scrapy. Repeatable.")
    ] = []

    def __bool__(self) -> bool:
        return self.used


class Outputs(Options, frozen=True, kw_only=True):
    """Where items go."""

    output: Annotated[
        list[str],
        option(
            "-o, --output FILE",
            "Write items to FILE.jsonl, .csv, .parquet or .db (SQLite), to postgresql:// or mysql://, "
            "or to standard output (-). Repeatable.",
        ),
    ] = []
    replace: Replace = []

    def specs(self) -> list[str]:
        """The outputs of ``-o`` and ``-O``."""
        for spec in self.replace:
            if not is_replaceable(spec):
                from shoal.config import mask
                from shoal.sinks import sink_id

                sink_id(spec)  # SinkError if it is no output at all
                raise ConfigError(
                    f"-O {mask(spec)}: only .jsonl, .csv and .parquet files of this machine can be replaced, not "
                    "databases, object storage or standard output; use -o"
                )
        return [*self.output, *(f"{spec}{'&' if '?' in spec else '?'}replace=yes" for spec in self.replace)]

    def with_registered(self, entry: Entry | None) -> list[str]:
        """The outputs of the registry and of the command line. If both name the same one, the command line decides
        how."""
        from shoal.sinks import sink_id

        typed = self.specs()
        identities = {sink_id(spec) for spec in typed}
        return [*(spec for spec in (entry.outputs if entry else ()) if sink_id(spec) not in identities), *typed]


class Limits(Options, frozen=True, kw_only=True):
    """When a run ends early."""

    max_items: Annotated[int | None, option("--max-items N", "End the run soon after it has N items.")] = None
    max_time: Annotated[
        str | None, option("--max-time TIME", "End the run after this time: seconds, or such as 30m or 2h.")
    ] = None
    max_bytes: Annotated[
        str | None, option("--max-bytes SIZE", "End the run after so many bytes of pages, such as 500MB.")
    ] = None

    def settings(self) -> dict[str, object]:
        """ConfigError if one has no number, or an unknown unit."""
        seconds, size = _TIME.parse(self.max_time), _BYTES.parse(self.max_bytes)
        return settings_of(max_items=self.max_items, max_time=seconds, max_bytes=size and max(1, round(size)))


class Rendering(Options, frozen=True, kw_only=True):
    """Whether pages are rendered in a browser."""

    render: Annotated[
        bool | None, option("--render/--no-render", "Render all pages in a browser, or none.", show_default=False)
    ] = None
    render_auto: Annotated[bool, option("--render-auto", "Render only the pages whose HTML is an empty shell.")] = False

    def apply(self, spider: Spider) -> None:
        """Override how the spider renders its pages. ConfigError if the command line says two things."""
        if self.render_auto and self.render is not None:
            raise ConfigError("--render-auto contradicts --render and --no-render; pass one of them")
        if self.render_auto:
            spider.render = "auto"
        elif self.render is not None:
            spider.render = self.render


class Crawling(Options, frozen=True, kw_only=True):
    """The queue of a crawl of this machine, the way of its pages, and how it begins."""

    frontier: FrontierUrl = None
    mode: Mode = None
    tor: Tor = False
    proxy: Proxy = []
    warc: Warc = None
    session: SessionFile = None
    setting: Setting = []
    new_run: NewRun = False


class Display(Options, frozen=True, kw_only=True):
    """What a process shows of its work, and where."""

    metrics_port: Annotated[
        str | None,
        option(
            "--metrics-port [ADDRESS:]PORT",
            "Serve /metrics and /health, on this machine unless an address is given. 9100-9109 takes the first "
            "free port, 0 any free port.",
        ),
    ] = None
    ui: Annotated[
        bool,
        option("--ui", "Show the dashboard of this run at http://127.0.0.1:8000 while it works, or at a free port."),
    ] = False
    quiet: Quiet = False


def is_replaceable(spec: str) -> bool:
    """Whether ``-O`` accepts an output: a file, but no database or object storage."""
    return "://" not in spec and spec.partition("?")[0].endswith(
        (".jsonl", ".ndjson", ".jsonlines", ".csv", ".parquet")
    )


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """The ``key=value`` pairs of a repeated option."""
    values = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise ConfigError(f"{option} {text!r}: write it as key=value")
        values[key] = value
    return values


_SETTINGS = {
    "depth": "scope.max_depth",
    "max_pages": "scope.max_pages",
    "delay": "download_delay",
    "concurrency": "concurrency",
    "frontier": "frontier",
    "mode": "mode",
    "tor": "tor.enabled",
    "proxy": "proxies",
    "warc": "warc.folder",
    "fail_above": "outcome.max_failed",
    "max_items": "scope.max_items",
    "max_time": "scope.max_seconds",
    "max_bytes": "scope.max_bytes",
    "batch_size": "lease.batch",
    "log_level": "log_level",
    **{name: f"cluster.{name}" for name in ("coordinator", "runner", "backup")},
    "session_timeout": "cluster.session",
    **{name: f"serve.{name}" for name in ("host", "port", "allow")},
}
"""The settings of options, by the name of their parameter."""
_OPTION_NAMES = {key: f"--{name.replace('_', '-')}" for name, key in _SETTINGS.items()}


def given(**options: object) -> dict[str, object]:
    """Those options that are on the command line."""
    return {name: value for name, value in options.items() if value not in (None, [], {}) and value is not False}


def settings_of(**options: object) -> dict[str, object]:
    """The settings of those options that are on the command line."""
    return {_SETTINGS[name]: value for name, value in given(**options).items()}


def resolve(
    spider: Spider | type[Spider] | None = None, options: Mapping[str, object] = {}, settings: list[str] = []
) -> Resolved:
    """All layers of the configuration, with this command line on top."""
    from shoal.config import find_config_file, load_config

    typed = pairs(settings, "--set")
    return load_config(
        file=find_config_file(os.environ),
        spider=None if spider is None else spider.settings,
        spider_name="" if spider is None else (spider if isinstance(spider, type) else type(spider)).__name__,
        spider_sources=None if spider is None else spider.setting_sources,
        environ=os.environ,
        command_line={**options, **typed},
        options={key: _OPTION_NAMES[key] for key in options if key not in typed},
    )


def starts_anew(new_run: bool, resume: bool) -> bool:
    """Whether to start a new run. ConfigError if both options are given."""
    if new_run and resume:
        raise ConfigError("--resume and --new-run contradict each other; pass one of them")
    return new_run


def share_of(text: str | None) -> float | None:
    """The value of ``--fail-above``: ``10%`` or ``0.1`` as a number from 0 to 1."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--fail-above must be a share such as 10% or 0.1, not {text!r:.80}")
    return share


class _Amount(NamedTuple):
    """How an option is written whose value has a unit."""

    option: str
    description: str
    units: dict[str, int]
    """The first one counts if there is none."""

    def parse(self, text: str | None) -> float | None:
        """``30m`` as seconds, or ``500MB`` as bytes. ConfigError says which units the option takes."""
        if text is None:
            return None
        number = text.strip().rstrip(ascii_letters)
        unit = text.strip().removeprefix(number).lower() or next(iter(self.units))
        try:
            amount = float(number) * self.units[unit]
        except (ValueError, KeyError):
            amount = -1.0
        if not 0 < amount < 1e18:
            raise ConfigError(f"{self.option} must be {self.description}, not {text!r:.80}")
        return amount


_TIME = _Amount(
    "--max-time",
    "a positive number of seconds, or one with s, m, h or d, such as 90, 30m or 2h",
    {"s": 1, "m": 60, "h": 3600, "d": 86400},
)
_BYTES = _Amount(
    "--max-bytes",
    "a positive number of bytes, or one with kB, MB, GB, KiB, MiB or GiB, such as 500MB",
    {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
)


def shown_output(spec: str) -> str:
    """An output as the user named it, without passwords and without what ``-O`` adds."""
    from shoal.config import mask

    return mask(spec).removesuffix("?replace=yes").removesuffix("&replace=yes")
