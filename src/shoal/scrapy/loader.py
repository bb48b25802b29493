"""``ItemLoader``: fills an item from queries, through the library ``itemloaders``.

The common cases take a shorter way than there: one query, an ``Item`` or a dict, and no statistics of rules.
"""

from __future__ import annotations

from typing import Any, cast

import itemadapter  # noqa: F401 - its module must be there before our items are announced to it
import itemloaders

from shoal.scrapy.item import Item, support_item_adapter
from shoal.scrapy.selector import Selector

support_item_adapter()


class ItemLoader(itemloaders.ItemLoader):
    """Collects values for the fields of an item. ``response`` gives the selector unless there is one."""

    default_item_class: type = Item
    default_selector_class: type = Selector

    def __init__(
        self, item: Any = None, selector: Any = None, response: Any = None, parent: Any = None, **context: Any
    ) -> None:
        if selector is None and response is not None:
            selector = self._selector_of(response)
        context["response"] = response
        super().__init__(item=item, selector=selector, parent=parent, **context)

    def _selector_of(self, response: Any) -> Any:
        try:
            return (
                response.selector if self.default_selector_class is Selector else self.default_selector_class(response)
            )
        except AttributeError:
            return None  # the response is not text: only values can be added

    def _is_plain(self, query: object) -> bool:
        return type(query) is str and self.selector is not None and getattr(self, "stats", None) is None

    def _get_xpathvalues(self, xpaths: Any, *field: Any, **options: Any) -> list[Any]:
        if self._is_plain(xpaths):
            return list(cast(Any, self.selector).xpath(xpaths, **options).getall())
        return super()._get_xpathvalues(xpaths, *field, **options)

    def _get_cssvalues(self, csss: Any, *field: Any) -> list[Any]:
        if self._is_plain(csss):
            return list(cast(Any, self.selector).css(csss).getall())
        return super()._get_cssvalues(csss, *field)

    def _get_item_field_attr(self, field_name: str, key: Any, default: Any = None) -> Any:
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
