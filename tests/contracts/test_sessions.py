"""The cookies of a run on every store: changes of several processes, epochs, versions, limits, and tools."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import pytest
import pytest_asyncio

from shoal.errors import ConfigError
from shoal.fetch.sessions.cookies import Cookie
from shoal.fetch.sessions.jars import Jar, JarKeys, Jars
from shoal.fetch.sessions.login import LoginState, login_state
from shoal.fetch.sessions.stored import (
    CookieFile,
    SessionImport,
    StoredSession,
    import_session,
    read_logins,
    usable_cookies,
)
from shoal.ports import Document
from shoal.testing import FakeClock, Harness

pytestmark = pytest.mark.asyncio

RUN = "run"
URL = "https://www.shop.example/"


def cookie(name: str, value: str = "1", domain: str = "shop.example", expires: float | None = None) -> Cookie:
    return Cookie(name, value, domain, "/", False, expires=expires)


class Worker:
    """The jars of one process."""

    def __init__(self, harness: Harness) -> None:
        self._queue = harness.frontiers[RUN]
        self.clock = FakeClock(time.time())
        self.jars = Jars(harness.store, self._queue, RUN, clock=self.clock)

    @property
    def jar(self) -> Jar:
        return self.jars.jar("")

    async def set(self, *cookies: Cookie, epoch: int | None = None) -> None:
        """As a page sets them, which is then completed."""
        for each in cookies:
            self.jars.set(self.jar, each, self.jar.epoch if epoch is None else epoch)
        await self.jars.flush()

    async def sends(self) -> dict[str, str]:
        """What it sends with the next page that it leases."""
        self.jars.seen((await self._queue.lease(0, 1.0)).cookies)
        if not self.jars.is_fresh(self.jar, URL):
            await self.jars.refresh(self.jar, URL)
        return dict(self.jar.cookies.pairs_for(URL))


MakeWorker: TypeAlias = Callable[[], Worker]


@pytest_asyncio.fixture
async def worker(harness: Harness) -> AsyncIterator[MakeWorker]:
    await harness.open()
    yield lambda: Worker(harness)
    await harness.close()


@pytest.fixture
def session(worker: MakeWorker, harness: Harness) -> StoredSession:
    return StoredSession(harness.store, harness.frontiers[RUN], RUN)


async def document(harness: Harness) -> Document:
    found = await harness.store.get_document(JarKeys(RUN).key("", "shop.example"))
    assert found is not None
    return found


# -- workers


async def test_a_version_makes_the_other_worker_read(worker: MakeWorker) -> None:
    first, second = worker(), worker()
    assert await second.sends() == {}
    await first.set(cookie("sid", "a"))
    assert await second.sends() == {"sid": "a"}
    await second.set(cookie("sid", "b"))
    assert await first.sends() == {"sid": "b"}
    await first.set(cookie("sid", expires=1.0))
    assert await second.sends() == {}


async def test_workers_that_change_cookies_of_one_site_at_the_same_time_lose_none(worker: MakeWorker) -> None:
    workers = [worker() for _ in range(5)]
    for round_ in range(5):
        await asyncio.gather(
            *(each.set(cookie(f"c{number}", str(round_))) for number, each in enumerate(workers)),
        )
    expected = {f"c{number}": "4" for number in range(5)}
    assert await worker().sends() == expected
    assert [await each.sends() for each in workers] == [expected] * 5


async def test_a_new_process_has_the_cookies_of_all_jars(worker: MakeWorker) -> None:
    old, new = worker(), worker()
    await old.set(cookie("sid"), cookie("other", domain="b.example"))
    old.jars.set(old.jars.jar("#alice/Müller"), cookie("sid", "alice"), 0)
    await old.jars.flush()
    await new.jars.load()
    assert [each.name for each in new.jar.cookies.all()] == ["other", "sid"]
    assert new.jars.jar("#alice/Müller").cookies.pairs_for(URL) == [("sid", "alice")]
    assert set(await new.jars.stored()) == {"", "#alice/Müller"}


async def test_a_page_that_was_requested_before_a_login_changes_nothing(worker: MakeWorker) -> None:
    first, second = worker(), worker()
    await first.set(cookie("sid", "old"))
    assert await second.sends() == {"sid": "old"}
    await first.jars.publish(first.jar, {cookie("sid").key: cookie("sid", "new")}, 7)
    # The second worker does not know of the login yet, and its page ends the session of the first epoch.
    await second.set(cookie("sid", expires=1.0), epoch=0)
    assert await first.sends() == {"sid": "new"}
    assert await second.sends() == {"sid": "new"}
    assert second.jar.epoch == 7
    await second.set(cookie("sid", expires=1.0), epoch=0)
    await second.set(cookie("cart", "full"))
    assert await first.sends() == {"sid": "new", "cart": "full"}


async def test_an_end_that_only_moves_is_not_stored_each_time(worker: MakeWorker, harness: Harness) -> None:
    page = worker()
    await page.set(cookie("sid", expires=page.clock.now + 3600))
    version = (await document(harness)).version
    for _ in range(10):
        page.clock.advance(60)
        await page.set(cookie("sid", expires=page.clock.now + 3600))
    assert (await document(harness)).version == version
    page.clock.advance(2000)  # now a process that reads the stored one would lose it much too early
    await page.set(cookie("sid", expires=page.clock.now + 3600))
    assert (await document(harness)).version != version
    version = (await document(harness)).version
    await page.set(cookie("sid", "other", expires=page.clock.now + 3600))
    assert (await document(harness)).version != version


async def test_the_cookies_of_a_site_have_limits(worker: MakeWorker, harness: Harness) -> None:
    page = worker()
    for domain in range(60):
        await page.set(*(cookie(f"c{n}", "v" * 4000, f"d{domain}.shop.example") for n in range(8)))
    assert len((await document(harness)).value) < 512 * 1024
    stored = (await page.jars.stored())[""]["shop.example"]
    assert stored.cookies[-1].domain == "d59.shop.example"  # the oldest went
    await page.set(*(cookie(f"c{number}", domain="www.shop.example") for number in range(70)))
    sent = await page.sends()
    assert len(sent) == 50
    assert "c69" in sent


# -- tools


async def test_an_import_counts_as_a_login(worker: MakeWorker, session: StoredSession, harness: Harness) -> None:
    page = worker()
    await page.set(cookie("sid", "old"), cookie("cart", "full"))
    login = login_state(harness.store, RUN, "")
    await login.change(lambda _: LoginState(epoch=5, logins=2, failures=3, reason="wrong password", stopped=True))
    await session.add("", [cookie("sid", "imported"), cookie("sid", domain="b.example")])
    assert await page.sends() == {"sid": "imported", "cart": "full"}
    await page.set(cookie("sid", expires=1.0), epoch=0)
    assert await page.sends() == {"sid": "imported", "cart": "full"}
    state = await login.read()
    assert state is not None
    assert (state.epoch, state.logins, state.failures, state.stopped) == (page.jar.epoch, 2, 0, False)
    epoch = state.epoch
    await session.add("", [cookie("sid", "again")])
    assert (await read_logins(harness.store, RUN))[""].epoch > epoch


async def test_a_clear_removes_cookies_for_all_workers(worker: MakeWorker, session: StoredSession) -> None:
    page, other = worker(), worker()
    await session.add("", [cookie("sid")])
    await session.add("#alice", [cookie("sid", "alice")])
    assert await page.sends() == {"sid": "1"}
    assert await other.sends() == {"sid": "1"}
    await session.clear([""])
    await other.set(cookie("sid", "late"))  # of a page that was requested before
    assert await page.sends() == {}
    assert await other.sends() == {}
    await page.set(cookie("guest"))
    assert await other.sends() == {"guest": "1"}
    reports = {report.jar: report for report in await session.reports()}
    assert reports[""].login is None
    assert [site.names for site in reports[""].sites] == [("guest",)]
    assert reports["#alice"].login is not None


async def test_a_file_is_imported_once(worker: MakeWorker, session: StoredSession, harness: Harness) -> None:
    page, queue = worker(), harness.frontiers[RUN]
    file = SessionImport("", CookieFile((cookie("sid", "file"),), "digest"))
    await import_session(harness.store, queue, RUN, file)
    assert await page.sends() == {"sid": "file"}
    await page.set(cookie("sid", "rotated"))
    await import_session(harness.store, queue, RUN, file)
    assert await worker().sends() == {"sid": "rotated"}
    await import_session(harness.store, queue, RUN, SessionImport("", CookieFile((cookie("sid", "new"),), "other")))
    assert await page.sends() == {"sid": "new"}
    await session.clear([""])
    await import_session(harness.store, queue, RUN, file)
    assert await page.sends() == {"sid": "file"}


async def test_a_report_has_no_values(worker: MakeWorker, session: StoredSession) -> None:
    ends = time.time() + 3600
    await session.add("", [cookie("sid", "s3cret", expires=ends), cookie("a", "s3cret"), cookie("over", expires=5.0)])
    (report,) = await session.reports()
    (site,) = report.sites
    assert (site.site, site.cookies, site.names, site.ends) == ("shop.example", 2, ("a", "sid"), ends)
    assert "s3cret" not in repr(report)
    assert {each.name for each in await session.cookies("")} == {"a", "sid"}


async def test_the_session_is_deleted_with_the_run(session: StoredSession, harness: Harness) -> None:
    await session.add("", [cookie("sid")], "digest")
    await harness.store.delete_run(RUN)
    assert await harness.store.list_documents(f"run/{RUN}/") == []


async def test_what_does_not_fit_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    ended = cookie("over", expires=5.0)
    cookies = usable_cookies(CookieFile((ended, *(cookie(f"c{number}") for number in range(60))), "", origins=1))
    assert len(cookies) == 50
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 61 cookies have expired and are left out",
        "cookies of shop.example are left out: a domain has up to 50 cookies and 64 KB",
        "the session file also has local storage, which is left out: only cookies are imported",
    ]
    with pytest.raises(ConfigError, match="all cookies of the session file have expired"):
        usable_cookies(CookieFile((ended,), ""))
