"""A store that another process of this machine owns.

`SocketStore` and `SocketFrontier` have the methods of the ports. They are made from the tables in
`shoal.frontier.local.wire`: each one encodes its arguments and makes a call. Only methods that need more than that are
written here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import msgspec

from shoal import clock
from shoal.errors import RequestError
from shoal.frontier.cancelled_calls import release_if_cancelled
from shoal.frontier.local import wire
from shoal.frontier.local.client import OwnerConnection
from shoal.frontier.local.places import TIMEOUT, LocalAddress
from shoal.http import Request
from shoal.ports import (
    Claim,
    Completion,
    CookieWrite,
    Failure,
    Frontier,
    FrontierOptions,
    History,
    Holder,
    Lease,
    Leased,
    LoggedItem,
    Store,
)

log = logging.getLogger("shoal.frontier")

_NO_REQUEST = Request("http://none.invalid/")
_decode_dead = msgspec.msgpack.Decoder(wire.DeadPage).decode


class _Remote:
    """An object whose methods are calls to the owner."""

    def __init__(self, connection: OwnerConnection, methods: Mapping[str, wire.Method], run: bytes = b"") -> None:
        self._connection = connection
        self._methods = methods
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = self.__dict__.get("_methods", {}).get(name)
        if method is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made = partial(self._bound, method)
        self.__dict__[name] = made
        return made

    async def _bound(self, method: wire.Method, *arguments: Any, **named: Any) -> Any:
        return await self._call(method, *method.bind(arguments, named))

    async def _call(self, method: wire.Method, *values: Any) -> Any:
        """A call with all arguments in the order of the port."""
        try:
            encoded = wire.encode(values)
        except (TypeError, ValueError, OverflowError, RecursionError) as exc:
            raise RequestError(f"the arguments of {method.name} can't be stored: {exc}") from exc
        return method.decode_result(await self._connection.call(method.name, self._run, msgspec.Raw(encoded)))


class SocketStore(_Remote):
    """See `shoal.ports.Store`."""

    shared: ClassVar[bool] = True

    def __init__(self, connection: OwnerConnection) -> None:
        super().__init__(connection, wire.STORE)

    @classmethod
    async def open(cls, url: str) -> Store:
        """Connect to the owner at ``local:NAME``. StoreAwayError if it does not answer."""
        address = LocalAddress.parse(url)

        async def find() -> str:
            return address.path

        return await cls.connect(find, address.timeout)

    @classmethod
    async def connect(cls, find: Callable[[], Awaitable[str]], timeout: float = TIMEOUT) -> Store:
        """Connect to the owner at the socket that ``find`` returns, now and whenever the connection was lost."""
        connection = OwnerConnection(find, timeout)
        await connection.open()
        return cast("Store", cls(connection))

    async def frontier(
        self, run_id: str, options: FrontierOptions | None = None, holder: Holder | None = None
    ) -> Frontier:
        key = wire.encode(wire.RunKey(run_id, options, holder))
        frontier = cast("Frontier", SocketFrontier(self._connection, wire.FRONTIER, key))
        await frontier.roles()  # RunError if there is no such run
        return frontier

    async def close(self) -> None:
        """Close the connection. Leases that were not released end with this process, or expire."""
        await self._connection.close()


class SocketFrontier(_Remote):
    """See `shoal.ports.Frontier`. Of a lease, only its fingerprint and token are sent to the owner."""

    def hold(self, holder: Holder) -> None:
        key = wire.decode_run_key(self._run)
        self._run = wire.encode(wire.RunKey(key.run_id, key.options, holder))

    async def lease(self, limit: int, ttl: float, *, counts_attempt: bool = True, nonce: bytes = b"") -> Leased:
        call = self._call(wire.FRONTIER["lease"], limit, ttl, counts_attempt, nonce)
        return await release_if_cancelled(call, lambda leased: self.release(leased.leases))

    async def renew(self, leases: Sequence[Lease], ttl: float) -> list[Lease | None]:
        deadline = clock.now() + ttl
        return _restored(leases, await self._call(wire.FRONTIER["renew"], _bare(leases), ttl), deadline)

    async def reissue(self, leases: Sequence[Lease], ttl: float, *, nonce: bytes) -> list[Lease | None]:
        deadline = clock.now() + ttl
        call = self._call(wire.FRONTIER["reissue"], _bare(leases), ttl, nonce)
        # The holder of the old tokens may have contacted the hosts.
        answer = await release_if_cancelled(
            call, lambda reissued: self.release([lease for lease in reissued if lease], contacted=True)
        )
        return _restored(leases, answer, deadline)

    async def complete(self, completions: Sequence[Completion]) -> list[Any]:
        answer: list[Any] = await self._end("complete", completions)
        return answer

    async def fail(self, failures: Sequence[Failure]) -> list[Any]:
        answer: list[Any] = await self._end("fail", failures)
        return answer

    async def store_cookies(
        self, cookies: CookieWrite, completions: Sequence[Completion] = ()
    ) -> tuple[int, list[Any]]:
        answer: tuple[int, list[Any]] = await self._end("store_cookies", completions, cookies)
        return answer

    async def _end(self, name: str, ended: Sequence[Completion | Failure], *first: CookieWrite) -> Any:
        bare = [msgspec.structs.replace(page, lease=_bare_lease(page.lease)) for page in ended]
        return await self._call(wire.FRONTIER[name], *first, bare)

    async def release(self, leases: Sequence[Lease], *, contacted: bool = False) -> list[bool]:
        answer: list[bool] = await self._call(wire.FRONTIER["release"], _bare(leases), contacted)
        return answer

    async def read_items(
        self, after: int, limit: int, *, last: LoggedItem | None = None, max_bytes: int | None = None
    ) -> list[LoggedItem]:
        """``last`` is not sent: nothing can rewind the log of a local owner."""
        most = wire.ITEM_BYTES if max_bytes is None else min(max_bytes, wire.ITEM_BYTES)
        items: list[LoggedItem] = await self._call(wire.FRONTIER["read_items"], after, limit, None, most)
        return items

    async def advance(self, claim: Claim, cursor: bytes, ttl: float, *, last: LoggedItem | None = None) -> bool:
        moved: bool = await self._call(wire.FRONTIER["advance"], claim, cursor, ttl, None)
        return moved

    async def dead(self) -> AsyncIterator[History]:
        cursor = 0
        while True:
            raw = await self._connection.call(wire.DEAD, self._run, msgspec.Raw(wire.encode((cursor,))))
            page = _decode_dead(raw)
            for history in page.histories:
                yield history
            cursor = page.cursor
            if not cursor:
                return

    async def close(self) -> None:
        """Do nothing: the connection belongs to the store."""


def _bare_lease(lease: Lease) -> Lease:
    return Lease(_NO_REQUEST, lease.fingerprint, lease.token, 0, "", 0.0)


def _bare(leases: Sequence[Lease]) -> list[Lease]:
    return list(map(_bare_lease, leases))


def _restored(leases: Sequence[Lease], answer: Sequence[Lease | None], deadline: float) -> list[Lease | None]:
    """The caller's leases with what the owner changed."""
    return [
        msgspec.structs.replace(lease, token=new.token, deadline=deadline) if new else None
        for lease, new in zip(leases, answer, strict=True)
    ]
