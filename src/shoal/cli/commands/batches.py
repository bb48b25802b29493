"""`shoal batch`: try a URL, and see and cancel batches of the HTTP API."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from shoal.cli.help import Commands, argument, local_time, option, print_json
from shoal.cli.options import AsJson, FrontierUrl, Setting, given, pairs, resolve, settings_of
from shoal.cli.run_store import opened_store
from shoal.errors import ConfigError, RunError
from shoal.messages import pip_install, printable

if TYPE_CHECKING:
    from shoal.api.batch.options import BatchOptions
    from shoal.api.batch.results import Result
    from shoal.api.batch.service import SessionSummary
    from shoal.api.batch.session import Session
    from shoal.config import Config

SessionId = Annotated[str, argument("SESSION", "The ID of the batch, from `shoal batch list`.")]

_MAX_ANSWER = 64 << 20
_OPTIONS = {"fields": "--field", "also": "--show", "render": "--render, --wait-for or --screenshot"}

app = Commands()
batch_app = Commands(
    help="Try a URL, and see and cancel batches of the HTTP API.\n\n"
    "Programs send batches of URLs to `shoal serve`. Each one is a session in the frontier.",
    epilog=(
        "shoal batch try https://example.com --field title=h1\n"
        "shoal batch list --frontier redis://host\n"
        "shoal batch cancel SESSION --frontier redis://host"
    ),
    no_args_is_help=True,
)
app.add_typer(batch_app, name="batch")


# -- trying a URL


@batch_app.add(
    "try",
    examples="""
    shoal batch try https://example.com
    shoal batch try https://example.com --field title=h1 --show links
    shoal batch try https://example.com --wait-for "#price" --screenshot a.png
    """,
)
async def try_page(
    url: Annotated[str, argument("URL", "The page to fetch.")],
    field: Annotated[list[str], option("--field NAME=CSS", "Select a field with CSS. Repeatable.")] = [],
    show: Annotated[list[str], option("--show FORM", "html, text, markdown (default) or links. Repeatable.")] = [],
    render: Annotated[
        str | None, option("--render MODE", "Use a browser: always, or auto (if the page needs it).")
    ] = None,
    wait_for: Annotated[
        str | None, option("--wait-for WHAT", "Wait in the browser for a CSS selector, or milliseconds.")
    ] = None,
    screenshot: Annotated[Path | None, option("--screenshot FILE", "Save a picture of the page as PNG.")] = None,
    robots: Annotated[bool, option("--robots/--no-robots", "Obey robots.txt, or not.")] = True,
    celery: Annotated[bool, option("--celery", "Fetch it on a Celery worker, not in this process.")] = False,
    timeout: Annotated[float, option("--timeout SECONDS", "Give up after this time (default 300).", min=1.0)] = 300.0,
    as_json: AsJson = False,
    setting: Setting = [],
) -> None:
    """Fetch one URL as a batch, and print what the API would return.

    It needs no server. The exit code is 1 if the page could not be fetched.
    """
    with _needs_api():
        from shoal.api.batch.local_work import private_service, try_url
        from shoal.api.celery.remote import opened_service
    wanted = int(wait_for) if wait_for is not None and wait_for.isdecimal() else wait_for
    rendering = given(mode=render, wait_for=wanted, screenshot=screenshot and True)
    options = _options(
        {
            "fields": pairs(field, "--field"), "also": list(dict.fromkeys(show or ["markdown"])), "robots": robots,
            "render": rendering or None,
        }
    )  # fmt: skip
    config = resolve(None, {}, setting).config
    config.refuse_tor("`shoal batch`")

    async with (opened_service if celery else private_service)(config) as service:
        result = await try_url(service, url if "://" in url else f"http://{url}", options, timeout)
    picture = result.get("screenshot")
    if screenshot is not None and isinstance(picture, bytes):
        screenshot.write_bytes(picture)
    if as_json:
        print_json([result])
    else:
        _print_result(result, options, screenshot)
    if result["status"] != "success":
        sys.exit(1)


def _options(values: Mapping[str, object]) -> BatchOptions:
    """ConfigError names the option that is wrong."""
    from pydantic import ValidationError

    from shoal.api.batch.options import BatchOptions

    try:
        return BatchOptions.model_validate(dict(values))
    except ValidationError as exc:
        first = exc.errors()[0]
        option = _OPTIONS.get(str(first["loc"][0]) if first["loc"] else "", "")
        raise ConfigError(f"{option or 'options'}: {first['msg'].removeprefix('Value error, ')}") from exc


def _print_result(result: Result, options: BatchOptions, screenshot: Path | None) -> None:
    error = result.get("error")
    http = f", HTTP {result['http_status']}" if result.get("http_status") else ""
    browser = ", rendered in a browser" if result.get("rendered") else ""
    print(f"{printable(str(result['url']))}\n  status    {result['status']}{http}{browser}")
    if isinstance(error, dict):
        print(f"  error     {error['kind']}: {printable(str(error['message']))}")
    for name, key in (("title", "title"), ("type", "content_type"), ("final URL", "final_url")):
        if result.get(key) and result[key] != result["url"]:
            print(f"  {name:<9} {printable(str(result[key]))}")
    also = result.get("also")
    forms = also if isinstance(also, dict) else {}
    fields = forms.get("fields")
    for name, value in fields.items() if isinstance(fields, dict) else ():
        print(f"  field     {name} = {'(no match)' if value in (None, []) else printable(str(value))}")
    if screenshot is not None and result.get("screenshot"):
        print(f"  saved     {screenshot}")
    for form in options.also:
        content = forms.get(form)
        if content is not None:
            print()
            print(*map(printable, content if isinstance(content, list) else str(content).splitlines()), sep="\n")


# -- sessions


@batch_app.add("list", examples="shoal batch list --frontier redis://host")
async def list_batches(
    frontier: FrontierUrl = None,
    limit: Annotated[int, option("--limit N", "List at most N batches (default 20).", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List batches with their progress, newest first."""

    with _needs_api():
        from shoal.api.batch.service import list_sessions
    config = resolve(None, settings_of(frontier=frontier)).config
    by_id: dict[str, SessionSummary] = {}
    for url in _stores(config, frontier):
        async with opened_store(url, readonly=True) as store:
            for session in await list_sessions(store, config.project_name, None, limit):
                by_id[session.session_id] = session
    sessions = sorted(by_id.values(), key=lambda session: -session.created_at)[:limit]
    if as_json:
        print_json(sessions)
        return
    if not sessions:
        print("no batches: `shoal serve` accepts them at POST /api/crawl/batch")
        return
    print(
        f"{'session':<32} {'state':<10} {'where':<7} {'started':<19} {'done':>7} {'failed':>7} {'total':>7}  first URL"
    )
    for session in sessions:
        progress, where = session.progress, "celery" if session.distributed else "server"
        print(
            f"{session.session_id:<32} {session.state:<10} {where:<7} {local_time(session.created_at)} "
            f"{progress.done:>7} {progress.failed:>7} {progress.total:>7}  {printable(session.first_url)}"
        )


@batch_app.add(
    examples="""
    shoal batch show SESSION --frontier redis://host
    shoal batch show SESSION --json > results.jsonl
    """
)
async def show(
    session_id: SessionId,
    frontier: FrontierUrl = None,
    limit: Annotated[int, option("--limit N", "Show at most N results (default 100).", min=1)] = 100,
    as_json: AsJson = False,
) -> None:
    """Show the progress and the results of a batch.

    With --json, each line is a result with its content.
    """

    from shoal.api.batch.results import SessionResults

    async with _opened_session(session_id, frontier, readonly=True) as session:
        results = SessionResults(session)
        if as_json:
            print_json(result for _, result in await results.read(0, limit, _MAX_ANSWER))
            return
        progress = await session.progress()
        counts = msgspec.structs.asdict(progress)
        del counts["results"]
        shown = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
        print(f"session {session.id} is {await session.state()}: {shown}")
        for _, result in await results.read_outlines(0, limit, _MAX_ANSWER):
            error = result.get("error")
            text = f"{error['kind']}: {error['message']}" if isinstance(error, dict) else str(result["title"] or "")
            print(f"{result['status']!s:<9} {result['http_status'] or '':>3}  {printable(str(result['url']))}")
            if text:
                print(f"               {printable(text)}")


@batch_app.add(examples="shoal batch cancel SESSION --frontier redis://host")
async def cancel(session_id: SessionId, frontier: FrontierUrl = None) -> None:
    """Fetch no more pages of a batch. Its results so far can still be read."""

    async with _opened_session(session_id, frontier, readonly=False) as session:
        await session.cancel()
        print(f"session {session.id} is {await session.state()}")


@batch_app.add(examples="shoal batch workers")
async def workers(as_json: AsJson = False) -> None:
    """List the Celery workers that fetch batches.

    The broker is that of CELERY_BROKER_URL.
    """
    with _needs_api():
        from shoal.api.celery.watch import CeleryWatch

    watch = CeleryWatch()
    try:
        await watch.count_workers()
    finally:
        watch.close()
    for worker in watch.members:
        line = f"{printable(worker.name)}, process {worker.pid}"
        print(json.dumps({"name": worker.name, "pid": worker.pid, "answers": worker.answers}) if as_json else line)
    if not watch.members and not as_json:
        print("no Celery worker answers: start one with `shoal celery-worker`")


# -- stores


def _stores(config: Config, frontier: str | None) -> list[str | None]:
    """Where batches are: in the frontier, and those on Celery workers perhaps in a store of their own."""
    urls: list[str | None] = [frontier]
    if "CELERY_BROKER_URL" in os.environ:
        from shoal.api.celery.settings import distributed_frontier

        if (remote := distributed_frontier(config)) != config.frontier:
            urls = [remote] if config.frontier.startswith("memory:") else [frontier, remote]
    return urls


@asynccontextmanager
async def _opened_session(session_id: str, frontier: str | None, *, readonly: bool) -> AsyncIterator[Session]:
    """A session of the project. RunError if there is none."""
    with _needs_api():
        from shoal.api.batch.session import Session
    config = resolve(None, settings_of(frontier=frontier)).config
    for url in _stores(config, frontier):
        async with opened_store(url, readonly=readonly) as store:
            session = await Session.find(store, session_id)
            if session is not None and session.run.project == config.project_name:
                yield session
                return
    raise RunError(f"there is no batch {session_id!r:.110}: it has expired, or it is in another frontier")


@contextmanager
def _needs_api() -> Iterator[None]:
    """Turn a missing library into a ConfigError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as exc:
        extra = "celery" if exc.name in ("celery", "kombu") else "api"
        raise ConfigError(f"`shoal batch` needs {exc.name}; install it with: {pip_install(extra)}") from exc
