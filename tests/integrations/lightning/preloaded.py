"""Import the modules that ranks of worlds need for Lightning, in many seconds. No import here may start a thread."""

import gc

import bytecheckpoint.integrations.lightning  # noqa: F401

gc.freeze()
