"""Scrapy's headers: their names and values are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

Source: TypeAlias = "Mapping[str, object] | Mapping[bytes, object] | Iterable[tuple[str | bytes, object]] | None"
"""The argument of ``Headers``: a mapping or pairs. A value is text, bytes, a number, or a list of them."""


class Headers(MutableMapping[object, object]):
    """A mapping from header names to values, both bytes. The case of a name does not matter. A name may have several
    values.

    ``headers[name]`` and ``get`` return the last value, ``getlist`` all of them.
    """

    __slots__ = ("_values", "encoding")

    def __init__(self, seq: Source = None, encoding: str = "utf-8") -> None:
        self.encoding = encoding
        self._values: dict[bytes, list[bytes]] = {}
        if seq:
            self.update(seq)

    def _name(self, key: object) -> bytes:
        name = key if isinstance(key, bytes) else str(key).encode(self.encoding)
        return name.title()

    def _bytes(self, value: object) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, str | int | float):
            return str(value).encode(self.encoding)
        raise TypeError(f"Unsupported value type: {type(value)}")

    def _list(self, value: object) -> list[bytes]:
        if value is None:
            return []
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            return [self._bytes(value)]
        return [self._bytes(member) for member in value]

    def normkey(self, key: object) -> bytes:
        """The name as it is stored: bytes, with capitals as in ``Content-Type``."""
        return self._name(key)

    def normvalue(self, value: object) -> list[bytes]:
        """The values as they are stored: a list of bytes."""
        return self._list(value)

    def __getitem__(self, key: object) -> bytes | None:
        values = self._values[self._name(key)]
        return values[-1] if values else None

    def get(self, key: object, default: object = None) -> bytes | None:
        values = self._values.get(self._name(key))
        if values:
            return values[-1]
        return default if default is None else self._list(default)[-1]

    def getlist(self, key: object, default: object = None) -> list[bytes]:
        values = self._values.get(self._name(key))
        return list(values) if values is not None else self._list(default)

    def __setitem__(self, key: object, value: object) -> None:
        self._values[self._name(key)] = self._list(value)

    setlist = __setitem__

    def setlistdefault(self, key: object, default_list: object = ()) -> list[bytes]:
        return self._values.setdefault(self._name(key), self._list(default_list))

    def appendlist(self, key: object, value: object) -> None:
        self._values.setdefault(self._name(key), []).extend(self._list(value))

    def update(self, seq: Any = (), /, **named: object) -> None:
        """Replace values. ``seq`` is a mapping or pairs."""
        pairs = seq.items() if isinstance(seq, Mapping) else (seq or ())
        collected: dict[bytes, list[bytes]] = {}
        for key, value in (*pairs, *named.items()):
            collected.setdefault(self._name(key), []).extend(self._list(value))
        self._values.update(collected)

    def __delitem__(self, key: object) -> None:
        del self._values[self._name(key)]

    def __contains__(self, key: object) -> bool:
        return self._name(key) in self._values

    has_key = __contains__

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> Any:
        """Pairs of a name and the list of its values."""
        return [(name, list(values)) for name, values in self._values.items()]

    def values(self) -> Any:
        return [self[name] for name in self._values]

    def to_string(self) -> bytes:
        """The headers as they are sent."""
        return b"\r\n".join(name + b": " + value for name, values in self._values.items() for value in values)

    def to_unicode_dict(self) -> dict[str, str]:
        """Text by name; several values are joined with commas."""
        return {name.decode(self.encoding): b",".join(values).decode(self.encoding, "replace")
                for name, values in self._values.items()}  # fmt: skip

    def to_tuple_list(self) -> list[tuple[str, str]]:
        """Pairs of text, one for each value."""
        return [(name.decode(self.encoding), value.decode(self.encoding, "replace"))
                for name, values in self._values.items() for value in values]  # fmt: skip

    def copy(self) -> Headers:
        headers = Headers(encoding=self.encoding)
        headers._values = {name: list(values) for name, values in self._values.items()}
        return headers

    __copy__ = copy

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Headers):
            return self._values == other._values
        return isinstance(other, Mapping) and self._values == Headers(other, self.encoding)._values

    def __repr__(self) -> str:
        return f"Headers({dict(self.items())!r})"
