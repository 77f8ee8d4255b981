"""Models of many MiB from folders of Hugging Face: what each rank of Megatron-Core reads, holds and computes.

The first load of a process counts with all that it imports. It takes 2 MiB of modules: `numpy.ma`, for `numpy.unique`.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from tests.frameworks.megatron.test_foreign_layouts import arguments
from tests.layouts.models import Family
from tests.support.megatron.models import Layout, gpt_chunks, initialize_parallel, transformer_config
from tests.support.settings import using
from tests.support.worlds import Worlds

pytestmark = [pytest.mark.timeout(400), pytest.mark.short]

MIB = 1 << 20
V: dict[str, Any] = {"tied": False, "vocabulary": 2048}
EXPERTS = Layout(tp=2, pp=2, ep=2, etp=1, sequence=True, moe=True, **V)
CASES = [
    ("llama-large", Layout(**V)),
    ("llama-large", Layout(tp=2, pp=2, **V)),
    ("llama-large", Layout(tp=2, pp=2, vpp=2, **V)),
    ("qwen3_moe-large", Layout(moe=True, **V)),
    ("qwen3_moe-large", EXPERTS),
]
#: Sizes of a chunk: the usual one, and one that is to these tensors what the usual one is to those of real models.
USUAL, SMALL = 8 * MIB, 2 * MIB


@functools.cache
def files_written() -> list[str]:
    """Return a list, to which the files are added that threads of this process open to write from now on."""
    found: list[str] = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            found.append(str(args[0]))

    sys.addaudithook(note)
    return found


def memory(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) << 10


@dataclass
class Loaded:
    """What one rank did in a load.

    Attributes:
        share: bytes of its parameters.
        read: bytes read.
        memory: bytes of memory beside the model, at most, without those in `code`.
        code: bytes of the code of libraries that ran for the first time, which the ranks of a machine share.
        written: files opened to write.
        difference: largest difference of the logits, to the largest; 0 before the last stage.
    """

    share: int
    read: int
    memory: int
    code: int
    written: list[str]
    difference: float


def chunks_of(name: str, layout: Layout) -> list[Any]:
    """Return this rank's chunks of the model, with elements of chance."""
    from tests.support.megatron.family_modules import block_spec

    config = Family(name).config
    changes, given = arguments(name.removesuffix("-large"), config)
    assert given.pop("share_embeddings_and_output_weights") == layout.tied
    changes |= {"hidden_size": config["hidden_size"], "perform_initialization": False}
    made = transformer_config(layout, **changes)

    def of_chunk(virtual: dict[str, int]) -> dict[str, Any]:
        spec = block_spec(name, made, **virtual)
        return {"transformer_layer_spec": spec, "parallel_output": False, **given}

    return [chunk.float().eval() for chunk in gpt_chunks(layout, made, of_chunk)]


@torch.no_grad()
def logits_of(chunks: list[Any], layout: Layout, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits, or on other stages than the last one the hidden states behind it."""
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    length = ids.shape[1] // (layout.tp if layout.sequence else 1)
    hidden = torch.empty(length, 1, chunks[0].config.hidden_size)
    mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1]), 1).bool()[None, None]
    for chunk in range(layout.vpp):
        for stage in range(layout.pp):
            if parallel_state.get_pipeline_model_parallel_rank() == stage:
                chunks[chunk].set_input_tensor(hidden)
                out = chunks[chunk](ids, torch.arange(ids.shape[1])[None], mask)
                if chunk == layout.vpp - 1 and stage == layout.pp - 1:
                    return out[0]
                hidden = out
            if chunk < layout.vpp - 1 or stage < layout.pp - 1:
                dist.broadcast(hidden, dist.get_global_rank(group, stage), group)
    return hidden


def load(name: str, layout: Layout, small: str, source: str) -> list[Loaded]:
    """Load in chunks of both sizes; first a small model, if its folder is given, which imports the client of a server."""
    initialize_parallel(layout)
    if small:
        tensors = {key: torch.empty(shape) for key, shape in Family("llama").megatron.items()}
        bytecheckpoint.load(small, {"model": tensors}, layout="llama")
    family, chunks = Family(name), chunks_of(name, layout)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    found = []
    for chunk_bytes in (USUAL, SMALL):
        for parameter in parameters:
            parameter.data.fill_(torch.nan)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        before, code, files = memory("VmRSS"), memory("RssFile"), files_written()
        files.clear()
        with using(chunk_bytes=chunk_bytes):
            report = bytecheckpoint.load(source, {"model": chunks}, layout="auto")
        code = memory("RssFile") - code
        written, extra = [*files], memory("VmHWM") - before - code
        assert not report.missing and not report.unexpected
        difference, logits = 0.0, logits_of(chunks, layout, torch.tensor(family.ids)[None])
        if chunks[-1].post_process:
            logits = logits[:, : family.config["vocab_size"] : 50].numpy()
            difference = np.abs(logits - family.logits).max() / np.abs(family.logits).max()
        share = sum(parameter.nbytes for parameter in parameters)
        found.append(Loaded(share, report.bytes_read, extra, code, written, float(difference)))
    return found


def check(ranks: list[list[Loaded]]) -> None:
    """Fail unless each rank read its share, held no second copy, wrote nothing, and computes what transformers does."""
    for usual, small in ranks:
        assert small.share > 10 * MIB and small.read <= 1.1 * small.share, ranks
        for loaded in (usual, small):
            assert loaded.memory <= 64 * MIB and loaded.code <= 32 * MIB, ranks
            assert not loaded.written
            assert loaded.difference <= 3e-6, ranks
    assert sum(usual.read for usual, _ in ranks) <= 1.1 * sum(usual.share for usual, _ in ranks), ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    for name in {name for name, _ in CASES}:
        Family(name).write(folder / name)
    return folder


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_a_rank_reads_its_share_into_place(worlds: Worlds, name: str, layout: Layout, folders: Path) -> None:
    worlds.close()
    source = folders / name
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    ranks = worlds.run(layout.world, load, name, layout, "", str(source), timeout=200)
    assert before == {path: path.stat().st_mtime_ns for path in source.iterdir()}
    check(ranks)
