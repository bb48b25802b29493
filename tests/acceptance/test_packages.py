"""The packages as people get them: a wheel and an sdist that pass `twine check`, are installed, and are run by pipx.

The programs are those of requirements/packages.txt, in an environment of their own. What the package needs comes from
requirements/core.txt, so only these versions with these hashes are installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from shoal import __version__
from tests.acceptance.test_cli import ROOT, shop

__all__ = ["shop"]
pytestmark = pytest.mark.timeout(600)  # packages are downloaded
TOOLS = ROOT / ".venv-packages" / "bin"
CORE = ROOT / "requirements" / "core.txt"


def run(*words: str | Path, **environment: str) -> str:
    # Programs compile what they import. That is a small part of what pip would compile.
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False,
        env={**os.environ, "PIP_NO_COMPILE": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was made from the sdist."""
    run("bash", "-c", ". scripts/lib.sh; need_tools packages", PYTHON=sys.executable, BASH_ENV="")
    folder = tmp_path_factory.mktemp("dist")
    run(TOOLS / "python", "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def needed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of what the package needs."""
    folder = tmp_path_factory.mktemp("needed")
    run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes",
        "--requirement", CORE, "--dest", folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def wheel(packages: Path) -> Path:
    (found,) = packages.glob("*.whl")
    assert found.name == f"shoal-{__version__}-py3-none-any.whl"
    return found


def files_of(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_packages_pass_twine(packages: Path, wheel: Path) -> None:
    said = run(TOOLS / "twine", "check", "--strict", *packages.iterdir())
    assert said.count("PASSED") == 2


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source)) for path in (source / "shoal").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }  # fmt: skip
    found = {name for name in files_of(wheel) if ".dist-info/" not in name}
    assert found == expected
    assert "shoal/py.typed" in found
    for ending in (".lua", ".sql"):
        assert any(name.endswith(ending) for name in found)
    assert f"shoal-{__version__}.dist-info/licenses/LICENSE" in files_of(wheel)


def test_the_sdist_makes_the_same_wheel_as_the_repository(packages: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = packages.glob("*.tar.gz")
    run(TOOLS / "python", "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    assert files_of(tmp_path / wheel.name) == files_of(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert not any(name.startswith((".venv", "dist/", ".git/")) or name.endswith(".pyc") for name in names)


def test_the_wheel_installs_into_an_empty_environment(wheel: Path, needed: Path, tmp_path: Path, shop: str) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty")
    python = tmp_path / "empty" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", "--find-links", needed, wheel)
    run(*pip, "check")
    shoal = tmp_path / "empty" / "bin" / "shoal"
    assert run(shoal, "--version", PYTHONPATH="").strip() == f"shoal {__version__}"
    said = run(python, "-I", "-c", "import shoal; print(shoal.__file__)")
    assert Path(said.strip()).is_relative_to(tmp_path)
    output = tmp_path / "pages.jsonl"
    run(shoal, "crawl", shop, "--max-pages", "3", "--delay", "0", "-o", output, "--quiet", PYTHONPATH="")
    assert len(output.read_text().splitlines()) == 3


def test_pipx_runs_the_wheel(wheel: Path, needed: Path, tmp_path: Path, shop: str) -> None:
    output = tmp_path / "pages.jsonl"
    command = ["shoal", "crawl", shop, "--max-pages", "3", "--delay", "0", "-o", output, "--quiet"]
    run(
        TOOLS / "pipx", "run", "--python", sys.executable, "--pip-args",
        f"--find-links {needed} --constraint {constraints(tmp_path)}", "--spec", wheel, *command,
        PIPX_HOME=str(tmp_path / "home"), PIPX_BIN_DIR=str(tmp_path / "bin"), PYTHONPATH="",
    )  # fmt: skip
    titles = [json.loads(line)["title"] for line in output.read_text().splitlines()]
    assert len(titles) == 3


def constraints(folder: Path) -> Path:
    """The locked versions without their hashes, as pipx also installs pip, which has none there."""
    file = folder / "versions.txt"
    lines = [line.removesuffix("\\").strip() for line in CORE.read_text().splitlines()]
    file.write_text("\n".join(line for line in lines if line and not line.startswith(("#", "--hash"))) + "\n")
    return file
