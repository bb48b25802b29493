"""A simulated receiver of notifications, and the judge of what it got."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

from msgspec import Struct

from shoal.errors import FetchError
from shoal.http import Request, Response
from shoal.testing.simulation.loop import Process
from shoal.urls.normalize import host_of

if TYPE_CHECKING:
    from shoal.testing.simulation.schedule_judge import ScheduleJudge
    from shoal.testing.simulation.world import World

KEY = "a key"
"""Signs the messages."""
_DOMAIN = ".receiver.example"
_TIMEOUT = 10.0
_GRACE = 60.0
"""Seconds after which no server that works still sends a message that another one has delivered."""


class Delivery(Struct):
    """A message that has arrived."""

    at: float
    channel: str
    message: str
    """Its id."""
    about: str
    """The key of its problem."""
    event: str
    sent_at: float
    """The time in the message."""
    process: Process
    is_accepted: bool
    is_confirmed: bool = False
    """Whether the sender knows that it was accepted."""


class Receiver:
    """Answers webhooks. It loses, delays and refuses some of them, and some of its answers are lost."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(world.random.random())
        self.deliveries: list[Delivery] = []
        self.failure_rate = 0.0
        """The share of requests that are lost, refused, or answered in vain."""
        self.is_down = False

    def url(self, channel: str) -> str:
        """Where a channel sends its messages."""
        return f"http://{channel}{_DOMAIN}/messages"

    def serves(self, url: str) -> bool:
        """Whether a URL is one of these."""
        return host_of(url).endswith(_DOMAIN)

    async def fetch(self, request: Request) -> Response:
        """Answer a request. FetchError if it is lost, or if the answer is."""
        random = self._random
        await asyncio.sleep(random.uniform(0.01, 0.3))
        fails = random.random() < self.failure_rate
        how = random.choice(["lost", "refused", "in vain", "late", "twice"]) if fails else ""
        if self.is_down or how == "lost":
            await asyncio.sleep(request.timeout or _TIMEOUT)
            raise FetchError("the receiver did not answer", kind="timeout", retryable=True)
        if how == "refused":
            self._receive(request, is_accepted=False)
            return Response(request.url, status=500, headers={}, body=b"", request=request)
        delivery = self._receive(request, is_accepted=True)
        if how == "twice":
            self._receive(request, is_accepted=True)
        if how == "late":
            await asyncio.sleep(random.uniform(1.0, _TIMEOUT - 1.0))
        if how == "in vain":
            await asyncio.sleep(request.timeout or _TIMEOUT)
            raise FetchError("the receiver did not answer", kind="timeout", retryable=True)
        delivery.is_confirmed = True
        return Response(request.url, status=204, headers={}, body=b"", request=request)

    def _receive(self, request: Request, *, is_accepted: bool) -> Delivery:
        world, body = self._world, json.loads(request.body)
        at, _, signature = request.headers["X-Shoal-Signature"].removeprefix("t=").partition(",v1=")
        expected = hmac.new(KEY.encode(), f"{at}.".encode() + request.body, hashlib.sha256).hexdigest()
        world.require(signature == expected, "a message is not signed")
        world.require(request.headers["X-Shoal-Message"] == body["id"], "the header has another id than the message")
        delivery = Delivery(
            at=world.loop.time(), channel=host_of(request.url).removesuffix(_DOMAIN), message=body["id"],
            about=body["problem"]["key"], event=body["event"], sent_at=body["at"], process=world.current,
            is_accepted=is_accepted,
        )  # fmt: skip
        world.note(
            f"{delivery.process.name} sends {delivery.event} {delivery.about} through {delivery.channel}"
            f"{'' if is_accepted else ', which refuses it'}"
        )
        for other in self.deliveries:
            is_same = (other.message, other.channel, other.process) == (body["id"], delivery.channel, delivery.process)
            world.require(
                not (is_same and other.is_confirmed) or bool(world.server.restored_at),
                f"{delivery.process.name} sends {delivery.about} again after it was confirmed",
            )
        self.deliveries.append(delivery)
        return delivery

    # -- the judge

    def missing(self, due: Iterable[str], channels: Iterable[str]) -> list[str]:
        """The problems that a channel does not know of."""
        known = {(delivery.channel, delivery.about) for delivery in self.deliveries if delivery.is_accepted}
        return [f"{about} through {channel}" for channel in channels for about in due if (channel, about) not in known]

    def judge(self, judge: ScheduleJudge, *, has_true_clocks: bool) -> None:
        """AssertionError if a message was sent under two ids, after it was confirmed, or out of order."""
        rewinds = len(self._world.server.restored_at)
        ids: dict[tuple[str, str, str], set[str]] = {}
        for delivery in self.deliveries:
            self._judge_late(judge, delivery)
            ids.setdefault((delivery.channel, delivery.about, delivery.event), set()).add(delivery.message)
        for (channel, about, event), messages in ids.items():
            if event == "problem.new" and about.startswith(("finished/", "schedule_missed/")) and has_true_clocks:
                assert len(messages) <= 1 + rewinds, f"{about} has {len(messages)} ids in {channel}"
        if has_true_clocks and not rewinds:
            self._judge_order()

    def _judge_late(self, judge: ScheduleJudge, delivery: Delivery) -> None:
        confirmed = judge.confirmed.get((delivery.message, delivery.channel))
        is_late = confirmed is not None and delivery.at > confirmed + _GRACE
        assert not is_late or delivery.process.was_frozen or self._world.server.restored_at, (
            f"{delivery.process.name} sends {delivery.about} {delivery.at - (confirmed or 0):.1f} s after the store "
            "knew that it was delivered"
        )

    def _judge_order(self) -> None:
        """The messages that waited in the store arrive in their order, apart from those that are repeated."""
        first: dict[tuple[str, str], Delivery] = {}
        for delivery in self.deliveries:
            if delivery.is_accepted and delivery.about != "store_away":
                first.setdefault((delivery.channel, delivery.message), delivery)
        for channel in {delivery.channel for delivery in first.values()}:
            own = [delivery for delivery in first.values() if delivery.channel == channel]
            for before, after in pairwise(own):
                assert before.sent_at <= after.sent_at, f"{channel}: {before.about} arrives before {after.about}"


class SimulatedFetcher:
    """The HTTP client of a server: for the site, and for the receiver."""

    def __init__(self, world: World, receiver: Receiver) -> None:
        self._world = world
        self._receiver = receiver

    async def fetch(self, request: Request) -> Response:
        if self._receiver.serves(request.url):
            return await self._receiver.fetch(request)
        return await self._world.site.fetch(request)

    async def close(self) -> None:
        """Do nothing."""
