"""States of random number generators: `rng_state` (public), and the generators that a process has."""

from bytecheckpoint.frameworks.rng.state import rng_state

__all__ = ["rng_state"]
