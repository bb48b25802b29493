"""Describes each part of the interface as text."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import shoal

ROOT = Path(shoal.__file__).parent
FROZEN = Path(__file__).parent / "frozen"
MODULES = ("shoal", "shoal.ports", "shoal.testing")
"""The modules that the reference documents."""


def public_names() -> str:
    """The names of the public modules, with their signatures and attributes."""
    lines = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines.append(f"[{module_name}]")
        for name in sorted(module.__all__):
            lines += _described(name, getattr(module, name))
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any) -> Iterator[str]:
    yield f"{name}{_signature_of(value)}"
    if inspect.isclass(value):
        names = {member for base in value.__mro__ if base.__module__.startswith("shoal") for member in vars(base)}
        for member in sorted(names):
            if not member.startswith("_") and member != "test" and not member.startswith("test_"):
                yield f"  .{member}{_signature_of(inspect.getattr_static(value, member))}"


def _signature_of(value: Any) -> str:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_constant(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Default:
    """A default value that is an object: only that there is one counts."""

    def __repr__(self) -> str:
        return "..."


def _constant(default: object) -> object:
    known = default is inspect.Parameter.empty or isinstance(default, (str, bytes, int, float, tuple, type(None)))
    return default if known else _Default()


def errors() -> str:
    """The tree of errors."""
    import shoal.errors as module

    def tree(error: type[BaseException], depth: int) -> Iterator[str]:
        yield f"{'  ' * depth}{error.__name__}"
        children = [child for child in error.__subclasses__() if child.__module__ == module.__name__]
        for child in sorted(children, key=lambda child: child.__name__):
            yield from tree(child, depth + 1)

    return "\n".join(tree(module.ShoalError, 0)) + "\n"


def settings() -> str:
    """Each setting with its default."""
    from shoal.config import Config
    from shoal.config.layers import flatten

    return "".join(f"{name} = {value!r}\n" for name, value in sorted(flatten(Config()).items()))


def metrics() -> str:
    """The names of all metrics."""
    names = {
        node.value
        for path in (ROOT / "operations").glob("metrics*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        and re.fullmatch(r"shoal_[a-z_]+", node.value)
    }  # fmt: skip
    return "".join(f"{name}\n" for name in sorted(names))


def commands() -> str:
    """The help of each command."""
    import typer

    from shoal.cli.main import COMMANDS, app, main

    root: Any = typer.main.get_command(app)
    paths: list[tuple[str, ...]] = [()]
    for name in (name for group in COMMANDS.values() for name in group):
        paths += [(name,), *((name, inner) for inner in getattr(root.get_command(None, name), "commands", ()))]
    return "\n".join(f"$ {' '.join(('shoal', *path))} --help\n{_help_of(path, main)}" for path in paths)


def _help_of(path: tuple[str, ...], main: Callable[[], None]) -> str:
    shown = io.StringIO()
    streams = sys.stdout, sys.stderr
    with (
        mock.patch.object(sys, "argv", ["shoal", *path, "--help"]),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        main()
    sys.stdout, sys.stderr = streams  # the command guards them
    return shown.getvalue()


def openapi() -> str:
    """The OpenAPI document, without the version of Shoal."""
    from shoal.api.server.app import create_app
    from shoal.config import Config

    document = create_app(Config()).openapi()
    document["info"].pop("version")
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


SURFACES: dict[str, Callable[[], str]] = {
    "public_names.txt": public_names,
    "errors.txt": errors,
    "settings.txt": settings,
    "metrics.txt": metrics,
    "commands.txt": commands,
    "openapi.json": openapi,
}
