"""Save and load the random number generators of a process: `rng_state`."""

from bytecheckpoint.frameworks.rng.state import rng_state

__all__ = ["rng_state"]
