"""Runs Scrapy spiders: classes with Scrapy's names and behaviour on Shoal's engine.

Change ``import scrapy`` to ``from shoal import scrapy``, or change nothing and run ``shoal run --scrapy FILE``.

This room may import `operations` and what is below it; only the command line imports this room. Start with `adapter`,
then `project`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.scrapy.http import FormRequest as FormRequest
    from shoal.scrapy.http import JsonRequest as JsonRequest
    from shoal.scrapy.http import Request as Request
    from shoal.scrapy.item import Field as Field
    from shoal.scrapy.item import Item as Item
    from shoal.scrapy.selector import Selector as Selector
    from shoal.scrapy.spider import Spider as Spider

_PLACES = {
    "Spider": "spider",
    "Request": "http",
    "FormRequest": "http",
    "JsonRequest": "http",
    "Item": "item",
    "Field": "item",
    "Selector": "selector",
}
"""The module of each name. It is imported when the name is used."""

__version__ = "2.19.0"
"""The version of Scrapy whose behaviour this package has."""
version_info = (2, 19, 0)
twisted_version = (0, 0, 0)

__all__ = ["Field", "FormRequest", "Item", "JsonRequest", "Request", "Selector", "Spider"]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"shoal.scrapy.{_PLACES[name]}"), name)
    from shoal.scrapy.names import submodule

    return submodule(name)
