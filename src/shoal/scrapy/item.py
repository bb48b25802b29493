"""``Item`` and ``Field``: items with declared fields."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from copy import deepcopy
from pprint import pformat
from typing import Any, ClassVar, NoReturn, Self

from shoal.scrapy.values import Function, Values


class Field(dict[str, Any]):
    """The metadata of a field: its processors, its serializer, and values of the project."""


class ItemMeta(ABCMeta):
    """Collects the fields of an item class and of its bases into ``fields``, in the order of their declaration."""

    fields: dict[str, Field]
    _declared: dict[str, Field]
    _serializers: dict[str, Function]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: Values, **options: Any) -> ItemMeta:
        declared = {key: value for key, value in namespace.items() if isinstance(value, Field)}
        kept = {key: value for key, value in namespace.items() if key not in declared}
        kind = super().__new__(mcs, name, bases, kept, **options)
        fields = dict(namespace.get("fields") or {})
        kind._declared = {**fields, **declared}
        for base in reversed(kind.__mro__):  # a field that is declared again keeps its place
            if isinstance(base, ItemMeta):
                fields.update(base._declared)
        kind.fields = fields
        kind._serializers = {key: field["serializer"] for key, field in fields.items() if field.get("serializer")}
        return kind


class Item(MutableMapping[str, Any], metaclass=ItemMeta):
    """A mapping that accepts only the fields its class declares. Any other name raises KeyError."""

    fields: ClassVar[dict[str, Field]]
    """All declared fields, with their metadata."""
    _values: Values
    _serializers: ClassVar[dict[str, Function]]

    def __init__(self, *args: Any, **values: Any) -> None:
        self._values = {}
        if args or values:
            for name, value in dict(*args, **values).items():
                self[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __setitem__(self, name: str, value: object) -> None:
        if name not in self.fields:
            fields = ", ".join(self.fields) or "none"
            raise KeyError(f"{type(self).__name__} does not support field: {name} (its fields: {fields})")
        self._values[name] = value

    def __delitem__(self, name: str) -> None:
        del self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __getattr__(self, name: str) -> NoReturn:
        if name in type(self).fields:
            raise AttributeError(f"fields are not attributes: read item[{name!r}]")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"fields are not attributes: write item[{name!r}] = ...")
        super().__setattr__(name, value)

    __hash__ = object.__hash__

    def get(self, name: str, default: object = None) -> Any:
        return self._values.get(name, default)

    def keys(self) -> KeysView[str]:
        return self._values.keys()

    def values(self) -> ValuesView[Any]:
        return self._values.values()

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()

    def copy(self) -> Self:
        """Return an item of the same class with the same values."""
        return type(self)(self)

    __copy__ = copy

    def deepcopy(self) -> Self:
        """Return a copy whose values are copies too."""
        return deepcopy(self)

    def __repr__(self) -> str:
        return pformat(dict(self._values))


def serialized(item: object) -> object:
    """Return the item as outputs store it: the ``serializer`` of each field is applied. Other objects are returned
    unchanged."""
    if not isinstance(item, Item) or not item._serializers:
        return item
    copy = item.copy()
    for name, serializer in item._serializers.items():
        if name in copy._values:
            copy._values[name] = serializer(copy._values[name])
    return copy


def support_item_adapter() -> None:
    """Let ``itemadapter.ItemAdapter`` handle Shoal's items, if a project has imported it.

    It knows the items of Scrapy only if it could import ``scrapy`` itself.
    """
    library = sys.modules.get("itemadapter.adapter")
    if library is None or library.ItemAdapter.is_item_class(Item):
        return

    class ItemAdapterOfItems(library.ScrapyItemAdapter):  # type: ignore[misc, name-defined]
        """Fields and their metadata come from ``Item.fields``."""

        @classmethod
        def is_item(cls, item: object) -> bool:
            return isinstance(item, Item)

        @classmethod
        def is_item_class(cls, item_class: type) -> bool:
            return issubclass(item_class, Item)

    library.ItemAdapter.ADAPTER_CLASSES.appendleft(ItemAdapterOfItems)
