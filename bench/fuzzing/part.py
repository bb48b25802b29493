"""The interface of one kind of hostile input for `bench/fuzz`."""

from __future__ import annotations

import random
from typing import Any, Protocol


class Part(Protocol):
    """Each module of `fuzzing.parts` has these names. New modules are found automatically."""

    SECONDS: float
    """CPU time that one input may take."""
    MEGABYTES: float
    """Memory that one input may take in addition to that of the process before."""

    @staticmethod
    def make(rng: random.Random) -> Any:
        """A new input. It must be JSON: a failure is stored and can be run again."""

    @staticmethod
    def mutate(rng: random.Random, case: Any) -> Any:
        """A variant of an input that was expensive."""

    @staticmethod
    def run(case: Any) -> str:
        """Process the input, in a child process. Returns a short label of the outcome. Any exception is a failure."""
