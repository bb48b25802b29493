"""What an item is, and how it travels: msgpack of ``[type name, data]``.

An item is a dict (or another mapping), a dataclass, a msgspec Struct, a pydantic model or an attrs class, with text
for keys. Values are what msgspec knows: text, numbers, bytes, dates, UUIDs, decimals, enums, lists, sets, and any of
these in each other. Neither pydantic nor attrs is imported here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal.errors import ItemError

PLAIN = "item"
"""The type name of an item that has no class of its own."""

_KINDS = "a dict, dataclass, msgspec Struct, pydantic model or attrs class"
_VALUES = "text, numbers, bytes, dates, lists and dicts of them"
_WITH_FIELDS = (dict, msgspec.Struct, Mapping)
_TEXT = frozenset({str})
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_FAILURES = (TypeError, ValueError, OverflowError, RecursionError, AttributeError, msgspec.MsgspecError)


def _dump(model: Any) -> Any:
    """A pydantic model as plain data. Its JSON form knows every type of pydantic, but not binary data."""
    try:
        return model.model_dump(mode="json")
    except ValueError:
        return model.model_dump()


def _to_plain(value: Any) -> Any:
    """What msgspec does not know by itself, as something that it does."""
    if _is_pydantic(type(value)):
        return _dump(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"a {_type_name(value)} can't be stored")


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "model_dump") and hasattr(kind, "model_fields")


_encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
_decode = msgspec.msgpack.Decoder(tuple[str, dict[str, Any]]).decode
_encode_json = msgspec.json.Encoder().encode


def is_item(value: object) -> bool:
    """Whether it looks like an item; what is in it is seen when it is encoded."""
    if isinstance(value, _WITH_FIELDS):
        return True
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__") or _is_pydantic(kind)


def encode_item(item: object) -> bytes:
    """The item as bytes. ItemError says which of its fields can't be stored, and why."""
    name, data = (PLAIN, item) if type(item) is dict else _named(item)
    try:
        payload = _encode((name, data))
        if not (
            type(data) is dict and _TEXT.issuperset(map(type, data)) and _SCALARS.issuperset(map(type, data.values()))
        ):
            data = _decode(payload)[1]
            _check_keys(data)
        if b"\0" in payload and (bad := [field for field in data if "\0" in field]):
            raise ValueError(f"its field {bad[0]!r} has a NUL in its name, which no column can have; rename the field")
    except _FAILURES as exc:
        raise ItemError(_explain(item) or f"this {_type_name(item)} can't be stored: {exc}") from exc
    return payload


def decode_item(payload: bytes) -> tuple[str, dict[str, Any]]:
    """The type name and the data of an encoded item."""
    try:
        return _decode(payload)
    except msgspec.MsgspecError as exc:
        raise ItemError(f"not an encoded item: {exc}") from exc


def as_text(value: Any) -> str:
    """A value of a decoded item as text: text as it is, anything else as JSON writes it, without quotes around."""
    if type(value) is str:
        return value
    text = _encode_json(value).decode()
    return text[1:-1] if text[0] == '"' else text


def _named(item: object) -> tuple[str, Any]:
    if not is_item(item):
        raise ItemError(f"an item is {_KINDS}, not {_article(item)}")
    kind = type(item)
    name = PLAIN if kind.__module__ in ("builtins", "collections", "types") else kind.__name__
    if isinstance(item, msgspec.Struct) and item.__struct_config__.array_like:
        return name, msgspec.structs.asdict(item)
    return name, item


def _check_keys(value: Any) -> None:
    if type(value) is dict:
        for key, child in value.items():
            if type(key) is not str:
                raise TypeError(f"the key {key!r} is not text")
            if type(child) not in _SCALARS:
                _check_keys(child)
    elif type(value) is list:
        for child in value:
            if type(child) not in _SCALARS:
                _check_keys(child)
    elif type(value) is msgspec.msgpack.Ext:
        raise TypeError("a msgpack extension is no value that an output can hold")


# -- finding out what was wrong, once something was


def _explain(item: object) -> str | None:
    try:
        return _find_fault(item, "", ())
    except RecursionError:
        return "the item is nested too deep"


def _find_fault(value: Any, path: str, above: tuple[int, ...]) -> str | None:
    """The first thing in ``value`` that can't be stored, in words. ``above`` are the containers that lead to it."""
    where = f"item field {path}" if path else "the item"
    if id(value) in above:
        return f"{where} refers back to a {_type_name(value)} that it is part of"
    try:
        children = _children(value)
    except RecursionError:
        raise
    except _FAILURES as exc:
        return f"{where} ({_article(value)}) can't be stored: {exc}"
    if children is None:
        return _leaf_fault(value, where)
    for key, child in children:
        if not _is_text(key):
            return f"{where} has the key {key!r}, {_article(key)}: keys must be text"
        label = f"[{key.index}]" if isinstance(key, _Index) else f".{key}" if path else str(key)
        fault = _find_fault(child, path + label, (*above, id(value)))
        if fault is not None:
            return fault
    return None


def _leaf_fault(value: Any, where: str) -> str | None:
    try:
        _encode(value)
    except OverflowError:
        return f"{where} is an int past 64 bits: store it as text"
    except UnicodeEncodeError:
        return f"{where} is text with half a surrogate pair, which is no valid Unicode"
    except _FAILURES:
        return f"{where} is {_article(value)}, which can't be stored: use {_VALUES}"
    return None


class _Index(msgspec.Struct):
    """A place in a list, where others have a key."""

    index: int


def _children(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """The parts of a container with their keys; None for anything else."""
    kind = type(value)
    if isinstance(value, Mapping):
        return iter(list(value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return ((_Index(index), child) for index, child in enumerate(value))
    if isinstance(value, msgspec.Struct):
        return iter(msgspec.structs.asdict(value).items())
    if hasattr(kind, "__dataclass_fields__"):
        return ((name, getattr(value, name)) for name in kind.__dataclass_fields__)
    if hasattr(kind, "__attrs_attrs__"):
        return ((field.name, getattr(value, field.name)) for field in kind.__attrs_attrs__)
    if _is_pydantic(kind):
        dumped = _dump(value)
        return iter(dumped.items()) if isinstance(dumped, dict) else None
    return None


def _is_text(key: object) -> bool:
    """Whether msgspec stores this key as text."""
    if isinstance(key, str | _Index):
        return True
    try:
        return isinstance(msgspec.msgpack.decode(_encode(key)), str)
    except _FAILURES:
        return False


def _type_name(value: object) -> str:
    return type(value).__name__


def _article(value: object) -> str:
    if value is None:
        return "None"
    name = _type_name(value)
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"
