"""Names of a zone that never answers delay no other host and no address, whoever asks for them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.serving import FAST, Api, Process, beside, until
from tests.acceptance.silent_zone import NameServer, name_server
from tests.support.forking import SHOAL
from tests.support.servers import StreamServer, answer, read_head
from tests.support.socks_server import SocksServer

PATIENT = {"SHOAL_DNS__DEADLINE": "1000", "SHOAL_DNS__MAX_LOOKUPS": "40", "SHOAL_RETRY__MAX_ATTEMPTS": "1"}
"""Lookups last longer than the test. One zone has a quarter of them."""
SHARE = 10


class Site(StreamServer):
    """Has pages, at any name. Those below /gate/ are sent when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, str] = {}
        self.gate = asyncio.Event()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_head(reader)
            self._log(request)
            if request.path.startswith("/gate/"):
                await self.gate.wait()
            await reader.readexactly(int(request.header("content-length") or 0))
            content_type = "application/xml" if request.path.endswith(".xml") else "text/html"
            writer.write(answer(self.pages.get(request.path, "<title>Page</title>"), content_type=content_type))
            await writer.drain()

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def at(self, name: str) -> str:
        """Its URL under a name."""
        return f"http://{name}:{self.port}"

    def served(self, *urls: str) -> bool:
        """Whether all of these URLs were requested."""
        return set(urls) <= {f"http://{visit.host}{visit.path}" for visit in [*self.requests]}

    def open_gate(self) -> None:
        self._server.get_loop().call_soon_threadsafe(self.gate.set)


@pytest.fixture
def site() -> Iterator[Site]:
    with beside(Site()) as site:
        yield site


@pytest.fixture
def names(tmp_path: Path) -> Iterator[NameServer]:
    with name_server(tmp_path) as server:
        yield server


def silent_urls(zone: str, count: int = 60) -> list[str]:
    return [f"http://n{number}.{zone}/" for number in range(count)]


CRAWL = """
from shoal import Spider, SitemapSpider

class Pages(Spider):
    settings = {settings}
    start_urls = {urls}

    def parse(self, response):
        yield response.follow_all("a")

class Mapped(SitemapSpider):
    settings = {settings}
    sitemap_urls = {urls}

    def parse(self, response):
        yield {{"url": response.url}}
"""
SETTINGS = {
    "download_delay": 0, "concurrency": 300, "robots.obey": False, "throttle.enabled": False,
    "scope.allowed_domains": [],
}  # fmt: skip


def start_crawl(
    names: NameServer, folder: Path, spider: str, urls: list[str], environ: dict[str, str], **settings: object
) -> Process:
    (folder / "crawl.py").write_text(CRAWL.format(settings={**SETTINGS, **settings}, urls=urls))
    return Process(names.asking(*SHOAL, "run", f"crawl.py:{spider}"), folder, "crawl", environ)


@pytest.mark.parametrize("resolver", ["c-ares", "system"])
def test_a_crawl(names: NameServer, site: Site, tmp_path: Path, resolver: str) -> None:
    other = f"http://127.0.0.1:{site.port}"  # the host that is connected to, for the second time under its address
    gate, page, address = f"{site.at('a.good.test')}/gate/", f"{site.at('b.good.test')}/page", f"{other}/page"
    site.pages["/gate/"] = f'<a href="{page}">b</a><a href="{address}">c</a>'
    urls = [*silent_urls("silent.test"), *silent_urls("silent.example"), gate]
    environ = {**PATIENT, "SHOAL_DNS__RESOLVER": resolver}
    share = SHARE if resolver == "c-ares" else 8  # of 32 threads
    process = start_crawl(names, tmp_path, "Pages", urls, environ)
    try:
        until(lambda: site.served(gate), what="the first page")
        until(lambda: names.asked("silent.test") + names.asked("silent.example") == 2 * share, what="the limit")
        site.open_gate()
        until(lambda: site.served(page, address), what="the other hosts")
        assert (names.asked("silent.test"), names.asked("silent.example")) == (share, share)
        assert process.process.poll() is None
    finally:
        process.kill()


def test_a_crawl_of_sitemaps_with_robots_txt(names: NameServer, site: Site, tmp_path: Path) -> None:
    sitemap, page = f"{site.at('a.good.test')}/gate/map.xml", f"{site.at('b.good.test')}/page"
    site.pages["/robots.txt"] = ""
    site.pages["/gate/map.xml"] = f"<urlset><url><loc>{page}</loc></url></urlset>"
    urls = [*(f"{url}sitemap.xml" for url in silent_urls("silent.test")), sitemap]
    process = start_crawl(names, tmp_path, "Mapped", urls, PATIENT, **{"robots.obey": True})
    try:
        until(lambda: site.served(sitemap), what="the sitemap")
        until(lambda: names.asked("silent.test") == SHARE, what="the limit")
        site.open_gate()
        until(lambda: site.served(f"{site.at('b.good.test')}/robots.txt", page), what="the page")
    finally:
        process.kill()


class ApartApi(Api):
    """An API whose process asks the name server."""

    def __init__(self, names: NameServer, folder: Path, environ: dict[str, str]) -> None:
        self._names = names
        super().__init__(folder, {**FAST, "SHOAL_CONCURRENCY": "300", **environ})

    def start(self) -> None:
        command = self._names.asking(*SHOAL, "serve", "--port", str(self.port))
        self.process = Process(command, self.folder, "api", self.environ)
        until(self._answers, what="the server")

    def begin(self, urls: list[str], **more: Any) -> str:
        """Start a session."""
        options = {"robots": False, "retries": 0, **more.pop("options", {})}
        return str(self.batch(urls, wait=False, options=options, **more)["session_id"])

    def errors(self, session_id: str) -> set[tuple[str, str]]:
        """Kinds and messages of the errors of a session, when it has ended."""
        self.wait(session_id)
        found = [result["error"] for result in self.results(session_id)]
        return {("", "") if error is None else (error["kind"], error["message"]) for error in found}


def test_sessions_of_the_api(names: NameServer, site: Site, tmp_path: Path) -> None:
    """Each has its own limit, and none waits for another."""
    api = ApartApi(names, tmp_path, PATIENT)
    try:
        for session in (1, 2):
            api.begin(silent_urls(f"{session}.silent.test"))
            until(lambda session=session: names.asked("silent.test") == session * SHARE, what="the limit")
        good = api.begin([f"{site.at('a.good.test')}/page", f"{site.url}/page"])
        assert api.errors(good) == {("", "")}
        assert names.asked("silent.test") == 2 * SHARE
    finally:
        api.process.kill()


def test_a_lookup_ends_at_the_deadline(names: NameServer, tmp_path: Path) -> None:
    api = ApartApi(names, tmp_path, {"SHOAL_DNS__DEADLINE": "1", "SHOAL_DNS__MAX_LOOKUPS": "8"})
    try:
        errors = api.errors(api.begin(silent_urls("silent.test", 20)))
        missing = api.errors(api.begin(["http://missing.test/"]))
    finally:
        api.process.kill()
    assert {kind for kind, _ in errors} == {"dns"}
    texts = {message.partition(": ")[2] for _, message in errors}
    assert texts == {
        "no answer within 1 s (dns.deadline)",
        "too many names wait for an answer, no turn within 1 s (dns.max_lookups)",
    }
    assert missing == {("dns", "can't resolve the host missing.test")}


def test_webhooks(names: NameServer, site: Site, tmp_path: Path) -> None:
    api = ApartApi(names, tmp_path, PATIENT)
    try:
        for url in [*silent_urls("silent.test", 45), f"{site.at('hooks.good.test')}/called"]:
            api.begin([f"{site.url}/page"], webhook={"url": url, "secret": "a long secret"})
        until(
            lambda: names.asked("silent.test") == 45, what="all lookups of webhooks"
        )  # each session has its own limit
        until(lambda: site.served(f"{site.at('hooks.good.test')}/called"), what="the webhook")
    finally:
        api.process.kill()


def test_a_hostile_page_in_the_browser(names: NameServer, site: Site, tmp_path: Path) -> None:
    """The pages of other sessions load."""
    beacons = "".join(f"fetch('{url}', {{mode: 'no-cors'}}).catch(() => 0);" for url in silent_urls("silent.test"))
    site.pages["/hostile"] = f"<script>{beacons}</script>"
    api = ApartApi(names, tmp_path, {**PATIENT, "SHOAL_BROWSER__SANDBOX": "false", "SHOAL_SERVE__RENDER": "true"})
    try:
        api.begin([f"{site.at('a.good.test')}/hostile"], options={"render": {"wait_for": "#never"}})
        until(lambda: names.asked("silent.test") == SHARE, what="the limit")
        good = api.begin([f"{site.at('c.good.test')}/page", f"{site.url}/page"], options={"render": True})
        assert api.errors(good) == {("", "")}
        plain = api.begin([f"{site.at('d.good.test')}/page"])
        assert api.errors(plain) == {("", "")}
        assert names.asked("silent.test") == SHARE
    finally:
        api.process.kill()


# -- answers

HOSTS = "127.0.0.1 localhost\n::1 localhost\n10.7.7.7 inhosts in.hosts.test\nfd00::7 six.hosts.test\n"
ZONE = {
    "short.corp.test": ["10.2.0.1"], "both.test": ["10.1.0.1", "2001:db8::1"], "six.test": ["2001:db8::2"],
    "many.test": [f"10.3.0.{number}" for number in range(1, 25)], "xn--bcher-kva.test": ["10.4.0.1"],
    "under_score.test": ["10.4.0.2"],
}  # fmt: skip
ASKED = [
    "inhosts", "in.hosts.test", "six.hosts.test", "localhost", "short", "short.corp.test", "short.", "both.test",
    "BOTH.test.", "six.test", "many.test", "bücher.test", "under_score.test", "missing.test", "broken.test",
    "127.0.0.1", "127.1", "0x7f.1", "2130706433", "::1", "fe80::1%lo", "1.2.3.4.5", "256.1.1.1", "a b.test",
]  # fmt: skip
RESOLVE = """
import asyncio, json, socket, sys, uvloop
from shoal.config import DnsSettings
from shoal.fetch.resolving import Names

async def main():
    names, answers = Names(DnsSettings(resolver=sys.argv[1])), []
    for host in json.loads(sys.argv[2]):
        try:
            answers.append([list(each) for each in await names.resolve(host)])
        except socket.gaierror as exc:
            answers.append("missing" if exc.errno == socket.EAI_NONAME else "failed")
    print(json.dumps(answers))

uvloop.run(main())
"""


def test_c_ares_answers_like_the_system(tmp_path: Path) -> None:
    """For addresses in any spelling, /etc/hosts, search domains, both families and their order, and failures."""
    with name_server(tmp_path, ZONE) as names:
        names.configure("hosts", HOSTS)
        answers = {}
        for resolver in ("c-ares", "system"):
            command = names.asking(sys.executable, "-c", RESOLVE, resolver, json.dumps(ASKED))
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            answers[resolver] = dict(zip(ASKED, json.loads(done.stdout), strict=True))
    system = answers["system"]
    assert [system[name][0][0] for name in ("inhosts", "short", "127.1")] == ["10.7.7.7", "10.2.0.1", "127.0.0.1"]
    assert [system[name] for name in ("missing.test", "broken.test")] == ["missing", "failed"]
    if system["six.test"] == "missing":  # this machine has no IPv6, so the system does not ask for it
        for name in ("both.test", "BOTH.test.", "six.test", "six.hosts.test", "localhost"):
            del system[name], answers["c-ares"][name]
    assert answers["c-ares"] == system


CONNECT = """
import asyncio, os, sys, uvloop
from shoal import Request
from shoal.config import HttpSettings
from shoal.fetch.http_fetcher import HttpFetcher

async def main():
    loop = asyncio.get_running_loop()
    lookups = [asyncio.ensure_future(loop.getaddrinfo("n.silent.test", 80)) for _ in range(8)]
    await asyncio.sleep(0)
    for url in sys.argv[1:]:
        print((await HttpFetcher(HttpSettings(), "test").fetch(Request(url))).status, flush=True)
    print(sum(lookup.done() for lookup in lookups), flush=True)
    os._exit(0)

uvloop.run(main())
"""


def test_connecting_needs_no_thread_of_lookups(names: NameServer, site: Site) -> None:
    """Even if a library of the spider has filled all threads of uvloop."""
    command = names.asking(sys.executable, "-c", CONNECT, f"{site.url}/a", f"{site.at('a.good.test')}/b")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["200", "200", "0"]


FAIL = """
import asyncio, socket, uvloop
from shoal.config import DnsSettings
from shoal.fetch.resolving import Names

async def main():
    names = Names(DnsSettings(failure_seconds=2))
    for number in range(1, 10_000):
        try:
            print(number, (await names.resolve("late.test"))[0].host)
            return
        except socket.gaierror as exc:
            print(exc.strerror, flush=True)
        await asyncio.sleep(0.01)

uvloop.run(main())
"""


def test_a_failure_is_remembered_for_a_moment(names: NameServer) -> None:
    command = names.asking(sys.executable, "-c", FAIL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        failures = [process.stdout.readline() for _ in range(20)]
        names.add("late.test", "10.5.0.1")
        *others, last = process.stdout
    assert {*failures, *others} == {"the name does not exist\n"}
    attempts, address = last.split()
    assert address == "10.5.0.1"
    assert names.questions("late.test") < 2 * int(attempts)


TOGETHER = """
import asyncio, os, uvloop
from shoal.config import DnsSettings
from shoal.fetch.resolving import CaresResolver, Names

CaresResolver.most = 3

async def main():
    names, callers = Names(DnsSettings(deadline=1000)), {}
    for caller in ("first", "second"):
        callers[caller] = names.new_caller()
        for number in range(9):
            asyncio.ensure_future(names.resolve(f"{caller}{number}.silent{number}.test", callers[caller]))
    for _ in range(3):
        await asyncio.sleep(0)  # the lookups begin
    print((await names.resolve("a.good.test"))[0].host, flush=True)
    os._exit(0)

uvloop.run(main())
"""


def test_all_callers_together_have_a_limit(names: NameServer) -> None:
    """But each may look up one name."""
    done = subprocess.run(
        names.asking(sys.executable, "-c", TOGETHER), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("127.0.0.1\n", "")
    assert sum(names.questions(f"first{number}.silent{number}.test") > 0 for number in range(9)) == 3
    assert sum(names.questions(f"second{number}.silent{number}.test") > 0 for number in range(9)) == 1


MAIL = """
import asyncio, os, uvloop
from pathlib import Path
from shoal.operations.notifications.channels import Mail
from shoal.operations.notifications.messages import make_test_message
from shoal.operations.notifications.settings import SmtpChannel

async def main():
    settings = SmtpChannel(host="mail.silent.test", sender="a@b.test", to=("c@d.test",), security="none", timeout=100)
    mail = Mail("here", settings, None, Path())
    message = make_test_message("m", "test")
    sending = [asyncio.ensure_future(mail.send(message)) for _ in range(64)]
    await asyncio.sleep(0.2)
    print(await asyncio.to_thread(lambda: "written"), sum(task.done() for task in sending), flush=True)
    os._exit(0)

uvloop.run(main())
"""


def test_mail_to_a_silent_server_leaves_threads_for_outputs(names: NameServer) -> None:
    done = subprocess.run(
        names.asking(sys.executable, "-c", MAIL), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("written 0\n", "")


PROXIES = """
import asyncio, sys, uvloop
from shoal import Request
from shoal.config import DnsSettings, HttpSettings
from shoal.errors import ProxyError
from shoal.fetch.http_fetcher import HttpFetcher

async def main():
    fetcher = HttpFetcher(HttpSettings(), "test", dns=DnsSettings(deadline=0.5))
    for proxy in ("http://p.silent.test:1", "socks5://user:pass@q.silent.test:1"):
        try:
            await fetcher.fetch(Request("http://127.0.0.1:1/", proxy=proxy))
        except ProxyError as exc:
            print(exc.retryable, exc)
    print((await fetcher.fetch(Request(sys.argv[1], proxy=sys.argv[2]))).status)
    await fetcher.close()

uvloop.run(main())
"""


def test_names_of_proxies(names: NameServer, site: Site) -> None:
    """Through a proxy with a name, and through two whose names have no answer."""
    with beside(SocksServer({"user": "p@ss"})) as socks:
        proxy = socks.address("user").replace("127.0.0.1", "a.good.test")
        command = names.asking(sys.executable, "-c", PROXIES, f"{site.url}/page", proxy)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    late = "can't resolve the host of the proxy: no answer within 0.5 s (dns.deadline)"
    assert (done.stdout.splitlines(), done.stderr) == (
        [f"True {late}", f"True {late}", "200"], "",
    )  # fmt: skip
    assert len(socks.connects) == 1


LATE = """
import asyncio, socket, sys, uvloop
from shoal.config import DnsSettings
from shoal.fetch import resolving

resolving._FIRST_PAUSE = 100

async def main():
    names = resolving.Names(DnsSettings(deadline=2, failure_seconds=100))
    busy, other = resolving.Caller(1), names.new_caller()
    asyncio.ensure_future(names.resolve("n.silent.test", busy))
    await asyncio.sleep(0.3)
    try:
        await names.resolve("late.silent.test", busy)
    except socket.gaierror as exc:
        print(exc.strerror, flush=True)
    sys.stdin.readline()
    print((await names.resolve("late.silent.test", other))[0].host)

uvloop.run(main())
"""


def test_a_caller_with_too_many_lookups_spoils_no_name_for_others(names: NameServer) -> None:
    """Its turn comes when there is no time left for an answer. That says nothing about the name."""
    command = names.asking(sys.executable, "-c", LATE)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "no answer within 2 s (dns.deadline)\n"
        names.add("late.silent.test", "10.5.0.2")
        print("go on", file=process.stdin, flush=True)
        assert process.stdout.read() == "10.5.0.2\n"


FORK = """
import os, uvloop
from shoal.fetch.resolving import Names

async def main(who):
    print(who, (await Names().resolve(f"{who}.good.test"))[0].host, flush=True)

uvloop.run(main("parent"))
if child := os.fork():
    print(os.waitpid(child, 0)[1])
else:
    uvloop.run(main("child"))
"""


def test_a_forked_process_has_its_own_resolver(names: NameServer) -> None:
    """The thread of c-ares stays in the parent."""
    command = names.asking(sys.executable, "-c", FORK)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("parent 127.0.0.1\nchild 127.0.0.1\n0\n", "")


LEAVE = """
import asyncio, sys, uvloop
from shoal.config import DnsSettings
from shoal.fetch.resolving import Names

async def main():
    names = Names(DnsSettings(resolver=sys.argv[1]))
    lookup = asyncio.ensure_future(names.resolve("n.silent.test"))
    await asyncio.sleep(0.2)
    lookup.cancel()
    names.close()

uvloop.run(main())
print("left")
"""


@pytest.mark.parametrize("resolver", ["c-ares", "system"])
def test_a_process_ends_while_a_name_is_looked_up(names: NameServer, resolver: str) -> None:
    began = time.monotonic()
    command = names.asking(sys.executable, "-c", LEAVE, resolver)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", ""), time.monotonic() - began
