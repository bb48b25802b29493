"""Items: what counts as one, and how it is encoded (msgpack of ``[type name, data]``).

An item is a dict (or another mapping), a dataclass, a msgspec Struct, a pydantic model or an attrs class. Its keys are
text. Its values are types that msgspec supports: text, numbers, bytes, dates, UUIDs, decimals, enums, lists, sets, and
nested ones. This module imports neither pydantic nor attrs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias, cast, get_type_hints

import msgspec

from shoal.errors import DECODING_ERRORS, ItemError

Record: TypeAlias = dict[str, Any]
"""The data of a decoded item: its fields by name."""

PLAIN = "item"
"""The type name of an item without a class of its own."""

_KINDS = "a dict, dataclass, msgspec Struct, pydantic model or attrs class"
_VALUES = "text, numbers, bytes, dates, lists and dicts of them"
_WITH_FIELDS = (dict, msgspec.Struct, Mapping)
_TEXT = frozenset({str})
_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})
_FAILURES = (TypeError, ValueError, OverflowError, RecursionError, AttributeError, msgspec.MsgspecError)


class _Model(Protocol):
    """A pydantic model."""

    def model_dump(self, *, mode: str = "python") -> object: ...


def _dump(model: object) -> object:
    """Convert a pydantic model to plain data. JSON mode supports every type of pydantic except binary data."""
    pydantic = cast("_Model", model)
    try:
        return pydantic.model_dump(mode="json")
    except ValueError:
        return pydantic.model_dump()


def _to_plain(value: object) -> object:
    """Convert a type that msgspec does not support to one that it does."""
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
    raise TypeError(f"cannot store a {_type_name(value)}")


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "model_dump") and hasattr(kind, "model_fields")


_encode = msgspec.msgpack.Encoder(enc_hook=_to_plain).encode
_decode = msgspec.msgpack.Decoder(tuple[str, Record]).decode
_encode_json = msgspec.json.Encoder().encode


def is_item(value: object) -> bool:
    """Whether the value looks like an item. Its fields are checked when it is encoded."""
    if isinstance(value, _WITH_FIELDS):
        return True
    kind = type(value)
    return hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__attrs_attrs__") or _is_pydantic(kind)


def encode_item(item: object) -> bytes:
    """Encode the item. ItemError names the field that cannot be stored, and why."""
    name, data = (PLAIN, item) if type(item) is dict else _named(item)
    try:
        payload = _encode((name, data))
        if not (
            type(data) is dict and _TEXT.issuperset(map(type, data)) and _SCALARS.issuperset(map(type, data.values()))
        ):
            data = _decode(payload)[1]
            _check_keys(data)
        if b"\0" in payload and (bad := [field for field in data if "\0" in field]):
            raise ValueError(f"the name of field {bad[0]!r} contains a NUL, which databases do not allow; rename it")
    except _FAILURES as exc:
        raise ItemError(_explain(item) or f"cannot store this {_type_name(item)}: {exc}") from exc
    return payload


def encode_record(name: str, record: Record) -> bytes:
    """Encode what `decode_item` returned, with changes that are plain values."""
    return _encode((name, record))


def decode_item(payload: bytes) -> tuple[str, Record]:
    """Return the type name and the data of an encoded item."""
    try:
        return _decode(payload)
    except DECODING_ERRORS as exc:
        raise ItemError(f"not an encoded item: {exc}") from exc


def as_text(value: object) -> str:
    """Convert a value of a decoded item to text: text unchanged, anything else as JSON without outer quotes."""
    if type(value) is str:
        return value
    text = _encode_json(value).decode()
    return text[1:-1] if text[0] == '"' else text


class ItemTypes:
    """The classes of a spider's items by name, so that a program gets its own types back.

    A class is known once an item of it was encoded in this process, or if the module of the spider has it. Of two
    classes with the same name neither is used."""

    def __init__(self, spider: type) -> None:
        self._spider = spider
        self._types: dict[str, type | None] = {}
        self._hints: dict[type, dict[str, Any]] = {}

    def see(self, kind: type) -> None:
        """Remember the class of an item that is encoded."""
        name = kind.__name__
        if self._types.setdefault(name, kind) is not kind:
            self._types[name] = None

    def restore(self, payload: bytes) -> Any:
        """The item as an object of its class, without a call of its ``__init__``. Its data as a dict, if the class is
        not known or cannot hold all of it. A value that does not have the annotated type stays as it is stored."""
        name, record = decode_item(payload)
        if name == PLAIN:
            return record
        if name not in self._types:
            self._types[name] = self._find(name)
        kind = self._types[name]
        if kind is None:
            return record
        try:
            return self._build(kind, record)
        except Exception:  # the user's class may raise anything, and the data is good
            return record

    def _find(self, name: str) -> type | None:
        for base in self._spider.__mro__:
            kind = vars(sys.modules.get(base.__module__, object)).get(name)
            if isinstance(kind, type) and kind.__name__ == name:
                return kind
        return None

    def _build(self, kind: type, record: Record) -> object:
        if issubclass(kind, msgspec.Struct):
            return self._build_struct(kind, record)
        if _is_pydantic(kind):
            return _build_model(kind, record)
        if issubclass(kind, Mapping):
            return cast("Any", kind)(record)
        item = object.__new__(kind)
        for name, value in record.items():
            object.__setattr__(item, name, self._convert(kind, name, value))
        fields: Any = getattr(kind, "__dataclass_fields__", None)
        names = fields or [field.name for field in cast("Any", kind).__attrs_attrs__]
        return item if all(hasattr(item, name) for name in names) else record  # names with a leading _ are not stored

    def _build_struct(self, kind: type[msgspec.Struct], record: Record) -> object:
        names = {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
        if kind.__struct_config__.array_like:
            names = {name: name for name in names.values()}
        tag = kind.__struct_config__.tag_field
        fields = {names[key]: value for key, value in record.items() if key != tag}
        return kind(**{name: self._convert(kind, name, value) for name, value in fields.items()})

    def _convert(self, kind: type, name: str, value: object) -> object:
        """The value as its annotation says: a date, a set, a nested object."""
        if kind not in self._hints:
            try:
                self._hints[kind] = get_type_hints(kind)
            except Exception:  # names that exist only for type checkers
                self._hints[kind] = {}
        hint = self._hints[kind].get(name)
        if hint is None or type(value) is hint:
            return value
        try:
            return msgspec.convert(value, hint)
        except _FAILURES:
            return value


def _build_model(kind: Any, record: Record) -> object:
    """A pydantic model of stored data."""
    fields = kind.model_fields
    if any(key not in fields and key not in kind.model_computed_fields for key in record):
        raise ValueError("the model has no such field")
    data = {key: value for key, value in record.items() if key in fields}
    aliases = {key: fields[key].validation_alias or key for key in data}
    try:
        if all(isinstance(alias, str) for alias in aliases.values()):
            return kind.model_validate({aliases[key]: value for key, value in data.items()}, strict=False)
    except ValueError:  # for example of a model that was made without validation
        pass
    model = kind.model_construct()
    vars(model).update(data)
    return model


def _named(item: object) -> tuple[str, object]:
    if not is_item(item):
        raise ItemError(f"an item must be {_KINDS}, not {_article(item)}")
    kind = type(item)
    name = PLAIN if kind.__module__ in ("builtins", "collections", "types") else kind.__name__
    if isinstance(item, msgspec.Struct) and item.__struct_config__.array_like:
        return name, msgspec.structs.asdict(item)
    return name, item


def _check_keys(value: object) -> None:
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
        raise TypeError("outputs cannot store a msgpack extension")


# --- explaining an error


def _explain(item: object) -> str | None:
    try:
        return _find_fault(item, "", ())
    except RecursionError:
        return "the item is nested too deeply"


def _find_fault(value: object, path: str, above: tuple[int, ...]) -> str | None:
    """Describe the first part of ``value`` that cannot be stored. ``above`` has the ids of its containers."""
    where = f"item field {path}" if path else "the item"
    if id(value) in above:
        return f"{where} is a {_type_name(value)} that contains itself"
    try:
        children = _children(value)
    except RecursionError:
        raise
    except _FAILURES as exc:
        return f"{where} ({_article(value)}) cannot be stored: {exc}"
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


def _leaf_fault(value: object, where: str) -> str | None:
    try:
        _encode(value)
    except OverflowError:
        return f"{where} is an int that needs more than 64 bits: store it as text"
    except UnicodeEncodeError:
        return f"{where} is text with half a surrogate pair, which is not valid Unicode"
    except _FAILURES:
        hint = "; .get() or .getall() of it is text" if type(value).__module__.startswith("shoal.selector") else ""
        return f"{where} is {_article(value)}, which cannot be stored: use {_VALUES}{hint}"
    return None


class _Index(msgspec.Struct):
    """The key of a list element."""

    index: int


def _children(value: object) -> Iterator[tuple[object, object]] | None:
    """Return the parts of a container with their keys; None for anything else."""
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
