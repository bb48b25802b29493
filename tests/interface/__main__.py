"""Writes the files in `frozen/` anew. With ``--stores NAME`` it also adds a store of each backend under that name."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

from tests.interface.stores import BACKENDS, written
from tests.interface.surfaces import FROZEN, SURFACES


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/freeze", description=__doc__)
    parser.add_argument("--stores", metavar="NAME", help="add stores of this version under a name, such as 0.1")
    options = parser.parse_args()
    for name, describe in SURFACES.items():
        (FROZEN / name).write_text(describe())
    if options.stores:
        for backend in BACKENDS.values():
            with (
                tempfile.TemporaryDirectory() as folder,
                cast("AbstractContextManager[str]", backend.empty(Path(folder))) as url,
            ):
                text = asyncio.run(written(backend, url))
                (FROZEN / "stores" / f"{options.stores}.{backend.suffix}").write_text(text)


if __name__ == "__main__":
    main()
