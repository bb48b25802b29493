"""Options that several commands share, and the settings they lead to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

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
Scrapy = Annotated[bool, option("--scrapy", "SPIDER is a Scrapy spider, or the folder of a Scrapy project.")]
ScrapySetting = Annotated[list[str], option("-s NAME=VALUE", "With --scrapy: set a setting of Scrapy. Repeatable.")]
OneRun = Annotated[str, argument("RUN", "The ID of the run, from `shoal runs`; or pass --run-id RUN.")]
NewestRun = Annotated[
    str | None, argument("RUN", "The ID of the run (default: the newest); or pass --run-id RUN.", show_default=False)
]
RunOption = Annotated[str | None, option("--run-id ID", "The ID of the run (default: the newest).")]
Output = Annotated[
    list[str],
    option(
        "-o, --output FILE",
        "Write items to FILE.jsonl, .csv, .parquet or .db (SQLite), to postgresql:// or mysql://, "
        "or to standard output (-). Repeatable.",
    ),
]
Replace = Annotated[list[str], option("-O, --replace FILE", "Like -o, but replace a file that another run wrote.")]
FrontierUrl = Annotated[
    str | None,
    option(
        "--frontier URL",
        "The store of URLs: memory: (default), sqlite:///file.db, redis://host or postgresql://host/db.",
    ),
]
Mode = Annotated[
    str | None,
    option(
        "--mode MODE",
        "standalone (default), or distributed: share the frontier in Redis, unless --frontier names another.",
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
NewRun = Annotated[bool, option("--new-run", "Start a new run instead of resuming an unfinished one.")]
Resume = Annotated[bool, option("--resume", "Resume an unfinished run. This is the default.")]
Tor = Annotated[bool, option("--tor", "Send all pages through Tor. Each process starts a Tor daemon of its own.")]
Warc = Annotated[str | None, option("--warc FOLDER", "Write what is sent and received to WARC files in FOLDER.")]
MaxItems = Annotated[int | None, option("--max-items N", "End the run soon after it has N items.")]
MaxTime = Annotated[
    str | None, option("--max-time TIME", "End the run after this time: seconds, or such as 30m or 2h.")
]
MaxBytes = Annotated[str | None, option("--max-bytes SIZE", "End the run after so many bytes of pages, such as 500MB.")]
SessionFile = Annotated[
    str | None,
    option(
        "--session FILE",
        "Begin with the cookies of FILE: cookies.txt, or JSON of Playwright or a browser extension. A resumed run "
        "imports the file again only if it has changed.",
    ),
]
Quiet = Annotated[bool, option("-q, --quiet", "Hide progress; show only warnings and the summary.")]
FailAbove = Annotated[
    str | None,
    option(
        "--fail-above SHARE",
        "Exit with code 5 if more than this share of the pages failed (default 10%). It sets outcome.max_failed.",
    ),
]
Dashboard = Annotated[
    bool, option("--ui", "Show the dashboard of this run at http://127.0.0.1:8000 while it works, or at a free port.")
]
MetricsPort = Annotated[
    str | None,
    option(
        "--metrics-port [ADDRESS:]PORT",
        "Serve /metrics and /health, on this machine unless an address is given. 9100-9109 takes the first "
        "free port, 0 any free port.",
    ),
]
BatchSize = Annotated[int | None, option("--batch-size N", "Lease up to N requests at a time (default 50).")]
KeepAlive = Annotated[bool, option("--keep-alive", "Keep running when the run is finished.")]
Rendered = Annotated[
    bool | None, option("--render/--no-render", "Render all pages in a browser, or none.", show_default=False)
]
RenderedIfNeeded = Annotated[bool, option("--render-auto", "Render only the pages whose HTML is an empty shell.")]
AllowChanged = Annotated[
    bool, option("--allow-changed", "Work even if the spider's file changed since the run started.")
]
AsJson = Annotated[bool, option("--json", "Print one JSON object per line.")]


def given(options: Mapping[str, object]) -> dict[str, object]:
    """The options that are on the command line."""
    return {key: value for key, value in options.items() if value is not None}


def is_replaceable(spec: str) -> bool:
    """Whether ``-O`` accepts an output: a file, but no database or object storage."""
    return "://" not in spec and spec.partition("?")[0].endswith(
        (".jsonl", ".ndjson", ".jsonlines", ".csv", ".parquet")
    )


def outputs_of(output: list[str], replace: list[str]) -> list[str]:
    """The outputs of ``-o`` and ``-O``."""
    for spec in replace:
        if not is_replaceable(spec):
            from shoal.config import mask
            from shoal.sinks import sink_id

            sink_id(spec)  # SinkError if it is no output at all
            raise ConfigError(
                f"-O {mask(spec)}: only .jsonl, .csv and .parquet files of this machine can be replaced, not "
                "databases, object storage or standard output; use -o"
            )
    return [*output, *(f"{spec}{'&' if '?' in spec else '?'}replace=yes" for spec in replace)]


def all_outputs(entry: Entry | None, output: list[str], replace: list[str]) -> list[str]:
    """The outputs of the registry and of the command line. If both name the same one, the command line decides how."""
    from shoal.sinks import sink_id

    typed = outputs_of(output, replace)
    identities = {sink_id(spec) for spec in typed}
    return [*(spec for spec in (entry.outputs if entry else ()) if sink_id(spec) not in identities), *typed]


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """The ``key=value`` pairs of a repeated option."""
    values = {}
    for text in texts:
        key, mark, value = text.partition("=")
        if not mark or not key:
            raise ConfigError(f"{option} {text!r}: write it as key=value")
        values[key] = value
    return values


_OPTION_NAMES = {
    "download_delay": "--delay",
    "concurrency": "--concurrency",
    "scope.max_pages": "--max-pages",
    "scope.max_items": "--max-items",
    "scope.max_seconds": "--max-time",
    "scope.max_bytes": "--max-bytes",
    "scope.max_depth": "--depth",
    "frontier": "--frontier",
    "proxies": "--proxy",
    "mode": "--mode",
    "lease.batch": "--batch-size",
    "log_level": "--log-level",
    "tor.enabled": "--tor",
    "warc.folder": "--warc",
    "outcome.max_failed": "--fail-above",
    **{f"cluster.{name}": f"--{name}" for name in ("coordinator", "runner", "backup")},
    "cluster.session": "--session-timeout",
    **{f"serve.{name}": f"--{name}" for name in ("host", "port", "allow")},
}


def resolve(spider: Spider | type[Spider] | None, options: Mapping[str, object], settings: list[str]) -> Resolved:
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


def set_rendering(spider: Spider, rendered: bool | None, if_needed: bool) -> None:
    """Override how the spider renders its pages, if the command line says so. ConfigError if it says two things."""
    if if_needed and rendered is not None:
        raise ConfigError("--render-auto contradicts --render and --no-render; pass one of them")
    if if_needed:
        spider.render = "auto"
    elif rendered is not None:
        spider.render = rendered


def starts_anew(new_run: bool, resume: bool) -> bool:
    """Whether to start a new run. ConfigError if both options are given."""
    if new_run and resume:
        raise ConfigError("--resume and --new-run contradict each other; pass one of them")
    return new_run


def share_of(text: str, option: str) -> float:
    """``10%`` or ``0.1`` as a number from 0 to 1."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{option} must be a share such as 10% or 0.1, not {text!r:.80}")
    return share


_UNITS = {
    "--max-time": {"s": 1, "m": 60, "h": 3600, "d": 86400},
    "--max-bytes": {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
}

_AMOUNTS = {
    "--max-time": "a positive number of seconds, or one with s, m, h or d, such as 90, 30m or 2h",
    "--max-bytes": "a positive number of bytes, or one with kB, MB, GB, KiB, MiB or GiB, such as 500MB",
}


def amount_of(text: str, option: str) -> float:
    """``30m`` as seconds, or ``500MB`` as bytes. ConfigError says which units the option takes."""
    number, unit = text.strip(), ""
    while number and number[-1].isalpha():
        number, unit = number[:-1], number[-1] + unit
    try:
        return float(number) * _UNITS[option].get(unit.lower() or next(iter(_UNITS[option])), float("nan"))
    except ValueError:
        return float("nan")


def limits_of(max_items: int | None, max_time: str | None, max_bytes: str | None) -> dict[str, object]:
    """The settings of the options that end a run. ConfigError if one has no number, or an unknown unit."""
    limits: dict[str, object] = {} if max_items is None else {"scope.max_items": max_items}
    for name, text, key in (
        ("--max-time", max_time, "scope.max_seconds"),
        ("--max-bytes", max_bytes, "scope.max_bytes"),
    ):
        if text is not None:
            amount = amount_of(text, name)
            if not 0 < amount < 1e18:
                raise ConfigError(f"{name} must be {_AMOUNTS[name]}, not {text!r:.80}")
            limits[key] = amount if name == "--max-time" else max(1, round(amount))
    return limits


def shown_output(spec: str) -> str:
    """An output as the user named it, without passwords and without what ``-O`` adds."""
    from shoal.config import mask

    return mask(spec).removesuffix("?replace=yes").removesuffix("&replace=yes")
