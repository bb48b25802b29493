"""Installs small packages with entry points, as pip would, for the tests of plugins."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, code: str, version: str = "1.0", **entry_points: str) -> None:
    """Put a package with this code into a folder of ``sys.path``. ``entry_points``: group to ``name = object``."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"[shoal.{group}]\n{entry}\n" for group, entry in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
