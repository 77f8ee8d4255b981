"""Serve a checkpoint with vLLM: `vllm serve CONFIG --load-format bytecheckpoint` (docs/how-to/serve-with-vllm.md).

vLLM finds `register` by the entry point `vllm.general_plugins`, in every process of an engine.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WorkerExtension", "register"]


class WorkerExtension:
    """Methods of each worker of vLLM, for `--worker-extension-cls bytecheckpoint.integrations.vllm.WorkerExtension`."""

    def bytecheckpoint_fingerprint(self: Any) -> dict[str, str]:
        """Return the fingerprint of the weights that the engine holds, by state, as `engine_fingerprint` makes it.

        Raises as `engine_fingerprint`.
        """
        from bytecheckpoint.integrations.engines.held_weights import engine_fingerprint

        return dict(engine_fingerprint(self.get_model()).states)

    def bytecheckpoint_prove(self: Any) -> int:
        """Compare the weights that the engine holds with the checkpoint of the last load or reload, as `prove_engine`."""
        from bytecheckpoint.integrations.engines.held_weights import prove_engine

        model = self.get_model()
        return prove_engine(model, *getattr(model, "bytecheckpoint_source", ("", None)))


def register() -> None:
    """Register the load format "bytecheckpoint"."""
    from vllm.model_executor.model_loader import register_model_loader

    from bytecheckpoint.integrations.vllm.loader import CheckpointLoader

    register_model_loader("bytecheckpoint")(CheckpointLoader)
