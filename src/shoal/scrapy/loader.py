"""``ItemLoader``: fills an item from queries, through the library ``itemloaders``.

Common cases bypass the library, for speed: one query, an ``Item`` or a dict, and no ``stats``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import itemadapter  # noqa: F401 - support_item_adapter() needs it loaded
import itemloaders

from shoal.scrapy.item import Item, support_item_adapter
from shoal.scrapy.response import Response
from shoal.scrapy.selector import Selector

support_item_adapter()


class ItemLoader(itemloaders.ItemLoader):
    """Collects values for the fields of an item. Without a ``selector``, that of ``response`` is used."""

    default_item_class: type = Item
    default_selector_class: type = Selector

    def __init__(
        self,
        item: Any = None,
        selector: Any = None,
        response: Response | None = None,
        parent: itemloaders.ItemLoader | None = None,
        **context: Any,
    ) -> None:
        if selector is None and response is not None:
            selector = self._selector_of(response)
        context["response"] = response
        super().__init__(item=item, selector=selector, parent=parent, **context)

    def _selector_of(self, response: Response) -> object:
        try:
            if self.default_selector_class is not Selector:
                return self.default_selector_class(response)
            return getattr(response, "selector", None)
        except AttributeError:
            return None  # the response is not text: only values can be added

    def _plain_selector(self) -> Selector | None:
        """Return the selector; None if the library has to count the queries in ``stats``."""
        return cast("Selector | None", self.selector) if getattr(self, "stats", None) is None else None

    def _get_xpathvalues(self, xpaths: str | Iterable[str], *field: str | None, **options: Any) -> list[object]:
        if type(xpaths) is str and (selector := self._plain_selector()) is not None:
            return selector.xpath(xpaths, **options).getall()
        return super()._get_xpathvalues(xpaths, *field, **options)

    def _get_cssvalues(self, csss: str | Iterable[str], *field: str | None) -> list[object]:
        if type(csss) is str and (selector := self._plain_selector()) is not None:
            return selector.css(csss).getall()
        return super()._get_cssvalues(csss, *field)

    def _get_item_field_attr(self, field_name: str, key: str, default: object = None) -> object:
        item = self.item
        if isinstance(item, Item):
            return item.fields[field_name].get(key, default)
        return default if type(item) is dict else super()._get_item_field_attr(field_name, key, default)

    def load_item(self) -> Any:
        """Fill the item with the values collected so far, after the output processors, and return it."""
        item = self.item
        if not isinstance(item, Item | dict):
            return super().load_item()
        for name in tuple(self._values):
            value = self.get_output_value(name)
            if value is not None:
                item[name] = value
        return item
