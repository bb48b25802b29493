"""CSS, XPath and JMESPath queries with the interface of parsel, over turbohtml's parser.

A query finds nodes, strings and JSON values. Elements and comments stay turbohtml nodes. Texts, attribute values,
numbers and booleans are plain strings. A ``Selector`` wraps one result, a ``SelectorList`` all results of a query. The
room imports nothing but errors. Start with `selectors.py`.
"""

from __future__ import annotations

from shoal.selector.selectors import Selector as Selector
from shoal.selector.selectors import SelectorList as SelectorList

__all__ = ["Selector", "SelectorList"]
