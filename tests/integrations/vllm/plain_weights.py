"""Workers of vLLM whose linear layers keep their weights, as on a GPU: on a CPU, vLLM packs them for oneDNN."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops

from bytecheckpoint.integrations.vllm import WorkerExtension

_custom_ops._supports_onednn = False  # in each worker, before it makes its model


class PlainWeights(WorkerExtension):
    """Methods of each worker, for `collective_rpc`."""

    def flip(self: Any, name: str, rank: int) -> None:
        """Flip one bit of a parameter of a rank, as a fault of memory does; or flip it back."""
        if self.rank == rank:
            dict(self.get_model().named_parameters())[name].detach().view(-1).view(torch.int32)[-1] ^= 1
