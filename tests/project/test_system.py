"""Only `shoal.system` reads clocks, draws random numbers and starts threads, so that a simulation can replace them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
USES = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"},
    "os": {"urandom"},
    "random": {"random", "uniform", "choice", "choices", "shuffle", "sample", "randint", "randrange", "expovariate"},
    "secrets": {"token_bytes", "token_hex", "token_urlsafe", "randbelow", "randbits", "choice"},
    "uuid": {"uuid1", "uuid4"},
    "datetime": {"now", "utcnow", "today"},
    "asyncio": {"to_thread"},
    "threading": {"Thread", "Timer"},
    "futures": {"ThreadPoolExecutor"},
}
ALONE = {
    "fetch/browser/guardian.py",  # a program that runs without Shoal
}


def uses(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    types = {
        id(name) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) for name in ast.walk(node.annotation)
    }
    for node in ast.walk(tree):
        if id(node) not in types and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in USES.get(node.value.id, ()):
                yield f"line {node.lineno}: {node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").rpartition(".")[2]
            yield from (f"line {node.lineno}: {a.name}" for a in node.names if a.name in USES.get(module, ()))


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in ("system", "scrapy", "testing")
        and path.relative_to(SOURCE).as_posix() not in ALONE
    ],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_the_machine_is_asked_in_one_place(path: Path) -> None:
    assert list(uses(path)) == []
