"""Arguments and answers of ``lease``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from shoal.frontier.redis.records import Parcel, UnreadableError, pack_token, read_head, read_record
from shoal.frontier.rules import DEAD, UNREADABLE, token_base
from shoal.http import Request
from shoal.ports import Lease
from shoal.urls.normalize import host_of


def tokens_of(nonce: bytes, part: int) -> bytes:
    """The common part of the tokens of one part of a call: all but their first two bytes."""
    if part:
        nonce = blake2b(nonce + part.to_bytes(4, "big"), digest_size=16).digest()
    return pack_token(token_base(nonce))[2:]


def read_leases(
    fingerprints: bytes, records: Sequence[bytes], delays: Mapping[int, float], deadline: float
) -> tuple[list[Lease], Parcel]:
    """The leases, and the endings of those whose requests cannot be read."""
    leases, unreadable = [], Parcel()
    for index, record in enumerate(records):
        fingerprint = fingerprints[16 * index : 16 * index + 16]
        try:
            head, request = read_record(record)
        except UnreadableError as exc:
            head = read_head(record)
            lost = Lease(Request("http://unreadable/"), fingerprint, head.token, head.attempts, "", deadline)
            unreadable.add_ending(lost, DEAD, contacted=False, kind=UNREADABLE, text=str(exc))
        else:
            learned = delays.get(head.host, 0.0)
            host = host_of(request.url)
            leases.append(Lease(request, fingerprint, head.token, head.attempts, host, deadline, learned))
    return leases, unreadable
