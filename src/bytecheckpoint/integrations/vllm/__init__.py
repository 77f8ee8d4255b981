"""Serve a checkpoint with vLLM: `vllm serve CONFIG --load-format bytecheckpoint` (docs/how-to/serve-with-vllm.md).

vLLM finds `register` by the entry point `vllm.general_plugins`, in every process of an engine.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register the load format "bytecheckpoint"."""
    from vllm.model_executor.model_loader import register_model_loader

    from bytecheckpoint.integrations.vllm.loader import CheckpointLoader

    register_model_loader("bytecheckpoint")(CheckpointLoader)
