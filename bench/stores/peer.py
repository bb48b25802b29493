"""pgqueuer on the same PostgreSQL: the benchmark in its source, and its enqueue with the same URLs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stores import servers

DURABILITY = ("durable", "balanced", "volatile")
DRAINS = ((5, 10), (1, 100), (5, 100), (5, 200), (10, 200))
"""Consumers and batch size. The first pair is from its documentation. The best pair is reported."""


def measure(work: Path, urls: int, core: int | None, pin: list[str]) -> list[dict[str, Any]]:
    """Enqueue and drain with full durability and each pair; then with less durability and the best pair."""
    python = work / "venvs/pgqueuer/bin/python"
    tool = benchmark_tool(work, python)
    cores = None if core is None else {core}
    figures: list[dict[str, Any]] = []
    best = DRAINS[0]
    for durability in DURABILITY:
        with database(python, durability, cores) as variables:
            command = [*pin, str(python), str(Path(__file__).with_name("pgqueuer_enqueue.py")), str(urls)]
            figures += [{"durability": durability, **figure} for figure in json.loads(run(command, variables))]
        rates = {}
        for consumers, batch in DRAINS if durability == "durable" else (best,):
            with database(python, durability, cores) as variables:
                rates[consumers, batch] = drain([*pin, str(python), str(tool)], variables, urls // 2, consumers, batch)
            figures.append(
                {
                    "durability": durability,
                    "act": "work",
                    "batch": batch,
                    "callers": consumers,
                    "count": urls // 2,
                    "rate": rates[consumers, batch],
                }
            )
        best = max(rates, key=rates.__getitem__)
    return figures


@contextmanager
def database(python: Path, durability: str, cores: set[int] | None) -> Iterator[dict[str, str]]:
    """A new server with its tables. Yields the environment for its programs."""
    with servers.server("postgresql", cores) as running:
        variables = os.environ | {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(running.port),
            "PGUSER": "shoal",
            "PGDATABASE": "postgres",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        run([str(python), "-m", "pgqueuer", "install", "--durability", durability], variables)
        run([str(python), "-m", "pgqueuer", "autovac"], variables)  # as its guide recommends for speed
        yield variables


def drain(command: list[str], variables: dict[str, str], jobs: int, consumers: int, batch: int) -> float:
    """Jobs per second, measured by its own tool: fetched, passed to a function that does nothing, logged as done."""
    answer = Path(variables.get("TMPDIR", "/tmp")) / f"pgqueuer-{os.getpid()}.json"
    words = ["--strategy", "drain", "--jobs", str(jobs), "--dequeue", str(consumers)]
    try:
        run([*command, *words, "--dequeue-batch-size", str(batch), "--output-json", str(answer)], variables)
        return float(json.loads(answer.read_text())["rate"])
    finally:
        answer.unlink(missing_ok=True)


def run(command: list[str], variables: dict[str, str]) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=900).stdout


def benchmark_tool(work: Path, python: Path) -> Path:
    """`tools/benchmark.py` of the installed version, from the source package: the wheel does not have it."""
    script = "import importlib.metadata as m; print(m.version('pgqueuer'))"
    version = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    folder = work / f"pgqueuer-{version}"
    tool = folder / "benchmark.py"
    if not tool.exists():
        folder.mkdir(exist_ok=True)
        wanted = ["--no-deps", "--no-binary", "pgqueuer", "--dest", str(folder), f"pgqueuer=={version}"]
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *wanted]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (archive,) = folder.glob("pgqueuer-*.tar.gz")
        with tarfile.open(archive) as source:
            content = source.extractfile(f"pgqueuer-{version}/tools/benchmark.py")
            assert content is not None
            tool.write_bytes(content.read())
        archive.unlink()
    return tool
