"""The list of all modules, from the docstrings of the source. `scripts/modules` writes it to docs/modules.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "shoal"
PAGE = ROOT / "docs" / "modules.md"
ROOMS = (
    *("system", "errors", "messages", "config", "urls", "item", "selector", "http", "ports", "spider"),
    *("sitemap_spider", "clients", "fetch", "frontier", "sinks", "crawling", "runs", "operations", "scrapy"),
    *("api", "celery", "testing", "cli"),
)
"""The packages and modules of `shoal`, from the lowest to the highest. Each may import itself and those before it.
`testing` and `scrapy` are leaves: no room imports `testing`, and only `cli` imports `scrapy`."""
_HEAD = """# Modules

Every module of Shoal with the first line of its docstring, from the highest room to the lowest: a room may import those
below it in this list. `scripts/modules` writes this page, and the tests compare it with the source.
[Architecture](architecture.md) explains how the rooms work together, and which file to edit for what.
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for room in reversed(ROOMS):
        folder = SOURCE / room
        if folder.is_dir():
            parts.append("\n".join([f"## {room}", "", _paragraph(folder / "__init__.py"), "", *_rows(folder)]) + "\n")
        else:
            path = folder.with_suffix(".py")
            parts.append(f"## {room}\n\n{_first_line(path)}\n")
    return "\n".join(parts)


def _rows(folder: Path) -> Iterator[str]:
    yield "| module | what it is |"
    yield "| --- | --- |"
    for path in sorted(folder.rglob("*.py"), key=lambda path: (path.parent != folder, path)):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if path != folder / "__init__.py" and name != "__main__":
            yield f"| `{name.removesuffix('/__init__')}` | {_first_line(path)} |"


def _first_line(path: Path) -> str:
    return " ".join(_docstring(path).partition("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")


def _paragraph(path: Path) -> str:
    """The docstring of a room, without the code in it."""
    paragraphs = [text for text in _docstring(path).split("\n\n") if not text.startswith("    ")]
    return "\n\n".join(text.replace("``", "`").replace("::", ":") for text in paragraphs)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


if __name__ == "__main__":
    PAGE.write_text(page())
