"""A busy machine must not make a property fail."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
