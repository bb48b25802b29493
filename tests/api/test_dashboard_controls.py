"""Everything the dashboard can do is a route of the HTTP API and a command: docs/dashboard.md has the table."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import typer

from shoal.api.server.app import create_app
from shoal.cli.main import app as shoal
from shoal.config import Config
from tests.project.test_documents import DOCS, commands

TEMPLATES = Path(__file__).parents[2] / "src/shoal/api/dashboard/templates"
SCREENS = TEMPLATES.parent
OWN = {"POST /ui/logout", "POST /ui/login"}
"""The session of a browser: a program sends its token instead."""


class Row(NamedTuple):
    """A row of the table: what it is for, its route, and its command."""

    what: str
    route: str
    command: str


@cache
def openapi_routes() -> frozenset[str]:
    document = create_app(Config()).openapi()
    return frozenset(f"{verb.upper()} {shape(path)}" for path, verbs in document["paths"].items() for verb in verbs)


def shape(path: str) -> str:
    """A path with ``{}`` for each of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path.partition("?")[0])


def controls(text: str) -> set[str]:
    """The requests that the buttons and forms of a template send."""
    names = dict(re.findall(r"\{% set (\w+) = (\"[^%]*?) %\}", text))
    found = set()
    for verb, path in re.findall(r"hx-(get|post|put|patch|delete)=\"([^\"]*)\"", text):
        for name, value in names.items():
            path = path.replace(f"{{{{ {name} }}}}", re.sub(r"\" ~ [^~]+", "{{ x }}", value).removeprefix('"'))
        found.add(f"{verb.upper()} {shape(re.sub(r'{{.*?}}', '{x}', path))}")
    for form in re.findall(r"<form\b[^>]*>", text):
        method = re.search(r"method=\"(\w+)\"", form)
        if method and method[1] != "get":
            action = re.search(r"action=\"([^\"]*)\"", form)
            assert action, form
            found.add(f"{method[1].upper()} {action[1]}")
        assert "hx-" in form or method, f"a form that sends nothing: {form}"
    return found


def all_controls() -> set[str]:
    return set().union(*(controls(file.read_text()) for file in TEMPLATES.glob("*.html"))) - OWN


def table(heading: str) -> list[Row]:
    text = (DOCS / "dashboard.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if re.match(r"\| (?!---|control|screen)", line)]
    return [Row(what.strip(), route.strip().strip("`"), command.strip()) for what, route, command in rows]


def real_commands() -> set[str]:
    return {*commands(typer.main.get_command(shoal), "shoal"), "shoal hosts"}


def test_the_templates_are_read() -> None:
    assert controls('<form hx-post="/api/runs/{{ run.run_id|urlencode }}/pause">') == {"POST /api/runs/{}/pause"}
    set_first = '{% set api = "/api/hosts/" ~ host|urlencode %}<button hx-put="{{ api }}"></button>'
    assert controls(set_first + '<a hx-post="{{ api }}/block">') == {"PUT /api/hosts/{}", "POST /api/hosts/{}/block"}
    assert len(all_controls()) > 18


def test_every_control_is_a_route_of_the_api() -> None:
    known = openapi_routes()
    # `*` is the host that stands for all others.
    assert {each.replace("/*", "/{}") for each in all_controls()} <= known


def test_every_control_has_a_row_with_its_route_and_its_command() -> None:
    rows = table("Do the same from a program")
    assert {f"{verb} {shape(path)}" for verb, path in (row.route.split(" ") for row in rows)} == all_controls()
    real = real_commands()
    for row in rows:
        named = re.match(r"`(shoal(?: [a-z-]+)+)", row.command)
        assert named, row
        words = named[1].split()
        assert any(" ".join(words[:count]) in real for count in range(2, len(words) + 1)), row


def test_every_screen_has_a_row_with_its_routes_and_its_commands() -> None:
    rows = table("Read the same from a program")
    modules = SCREENS.glob("*_screens.py")
    screens = {
        path for each in modules for path in re.findall(r"^@screen\(router, \"([^\"]+)\"", each.read_text(), re.M)
    }
    assert len(screens) > 14
    assert {row.what.split("`")[1] for row in rows} == screens
    for row in rows:
        for route in re.findall(r"GET [^`]+", row.route):
            assert shape(route) in openapi_routes(), route
        for command in re.findall(r"`(shoal [a-z -]+?)(?: [A-Z\[-][^`]*)?`", row.command):
            assert command in real_commands(), command
        assert "GET " in row.route, row
        assert "shoal" in row.command, row
