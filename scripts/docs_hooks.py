"""MkDocs hooks: pages for the documents outside docs/, with links that work both in the repository and on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # in the repository -> on the site
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "bench.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace each folder in the navigation by all its pages, README.md first."""
    config.nav = [_expand(entry, Path(config.docs_dir)) for entry in config.nav or []]
    return config


def _expand(entry: Any, docs: Path) -> Any:
    if isinstance(entry, dict):
        return {title: _expand(inner, docs) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [_expand(inner, docs) for inner in entry]
    if entry.endswith("/"):
        pages = sorted((docs / entry).glob("*.md"), key=lambda path: (path.name != "README.md", path.name))
        return [entry + page.name for page in pages]
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to documents of the repository at their pages. MkDocs reports links without a page."""
    here = page.file.src_uri
    source = SOURCES.get(here, f"docs/{here}")

    def to_page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        found = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{link[2] or ''})"

    return LINK.sub(to_page, markdown)
