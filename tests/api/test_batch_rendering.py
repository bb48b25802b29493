"""The rendering options of a batch: what callers write, what is stored, and what the browser gets."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from shoal.api.batch.options import BatchOptions
from shoal.api.batch.quota import size_of
from shoal.crawling.onion import size_with_extras
from shoal.http import Render
from shoal.http.rendering import Captured, Click, Press, Scroll, Wait
from shoal.http.response import RenderedResponse


def rendering(value: object) -> Render | None:
    """As the server reads it, stores it, and a worker reads it again."""
    read = BatchOptions.model_validate({"render": value})
    stored = BatchOptions.model_validate(read.model_dump(mode="json"))
    assert stored == read
    return None if stored.render is None else stored.render.as_render()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, None),
        (None, None),
        (True, Render()),
        ({}, Render()),
        ("auto", Render(mode="auto")),
        ({"mode": "auto", "wait_for": 100}, Render(mode="auto", wait_for=100)),
        ({"wait_for": "networkidle", "screenshot": "full"}, Render(wait_for="networkidle", screenshot="full")),
        ({"pdf": True, "capture": ["*/api/*"]}, Render(pdf=True, capture=("*/api/*",))),
        (
            {"actions": [{"do": "click", "selector": "#a"}, {"do": "press", "key": "Control+A"}, {"do": "scroll"},
                         {"do": "wait", "wait_for": "li"}]},
            Render(actions=(Click(selector="#a"), Press(key="Control+A"), Scroll(times=20), Wait(wait_for="li"))),
        ),
    ],
)  # fmt: skip
def test_what_callers_write(value: object, expected: Render | None) -> None:
    assert rendering(value) == expected


@pytest.mark.parametrize(
    "selector",
    [
        "a",
        "input[name=word]",
        'a[href="x=y"]',
        "div > p",
        ".price",
        "*",
        "li:nth-child(2)",
        "a:not([b=c])",
        "a, b",
        "é",
    ],
)
def test_selectors_that_are_css(selector: str) -> None:
    assert rendering({"wait_for": selector}) == Render(wait_for=selector)


@pytest.mark.parametrize(
    "selector",
    ["text=x", " xpath = //a", "//a", "((//a", "..", '"quoted"', "'quoted'", "a >> b", "_react=X", "css:light=a",
     "internal:control=enter-frame", "nth=0", " ", "a\nb", "a\0"],
)  # fmt: skip
def test_selectors_in_other_languages_are_refused(selector: str) -> None:
    """Playwright would understand them. Callers get CSS, and nothing else."""
    with pytest.raises(ValidationError, match="must be a CSS selector"):
        rendering({"screenshot": selector})


def test_bytes_count() -> None:
    assert size_of({"screenshot": b"x" * 1000}) > 1000
    response = RenderedResponse("http://a.example/", body=b"12").rendered(
        screenshot=b"345", pdf=b"6", captured=[Captured("http://a.example/b", 200, "text/plain", b"7890")]
    )
    assert size_with_extras(response) == 10
