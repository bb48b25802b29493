"""The base class of requests and responses."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar, overload

T = TypeVar("T")


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

    def copy(self) -> Self:
        return self.replace()

    @overload
    def replace(self, *args: Any, cls: None = None, **changes: Any) -> Self: ...

    @overload
    def replace(self, *args: Any, cls: type[T], **changes: Any) -> T: ...

    def replace(self, *args: Any, cls: type[T] | None = None, **changes: Any) -> T | Self:
        """Return a copy with these attributes changed."""
        self._prepare(changes)
        for name in self.attributes:
            changes.setdefault(name, getattr(self, name))
        return type(self)(*args, **changes) if cls is None else cls(*args, **changes)

    def _prepare(self, changes: dict[str, object]) -> None:
        """Convert the arguments of ``replace``, in a subclass whose arguments are not its ``attributes``."""
