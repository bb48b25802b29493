"""What requests and responses have in common."""

from __future__ import annotations

from typing import Any, ClassVar


class Message:
    """A request or a response: it can be copied with changes, and has flags for the log."""

    attributes: ClassVar[tuple[str, ...]] = ()
    """The arguments, for ``replace``."""
    _flags: list[str] | None = None

    @property
    def flags(self) -> list[str]:
        if self._flags is None:
            self._flags = []
        return self._flags

    @flags.setter
    def flags(self, value: list[str] | None) -> None:
        self._flags = value

    def copy(self) -> Any:
        return self.replace()

    def replace(self, *args: Any, cls: type[Any] | None = None, **changes: Any) -> Any:
        """Return a copy with these attributes changed."""
        for name in self.attributes:
            changes.setdefault(name, getattr(self, name))
        return (cls or type(self))(*args, **changes)
