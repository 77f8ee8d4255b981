"""Import the modules that ranks of worlds need for torchtitan, in many seconds. No import here may start a thread."""

import gc

from tests.integrations.torchtitan.shims import load_training

load_training()
gc.freeze()
