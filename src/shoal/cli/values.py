"""Values of options and arguments, without Pydantic where it would change nothing: importing it takes 70 ms."""

from __future__ import annotations

from typing import Any, TypeAlias

_Click: TypeAlias = Any
_MAX_DIGITS = 15


class _Coercion:
    """Stands in for the coercion that Typer makes when a parameter gets its value. It makes that one when it has to,
    such as for a value that is wrong."""

    def __init__(self, param: _Click) -> None:
        self._param = param

    def coerce(self, value: object, param: _Click, ctx: _Click) -> object:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        found = _simple(param.type_descriptor, value, many=param.multiple or param.nargs != 1)
        if found is not None:
            return found
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def spare_pydantic(param: _Click) -> None:
    """Let a parameter of Typer convert plain texts and numbers by itself. Every value and error stays the same."""
    if getattr(param, "_runtime_param", param) is None and hasattr(param, "type_descriptor"):
        param._runtime_param = _Coercion(param)


def _simple(kind: _Click, value: object, *, many: bool) -> object | None:
    """The value as Typer would convert it; None if that is not obvious."""
    info = kind.parameter_info
    if info.parser is not None or kind.is_file or kind.is_path:
        return None
    if many:
        texts = list(value) if kind.annotation == list[str] and isinstance(value, list | tuple) else [None]
        return texts if all(type(each) is str for each in texts) else None
    if kind.annotation is str and type(value) is str:
        return value
    if kind.annotation is int and not info.clamp:
        return _number(value, info.min, info.max)
    return None


def _number(value: object, least: float | None, most: float | None) -> int | None:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        value = int(value)
    if type(value) is not int or (least is not None and value < least) or (most is not None and value > most):
        return None
    return value
