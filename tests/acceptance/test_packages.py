"""The packages as people get them: a wheel and an sdist that pass `twine check`, are installed, and are run by pipx.

The programs are those of requirements/packages.txt, in an environment of their own. What the package needs is packed
again from the environment of the tests: the versions of requirements/core.txt, whose hashes pip has checked. Only pip
itself is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from shoal import __version__
from tests.acceptance.test_cli import ROOT

pytestmark = pytest.mark.timeout(600)  # environments are created
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
    """A folder with the wheels of what the package needs, and of no other package."""
    folder = tmp_path_factory.mktemp("needed")
    for line in locked():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            pack(distribution(requirement.name), folder)
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "pip")  # for pipx itself
    return folder


def pack(installed: Distribution, folder: Path) -> None:
    """Make a wheel of an installed package. Its scripts are left out, as pip makes them again."""
    assert installed.files is not None
    files = [file for file in installed.files if ".." not in file.parts and "__pycache__" not in file.parts]
    (described,) = (file for file in files if file.name == "WHEEL")
    tags = [tag.split("-") for tag in re.findall(r"^Tag: (.+)$", described.read_text(), re.MULTILINE)]
    tag = "-".join(".".join(sorted(set(parts))) for parts in zip(*tags, strict=True))
    name = described.parent.name.removesuffix(".dist-info")
    with ZipFile(folder / f"{name}-{tag}.whl", "w") as wheel:
        for file in files:
            if file.name not in ("INSTALLER", "REQUESTED", "direct_url.json"):
                wheel.write(str(file.locate()), str(file))


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


SECRETS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY|AKIA[0-9A-Z]{16}|gh[pousr]_[0-9A-Za-z]{36}|xox[abp]-[0-9]|/(?:home|root|work)/\w"
)


def test_the_wheel_has_no_secrets_no_paths_of_a_machine_and_no_tests(wheel: Path) -> None:
    files = files_of(wheel)
    assert {name: SECRETS.findall(content) for name, content in files.items() if SECRETS.search(content)} == {}
    odd = [
        name
        for name in files
        if re.search(r"(^|/)(tests?|\.env|\.git|conftest\.py|.*\.(key|pem|db|log|pyc))(/|$)", name)
    ]
    assert odd == []


def test_the_sdist_makes_the_same_wheel_as_the_repository(packages: Path, wheel: Path, tmp_path: Path) -> None:
    (sdist,) = packages.glob("*.tar.gz")
    run(TOOLS / "python", "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    assert files_of(tmp_path / wheel.name) == files_of(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    assert not any(name.startswith((".venv", "dist/", ".git/")) or name.endswith(".pyc") for name in names)


def test_pipx_runs_the_wheel(wheel: Path, needed: Path, tmp_path: Path, shop: str) -> None:
    """In a new environment, which has the packages that the wheel asks for, and no others."""
    output = tmp_path / "pages.jsonl"
    command = ["shoal", "crawl", shop, "--max-pages", "3", "--delay", "0", "-o", output, "--quiet"]
    run(
        TOOLS / "pipx", "run", "--python", sys.executable, "--spec", wheel, *command,
        PIPX_HOME=str(tmp_path / "home"), PIPX_BIN_DIR=str(tmp_path / "bin"), PYTHONPATH="",
        PIP_NO_INDEX="1", PIP_FIND_LINKS=str(needed), PIP_NO_COMPILE="1",
    )  # fmt: skip
    titles = [json.loads(line)["title"] for line in output.read_text().splitlines()]
    assert len(titles) == 3

    (shoal,) = (tmp_path / "home").glob(".cache/*/bin/shoal")
    assert run(shoal, "--version", PYTHONPATH="").strip() == f"shoal {__version__}"
    python = shoal.with_name("python")
    said = run(python, "-I", "-c", "import shoal; print(shoal.__file__)")
    assert Path(said.strip()).is_relative_to(tmp_path)
    run(sys.executable, "-m", "pip", "--python", python, "check")


def locked() -> list[str]:
    """The lines of the lock file without their hashes."""
    lines = [line.removesuffix("\\").strip() for line in CORE.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "--hash"))]
