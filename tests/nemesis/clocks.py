"""Servers whose wall clock steps while clients use them. Their monotonic clock is not affected."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from tests.support.databases import DatabaseServer, PostgresServer, RedisServer


class SteppedClock(DatabaseServer, ABC):
    """A server under libfaketime, which reads the offset from a file at each call."""

    def _prepare(self) -> None:
        super()._prepare()
        self.step(0)

    @property
    def _offset_file(self) -> Path:
        return self.folder / "clock"

    def step(self, seconds: int) -> None:
        """Set the offset of the clock for all processes of the server at once."""
        new = self.folder / "clock.new"
        new.write_text(f"{seconds:+d}s\n")
        new.chmod(0o644)
        new.rename(self._offset_file)

    def _command(self) -> list[str]:
        library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
        assert library is not None, "these tests need libfaketime: apt-get install faketime"
        # libc is first because Redis' jemalloc reads the clock before libfaketime is ready.
        return [
            "env", f"LD_PRELOAD={library} libc.so.6", f"FAKETIME_TIMESTAMP_FILE={self._offset_file}",
            "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", *self._plain_command(),
        ]  # fmt: skip

    @abstractmethod
    def _plain_command(self) -> list[str]: ...


class SteppedRedis(SteppedClock, RedisServer):
    """Redis whose clock steps."""

    def _plain_command(self) -> list[str]:
        return RedisServer._command(self)


class SteppedPostgres(SteppedClock, PostgresServer):
    """PostgreSQL whose clock steps."""

    def _plain_command(self) -> list[str]:
        return PostgresServer._command(self)


KINDS: dict[str, type[SteppedRedis] | type[SteppedPostgres]] = {"redis": SteppedRedis, "postgres": SteppedPostgres}
