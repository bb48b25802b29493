"""Randomness. Use it as ``chance.random()``, so that a simulation can replace it."""

from __future__ import annotations

import os
import random as _random
import secrets

token_bytes = os.urandom
"""Return so many random bytes that nobody can guess."""
token_hex = secrets.token_hex
token_urlsafe = secrets.token_urlsafe
randbits = secrets.randbits
random = _random.random
"""Return a number from 0 up to 1, for pauses and samples: somebody might guess it."""
uniform = _random.uniform
choice = _random.choice
shuffle = _random.shuffle
