"""Import the modules that ranks of worlds need for accelerate. No import here may start a thread."""

import gc

import accelerate.state  # noqa: F401
import torchdata.stateful_dataloader  # noqa: F401

import bytecheckpoint.integrations.accelerate  # noqa: F401

gc.freeze()
