"""The crawlers that are compared: their packages, and the command that crawls a site."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
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
    npm: bool = False
    """A folder of packages from npm instead."""


@dataclass(frozen=True)
class Job:
    """The values that a command needs for one run."""

    url: str
    output: Path
    scratch: Path
    concurrency: int
    limit: int
    delay: float = 0.0
    """Seconds between two requests to the same host."""
    store: str = ""
    """The URL of the server that the frontier is on."""
    hosts: tuple[str, ...] = ()
    authority: Path | None = None
    """The certificate that signed those of the hosts."""

    @property
    def leases_per_host(self) -> int:
        """The requests that a worker fetches, and those that it leases ahead from a server. All may be on one host."""
        return 3 * self.concurrency


@dataclass(frozen=True)
class Contender:
    key: str
    label: str
    environment: str
    command: tuple[str, ...]
    """`{folder}` is the environment, `{bin}` its programs, `{spiders}` the folder of spiders; or a field of Job."""
    group: str
    """A name for `--only` that selects several crawlers."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """By site: the page limit of a crawler that would take too long for the whole site."""
    sites: str = "abc"
    """On site d are only crawlers that can keep a delay for each host."""
    store: str | None = None
    """The kind of server that the frontier is on."""
    note: str = ""


BARE = ("aiohttp", "pyreqwest", "turbohtml", "ada-url", "uvloop", "msgspec")
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("scrapy", ("scrapy>=2.19",), ("Scrapy", "Twisted", "parsel", "lxml")),
        Environment("crawlee", ("crawlee[parsel]",), ("crawlee", "impit", "parsel", "lxml")),
        Environment("crawlo", ("crawlo",), ("crawlo", "aiohttp", "parsel", "lxml")),
        Environment("crawlee-js", ("@crawlee/cheerio",), ("@crawlee/cheerio", "cheerio", "got-scraping"), npm=True),
        Environment(
            "spider-rs",
            ("@spider-rs/spider-rs@0.0.157", "@spider-rs/spider-rs-linux-x64-gnu@0.0.157"),  # the newest binary on npm
            ("@spider-rs/spider-rs",),
            npm=True,
        ),
        Environment("bare", BARE, BARE),
        Environment("shoal", (str(REPOSITORY),), ("shoal", "aiohttp", "turbohtml", "uvloop", "msgspec")),
        Environment("shoal-profile", (str(REPOSITORY), "py-spy"), ("shoal", "py-spy")),
        Environment("shoal-links", (str(REPOSITORY), "ada-url"), ("shoal", "ada-url", "yarl")),
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
            "shoal-outputs",
            (f"{REPOSITORY}[all,testing]",),
            ("shoal", "asyncpg", "pymysql", "obstore", "pyarrow"),
        ),
        Environment(
            "shoal-api",
            (f"{REPOSITORY}[api,celery,redis,postgres]",),
            ("shoal", "aiohttp", "uvloop", "msgspec", "fastapi", "uvicorn", "celery", "kombu", "redis", "hiredis"),
        ),
        Environment(
            "shoal-scrapy",
            (f"{REPOSITORY}[scrapy]",),
            ("shoal", "aiohttp", "turbohtml", "uvloop", "msgspec", "itemloaders", "parsel"),
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
    *("-s", "DOWNLOAD_DELAY={delay}", "-s", "RANDOMIZE_DOWNLOAD_DELAY=False"),
    *("-s", "ROBOTSTXT_OBEY=True", "-s", "RETRY_ENABLED=True"),
    *("-s", "LOG_LEVEL=WARNING", "-s", "TELNETCONSOLE_ENABLED=False", "-s", "CLOSESPIDER_ITEMCOUNT={limit}"),
)
SHOAL = (
    *("-o", "{output}", "--set", "download_delay={delay}"),
    *("--set", "concurrency={concurrency}", "--set", "concurrency_per_host={leases_per_host}"),
)

SPIDER = "{spiders}/shoal_follow_all.py"
SLOW = {"a": 2_000, "b": 3_000, "c": 2_000, "d": 2_000}
SLOW_BUT_POLITE = {"a": 2_000, "b": 3_000, "c": 2_000}


def shoal(key: str, label: str, frontier: str, store: str | None = None, environment: str = "shoal") -> Contender:
    """`shoal run` with this frontier."""
    command = ("{bin}/shoal", "run", SPIDER, "--frontier", frontier, *SHOAL)
    return Contender(key, label, environment, command, "shoal", sites="abcd", store=store)


def bare(key: str, label: str, *options: str) -> Contender:
    return Contender(key, label, "bare", ("{bin}/python", "{spiders}/bare_loop.py", *options), "bare")


CONTENDERS = (
    Contender("scrapy", "Scrapy", "scrapy", SCRAPY, "scrapy", SLOW_BUT_POLITE, sites="abcd"),
    Contender(
        "crawlee",
        "Crawlee (Parsel, memory storage)",
        "crawlee",
        ("{bin}/python", "{spiders}/crawlee_crawler.py"),
        "crawlee",
        SLOW,
    ),
    Contender(
        "crawlee-js",
        "Crawlee for JavaScript (Cheerio)",
        "crawlee-js",
        ("node", "{spiders}/crawlee_cheerio.cjs", "{folder}"),
        "crawlee",
        SLOW,
        sites="abcd",
    ),
    Contender("crawlo", "Crawlo (aiohttp)", "crawlo", ("{bin}/python", "{spiders}/crawlo_spider.py"), "crawlo"),
    Contender(
        "spider-rs",
        "spider-rs (Rust, Node binding)",
        "spider-rs",
        ("node", "{spiders}/spider_rs.cjs", "{folder}"),
        "spider-rs",
        {"c": 2_000},  # the whole site takes it 8 minutes, because it requests most pages many times
        note="waits by itself: compare the CPU time; items without h1 and links",
    ),
    bare("bare", "bare loop, aiohttp"),
    bare("bare-skip", "bare loop, aiohttp, skipping known hrefs", "--skip-seen"),
    bare("bare-pyreqwest", "bare loop, pyreqwest, skipping known hrefs", "--skip-seen", "--pyreqwest"),
    shoal("shoal", "Shoal, in memory, follow_all", "memory:"),
    Contender(
        "shoal-each",
        "Shoal, in memory, one follow a link",
        "shoal",
        ("{bin}/shoal", "run", "{spiders}/shoal_follow_each.py", "--frontier", "memory:", *SHOAL),
        "shoal",
        sites="ab",
    ),
    shoal("shoal-sqlite", "Shoal, SQLite, follow_all", "sqlite:///{scratch}/run.db"),
    shoal("shoal-redis", "Shoal, Redis, follow_all", "{store}", "redis", "shoal-fleet"),
    shoal("shoal-postgresql", "Shoal, PostgreSQL, follow_all", "{store}", "postgresql", "shoal-fleet"),
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
    folder = venvs / contender.environment
    values = {
        "folder": folder,
        "bin": folder / "bin",
        "spiders": SPIDERS,
        "output": job.output,
        "scratch": job.scratch,
        "concurrency": job.concurrency,
        "leases_per_host": job.leases_per_host,
        "limit": job.limit,
        "delay": f"{job.delay:g}",
        "store": job.store,
    }
    return [part.format(**values) for part in contender.command]


def variables_of(job: Job) -> dict[str, str]:
    values = os.environ | {
        "BENCH_URL": job.url,
        "BENCH_OUTPUT": str(job.output),
        "BENCH_CONCURRENCY": str(job.concurrency),
        "BENCH_LIMIT": str(job.limit),
        "BENCH_DELAY": f"{job.delay:g}",
        "BENCH_HOSTS": ",".join(job.hosts),
        "PYTHONDONTWRITEBYTECODE": "1",  # do not write bytecode into the repository
    }
    if job.authority:
        trusted = ("BENCH_AUTHORITY", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
        values |= dict.fromkeys(trusted, str(job.authority))
    return values


def install(environment: Environment, venvs: Path) -> str | None:
    """Create the environment unless it exists with the same requirements. Returns an error message, or None."""
    folder = venvs / environment.name
    stamp = folder / ".installed"
    wanted = "\n".join(environment.requirements) + source_digest(environment)
    if stamp.exists() and stamp.read_text() == wanted:
        return None
    print(f"installing {', '.join(environment.requirements)}", flush=True)
    reason = npm_install(environment, folder) if environment.npm else pip_install(environment, folder)
    if reason is None:
        stamp.write_text(wanted)
    return reason


def npm_install(environment: Environment, folder: Path) -> str | None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}\n')
    command = ["npm", "install", "--no-audit", "--no-fund", *environment.requirements]
    if shutil.which("npm") is None:
        return "npm is missing: apt-get install nodejs npm"
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    errors = [line for line in result.stderr.splitlines() if line.startswith("npm error")] or ["npm failed"]
    return errors[0] if result.returncode else None


def pip_install(environment: Environment, folder: Path) -> str | None:
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
    if environment.npm:
        node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
        files = {name: venvs / environment.name / "node_modules" / name / "package.json" for name in environment.shown}
        return {"Node": node.strip().lstrip("v")} | {
            name: json.loads(file.read_text())["version"] for name, file in files.items()
        }
    script = (
        "import importlib.metadata as m, json, sys, platform;"
        "print(json.dumps({'Python': platform.python_version()} | {n: m.version(n) for n in sys.argv[1:]}))"
    )
    command = [str(venvs / environment.name / "bin/python"), "-c", script, *environment.shown]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return {}
    return dict(json.loads(result.stdout))
