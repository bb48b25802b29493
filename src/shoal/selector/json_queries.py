"""JMESPath queries over JSON."""

from __future__ import annotations

from turbohtml import Node

from shoal.errors import SelectorError
from shoal.selector.documents import JsonText, Root, load_json, top


def find_jmespath(root: Root, query: str, options: dict[str, object]) -> list[Root]:
    """Return the values that a JMESPath query finds. Text and elements are decoded as JSON first."""
    import jmespath  # here, because few spiders need it

    node = top(root)
    if isinstance(node, Node):
        node = node.text
    data = load_json(node) if isinstance(node, str) else node
    try:
        found = jmespath.search(query, data, **options)
    except (ValueError, TypeError) as exc:  # JMESPathError is a ValueError
        raise SelectorError(f"bad JMESPath query {query!r}: {exc}") from exc
    if found is None:
        return []
    values = found if isinstance(found, list) else [found]
    return [JsonText(value) if isinstance(value, str) else value for value in values]
