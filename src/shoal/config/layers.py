"""Fill a tree of settings from layers: a file, the environment, the command line, code.

This module does not know any key. The keys are in ``shoal.config.settings``. A tree is a ``Section`` whose fields are
values or further Sections. A dotted key (``http.proxy``) names one value in it.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import StructMeta, inspect
from msgspec.structs import force_setattr

from shoal.errors import ConfigError

Check: TypeAlias = Callable[[Any], str | None]
Mask: TypeAlias = Callable[[Any], object]
Parse: TypeAlias = Callable[[inspect.Type, object], object]

_MAX_SUGGESTIONS = 3


_EXPLICIT = "explicit"

S = TypeVar("S", bound="Section")


class _Recording(StructMeta):
    """Records which fields a Section was created with, also those that have the value of the default."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        section = super().__call__(*args, **fields)
        section.__dict__[_EXPLICIT] = frozenset(fields)
        return section


class Section(msgspec.Struct, metaclass=_Recording, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A part of the tree. Its values are checked whenever it is created, and its repr hides secrets."""

    checks: ClassVar[Mapping[str, Check]] = {}
    """By field, what its type cannot express. Returns the rest of a sentence that begins with the key, or None."""
    of_others: ClassVar[Mapping[str, Callable[[Any], object]]] = {}
    """By field, what makes a value that others may have written harmless, before it is checked."""
    masks: ClassVar[Mapping[str, Mask]] = {}
    """By field, how to hide its secrets."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names that other tools use for a setting, with its dotted key. An unknown key suggests it."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Settings of other tools that do not exist here, with what to use instead."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = checked(type(self), name, getattr(self, name), key=f"{type(self).__name__}.{name}")
            force_setattr(self, name, value)

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, object]:
        """The values of fields that follow from ``given``, which one layer sets. ConfigError if two contradict each
        other."""
        return {}

    def __copy__(self: S) -> S:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (
            type(self),
            {name: getattr(self, name) for name in self.__struct_fields__},
            explicit_names(self),
        )

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [(name, self.shown(name)) for name in self.__struct_fields__]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def shown(self, name: str) -> object:
        """Return the field's value with its secrets masked."""
        value = getattr(self, name)
        return self.masks[name](value) if name in self.masks and value is not None else value


def explicit_names(section: Section) -> frozenset[str]:
    """The fields that were set, and other names that were recorded. A copy by other means has no record: there, the
    fields that are not the default."""
    if _EXPLICIT in section.__dict__:
        return frozenset(section.__dict__[_EXPLICIT])
    plain = type(section)()
    return frozenset(name for name in section.__struct_fields__ if getattr(section, name) != getattr(plain, name))


def _restored(kind: type[S], fields: Mapping[str, object], explicit: frozenset[str]) -> S:
    section = kind(**fields)
    section.__dict__[_EXPLICIT] = explicit
    return section


def explicit_settings(tree: Section) -> dict[str, object]:
    """The values of a tree that were set explicitly, by dotted key."""
    fields = _fields(tree)
    return {key: getattr(section, name) for key, (section, name) in fields.items() if name in explicit_names(section)}


def unmark_explicit(tree: Section, name: str, added: Collection[str] = ()) -> None:
    """Record that a field of a new tree was not set explicitly, but these other names were."""
    tree.__dict__[_EXPLICIT] = explicit_names(tree) - {name} | set(added)


@cache
def _hints(section: type[Section]) -> dict[str, object]:
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.__struct_fields__}


_type_info = cache(inspect.type_info)


@cache
def sections(root: type[Section]) -> dict[str, type[Section]]:
    """Return the Sections in ``root`` by name."""
    return {name: hint for name, hint in _hints(root).items() if isinstance(hint, type) and issubclass(hint, Section)}


@cache
def keys(root: type[Section]) -> dict[str, tuple[type[Section], str]]:
    """Return every dotted key with its Section and field, in the order of the fields."""
    inner = sections(root)
    flat: dict[str, tuple[type[Section], str]] = {name: (root, name) for name in _hints(root) if name not in inner}
    for prefix, section in inner.items():
        flat |= {f"{prefix}.{name}": (section, name) for name in _hints(section)}
    return flat


def _fields(tree: Section) -> dict[str, tuple[Section, str]]:
    """Return every dotted key with the part of the tree that has it, and the name of its field."""
    prefixes = {key: key.rpartition(".")[0] for key in keys(type(tree))}
    return {
        key: (getattr(tree, prefix) if prefix else tree, key.rpartition(".")[2]) for key, prefix in prefixes.items()
    }


def flatten(tree: Section, *, reveal: bool = False) -> dict[str, object]:
    """Return each dotted key with its value, for printing. Secrets are masked unless ``reveal`` is set."""
    fields = _fields(tree)
    return {key: getattr(part, name) if reveal else part.shown(name) for key, (part, name) in fields.items()}


def masked(root: type[Section], key: str, value: object) -> object:
    """Return a value of this dotted key with its secrets masked."""
    section, name = keys(root)[key]
    return section.masks[name](value) if name in section.masks and value is not None else value


def _by_section(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Split dotted keys: the fields of the tree itself, and those of each Section in it by its name."""
    parts: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        prefix, _, name = key.rpartition(".")
        parts.setdefault(prefix, {})[name] = value
    return parts.pop("", {}), parts


def build(root: type[S], values: Mapping[str, object]) -> S:
    """Build the tree from values under dotted keys, which must be known. All other keys have their defaults."""
    top, parts = _by_section(values)
    return root(**top, **{prefix: sections(root)[prefix](**part) for prefix, part in parts.items()})


def changed(tree: S, values: Mapping[str, object]) -> S:
    """Build a copy of the tree with these values under dotted keys, which must be known. It shares the sections that
    stay the same: to check all of them again takes longer than a small batch."""
    top, parts = _by_section(values)
    return _changed(tree, {**top, **{prefix: _changed(getattr(tree, prefix), part) for prefix, part in parts.items()}})


def _changed(section: S, values: Mapping[str, object]) -> S:
    fields = {name: getattr(section, name) for name in section.__struct_fields__}
    return _restored(type(section), {**fields, **values}, explicit_names(section) | values.keys())


def read_settings(
    root: type[Section],
    settings: Mapping[str, object],
    *,
    source: Callable[[str], str] | None = None,
    parse: Parse | None = None,
    of_others: bool = False,
) -> tuple[dict[str, object], list[str]]:
    """Read one layer. Return the checked values under their dotted keys, and a sentence for each problem.

    ``settings`` has dotted keys, nested mappings or Sections. ``source`` returns where a key came from, for the
    sentences. ``parse`` converts a value before it is checked; it raises ValueError for a bad one. ``of_others``:
    others may have written the values.
    """
    values: dict[str, object] = {}
    problems: list[str] = []
    for key, value in _entries(root, settings):
        try:
            if key in sections(root):
                inner = ", ".join(k for k in keys(root) if k.startswith(f"{key}."))
                raise ConfigError(f'"{key}" must be a table; its keys are {inner}')
            if key not in keys(root):
                raise ConfigError(f'unknown key "{key}"{nearest(root, key)}')
            if key in values:
                raise ConfigError(f'"{key}" is set twice')
            section, name = keys(root)[key]
            values[key] = checked(section, name, value, key=key, parse=parse, of_others=of_others)
        except ConfigError as exc:
            problems.append(f"{source(key)}: {exc}" if source else str(exc))
    for prefix, section in sections(root).items():
        fields = {name: values[f"{prefix}.{name}"] for name in _hints(section) if f"{prefix}.{name}" in values}
        try:
            values |= {f"{prefix}.{name}": value for name, value in section.implied(fields).items()}
        except ConfigError as exc:
            problems.append(f"{source(f'{prefix}.{next(iter(fields))}')}: {exc}" if source else str(exc))
    return values, problems


def _entries(root: type[Section], settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
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
    """Return ``; did you mean ...?`` with the keys most similar to an unknown one, or an empty string."""
    key = key.lower().replace("-", "_")
    last = key.rpartition(".")[2]
    first = key.partition(".")[0]
    if first in root.elsewhere and first not in sections(root):
        return f"; {root.elsewhere[first]}"
    similar = (
        [other for other in keys(root) if other.rpartition(".")[2] == last]
        or [root.aliases[last] for _ in root.aliases.keys() & {last}]
        or _with_words(root, key)
        or _with_words(root, last)
        or get_close_matches(key, keys(root), n=1)
    )
    return f"; did you mean {' or '.join(spell(other) for other in similar[:_MAX_SUGGESTIONS])}?" if similar else ""


def _with_words(root: type[Section], key: str) -> list[str]:
    """Return the keys that contain every word of this one, the least nested first."""
    words = set(re.split("[._]", key))
    similar = [other for other in keys(root) if words <= set(re.split("[._]", other))]
    return [other for other in similar if "." not in other] or similar


def checked(
    section: type[Section], name: str, value: object, *, key: str, parse: Parse | None = None, of_others: bool = False
) -> object:
    """Convert the value to the type of its field (a list becomes a tuple). ConfigError names ``key`` if that fails."""
    inner = sections(section).get(name)
    if inner is not None:
        if not isinstance(value, inner):
            raise ConfigError(f'"{key}" must be of type {inner.__name__}, not {type(value).__name__}')
        return value
    hint = _hints(section)[name]
    info = _type_info(hint)
    try:
        if parse is not None:
            value = parse(info, value)
        if isinstance(info, inspect.LiteralType) and isinstance(value, str):
            value = next((word for word in info.values if str(word).lower() == value.lower()), value)
        converted = msgspec.convert(value, hint)
    except (msgspec.MsgspecError, ValueError):
        # No "from exc": the cause may contain a secret, and adds nothing.
        actual = "" if name in section.masks else f", not {value!r}"
        raise ConfigError(f'"{key}" must be {expected(info)}{actual}') from None
    if of_others and name in section.of_others:
        converted = section.of_others[name](converted)
    problem = section.checks[name](converted) if name in section.checks else None
    if problem is not None:
        raise ConfigError(f'"{key}" {problem}')
    return converted


def expected(info: inspect.Type) -> str:
    """Describe the values that a field of this type accepts."""
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
            return "non-empty text" if min_length else "text"
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
    raise TypeError(f"no description for {info}")


_BOOLS = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)


def from_text(info: inspect.Type, value: object) -> object:
    """Convert text from the environment or the command line to this type. ValueError if that is not possible.

    Lists are separated by commas or written in JSON, tables are JSON, and ``none`` is None where that is allowed. A
    value that is not text is returned unchanged.
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
            # "[0-9]" may be a regex: it is JSON only if it decodes to a list of the right type.
            list_type = list[int] if isinstance(item, inspect.IntType) else list[str]
            if isinstance(item, inspect.DictType):
                return msgspec.json.decode(value)
            try:
                return msgspec.json.decode(value, type=list_type)
            except (msgspec.MsgspecError, ValueError):
                return [from_text(item, part.strip()) for part in value.split(",") if part.strip()]
        case inspect.DictType():
            return msgspec.json.decode(value)
    return value


def read_toml(file: Path) -> dict[str, object]:
    """Read a TOML file. ConfigError names the file, and the line if it is not valid TOML.

    A file that another user could have written also raises ConfigError: settings decide which code runs and where
    data goes.
    """
    try:
        with file.open("rb") as opened:
            check_trust(file, os.fstat(opened.fileno()))  # of the opened file: the target of a link counts
            return tomllib.loads(opened.read().decode("utf-8"))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{file}: not valid TOML: {exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{file}: not valid TOML: not UTF-8 at byte {exc.start}") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {file}: {exc.strerror}") from exc


def check_trust(file: Path, status: os.stat_result) -> None:
    """Raise ConfigError unless the file belongs to this user or root, and nobody else can write to it."""
    if stat.S_ISCHR(status.st_mode) and os.path.samestat(status, os.stat(os.devnull)):
        return  # always empty: no file at all
    me = os.geteuid()
    if status.st_uid not in (me, 0):
        raise ConfigError(
            f"refusing to read {file}: it belongs to user {status.st_uid}, but its settings would run as user {me}. "
            f"If you trust it, run: chown {me} {file}"
        )
    if status.st_mode & 0o002:
        raise ConfigError(f"refusing to read {file}: every user can write to it. Run: chmod go-w {file}")
    if status.st_mode & 0o020 and not _is_private_group(status.st_gid):
        raise ConfigError(
            f"refusing to read {file}: the members of group {status.st_gid} can write to it. Run: chmod g-w {file}"
        )


def _is_private_group(group: int) -> bool:
    """Whether this is the user's own group, as many systems create it: same name, no other members."""
    try:
        user, owners = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == user.pw_gid and owners.gr_name == user.pw_name and set(owners.gr_mem) <= {user.pw_name}
