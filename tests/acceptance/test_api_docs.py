"""The API's own documentation page, in a real browser without a network."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.acceptance.serving import serving, until


def rendered(url: str, profile: Path) -> str:
    """The page as Chromium shows it after its scripts have run. Every name but this machine's is unknown."""
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
         "--virtual-time-budget=60000", "--timeout=60000", "--dump-dom", url],
        check=True, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    return done.stdout


def test_the_page_lists_all_operations(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        _, schema = api.get("/openapi.json")

        def complete() -> str | None:
            page = rendered(f"{api.url}/docs", tmp_path / "profile")
            return page if "operation-tag-content" in page or "Unable to render" in page else None

        page = until(complete, what="the page")  # a busy browser may show it before its scripts have run
        assert "Unable to render" not in page
        for path, operations in schema["paths"].items():
            assert f'data-path="{path}"' in page
            assert page.count(f'data-path="{path}"') >= len(operations)
