"""Regular expressions: those of the user run with `re`, those that others may have written with RE2.

`re` may need years for a URL of 50 characters. RE2 needs time in proportion to the URL, whatever the expression is. It
is slower for ordinary ones, and refuses lookaround and backreferences. So it is only for the expressions of schedules,
API callers and stored runs. They are marked in the text itself, because settings pass through layers and processes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Protocol

from shoal.errors import ConfigError
from shoal.suggestions import pip_install

_MARK = "(?#linear)"
"""A comment for `re`."""
_MAX_MEMORY = 256 << 10
"""Of one expression in RE2. It refuses larger ones."""
_MAX_STEPS = 5000
"""Of all expressions of a list together: RE2 may do each of them for each character of a URL."""


class CompiledPattern(Protocol):
    @property
    def pattern(self) -> str: ...

    def search(self, string: str, /) -> object: ...


def linear(patterns: Iterable[str], own: Collection[str] = ()) -> tuple[str, ...]:
    """Mark expressions that others may have written. Those that the user has, too (``own``), stay as they are."""
    return tuple(text if text in own else _MARK + text.removeprefix(_MARK) for text in patterns)


def unmarked(patterns: Iterable[str]) -> tuple[str, ...]:
    return tuple(text.removeprefix(_MARK) for text in patterns)


def compile_pattern(text: str) -> CompiledPattern:
    """ValueError says why that is not possible. ConfigError if RE2 is needed, but not installed."""
    try:
        return _compile_linear(text.removeprefix(_MARK)) if text.startswith(_MARK) else re.compile(text)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(str(exc)) from None


def _compile_linear(text: str) -> CompiledPattern:
    try:
        import re2
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "regular expressions of API callers, schedules and stored runs need RE2; install it with: "
            + pip_install("re2")
        ) from exc
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MAX_MEMORY
    try:
        found: CompiledPattern = re2.compile(text, options)
    except re2.error as exc:
        (reason,) = exc.args
        raise ValueError(
            f"{reason.decode(errors='replace')}. Expressions of API callers, schedules and stored runs are "
            "searched by RE2, in linear time. If you need this one, set it in the spider, or in [scope] of shoal.toml "
            "on each machine"
        ) from None
    return found


def check_regexes(patterns: tuple[str, ...]) -> str | None:
    """The rest of a sentence that says what is wrong. None if nothing is."""
    steps = 0
    for text in patterns:
        try:
            steps += getattr(compile_pattern(text), "programsize", 0)
        except ConfigError:
            raise
        except ValueError as exc:
            return f"must contain regular expressions; {unmarked([text])[0]!r:.200} does not compile: {exc}"
        if steps > _MAX_STEPS:
            return (
                f"has expressions that RE2 searches in more than {_MAX_STEPS} steps for each character. Use fewer or "
                "simpler ones, or set them in the spider, or in [scope] of shoal.toml on each machine"
            )
    return None
