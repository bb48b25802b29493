"""The identity of a file that is an output, and the role of its drainer, which is named after it.

Two machines may have different files at one path, and a shared file system has one file for all of them. So a small
file beside the output (``books.jsonl.shoal``) has a random identity. The role of the output is named after both path
and identity: machines with different files write a complete copy each; machines with the same file have one writer, and
the others stand by. Output and identity may be moved together to another folder.

The small file records its own inode, so a copy of it counts as none. If the folder is not writable, an extended
attribute of the output has the identity. Without an identity, the output continues a role of its path if its content is
what that role has written. Otherwise it gets a new identity, unless the run has written to that path before: then its
content is unknown, and nothing is written.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import socket
from contextlib import suppress

import msgspec

from shoal.errors import DECODING_ERRORS, SinkError
from shoal.ports import ItemSource, RoleState
from shoal.sinks import file_of, is_sqlite, open_sink, sink_id
from shoal.sinks.drainer import PREFIX, first_after, host_of, read_cursor, split_role
from shoal.sinks.storage import OUTPUT_MODE, in_thread, owner_of, stat_of, storage_errors, sync_folder, write_all
from shoal.system import chance

log = logging.getLogger("shoal.sinks")

SIDECAR = ".shoal"
_ATTRIBUTE = "user.shoal.identity"
_TABLE = "?table="
_SQLITE = b"SQLite format 3\0"
_MAX_HOST = 60
_ROLE_SECONDS = 65
"""A little longer than the role of a dead process lasts."""
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


class _Sidecar(msgspec.Struct, frozen=True):
    """The content of the file beside an output. ``inode`` is its own, or that of the output in an attribute.

    The identity of a file that an earlier version wrote is its path at that time: the name of its role."""

    identity: str
    inode: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Sidecar).decode


async def output_role(spec: str, frontier: ItemSource, run_id: str) -> str:
    """The name of the role of an output's drainer. For a file: after its identity, which it gets if it has none."""
    name, path = sink_id(spec), file_of(spec)
    if path is None or await in_thread(_is_no_file, path):
        return name
    with storage_errors(path):
        identity = await in_thread(_read_identity, path)
        roles = await _roles(frontier)
        if identity is None:
            if await in_thread(_has_content, path):
                roles = await _released(name, frontier)
                identity = await _continued(spec, path, run_id, _roles_at(name, roles))
                if identity is None and owner_of(path) == run_id:
                    await _check_log(f"{path} was written by run {run_id} at another path", path, frontier)
            elif any(host_of(role.role) == this_host() for role in _written(_roles_at(name, roles))):
                await _check_log(f"{path} is gone", path, frontier)
            identity = await in_thread(_store_identity, path, identity or f"{this_host()}-{chance.token_hex(4)}")
    role = _role_of(name, path, identity, roles)
    _report_copies(role, name, run_id, roles)
    return role


async def identity_of(path: str) -> str | None:
    """The identity of a file on this machine; None if it has none."""
    return await in_thread(_read_identity, path)


def _is_no_file(path: str) -> bool:
    """Whether there is a folder or a device, in which case the sink says what is wrong."""
    return os.path.exists(path) and not os.path.isfile(path)


def _role_of(name: str, path: str, identity: str, roles: list[RoleState]) -> str:
    """The run's role with this identity, wherever the file was when it got its name. Otherwise a new role."""
    options = name.removeprefix(path)
    if os.path.isabs(identity):
        return identity + options
    for role in roles:
        place, identity_of_role = split_role(role.role)
        path, mark, table = place.rpartition(_TABLE)
        if identity_of_role == identity and options == (mark + table if path else ""):
            return f"{place}#{identity}"
    return f"{name}#{identity}"


def _roles_at(name: str, roles: list[RoleState]) -> list[RoleState]:
    """The roles of this path, whatever their identity."""
    return [role for role in roles if split_role(role.role)[0] == name]


# -- a file without an identity


async def _continued(spec: str, path: str, run_id: str, roles: list[RoleState]) -> str | None:
    """The identity of the role of this path that wrote the content of the file; None if none of them did."""
    here = this_host()
    writers = _written(roles)
    for role in sorted(writers, key=lambda role: (host_of(role.role) != here, -read_cursor(role.cursor).position)):
        if not role.held and await _matches(spec, path, role.cursor, run_id):
            return split_role(role.role)[1] or path
    if writers and owner_of(path) in (None, run_id):
        busy = any(role.held for role in writers)
        raise SinkError(
            f"{path} has content, and run {run_id} has written a file at this path, but {path}{SIDECAR} is missing or "
            f"a copy, so it is unknown whether it is the same file. "
            f"{'A process of the run may be writing it: stop that, or wait until its role expires. ' if busy else ''}"
            f"Restore both files, choose another output, or remove {path} to write all items again"
        )
    return None


async def _check_log(what: str, path: str, frontier: ItemSource) -> None:
    """SinkError if the log no longer has all items. A file that the run can't continue is written again from the first
    item on."""
    first = await first_after(frontier, 0)
    if first > 1:
        raise SinkError(
            f"{what}, and can't be continued here, because {path}{SIDECAR} is missing or a copy. It can't be written "
            f"again, because items 1 to {first - 1} are no longer in the item log (items.keep is false). Restore it, "
            "or choose another output"
        )


async def _roles(frontier: ItemSource) -> list[RoleState]:
    return [role for role in await frontier.roles() if role.role.startswith(PREFIX)]


async def _released(name: str, frontier: ItemSource) -> list[RoleState]:
    """The roles, as soon as no process holds one of this path. The role of a dead process expires; a live one keeps
    it."""
    has_warned = False
    for _ in range(_ROLE_SECONDS):
        roles = await _roles(frontier)
        if not any(role.held for role in _written(_roles_at(name, roles))):
            break
        if not has_warned:
            has_warned = True
            log.warning("another process of this run writes %s, or died; waiting up to %d s", name, _ROLE_SECONDS)
        await asyncio.sleep(1)
    return roles


def _written(roles: list[RoleState]) -> list[RoleState]:
    return [role for role in roles if read_cursor(role.cursor).position]


def _has_content(path: str) -> bool:
    status = stat_of(path)
    if status is not None and status.st_size:
        return True
    with suppress(FileNotFoundError, NotADirectoryError):
        return bool(os.listdir(path + ".parts"))  # of a Parquet file
    return False


async def _matches(spec: str, path: str, cursor: bytes, run_id: str) -> bool:
    """Whether the file has what the run had written when it saved this cursor. A database checks that itself."""
    if is_sqlite(spec):
        return await in_thread(_is_database, path)
    sink = open_sink(spec, run_id=run_id)
    try:
        await sink.open(read_cursor(cursor).state)  # which changes nothing in the file
    except SinkError:
        return False
    finally:
        await sink.close(finished=False)
    return True


def _is_database(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _report_copies(role: str, name: str, run_id: str, roles: list[RoleState]) -> None:
    others = {host_of(other.role) for other in _roles_at(name, roles) if other.role != PREFIX + role} - {""}
    elsewhere = sorted(others - {this_host()})
    if elsewhere:
        log.warning(
            "run %s also writes %s on %s, which is another file: each machine writes a complete copy",
            run_id,
            name,
            ", ".join(elsewhere),
        )
    elif others:
        log.warning("run %s has written another file at %s before: this one begins with its first item", run_id, name)


# -- identities


def this_host() -> str:
    """The name of this machine in identities."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:_MAX_HOST] or "host"


def _read_identity(path: str) -> str | None:
    """The identity of a file; None if it has none, or has that of the file of which it is a copy."""
    with suppress(FileNotFoundError, NotADirectoryError), open(path + SIDECAR, "rb") as sidecar:
        identity = _identity_in(sidecar.read(), os.fstat(sidecar.fileno()).st_ino)
        if identity is not None:
            return identity
    with suppress(OSError, AttributeError):  # not every system has such attributes
        return _identity_in(os.getxattr(path, _ATTRIBUTE), os.stat(path).st_ino)
    return None


def _identity_in(content: bytes, inode: int) -> str | None:
    try:
        sidecar = _decode(content)
    except DECODING_ERRORS:
        return None
    return sidecar.identity if sidecar.inode == inode and sidecar.identity else None


def _store_identity(path: str, identity: str) -> str:
    """Store the identity of a file. If another process was first, return what that one stored."""
    try:
        return _write_sidecar(path + SIDECAR, identity)
    except OSError as exc:
        if exc.errno not in _READ_ONLY or not os.path.exists(path):
            raise
    try:
        return _write_attribute(path, identity)
    except (OSError, AttributeError) as exc:
        raise SinkError(
            f"can't write {path}: it needs an identity, but its folder is not writable, and it can't have extended "
            f"attributes ({exc}). Make the folder writable, or use {path}?identity=path if no other machine writes "
            "this run to a file at the same path"
        ) from None


def _write_sidecar(sidecar: str, identity: str) -> str:
    temporary = f"{sidecar}.{chance.token_hex(4)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OUTPUT_MODE)
    try:
        write_all(descriptor, _encode(_Sidecar(identity, os.fstat(descriptor).st_ino)) + b"\n")
        os.fsync(descriptor)
        stored = _publish(temporary, sidecar, identity)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(sidecar)
    return stored


def _publish(temporary: str, sidecar: str, identity: str) -> str:
    """Give the file its name, unless another process has done so with its own."""
    while True:
        try:
            os.link(temporary, sidecar)
            return identity
        except FileExistsError:
            pass
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            os.rename(temporary, sidecar)
            return identity
        with suppress(FileNotFoundError), open(sidecar, "rb") as current:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(current.fileno(), fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(current.fileno()), os.stat(sidecar)):
                continue
            stored = _identity_in(current.read(), os.fstat(current.fileno()).st_ino)
            if stored is None:  # a copy
                os.rename(temporary, sidecar)
            return stored or identity


def _write_attribute(path: str, identity: str) -> str:
    content = _encode(_Sidecar(identity, os.stat(path).st_ino))
    try:
        os.setxattr(path, _ATTRIBUTE, content, os.XATTR_CREATE)
    except FileExistsError:
        stored = _identity_in(os.getxattr(path, _ATTRIBUTE), os.stat(path).st_ino)
        if stored is not None:
            return stored
        os.setxattr(path, _ATTRIBUTE, content)
    return identity
