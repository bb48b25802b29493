"""Logs in: once for each jar of a run, in one process of the fleet, and again when pages say that it is over.

A jar that needs a login puts its process on hold. The process leases nothing, and releases leased pages without the
loss of an attempt. One process claims the role of the login, runs ``Spider.log_in`` with cookies of its own, and
publishes them under a new epoch. The others wait for that epoch.

Two logins overlap only if a process was frozen after it had sent its request, so that its role expired. Its cookies
have an earlier epoch and are dropped. If the site has ended the newer session meanwhile, one more login repairs that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal.config import LoginSettings
from shoal.errors import DECODING_ERRORS, FetchError, FrontierError, LoginError, describe
from shoal.fetch.layers import Postponed
from shoal.fetch.sessions.cookies import Cookie, CookieKey
from shoal.fetch.sessions.jars import Jar, Jars, quoted
from shoal.fetch.sessions.session import HostTurns, Persist, fetch_with
from shoal.http import Request, Response
from shoal.http.login import Login
from shoal.messages import printable
from shoal.ports import Claim, Documents, Fetch, Frontier
from shoal.ports.documents import StoredValue
from shoal.selector import selectors
from shoal.system import chance, clock

log = logging.getLogger("shoal.session")

LOGIN_ROLE = "login "
"""The role of a login is this and the name of the jar."""
OUT_KIND = "logged out"
"""The kind of the failure of a page that is logged out however fresh the login is."""
_ROLE_SECONDS = 30.0
_WAIT = (0.1, 0.5)  # seconds between two checks of a login of another process
_PATIENCE = 3  # if the site does not answer, this many times as many attempts
_LONGEST_WAIT = 60.0  # seconds between two attempts
_SUSPECT = 3  # answers without a login after which a page is tried first after the next login
_ALWAYS = b"always"
_PAGE_SECONDS = 86400.0  # how long answers of a page are counted
_MAX_SUSPECTS = 20


class LoginState(Struct, frozen=True, kw_only=True):
    """The stored state of a jar's login."""

    epoch: int = 0
    """The epoch of the last login that succeeded. 0 if none has."""
    at: float = 0.0
    """When that login succeeded."""
    logins: int = 0
    unproven: int = 0
    """How many of the last logins no page has proven with an answer."""
    failures: int = 0
    """How many attempts have failed since the last login."""
    reason: str = ""
    """Why the last attempt failed."""
    failed_at: float = 0.0
    stopped: bool = False
    """Whether the run was stopped because the login keeps failing."""


def login_state(documents: Documents, run_id: str, jar: str) -> StoredValue[LoginState]:
    """The stored state of a login."""
    return StoredValue(documents, f"run/{run_id}/login/{quoted(jar)}", LoginState)


class _Proof(Struct, array_like=True):
    """A page that was answered with a login, and the epoch of that login."""

    epoch: int
    url: str


class _JarLogin:
    """What this process knows about the login of a jar."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch
        """Fetches with the identity of the jar."""
        self.needs_after: int | None = None
        """The jar needs a login with a later epoch than this. None: it needs no login."""
        self.suspects: list[Request] = []
        """Pages to try first after the next login."""
        self.is_urgent = False
        """Whether a suspect has had too many tries after logins of other processes."""
        self.proven = -1
        """The epoch of the last login that this process has proven with a page."""


class _PrivateJar:
    """The cookies of a login in progress."""

    def __init__(self, name: str, epoch: int, cookies: Iterable[Cookie], turns: HostTurns, fetch: Fetch) -> None:
        self._jars = Jars()
        self._jar = self._jars.jar(name)
        self._jar.epoch = epoch
        self._turns = turns
        self._fetch = fetch
        for cookie in cookies:
            self._jar.cookies.put(cookie)

    @property
    def cookies(self) -> list[Cookie]:
        return self._jar.cookies.all()

    async def send(self, request: Request) -> Response:
        """Fetch a page when it is its host's turn."""
        fetch = partial(fetch_with, self._jars, self._jar, fetch=self._fetch, is_login=True)
        return await self._turns.fetch(request, fetch)

    def copy(self) -> _PrivateJar:
        return _PrivateJar(self._jar.name, self._jar.epoch, self.cookies, self._turns, self._fetch)


class LoginKeeper:
    """Keeps the jars of one process logged in. It is a `Route`: while it is not ready, the engine leases nothing."""

    def __init__(
        self,
        run_id: str,
        settings: LoginSettings,
        jars: Jars,
        frontier: Frontier,
        documents: Documents | None,
        *,
        log_in: Callable[[Login], Awaitable[object]] | None,
        is_logged_out: Callable[[Response], object],
        persist: Persist,
        stop_run: Callable[[], Awaitable[object]],
    ) -> None:
        """``log_in``: None if the spider cannot log in by itself. ``stop_run``: called if the login keeps failing,
        before this process ends."""
        self._run_id = run_id
        self._settings = settings
        self._jars = jars
        self._frontier = frontier
        self._documents = documents
        self._log_in = log_in
        self._is_logged_out = is_logged_out
        self._persist = persist
        self._stop_run = stop_run
        self._turns = HostTurns(frontier, persist)
        self._logins: dict[str, _JarLogin] = {}
        self._wake = asyncio.Event()
        self._own_states: dict[str, LoginState] = {}
        """The states, if they are not stored."""
        self._began_at = clock.time()
        self.reason = ""
        """Why the engine may lease nothing. Empty if it may."""
        self.on_hold: Callable[[], None] = lambda: None
        """Called when a jar needs a login."""
        self.on_ready: Callable[[], None] = lambda: None

    @property
    def ready(self) -> bool:
        return not self.reason

    # -- called with each page

    async def check(self, jar: Jar, fetch: Fetch) -> None:
        """Raise Postponed if the jar must log in first."""
        login = self._logins.get(jar.name) or await self._begin(jar, fetch)
        if login.needs_after is not None:
            raise Postponed(self.reason, contacted=False)

    async def _begin(self, jar: Jar, fetch: Fetch) -> _JarLogin:
        """The login of a jar that this process uses for the first time. A cleared jar has an epoch, but no login."""
        last = jar.epoch
        if self._jars.is_stored:
            last = (await self._state(jar.name).read() or LoginState()).epoch
        login = self._logins.get(jar.name)
        if login is None:  # another page may have been faster
            login = self._logins[jar.name] = _JarLogin(fetch)
            jar.epoch = max(jar.epoch, last)
            if self._log_in is not None and not last:
                self._need(jar, login, 0)  # the cookies of another login may be here already, but not its state
        return login

    async def note_page(self, jar: Jar, epoch: int, request: Request) -> None:
        """Note that a page was answered with a login."""
        login = self._logins.get(jar.name)
        if login is not None and login.proven < epoch and request.method == "GET":
            login.proven = epoch
            proof = msgspec.msgpack.encode(_Proof(epoch, request.url))
            await self._frontier.remember(self._proof_key(jar), proof, _PAGE_SECONDS)

    def _proof_key(self, jar: Jar) -> str:
        return f"logged in {self._run_id} {jar.name}"

    async def _proof(self, jar: Jar) -> _Proof:
        stored = await self._persist(lambda: self._frontier.recall(self._proof_key(jar)))
        try:
            return _Proof(0, "") if stored is None else msgspec.msgpack.decode(stored, type=_Proof)
        except DECODING_ERRORS:  # another program wrote it
            return _Proof(0, "")

    def is_out(self, response: Response) -> bool:
        """Whether a page is logged out."""
        try:
            with selectors.uncounted():  # its queries match on few pages, as they should
                return bool(self._is_logged_out(response))
        except Exception as exc:  # the user's code may raise anything: it costs this page
            reason = f"logged_out() of the spider failed: {type(exc).__name__}: {exc}"
            raise FetchError(reason, kind="callback", retryable=False, status=response.status) from exc

    async def logged_out(self, jar: Jar, epoch: int, request: Request, response: Response) -> Exception:
        """Note that a page is logged out. Returns the error to raise. ``epoch``: of the jar at the request."""
        reason = f"the site answered {response.url} without a login"
        if jar.epoch > epoch:
            return Postponed(f"{reason}; there is a newer login", contacted=True)
        key = self._page_key(jar, request)
        answers = await self._frontier.recall(key) or b"0"
        if answers == _ALWAYS:
            message = f"{reason}, {_SUSPECT} times and as the first page after a login"
            return FetchError(message, kind=OUT_KIND, retryable=False, status=response.status)
        count = int(answers) + 1
        await self._frontier.remember(key, b"%d" % count, _PAGE_SECONDS)
        login = self._logins.get(jar.name)
        if login is None:  # the process has started over
            return Postponed(reason, contacted=True)
        if count >= _SUSPECT and len(login.suspects) < _MAX_SUSPECTS and request not in login.suspects:
            login.suspects.append(request)
            login.is_urgent |= count >= 2 * _SUSPECT
        self._need(jar, login, epoch)
        return Postponed(reason, contacted=True)

    def _page_key(self, jar: Jar, request: Request) -> str:
        return f"logged out {self._run_id} {jar.name} {request.fingerprint().hex()}"

    def _need(self, jar: Jar, login: _JarLogin, after: int) -> None:
        if login.needs_after is None:
            login.needs_after = after
            self.reason = f"on hold: the run logs in{f' with {jar.name}' if jar.name else ''}"
            log.info("%s", self.reason)
            self._wake.set()
            self.on_hold()

    def forget(self) -> None:
        """Drop what was read from the store, because the store went back in time."""
        self._logins.clear()
        self.reason = ""

    # -- the logins

    async def keep(self) -> None:
        """Log in whenever a jar needs it. Runs until it is cancelled. LoginError if the login keeps failing."""
        selectors.current.set(None)  # the queries of a login are not those of the crawl
        while True:
            await self._wake.wait()
            self._wake.clear()
            while names := [name for name, login in self._logins.items() if login.needs_after is not None]:
                for name in names:
                    await self._renew(self._jars.jar(name), self._logins[name])
            self.reason = ""
            self.on_ready()

    async def _renew(self, jar: Jar, login: _JarLogin) -> None:
        """Wait until this process or another one has logged in."""
        assert login.needs_after is not None
        while True:
            if await self._adopt(jar, login):
                break
            async with self._role(jar) as claim:
                if claim is None:
                    await asyncio.sleep(chance.uniform(*_WAIT))
                    continue
                if await self._adopt(jar, login):
                    break
                if await self._attempt(jar, login, claim):
                    break
        login.needs_after = None

    async def _adopt(self, jar: Jar, login: _JarLogin) -> bool:
        """Use the login of another process, if there is one. LoginError if the other process has given up."""
        if not self._jars.is_stored:
            return False
        state = await self._persist(self._state(jar.name).read)
        if state is None:
            return False
        if state.epoch > (login.needs_after or 0) and not login.is_urgent:
            await self._persist(self._jars.load)
            jar.epoch = max(jar.epoch, state.epoch)
            login.suspects.clear()  # they get one more try
            return True
        if state.stopped and state.failed_at > self._began_at:
            raise LoginError(_given_up(state))
        return False

    @asynccontextmanager
    async def _role(self, jar: Jar) -> AsyncIterator[Claim | None]:
        """The right to log in. None while another process has it."""
        if not self._jars.is_stored:
            yield Claim(LOGIN_ROLE + jar.name, 0, b"", int(clock.time() * 1e6))
            return
        nonce = chance.token_bytes(16)
        claim = await self._persist(
            lambda: self._frontier.claim(LOGIN_ROLE + jar.name, _ROLE_SECONDS, nonce=nonce, above=jar.epoch)
        )
        try:
            yield claim
        finally:
            if claim is not None:
                with suppress(FrontierError):
                    await self._frontier.relinquish(claim)

    async def _attempt(self, jar: Jar, login: _JarLogin, claim: Claim) -> bool:
        """Log in once, under the role. LoginError if the login has failed too often."""
        if self._log_in is None:
            reason = (
                "the site has logged the run out, and the spider has no log_in(): import a new session with "
                f"`shoal session {self._run_id} --import FILE`, and start again"
            )
            await self._give_up(jar, replace(await self._read_state(jar), failures=1, reason=reason))
        state = await self._read_state(jar)
        proof = await self._proof(jar)
        is_proven = not state.epoch or proof.epoch >= state.epoch or self._tries_again(state)
        unproven = 0 if is_proven else state.unproven
        if unproven >= self._settings.attempts:
            await self._give_up(
                jar, replace(state, failures=unproven, reason="after it, every page was still answered without a login")
            )
        old_cookies = {cookie.key: cookie for cookie in jar.cookies.all()}
        private = _PrivateJar(jar.name, claim.epoch, old_cookies.values(), self._turns, login.fetch)
        attempt = Login(jar.name, private.send)
        renewing = asyncio.create_task(self._renew_role(claim))
        try:
            await self._call(attempt)
            verdicts = [(request, await self._is_out_again(request, private)) for request in login.suspects]
            if any(is_out for _, is_out in verdicts):
                if not proof.url or await self._is_out_again(Request(proof.url), private):
                    raise LoginError("after it, the first page was still answered without a login")
                unproven = -1
        except (LoginError, FetchError) as error:
            await self._failed(jar, error)
            return False
        finally:
            renewing.cancel()
            if attempt.response is not None:
                await attempt.response.release()
        if self._jars.is_stored and not await self._persist(lambda: self._frontier.advance(claim, b"", _ROLE_SECONDS)):
            log.warning("the login took too long, and another process may log in: it is dropped")
            return False
        await self._succeeded(jar, _changes(old_cookies, private.cookies), claim.epoch, unproven + 1)
        for request, is_out in verdicts:
            key, answers = self._page_key(jar, request), _ALWAYS if is_out else b"0"
            await self._persist(partial(self._frontier.remember, key, answers, _PAGE_SECONDS))
        login.suspects.clear()
        login.is_urgent = False
        return True

    async def _call(self, attempt: Login) -> None:
        """Call the spider's ``log_in``, and check the last page."""
        assert self._log_in is not None
        try:
            await self._log_in(attempt)
        except (LoginError, FetchError, FrontierError):
            raise
        except Exception as exc:  # the user's code may raise anything
            hint = "; is an `await` missing?" if "'coroutine' object" in str(exc) else ""
            raise LoginError(f"log_in() of the spider failed: {describe(exc)}{hint}") from exc
        if attempt.response is None:
            raise LoginError("log_in() of the spider has fetched nothing")
        if self.is_out(attempt.response):
            raise LoginError(f"the page after the login is still logged out: {attempt.response.url}")

    async def _is_out_again(self, request: Request, private: _PrivateJar) -> bool:
        """Whether a page is logged out although the login is fresh. The cookies that it sets are not kept."""
        try:
            response = await private.copy().send(request)
        except FetchError:
            return False
        try:
            return self.is_out(response)
        finally:
            await response.release()

    async def _renew_role(self, claim: Claim) -> None:
        while self._jars.is_stored:
            await asyncio.sleep(_ROLE_SECONDS / 4)
            with suppress(FrontierError):
                await self._frontier.advance(claim, b"", _ROLE_SECONDS)

    async def _succeeded(self, jar: Jar, changes: dict[CookieKey, Cookie | None], epoch: int, unproven: int) -> None:
        await self._persist(lambda: self._jars.publish(jar, changes, epoch))
        logins = (await self._read_state(jar)).logins + 1
        await self._store(jar, LoginState(epoch=epoch, at=clock.time(), logins=logins, unproven=unproven))
        log.info("logged in%s", f" with {jar.name}" if jar.name else "")

    async def _failed(self, jar: Jar, error: LoginError | FetchError) -> None:
        """Count a failed attempt, and wait before the next one. LoginError if no attempt is left."""
        state = await self._read_state(jar)
        failures = 1 if self._tries_again(state) else state.failures + 1
        state = replace(state, failures=failures, reason=printable(str(error)), failed_at=clock.time(), stopped=False)
        attempts = self._settings.attempts * (_PATIENCE if isinstance(error, FetchError) else 1)
        log.warning("the login failed (attempt %d of %d): %s", failures, attempts, state.reason)
        if failures >= attempts or not error.retryable:
            await self._give_up(jar, state)
        await self._store(jar, state)
        await asyncio.sleep(min(_LONGEST_WAIT, self._settings.retry_after * 2.0 ** (failures - 1)))

    async def _give_up(self, jar: Jar, state: LoginState) -> NoReturn:
        await self._stop_run()
        await self._store(jar, replace(state, stopped=True, failed_at=clock.time()))
        raise LoginError(_given_up(state))

    def _tries_again(self, state: LoginState) -> bool:
        """Whether an earlier process has given up. Then this process was started to try again."""
        return state.stopped and state.failed_at < self._began_at

    async def _read_state(self, jar: Jar) -> LoginState:
        if not self._jars.is_stored:
            return self._own_states.get(jar.name, LoginState())
        return await self._persist(self._state(jar.name).read) or LoginState()

    async def _store(self, jar: Jar, state: LoginState) -> None:
        if self._jars.is_stored:
            await self._persist(lambda: self._state(jar.name).change(lambda _: state))
        else:
            self._own_states[jar.name] = state

    def _state(self, jar: str) -> StoredValue[LoginState]:
        assert self._documents is not None
        return login_state(self._documents, self._run_id, jar)


def _given_up(state: LoginState) -> str:
    times = "" if state.failures == 1 else f" {state.failures} times (login.attempts)"
    return f"the login failed{times}: {state.reason}"


def _changes(before: dict[CookieKey, Cookie], after: list[Cookie]) -> dict[CookieKey, Cookie | None]:
    """What a login has changed. Every cookie that it left is a change, so that the cookie gets the login's epoch."""
    changes: dict[CookieKey, Cookie | None] = dict.fromkeys(before)
    return changes | {cookie.key: cookie for cookie in after}
