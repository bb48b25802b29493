"""What `bench/fuzz` needs to know about one kind of hostile input."""

from __future__ import annotations

import random
from typing import Any, Protocol


class Part(Protocol):
    """A module of `fuzzing.parts` has these names. A new module there is found by itself."""

    SECONDS: float
    """CPU time that one input may take."""
    MEGABYTES: float
    """Memory that one input may take, beyond what the process has before."""

    @staticmethod
    def make(rng: random.Random) -> Any:
        """A new input. It must be JSON: a failure is stored and can be run again."""

    @staticmethod
    def mutate(rng: random.Random, case: Any) -> Any:
        """A variant of an input that was expensive."""

    @staticmethod
    def run(case: Any) -> str:
        """Do the work, in a child process. Returns a short label of the outcome; raising anything is a failure."""
