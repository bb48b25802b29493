"""Compares the output of a crawler and the log of the server with the list of the pages of the site."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from crawl.content import Content, wrong_facts
from crawl.server import Serving


@dataclass
class Output:
    pages: Counter[str] = field(default_factory=Counter)
    """How often each page is in the output, by key."""
    wrong: Counter[str] = field(default_factory=Counter)
    """Items that are not right, by what is wrong."""


def read_output(output: Path, content: Content) -> Output:
    found = Output()
    if not output.exists():
        return found
    with output.open("rb") as lines:
        for line in lines:
            try:
                item = json.loads(line)
            except ValueError:
                break  # the last line of a crawler that was stopped
            key = content.key_of(item["url"])
            key = content.redirects.get(key, key)  # some crawlers show the URL before the redirect
            found.pages[key] += 1
            facts = content.pages.get(key)
            if facts is None:
                found.wrong["of pages that the site does not have"] += 1
            elif wrong := wrong_facts(item, facts):
                found.wrong[wrong] += 1
    return found


def check_pages(found: Output, expected: int, content: Content, serving: Serving, *, log: bool) -> list[str]:
    """Problems that make a run incomparable: work that was not done, was done twice, or gave a wrong result."""
    problems = []
    pages = sum(1 for key in found.pages if key in content.pages)
    if pages < expected:
        problems.append(f"{expected - pages} of {expected} pages not in the output")
    problems += [f"{count} items {wrong}" for wrong, count in found.wrong.items()]
    if repeated := sum(1 for count in found.pages.values() if count > 1):
        problems.append(f"{repeated} pages more than once in the output")
    return problems + (check_log(expected, content, serving) if log else [])


def check_log(expected: int, content: Content, serving: Serving) -> list[str]:
    problems = []
    fetched = sum(1 for key in serving.pages if key in content.pages)
    if fetched < expected:
        problems.append(f"{expected - fetched} of {expected} pages never requested")
    known = content.errors | content.redirects.keys()
    if expected == len(content.pages) and (left := len(known - serving.refused.keys())):
        problems.append(f"{left} of {len(known)} redirects and errors never requested")
    if (again := (serving.pages + serving.refused).total() - len(serving.pages | serving.refused)) > 0:
        problems.append(f"{again} pages fetched again")
    if failed := sum(count for key, count in serving.refused.items() if key not in known):
        problems.append(f"{failed} requests answered with an error")
    if serving.hurried:
        problems.append(f"{serving.hurried} requests before the delay of their host was over")
    return problems
