"""The examples of the API guide run in order, with the responses that the guide shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.acceptance.serving import celery
from tests.acceptance.test_cli import ROOT
from tests.acceptance.test_docs import blocks

MARK = "@@ the next answer @@"


def test_the_examples_of_the_guide(tmp_path: Path, shop: str) -> None:
    host = shop.removeprefix("http://").rstrip("/")
    examples: list[tuple[str, str]] = []
    for kind, text in blocks(ROOT / "docs" / "api.md"):
        text = text.replace("127.0.0.1:8000", host)
        named = re.match(r"# (\S+\.(?:py|toml))\n", text)
        if named:
            (tmp_path / named[1]).write_text(text)
        elif kind == "python":
            subprocess.run([sys.executable, "-c", text], check=True, timeout=30)
        else:
            examples += [
                (part.partition("\n")[0], part.partition("\n")[2]) for part in text.split("$ ", 1)[1].split("\n$ ")
            ]
    assert len(examples) > 12
    with celery(tmp_path, 1, SHOAL_FRONTIER="memory:", SHOAL_BROWSER__SANDBOX="false") as fleet:
        commands = [command.replace("localhost:8001", fleet.api.url) for command, _ in examples]
        script = f"\necho '{MARK}'\n".join(commands)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100,
            check=False, env={**os.environ, "no_proxy": "*"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answers = done.stdout.split(MARK)
    assert len(answers) == len(examples)
    for (command, shown), answer in zip(examples, answers, strict=True):
        assert answer.strip() or command.startswith(("SESSION=", "RUN=", "while ")), command
        if shown.strip():
            assert shape(json.loads(answer)) == shape(json.loads(shown)), f"{command}\n{answer}"


def shape(value: Any) -> Any:
    """What two answers of the same kind have in common."""
    if isinstance(value, dict):
        return {name: shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value[:1]] if not isinstance(value[0], dict) else [shape(v) for v in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__
