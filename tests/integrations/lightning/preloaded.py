"""What the ranks of worlds need for Lightning; importing it takes many seconds. No import here may start a thread."""

import gc

import bytecheckpoint.integrations.lightning  # noqa: F401

gc.freeze()
