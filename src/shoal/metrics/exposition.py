"""The text format of Prometheus: families of samples, one line each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels: TypeAlias = Mapping[str, str]


class Sample(NamedTuple):
    """One number. A histogram has several with the same labels and different suffixes."""

    labels: Labels
    value: float
    suffix: str = ""


class Family(Struct, frozen=True):
    """All samples of one name."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[Sample]


def render(families: Iterable[Family]) -> str:
    """The answer to a scrape. Families with the same name are combined, as the format requires: several runs may each
    have one."""
    together: dict[str, list[Family]] = {}
    for family in families:
        together.setdefault(family.name, []).append(family)
    lines: list[str] = []
    for name, alike in together.items():
        lines.append(f"# HELP {name} {_escaped(alike[0].help)}")
        lines.append(f"# TYPE {name} {alike[0].kind}")
        lines += [_line(name, sample) for family in alike for sample in family.samples]
    return "\n".join(lines) + "\n" if lines else ""


def _line(name: str, sample: Sample) -> str:
    labels = ",".join(f'{key}="{_escaped(value, quotes=True)}"' for key, value in sample.labels.items())
    return f"{name}{sample.suffix}{{{labels}}} {number(sample.value)}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def number(value: float) -> str:
    """A number in the notation of the format."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
