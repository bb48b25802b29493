"""CSS, XPath and JMESPath queries with the interface of parsel, over turbohtml's parser.

A query finds nodes, strings and JSON values. Elements and comments stay turbohtml nodes. Texts, attribute values,
numbers and booleans are plain strings. A ``Selector`` wraps one result, a ``SelectorList`` all results of a query.

This room does no I/O, and may import `urls` and what is below it. Start with `selectors`; `parsing` has the limits of
a page, `documents` and `metadata` what a page says about itself.
"""

from __future__ import annotations

from shoal.selector.selectors import Selector as Selector
from shoal.selector.selectors import SelectorList as SelectorList

__all__ = ["Selector", "SelectorList"]
