"""`shoal session`: the cookies and logins of a run, without values; export, import and clear."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, get_args

from shoal.cli.help import Commands, local_time, option, print_json
from shoal.cli.options import AsJson, FrontierUrl, NewestRun, resolve, settings_of
from shoal.cli.run_store import opened_run, record_action
from shoal.errors import ConfigError
from shoal.messages import did_you_mean, printable
from shoal.operations.problem import counted

if TYPE_CHECKING:
    from shoal.config import Config
    from shoal.fetch.sessions.login import LoginState
    from shoal.fetch.sessions.stored import CookieFile, JarReport, SessionImport, SiteReport, StoredSession
    from shoal.ports import Run, Store
    from shoal.spider import Spider

# Files of cookies on the command line: read with clear errors, written so that only their owner can read them.


def read_file(file: str) -> CookieFile:
    """The cookies of a file, or of standard input (``-``). ConfigError names the file and the line or entry."""
    from shoal.fetch.sessions.stored import MAX_FILE, read_cookie_file

    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_FILE + 1)
        else:
            with open(file, "rb") as source:
                data = source.read(MAX_FILE + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc
    try:
        return read_cookie_file(data)
    except ConfigError as error:
        raise ConfigError(f"{'standard input' if file == '-' else file}: {error}") from None


def read_session(file: str, spider: Spider, config: Config) -> SessionImport:
    """The cookies of a file for a crawl with a spider. ConfigError if the crawl would not send them."""
    from shoal.fetch.layers.identity_facts import make_roster
    from shoal.fetch.sessions.stored import SessionImport

    if config.tor.enabled:
        raise ConfigError("--session does not go with --tor: the site would know the user of the session")
    if not (config.cookies or spider.needs_login):
        raise ConfigError("--session needs cookies, and the setting cookies is false")
    jar = ""
    if config.proxies:
        names = [identity.name for identity in make_roster(config.proxies, config.identities)]
        if len(names) != 1:
            raise ConfigError(
                "--session needs one jar, and each proxy has its own. Use one proxy, or import into the jars of a "
                "stored run with `shoal session RUN --import FILE --jar PROXY`"
            )
        (jar,) = names
    return SessionImport(jar, read_file(file))


def write_file(file: str, text: str) -> None:
    """Write secrets to a file with mode 0600, in one step; to standard output with ``-``."""
    if file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = os.path.realpath(file)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"cannot write {file}: it is not a file; write - for standard output")
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".shoal-")  # its mode is 0600
        with open(descriptor, "w", encoding="utf-8") as target:
            target.write(text)
            target.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except OSError as exc:
        with suppress(OSError):
            os.unlink(temporary)
        raise ConfigError(f"cannot write {file}: {exc.strerror}") from exc


DEFAULT_JAR = "default"
"""How the jar without a name is shown."""
_MAX_NAMES = 12
_MAX_LINES = 50

app = Commands()


@app.add(
    examples="""
    shoal session --frontier sqlite:///shop.db
    shoal session shop_1 --import state.json --frontier redis://host
    shoal session shop_1 --export cookies.txt --frontier redis://host
    shoal session shop_1 --clear --jar "#alice" --frontier redis://host
    """
)
async def session(
    run_id: NewestRun = None,
    export_to: Annotated[
        str | None, option("--export FILE", "Write the cookies of a jar to FILE, or standard output (-).")
    ] = None,
    import_from: Annotated[
        str | None, option("--import FILE", "Add the cookies of FILE, or of standard input (-), to a jar.")
    ] = None,
    clear: Annotated[bool, option("--clear", "Remove cookies and logins; workers log in again.")] = False,
    jar: Annotated[
        str | None,
        option(
            "--jar NAME",
            'Only this jar, as it is listed. #NAME is that of meta["cookiejar"] = NAME; an identity has one of '
            "its own name.",
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        option(
            "--format FORMAT",
            "With --export: netscape (cookies.txt) or playwright (JSON). The default for .json is playwright, for "
            "others netscape.",
            autocompletion=lambda: ["netscape", "playwright"],
        ),
    ] = None,
    frontier: FrontierUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the cookies and logins of a run, without values.

    An exported file has the values: it is written with mode 0600. --import reads cookies.txt, the storage state of
    Playwright, and JSON lists of browser extensions. The cookies count as a new login: workers use them from their next
    page on.
    """
    from shoal.fetch.sessions.stored import CookieFormat, StoredSession

    if sum((export_to is not None, import_from is not None, clear)) > 1:
        raise ConfigError("--export, --import and --clear exclude each other; pass one of them")
    if file_format is not None and export_to is None:
        raise ConfigError("--format belongs to --export")
    formats = get_args(CookieFormat)
    if file_format not in (None, *formats):
        near = did_you_mean(str(file_format), formats)
        raise ConfigError(f"--format must be {' or '.join(formats)}, not {file_format!r}{near}")
    changes = import_from is not None or clear
    in_memory = resolve(None, settings_of(frontier=frontier)).config.frontier.startswith(("memory:", "local:"))
    if in_memory and changes:
        raise ConfigError(
            "the session of a crawl in memory cannot be changed from outside. Pass --session FILE to `shoal run`, or "
            "keep the run in a store, such as --frontier sqlite:///file.db"
        )

    async with opened_run(frontier, run_id, readonly=not changes) as (store, run, queue):
        stored = StoredSession(store, queue, run.run_id)
        reports = await stored.reports()
        if export_to is not None:
            await _export(stored, run, reports, jar, export_to, file_format)
        elif import_from is not None:
            await _import(store, stored, run, reports, jar, import_from)
        elif clear:
            await _clear(store, stored, run, reports, jar)
        else:
            _show(run, _chosen(run, reports, jar), as_json=as_json)
            if in_memory and not reports:
                print("the cookies of a crawl in memory belong to its process", file=sys.stderr)


def _title(jar: str) -> str:
    return printable(jar) or DEFAULT_JAR


def _chosen(run: Run, reports: list[JarReport], jar: str | None) -> list[JarReport]:
    """The jar of ``--jar``, or all of them. ConfigError lists the jars if there is no such one."""
    if jar is None:
        return reports
    chosen = [report for report in reports if report.jar == jar or (not report.jar and jar == DEFAULT_JAR)]
    if not chosen:
        names = [_title(report.jar) for report in reports]
        choices = ", ".join(names[:20]) or "none"
        raise ConfigError(f"run {run.run_id} has no jar {jar}; its jars are: {choices}{did_you_mean(jar, names)}")
    return chosen


async def _export(
    stored: StoredSession, run: Run, reports: list[JarReport], jar: str | None, file: str, file_format: str | None
) -> None:
    from shoal.fetch.sessions.stored import to_netscape, to_storage_state

    chosen = [report for report in _chosen(run, reports, jar) if report.sites]
    if not chosen:
        raise ConfigError(f"run {run.run_id} has no cookies to export")
    if len(chosen) > 1:
        names = ", ".join(_title(report.jar) for report in chosen)
        raise ConfigError(f"run {run.run_id} has {len(chosen)} jars: choose one with --jar: {names}")
    cookies = await stored.cookies(chosen[0].jar)
    is_json = file_format == "playwright" or (file_format is None and file.lower().endswith(".json"))
    write_file(file, to_storage_state(cookies) if is_json else to_netscape(cookies))
    print(f"wrote {counted(len(cookies), 'cookie')} of jar {_title(chosen[0].jar)} to {file}", file=sys.stderr)


async def _import(
    store: Store, stored: StoredSession, run: Run, reports: list[JarReport], jar: str | None, file: str
) -> None:
    name = "" if jar is None or jar == DEFAULT_JAR else jar
    if name and "#" not in name and "://" not in name and name not in {report.jar for report in reports}:
        raise ConfigError(
            f"run {run.run_id} has no jar {name}. The jar of meta[\"cookiejar\"] = \"{name}\" is called \"#{name}\"; "
            "that of an identity has the URL of its proxy, as `shoal identities` lists it"
        )  # fmt: skip
    from shoal.fetch.sessions.stored import usable_cookies

    cookie_file = read_file(file)
    cookies = usable_cookies(cookie_file)
    await stored.add(name, cookies, cookie_file.digest)
    await record_action(store, "import session", run.run_id, f"jar {_title(name)}", run.project)
    sites = sorted({cookie.domain for cookie in cookies})
    more = f" and {len(sites) - 5} more" if len(sites) > 5 else ""
    where = f"jar {_title(name)} of run {run.run_id}"
    print(f"imported {counted(len(cookies), 'cookie')} for {', '.join(sites[:5])}{more} into {where}")
    if run.state in ("paused", "cancelled"):
        print(f"the run is {run.state}: `shoal resume {run.run_id}` continues it")
    elif run.state == "finished":
        print("the run is finished: nothing uses the session unless it is reopened (`shoal retry-failed`)")


async def _clear(store: Store, stored: StoredSession, run: Run, reports: list[JarReport], jar: str | None) -> None:
    chosen = _chosen(run, reports, jar)
    await stored.clear(report.jar for report in chosen)
    if chosen:
        names = ", ".join(_title(report.jar) for report in chosen[:20])
        await record_action(store, "clear session", run.run_id, f"jar {names}", run.project)
    count = sum(site.cookies for report in chosen for site in report.sites)
    print(f"removed {counted(count, 'cookie')} of {counted(len(chosen), 'jar')} of run {run.run_id}")


# -- texts


def _show(run: Run, reports: list[JarReport], *, as_json: bool) -> None:
    if as_json:
        print_json(reports)
        return
    if not reports:
        print(f"run {run.run_id} has no stored cookies and no logins")
    for report in reports[:_MAX_LINES]:
        print(f"jar {_title(report.jar)}")
        if report.login is not None:
            for line in _login_lines(report.login):
                print(f"  {line}")
        if not report.sites:
            print("  no cookies")
        for site in report.sites[:_MAX_LINES]:
            print(f"  {_site_line(site)}")
        if len(report.sites) > _MAX_LINES:
            print(f"  and {len(report.sites) - _MAX_LINES:,} more sites; --json lists all")
    if len(reports) > _MAX_LINES:
        print(f"and {len(reports) - _MAX_LINES:,} more jars; --json lists all")


def _site_line(site: SiteReport) -> str:
    names = [printable(name) for name in site.names]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    ends = "until the session ends" if site.ends is None else f"the first ends at {_moment(site.ends)}"
    return f"{printable(site.site)}: {counted(site.cookies, 'cookie')} ({', '.join(names[:_MAX_NAMES])}{more}), {ends}"


def _login_lines(login: LoginState) -> list[str]:
    lines = []
    if login.epoch:
        lines.append(f"session since {_moment(login.at)}, epoch {login.epoch}; logins: {login.logins}")
    if login.failures or login.stopped:
        stopped = "; the run was stopped" if login.stopped else ""
        lines.append(
            f"login failed {counted(login.failures, 'time')}, last at "
            f"{_moment(login.failed_at)}{stopped}: {printable(login.reason)}"
        )
    return lines


def _moment(at: float) -> str:
    try:
        return local_time(at)
    except (ValueError, OverflowError, OSError):
        return "a time that is no date"
