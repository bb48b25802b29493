"""Selector and SelectorList: Shoal's own, with the arguments that Scrapy's have."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from shoal import selector
from shoal.selector import SelectorList as SelectorList

if TYPE_CHECKING:
    from shoal.scrapy.response import TextResponse
    from shoal.selector.documents import Root

__all__ = ["Selector", "SelectorList"]


class _AnySelector(ABCMeta):
    """Makes every selector of Shoal an instance of `Selector`: queries return those."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, selector.Selector)


class Selector(selector.Selector, metaclass=_AnySelector):
    """A selector of a text or of a response: ``Selector(response)``, ``Selector(text="<p>...")``."""

    __slots__ = ()

    def __init__(
        self,
        response: TextResponse | None = None,
        text: str | None = None,
        type: Literal["html", "xml", "json", "text"] | None = None,
        root: Root = None,
        namespaces: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        if response is not None and text is not None:
            raise ValueError("Selector.__init__() received both response and text")
        if response is not None and type is None:
            super().__init__(root=response.selector.root, namespaces=namespaces)
        elif response is not None:
            super().__init__(text=response.text, type=type, namespaces=namespaces)
        elif text is not None:
            super().__init__(text=text, type=type or "html", namespaces=namespaces)
        else:
            super().__init__(root=root, namespaces=namespaces)
