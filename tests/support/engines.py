"""Inference engines that serve checkpoints in processes of their own, and small models for them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from tests.support.layouts import Leaf

__all__ = ["PROMPT", "Engine", "change_some", "describe", "llama", "mixture", "save_sharded", "tokens_of"]

PROMPT = [1, 2, 3]


class Engine:
    """A running engine, which answers line by line.

    Args:
        program: file of the program that runs it.
        folder: folder of the model, in which its log is written.
        options: options of the program.
    """

    def __init__(self, program: Path, folder: Path, options: dict[str, Any]) -> None:
        words = [sys.executable, str(program), str(folder), json.dumps(options), json.dumps(PROMPT)]
        self.log = folder / "engine.log"
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            start_new_session=True,  # with its own processes, which outlive a killed parent
        )

    def result(self) -> dict[str, Any]:
        """Return the next result."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return found
        raise AssertionError("".join(lines) + self.log.read_text())

    def reload(self, path: str) -> dict[str, Any]:
        """Load another checkpoint in place."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        return self.result()

    def kill(self) -> None:
        """End all of the engine's processes, which take ten seconds to end by themselves."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                ours = os.getpgid(int(process.name)) == self.process.pid
                # The tracker removes the shared memory of the others, and ends after them.
                if ours and b"resource_tracker" not in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        with self.process:  # closes its streams
            self.process.wait()


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def mixture(inner: int = 64, *, tied: bool = True) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=inner,
        max_position_embeddings=128, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def change_some(model: torch.nn.Module) -> None:
    """Change a twentieth of the elements of each parameter, as between two versions that are published."""
    with torch.no_grad():
        for parameter in model.parameters():
            changed = torch.rand(parameter.shape) < 0.05
            parameter[changed] = 0.2 * torch.randn(int(changed.sum()))


def describe(model: Any, folder: Path) -> None:
    """Write config.json, as `save_pretrained` of the model writes it."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)


def tokens_of(model: Any) -> list[int]:
    """Return what transformers generates."""
    with torch.no_grad():
        found = model.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)
    generated: list[int] = found[0, len(PROMPT) :].tolist()
    return generated


def save_sharded(path: Path, model: Any, ranks: int) -> None:
    """Save a model as ranks of FSDP hold it: rows of each tensor."""

    def save(collective: Collective) -> None:
        mine: dict[str, Any] = {}
        for name, tensor in model.state_dict().items():
            shape, rank = tuple(tensor.shape), collective.rank
            first, end = (shape[0] * at // ranks for at in (rank, rank + 1))
            box = ((first, *(0,) * (len(shape) - 1)), (end - first, *shape[1:]))
            mine[name] = Leaf(shape, [box]).fill(tensor, False)
        bytecheckpoint.save(path, {"model": mine})

    ThreadWorld(ranks).run(save)
