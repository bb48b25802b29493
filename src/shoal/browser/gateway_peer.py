"""Who is at the other end of a loopback connection: the user that owns the other socket.

A port on the loopback is open to all users of the machine, and the browser can't send a password. On Linux the kernel
says which user a socket belongs to. Another process of the same user can still connect, and on other systems everybody.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from pathlib import Path

_SOCK_DIAG = 4  # a protocol of netlink; see sock_diag(7)
_BY_FAMILY = 20
_REQUEST = 1
_ERROR = 2
_QUESTION = struct.Struct("=IHHII BBBxI")
_ADDRESSES = struct.Struct("!HH4s12x4s12x")
_ANY_INTERFACE_AND_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_TABLE = Path("/proc/net/tcp")

Address = tuple[str, int]


def is_own(peer: Address, local: Address) -> bool:
    """Whether the socket at ``peer`` that is connected to ``local`` belongs to the user of this process.

    It does not if its process has closed it. IPv4 only.
    """
    if sys.platform != "linux":
        return True
    try:
        owner = _ask_kernel(peer, local)
    except OSError:  # a kernel or a container without this protocol
        try:
            owner = _search_table(_TABLE.read_text(), peer, local)
        except OSError:
            return True
    return owner == os.geteuid()


def _ask_kernel(peer: Address, local: Address) -> int | None:
    """The user of the socket; None if there is none. OSError if the kernel does not say."""
    addresses = _ADDRESSES.pack(peer[1], local[1], socket.inet_aton(peer[0]), socket.inet_aton(local[0]))
    body = addresses + _ANY_INTERFACE_AND_COOKIE
    size = _QUESTION.size + len(body)
    head = _QUESTION.pack(size, _BY_FAMILY, _REQUEST, 1, 0, socket.AF_INET, socket.IPPROTO_TCP, 0, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _SOCK_DIAG) as asking:
        asking.send(head + body)
        answer = asking.recv(4096)  # the kernel has answered within `send`
    kind = struct.unpack_from("=H", answer, 4)[0]
    if kind == _ERROR:
        code = -struct.unpack_from("=i", answer, 16)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    if answer[20 : 20 + len(addresses)] != addresses:
        return None  # a server that listens at the other port
    user, inode = struct.unpack_from("=II", answer, 16 + 64)
    return int(user) if inode else None  # a socket that its process has closed belongs to nobody


def _search_table(table: str, peer: Address, local: Address) -> int | None:
    """The same from the text of /proc/net/tcp."""
    wanted = [_hex(peer), _hex(local)]
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted:
            return int(fields[7]) if fields[9] != "0" else None
    return None


def _hex(address: Address) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"
