"""The crawlers that are compared: their packages, and the command that crawls a site."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SPIDERS = Path(__file__).parent / "spiders"
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """A separate virtual environment, so that no crawler affects the versions of another."""

    name: str
    requirements: tuple[str, ...]
    shown: tuple[str, ...]
    """The packages whose versions are recorded with the results."""


@dataclass(frozen=True)
class Job:
    """The values that a command needs for one run."""

    url: str
    output: Path
    scratch: Path
    concurrency: int
    limit: int


@dataclass(frozen=True)
class Contender:
    key: str
    label: str
    environment: str
    command: tuple[str, ...]
    """`{bin}` is the environment's folder of programs, `{spiders}` the folder of spiders; or a field of Job."""
    group: str
    """A name for `--only` that selects several crawlers."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """By site: the page limit of a crawler that would take too long for the whole site."""


BARE = ("aiohttp", "turbohtml", "ada-url", "uvloop", "msgspec")
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("scrapy", ("scrapy>=2.19",), ("Scrapy", "Twisted", "parsel", "lxml")),
        Environment("crawlee", ("crawlee[parsel]",), ("crawlee", "impit", "parsel", "lxml")),
        Environment("crawlo", ("crawlo",), ("crawlo", "aiohttp", "parsel", "lxml")),
        Environment("bare", BARE, BARE),
        Environment("shoal", (str(REPOSITORY),), ("shoal", "aiohttp", "turbohtml", "uvloop", "msgspec")),
        Environment(
            "shoal-fleet",
            (f"{REPOSITORY}[redis,postgres]",),
            ("shoal", "aiohttp", "turbohtml", "uvloop", "msgspec", "redis", "hiredis", "asyncpg"),
        ),
        Environment(
            "shoal-cluster",
            (f"{REPOSITORY}[redis,postgres,zookeeper]",),
            ("shoal", "aiohttp", "uvloop", "msgspec", "redis", "hiredis", "asyncpg", "kazoo"),
        ),
        Environment(
            "shoal-browser",
            (f"{REPOSITORY}[all,browser,testing]", "pytest-timeout"),
            ("shoal", "playwright", "aiohttp", "uvloop"),
        ),
        Environment(
            "shoal-api",
            (f"{REPOSITORY}[api,celery,redis,postgres]",),
            ("shoal", "aiohttp", "uvloop", "msgspec", "fastapi", "uvicorn", "celery", "kombu", "redis", "hiredis"),
        ),
        Environment(
            "shoal-schedules",
            (f"{REPOSITORY}[api,redis,postgres]",),
            ("shoal", "uvloop", "msgspec", "cronsim", "redis", "hiredis", "asyncpg"),
        ),
        Environment(
            "scrapy-redis",
            ("scrapy>=2.19", "scrapy-redis==0.9.*", "hiredis"),
            ("Scrapy", "scrapy-redis", "redis", "hiredis", "Twisted", "parsel", "lxml"),
        ),
        Environment("pgqueuer", ("pgqueuer[asyncpg]", "tqdm"), ("pgqueuer", "asyncpg", "uvloop")),
    )
}

SCRAPY = (
    *("{bin}/scrapy", "runspider", "{spiders}/scrapy_spider.py", "-O", "{output}:jsonlines"),
    *("-s", "CONCURRENT_REQUESTS={concurrency}", "-s", "CONCURRENT_REQUESTS_PER_DOMAIN={concurrency}"),
    *("-s", "DOWNLOAD_DELAY=0", "-s", "ROBOTSTXT_OBEY=True", "-s", "RETRY_ENABLED=True"),
    *("-s", "LOG_LEVEL=WARNING", "-s", "TELNETCONSOLE_ENABLED=False"),
)
SHOAL = (
    *("-o", "{output}", "--set", "download_delay=0"),
    *("--set", "concurrency={concurrency}", "--set", "concurrency_per_host={concurrency}"),
)

CONTENDERS = (
    Contender("scrapy", "Scrapy", "scrapy", SCRAPY, "scrapy"),
    Contender(
        "crawlee",
        "Crawlee (Parsel, memory storage)",
        "crawlee",
        ("{bin}/python", "{spiders}/crawlee_crawler.py"),
        "crawlee",
        {"a": 2_000, "b": 3_000},
    ),
    Contender("crawlo", "Crawlo (aiohttp)", "crawlo", ("{bin}/python", "{spiders}/crawlo_spider.py"), "crawlo"),
    Contender("bare", "bare loop", "bare", ("{bin}/python", "{spiders}/bare_loop.py"), "bare"),
    Contender(
        "bare-skip",
        "bare loop, skipping hrefs seen before",
        "bare",
        ("{bin}/python", "{spiders}/bare_loop.py", "--skip-seen"),
        "bare",
    ),
    Contender(
        "shoal",
        "Shoal, in memory, follow_all",
        "shoal",
        ("{bin}/shoal", "run", "{spiders}/shoal_follow_all.py", "--frontier", "memory:", *SHOAL),
        "shoal",
    ),
    Contender(
        "shoal-each",
        "Shoal, in memory, one follow a link",
        "shoal",
        ("{bin}/shoal", "run", "{spiders}/shoal_follow_each.py", "--frontier", "memory:", *SHOAL),
        "shoal",
    ),
    Contender(
        "shoal-sqlite",
        "Shoal, SQLite, follow_all",
        "shoal",
        ("{bin}/shoal", "run", "{spiders}/shoal_follow_all.py", "--frontier", "sqlite:///{scratch}/run.db", *SHOAL),
        "shoal",
    ),
)


def chosen(names: str | None) -> list[Contender]:
    """The crawlers that `--only` names by key or by group; without it, all."""
    if names is None:
        return list(CONTENDERS)
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    unknown = wanted - {contender.key for contender in CONTENDERS} - {contender.group for contender in CONTENDERS}
    if unknown:
        keys = ", ".join(contender.key for contender in CONTENDERS)
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {keys}")
    return [contender for contender in CONTENDERS if wanted & {contender.key, contender.group}]


def command_of(contender: Contender, job: Job, venvs: Path) -> list[str]:
    values = {
        "bin": venvs / contender.environment / "bin",
        "spiders": SPIDERS,
        "output": job.output,
        "scratch": job.scratch,
        "concurrency": job.concurrency,
    }
    return [part.format(**values) for part in contender.command]


def variables_of(job: Job) -> dict[str, str]:
    return os.environ | {
        "BENCH_URL": job.url,
        "BENCH_OUTPUT": str(job.output),
        "BENCH_CONCURRENCY": str(job.concurrency),
        "BENCH_LIMIT": str(job.limit),
        "PYTHONDONTWRITEBYTECODE": "1",  # do not write bytecode into the repository
    }


def install(environment: Environment, venvs: Path) -> str | None:
    """Create the environment unless it exists with the same requirements. Returns an error message, or None."""
    folder = venvs / environment.name
    stamp = folder / ".installed"
    wanted = "\n".join(environment.requirements) + source_digest(environment)
    if stamp.exists() and stamp.read_text() == wanted:
        return None
    print(f"installing {', '.join(environment.requirements)}", flush=True)
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    commands = [[*pip, "--upgrade", *environment.requirements]]
    if holds_repository(environment):  # pip does not reinstall a package whose version is unchanged
        commands.append([*pip, "--force-reinstall", "--no-deps", str(REPOSITORY)])
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            return errors[-1]
    stamp.write_text(wanted)
    return None


def holds_repository(environment: Environment) -> bool:
    return any(requirement.partition("[")[0] == str(REPOSITORY) for requirement in environment.requirements)


def source_digest(environment: Environment) -> str:
    """A digest of the source of the repository; empty for environments without it."""
    if not holds_repository(environment):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    files = [path for path in (REPOSITORY / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in [REPOSITORY / "pyproject.toml", *sorted(files)]:
        digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def versions(environment: Environment, venvs: Path) -> dict[str, str]:
    script = (
        "import importlib.metadata as m, json, sys, platform;"
        "print(json.dumps({'Python': platform.python_version()} | {n: m.version(n) for n in sys.argv[1:]}))"
    )
    command = [str(venvs / environment.name / "bin/python"), "-c", script, *environment.shown]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return {}
    return dict(json.loads(result.stdout))
