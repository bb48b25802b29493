"""The documentation is complete and loads nothing from the network: pages of the site, commands, modules, pictures."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from scripts import modules

from shoal.cli.main import app
from tests.support.claims import claimed_tests

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
GENERATED = {"index.md", "changelog.md", "contributing.md", "bench.md"}
"""Pages that scripts/docs_hooks.py makes from documents outside docs/."""


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str) and nav.endswith("/"):
        yield from (nav + path.name for path in (DOCS / nav).glob("*.md"))
    elif isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def test_every_page_has_one_place_on_the_site() -> None:
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} | GENERATED
    assert sorted(pages(SITE["nav"])) == sorted(written)


def test_tutorial_guides_explanation_and_reference_are_apart() -> None:
    assert [next(iter(section)) for section in SITE["nav"]] == [
        "Home", "Tutorial", "How-to guides", "Explanation", "Reference",
    ]  # fmt: skip


def test_the_site_needs_no_network() -> None:
    assert SITE["theme"]["font"] is False
    assert SITE["use_directory_urls"] is False
    assert "offline" in SITE["plugins"]
    for address in (*SITE["extra"]["polyfills"], *SITE["extra_css"]):
        assert (DOCS / address).is_file()


@pytest.mark.parametrize("picture", sorted((DOCS / "figures").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_loads_nothing(picture: Path) -> None:
    assert not re.findall(r"url\(\"?https?:|@import|@font-face|(?:href|src)=", picture.read_text())


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    named = re.findall(r"`([a-z_]+/[\w./-]*)", page.read_text())
    folders = {path.name for path in (*ROOT.iterdir(), *(ROOT / "src" / "shoal").iterdir()) if path.is_dir()}
    inside = [path for path in named if path.partition("/")[0] in folders]
    roots = (ROOT, ROOT / "src" / "shoal")
    assert not [
        path
        for path in inside
        if not any(Path(f"{root}/{path}{end}").exists() for root in roots for end in ("", ".py"))
    ]


def test_the_list_of_modules_is_of_this_source() -> None:
    assert modules.PAGE.read_text() == modules.page(), "run scripts/modules"


def commands(group: Any, name: str) -> Iterator[str]:
    with group.make_context(name, [], resilient_parsing=True) as context:
        for each in group.list_commands(context):
            command = group.get_command(context, each)
            if hasattr(command, "list_commands"):
                yield from commands(command, f"{name} {each}")
            else:
                yield f"{name} {each}"


def test_every_command_is_listed() -> None:
    text = (DOCS / "commands.md").read_text()
    listed = {match.strip() for match in re.findall(r"`(shoal [a-z -]+?)(?: [A-Z\[-][^`]*)?`", text)}
    real = set(commands(typer.main.get_command(app), "shoal"))
    assert real <= listed
    assert listed <= real | {"shoal hosts"}, "no such command"


def test_every_origin_has_a_test() -> None:
    """Each row of docs/origins.md names a test that exists. `tests.support.claims` checks that it runs and passes."""
    named = claimed_tests()
    assert len(named) > 60
    for name in named:
        file, _, test = name.partition("::")
        assert re.search(rf"def {test}\(", (ROOT / file).read_text()), name


def test_a_claim_whose_test_does_not_run_fails_the_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--claims"]
    done = subprocess.run(
        [*command, "tests/config/test_registry.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    broken = set(re.findall(r"claims what no test has shown: (\S+)", done.stdout))
    assert broken == claimed_tests().keys() - {"tests/config/test_registry.py::test_spiders_by_name"}
