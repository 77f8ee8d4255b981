"""Import the modules that ranks of worlds need for Trainer, in many seconds. No import here may start a thread."""

import gc

import accelerate.state  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.trainer  # noqa: F401
import trl.trainer.sft_trainer  # noqa: F401

import bytecheckpoint.integrations.transformers  # noqa: F401

gc.freeze()
