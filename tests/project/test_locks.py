"""The locked versions are those that pyproject.toml allows, and every file has a hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("*.txt")}


def pinned(lock: str) -> dict[str, str]:
    """The version of each package."""
    found = re.findall(r"^([a-z0-9.-]+)(?:\[[^]]*\])?==(\S+)(?: ;.*)? \\$", LOCKS[lock], re.MULTILINE)
    assert len(found) == len(re.findall(r"^\w", LOCKS[lock], re.MULTILINE)), "a line of another kind"
    return dict(found)


def required(*extras: str) -> list[Requirement]:
    """What the package needs with these extras, those included that they name themselves."""
    needed = [Requirement(text) for text in PROJECT["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, EXTRAS[extra]):
            needed += required(*requirement.extras) if requirement.name == "shoal" else [requirement]
    return needed


@pytest.mark.parametrize(("lock", "extras"), [("core", []), ("all", ["all"]), ("test", ["test", "check"])])
def test_the_lock_has_what_the_package_needs(lock: str, extras: list[str]) -> None:
    versions = pinned(lock)
    for requirement in required(*extras):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/{lock}.txt: run scripts/lock"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}: run scripts/lock"


def test_locks_agree_on_versions() -> None:
    tested = pinned("test")
    for lock in ("core", "all", "build"):
        for name, version in pinned(lock).items():
            assert tested.get(name, version) == version, (lock, name)
    assert pinned("core").keys() <= pinned("all").keys() <= pinned("test").keys()


@pytest.mark.parametrize("lock", sorted(LOCKS))
def test_every_package_has_hashes_and_none_an_address(lock: str) -> None:
    packages = re.split(r"^(?=\w)", LOCKS[lock], flags=re.MULTILINE)[1:]
    assert packages
    for package in packages:
        assert re.search(r"^    --hash=sha256:[0-9a-f]{64}", package, re.MULTILINE), package
    assert "://" not in LOCKS[lock]
    assert not re.search(r"^\s*--?(?!hash=)\w", LOCKS[lock], re.MULTILINE), "an option, such as an index"


def test_every_dependency_has_two_bounds() -> None:
    for requirement in required(*EXTRAS):
        signs = {specifier.operator for specifier in requirement.specifier}
        assert signs == {">=", "<"}, requirement
