"""What rendered pages reach in `shoal run`, which has no address guard: real Chromium, real names that change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.acceptance.rebinding import PUBLIC, said_apart
from tests.browser.reaching import CHANGING, INTRANET, MIXED, MOVING, OTHER_PRIVATE, OTHER_PUBLIC, PRIVATE, WAYS


@pytest.fixture(scope="module")
def outcome() -> Any:
    return json.loads(said_apart("-m", "tests.browser.reaching"))


@pytest.mark.parametrize("page", [MIXED, CHANGING])
def test_a_name_that_changes_leads_a_public_page_to_no_private_address(outcome: Any, page: str) -> None:
    found = outcome["found"][page]
    assert found["rebound"] == "refused"
    assert PRIVATE not in found["frame"]


def test_a_public_name_may_move_to_another_public_address(outcome: Any) -> None:
    assert outcome["found"][MOVING] == {"moved": OTHER_PUBLIC}


def test_no_way_out_of_a_public_page_leads_to_a_private_address(outcome: Any) -> None:
    found = outcome["found"][WAYS]
    assert found.pop("public") == OTHER_PUBLIC
    assert not {PRIVATE, "::1", "open", "late"} & set(found.values()), found
    log = "a rendered page may not load everything it asks for: 127.0.0.1 is a loopback address, which only pages from"
    assert log in outcome["log"]


def test_a_private_page_reaches_both_kinds_of_addresses(outcome: Any) -> None:
    found = outcome["found"][INTRANET]
    assert (found["own"], found["private"], found["public"]) == (PRIVATE, OTHER_PRIVATE, OTHER_PUBLIC)


def test_what_a_private_page_loads_keeps_its_kind(outcome: Any) -> None:
    found = outcome["found"][INTRANET]
    assert (found["fickle"], found["fickle again"]) == (PUBLIC, "refused")


def test_only_the_private_page_contacted_private_addresses(outcome: Any) -> None:
    """As these addresses saw it: no packet of another page, whatever its scripts say."""
    contacted = {each for each in outcome["contacted"] if "favicon" not in each}
    assert contacted == {
        *(f"{PRIVATE} 83", f"{PRIVATE} 83 /", f"{PRIVATE} 83 /data"),
        *(f"{OTHER_PRIVATE} 83", f"{OTHER_PRIVATE} 83 /data"),
    }
