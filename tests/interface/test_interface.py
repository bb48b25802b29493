"""The interface is as it was: names, commands, settings, metrics, errors, OpenAPI, and stores of earlier versions."""

from __future__ import annotations

import difflib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import pytest

from shoal.frontier import open_store
from tests.interface.stores import BACKENDS, check, written
from tests.interface.surfaces import FROZEN, SURFACES

STORES = sorted((FROZEN / "stores").iterdir())


@pytest.mark.parametrize("name", SURFACES)
def test_the_interface_is_as_it_was(name: str) -> None:
    before, now = (FROZEN / name).read_text(), SURFACES[name]()
    if now != before:
        lines = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=1)
        changes = "\n".join(list(lines)[:60])
        pytest.fail(
            f"{name} has changed. If you want that, run scripts/freeze and describe it in CHANGELOG.md.\n{changes}"
        )


@pytest.mark.parametrize("path", STORES, ids=lambda path: path.name)
async def test_a_store_of_an_earlier_version_can_be_used(path: Path, tmp_path: Path) -> None:
    backend = next(backend for backend in BACKENDS.values() if path.name.endswith(backend.suffix))
    with cast("AbstractContextManager[str]", backend.empty(tmp_path)) as url:
        backend.restore(url, path.read_text())
        await _check(url)


@pytest.mark.parametrize("name", BACKENDS)
async def test_a_store_of_this_version_can_be_used(name: str, tmp_path: Path) -> None:
    """So that the test above fails for the store, not for itself."""
    backend = BACKENDS[name]
    with cast("AbstractContextManager[str]", backend.empty(tmp_path)) as url:
        await written(backend, url)
        await _check(url)


async def _check(url: str) -> None:
    store = await open_store(url)
    try:
        await check(store)
    finally:
        await store.close()
