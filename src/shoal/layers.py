"""How a tree of settings is filled from layers: a file, the environment, the command line, code.

Nothing here knows a single key; those are in ``shoal.config``. A tree is a ``Section`` whose fields are values or
further Sections, and a dotted key (``http.proxy``) names one value in it.
"""

from __future__ import annotations

import grp
import os
import pwd
import tomllib
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import inspect
from msgspec.structs import force_setattr

from shoal.errors import ConfigError

Check: TypeAlias = Callable[[Any], str | None]
Parse: TypeAlias = Callable[[inspect.Type, Any], Any]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the tree: checked when made, however it is made, and without secrets in its repr."""

    checks: ClassVar[Mapping[str, Check]] = {}
    """What a type can't say: gives the rest of a sentence that begins with the key, or None if all is well."""
    masks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}
    """How a field that may hold a secret is shown."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            held = checked(type(self), name, getattr(self, name), key=f"{type(self).__name__}.{name}")
            force_setattr(self, name, held)

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, self.shown(name)) for name in self.__struct_fields__]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def shown(self, name: str) -> Any:
        """The field's value with its secrets masked."""
        value = getattr(self, name)
        return self.masks[name](value) if name in self.masks and value is not None else value


S = TypeVar("S", bound=Section)


@cache
def _hints(section: type[Section]) -> dict[str, Any]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.__struct_fields__}


@cache
def sections(root: type[Section]) -> dict[str, type[Section]]:
    """The Sections in ``root`` by their names."""
    return {name: hint for name, hint in _hints(root).items() if isinstance(hint, type) and issubclass(hint, Section)}


@cache
def keys(root: type[Section]) -> dict[str, tuple[type[Section], str]]:
    """Every dotted key, in the order of the fields, with the Section and the field that it names."""
    inner = sections(root)
    flat: dict[str, tuple[type[Section], str]] = {name: (root, name) for name in _hints(root) if name not in inner}
    for prefix, section in inner.items():
        flat |= {f"{prefix}.{name}": (section, name) for name in _hints(section)}
    return flat


def flatten(tree: Section, *, reveal: bool = False) -> dict[str, Any]:
    """Each dotted key with its value, for printing. Secrets are masked unless ``reveal`` is set."""
    flat = {}
    for key, (_, name) in keys(type(tree)).items():
        owner = getattr(tree, key.partition(".")[0]) if "." in key else tree
        flat[key] = getattr(owner, name) if reveal else owner.shown(name)
    return flat


def build(root: type[S], values: Mapping[str, Any]) -> S:
    """The tree with these values under their dotted keys, which must be known, and the defaults for the rest."""
    parts: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        prefix, _, name = key.rpartition(".")
        parts.setdefault(prefix, {})[name] = value
    top = parts.pop("", {})
    return root(**top, **{prefix: sections(root)[prefix](**part) for prefix, part in parts.items()})


def read_settings(
    root: type[Section],
    settings: Mapping[str, Any],
    *,
    source: Callable[[str], str] | None = None,
    parse: Parse | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """One layer: the checked values under their dotted keys, and a sentence for each setting that is wrong.

    ``settings`` has dotted keys, nested mappings or Sections. ``source`` says where a key came from, for the
    sentences. ``parse`` sees a value before it is checked; a ValueError from it is a bad value.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in _entries(root, settings):
        try:
            if key in sections(root):
                inner = ", ".join(k for k in keys(root) if k.startswith(f"{key}."))
                raise ConfigError(f'"{key}" must be a table; its keys are {inner}')
            if key not in keys(root):
                raise ConfigError(f'unknown key "{key}"{nearest(root, key)}')
            if key in values:
                raise ConfigError(f'"{key}" is given twice')
            section, name = keys(root)[key]
            values[key] = checked(section, name, value, key=key, parse=parse)
        except ConfigError as exc:
            problems.append(f"{source(key)}: {exc}" if source else str(exc))
    return values, problems


def _entries(root: type[Section], settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        section = sections(root).get(key)
        if section is not None and isinstance(value, section):
            yield from ((f"{key}.{field}", getattr(value, field)) for field in value.__struct_fields__)
        elif isinstance(value, Mapping) and key not in keys(root) and (value or section is not None):
            yield from _entries(root, value, f"{key}.")
        else:
            yield key, value


def nearest(root: type[Section], key: str, spell: Callable[[str], str] = '"{}"'.format) -> str:
    """``; did you mean ...?`` with the keys that may have been meant, or nothing."""
    last = key.lower().rpartition(".")[2]
    same = [known for known in keys(root) if known.rpartition(".")[2] == last]
    found = same or get_close_matches(key.lower(), keys(root), n=1)
    return f"; did you mean {' or '.join(spell(known) for known in found)}?" if found else ""


def checked(section: type[Section], name: str, value: Any, *, key: str, parse: Parse | None = None) -> Any:
    """The value as the field holds it (a list becomes a tuple); ConfigError, naming ``key``, if it can't."""
    hint = _hints(section)[name]
    if name in sections(section):
        if not isinstance(value, hint):
            raise ConfigError(f'"{key}" must be of type {hint.__name__}, not {type(value).__name__}')
        return value
    info = inspect.type_info(hint)
    try:
        if parse is not None:
            value = parse(info, value)
        if isinstance(info, inspect.LiteralType) and isinstance(value, str):
            value = next((word for word in info.values if str(word).lower() == value.lower()), value)
        held = msgspec.convert(value, hint)
    except (msgspec.MsgspecError, ValueError):
        # No "from": the cause may quote a secret, and says no more than this.
        but_was = "" if name in section.masks else f", not {value!r}"
        raise ConfigError(f'"{key}" must be {expected(info)}{but_was}') from None
    problem = section.checks[name](held) if name in section.checks else None
    if problem is not None:
        raise ConfigError(f'"{key}" {problem}')
    return held


def expected(info: inspect.Type) -> str:
    """What a field of this type takes, in words."""
    match info:
        case inspect.IntType(gt=gt, ge=ge, le=le) | inspect.FloatType(gt=gt, ge=ge, le=le):
            words = ["an integer" if isinstance(info, inspect.IntType) else "a number"]
            words += [f"more than {gt:g}"] if gt is not None else []
            words += [f"at least {ge:g}"] if ge is not None else []
            words += [f"at most {le:g}"] if le is not None else []
            return ", ".join(words)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=min_length):
            return "text that is not empty" if min_length else "text"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(f'"{word}"' for word in values)
        case inspect.VarTupleType(item_type=item):
            return f"a list (each {expected(item)})"
        case inspect.DictType(key_type=key, value_type=value):
            return f"a table ({expected(key)} to {expected(value)})"
        case inspect.UnionType(types=types):
            return ", or ".join(expected(part) for part in types)
        case inspect.NoneType():
            return "none"
    raise TypeError(f"no words for {info}")


_BOOLS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


def from_text(info: inspect.Type, value: Any) -> Any:
    """What text from the environment or the command line means for a field of this type; ValueError: nothing.

    Lists are separated by commas or written in JSON, tables are JSON, and ``none`` is None where that is allowed. A
    value that is no text is kept.
    """
    if not isinstance(value, str):
        return value
    match info:
        case inspect.UnionType(types=types):
            if value.strip().lower() == "none":
                return None
            (inner,) = (part for part in types if not isinstance(part, inspect.NoneType))
            return from_text(inner, value)
        case inspect.BoolType():
            word = value.strip().lower()
            if word not in _BOOLS:
                raise ValueError(word)
            return _BOOLS[word]
        case inspect.IntType():
            return int(value)
        case inspect.FloatType():
            return float(value)
        case inspect.VarTupleType(item_type=item):
            # "[0-9]" may be a regex: only a list of the right things is JSON.
            wanted = list[int] if isinstance(item, inspect.IntType) else list[str]
            try:
                return msgspec.json.decode(value, type=wanted)
            except (msgspec.MsgspecError, ValueError):
                return [from_text(item, part.strip()) for part in value.split(",") if part.strip()]
        case inspect.DictType():
            return msgspec.json.decode(value)
    return value


def read_toml(file: Path) -> dict[str, Any]:
    """What the file says; ConfigError with its name, and the line if it can't be read as TOML.

    ConfigError also if another user could have written it: it names code that runs, and where data goes.
    """
    try:
        with file.open("rb") as opened:
            check_trust(file, os.fstat(opened.fileno()))  # of what was opened: a link counts by its target
            return tomllib.loads(opened.read().decode("utf-8"))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: not valid TOML: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not valid TOML: not UTF-8 at byte {exc.start}") from exc
    except OSError as exc:
        raise ConfigError(f"{file}: can't be read: {exc.strerror}") from exc


def check_trust(file: Path, status: os.stat_result) -> None:
    """ConfigError if the file is neither this user's nor root's, or if others can write it."""
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        raise ConfigError(
            f"{file} is not used: it belongs to user {status.st_uid}, and its settings would run as user {me}. If you "
            f"trust it, make it yours: chown {me} {file}"
        )
    if status.st_mode & 0o002:
        raise ConfigError(f"{file} is not used: every user can write it. Fix that: chmod go-w {file}")
    if status.st_mode & 0o020 and not _is_private_group(status.st_gid):
        raise ConfigError(
            f"{file} is not used: the members of group {status.st_gid} can write it. Fix that: chmod g-w {file}"
        )


def _is_private_group(group: int) -> bool:
    """Whether it is the group that many systems make for each user: named like the user, with nobody else in it."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
