"""What a stranger's site or one caller of the API does is no harm for other callers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.fleets import frontier_url
from tests.acceptance.serving import Api, serving
from tests.acceptance.target import Target, target

ANN, BOB = secrets.token_hex(16), secrets.token_hex(16)
TOKENS = f'[serve.tokens]\nann = "{ANN}"\nbob = "{BOB}"\n'


@pytest.fixture
def site() -> Iterator[Target]:
    with target() as server:
        yield server


def as_caller(api: Api, token: str) -> Api:
    api.headers = {"Authorization": f"Bearer {token}"}
    return api


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "postgresql"])
@pytest.mark.parametrize("robots", [False, True])
def test_an_answer_to_one_caller_does_not_keep_the_others_from_its_host(
    tmp_path: Path, site: Target, kind: str, robots: bool
) -> None:
    """However long a Retry-After it has. The caller itself learns why its page failed."""
    (tmp_path / "shoal.toml").write_text(f"[serve]\nmax_block = 1.5\n{TOKENS}")
    places = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path}/batches.db"}
    environ = {"SHOAL_FRONTIER": places.get(kind) or frontier_url(kind)}
    with serving(tmp_path, environ) as api:
        options = {"retries": 1, "robots": robots}
        answer = as_caller(api, ANN).batch([f"{site.url}/a?status=503&after=86400"], options=options)
        assert [result["error"]["kind"] for result in answer["results"]] == ["http 503"]
        answer = as_caller(api, BOB).batch([f"{site.url}/b"], options=options)
        assert [result["status"] for result in answer["results"]] == ["success"]
    visits = [visit for visit in site.visits() if visit.path.startswith(("/a", "/b"))]
    assert [visit.path[:2] for visit in visits] == ["/a", "/a", "/b"]
    assert all(later.start - (earlier.end or 0) > 1.4 for earlier, later in zip(visits, visits[1:], strict=False))
