"""Folders of Hugging Face are loaded into real models of Megatron-Core, cut by tensor, pipeline and expert parallelism."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

import bytecheckpoint
from bytecheckpoint import HuggingFaceView
from bytecheckpoint.engine.view_files import VIEW_INDEX
from bytecheckpoint.layouts.binding import bind
from bytecheckpoint.layouts.layout import builtin_names, find
from bytecheckpoint.layouts.matching import Side
from tests.frameworks.megatron.test_foreign_layouts import configuration
from tests.layouts.models import Family, move
from tests.support.megatron.models import Layout, gpt_chunks, initialize_parallel
from tests.support.worlds import Worlds

pytestmark = pytest.mark.timeout(400)

V: dict[str, Any] = {"tied": False, "vocabulary": 48}
CASES = {
    "llama": [Layout(tp=2, pp=2, **V), Layout(tp=2, dp=2, **V)],
    "llama-tied": [Layout(tp=2, pp=2, vocabulary=48)],
    "mistral": [Layout(tp=2, pp=2, **V)],
    "qwen2": [Layout(tp=2, pp=2, **V)],
    "qwen3": [Layout(tp=2, pp=2, **V)],
    "smollm3": [Layout(pp=2, vpp=2, tp=2, vocabulary=48)],
    "phi3": [Layout(tp=2, pp=2, **V)],
    "seed_oss": [Layout(tp=2, pp=2, **V)],
    "stablelm": [Layout(pp=2, dp=2, **V)],
    "starcoder2": [Layout(tp=2, pp=2, vocabulary=48)],
    "gpt2": [Layout(tp=2, pp=2, vocabulary=48)],
    "gpt_neox": [Layout(tp=2, pp=2, **V)],
    "gemma2": [Layout(tp=2, pp=2, vocabulary=48)],
    "glm4": [Layout(tp=2, pp=2, sequence=True, **V)],
    "ernie4_5": [Layout(tp=2, dp=2, vocabulary=48)],
    "exaone4": [Layout(tp=2, pp=2, **V)],
    "bert": [Layout(tp=2, vocabulary=48)],
    "megatron_bert": [Layout(tp=2, pp=2, vocabulary=48)],
    "t5": [Layout(tp=2, **V)],
    "mixtral": [Layout(ep=3, dp=3, moe=True, **V)],
    "qwen2_moe": [Layout(tp=2, pp=2, sequence=True, moe=True, **V)],
    "qwen3_moe": [Layout(tp=2, pp=2, sequence=True, moe=True, **V)],
    "glm4_moe": [Layout(tp=2, ep=2, dp=2, sequence=True, moe=True, **V)],
    "deepseek_v3": [Layout(tp=2, ep=2, dp=2, sequence=True, moe=True, **V)],
    "glm4_moe-mtp": [Layout(tp=2, pp=2, sequence=True, moe=True, **V)],
    "qwen3_next": [Layout(tp=2, pp=3, sequence=True, moe=True, **V)],
    "qwen3_next-mtp": [Layout(tp=2, dp=2, sequence=True, moe=True, **V)],
    "deepseek_v3-mtp": [Layout(tp=2, ep=2, dp=2, sequence=True, moe=True, **V)],
    "nemotron_h": [Layout(tp=2, pp=2, moe=True, **V)],
    "nemotron_h-mtp": [Layout(tp=2, ep=2, dp=2, sequence=True, moe=True, **V)],
    "gpt_oss": [Layout(ep=3, dp=3, moe=True, **V)],
}


#: Families of which a view writes some tensors beside those in the step's own files: transposed ones, or copies.
WRITTEN_TWICE = {"gpt2", "gpt_oss", "glm4_moe-mtp", "deepseek_v3-mtp", "qwen3_next", "qwen3_next-mtp"}


def chunks_of(name: str, layout: Layout) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from tests.support.megatron.family_modules import bert, block_spec, t5
    from tests.support.megatron.hybrid import hybrid_model

    config, given = configuration(name, layout)
    ends = {"pre_process": parallel_state.is_pipeline_first_stage()}
    ends |= {"post_process": parallel_state.is_pipeline_last_stage(), "vocab_size": 48, "max_sequence_length": 8}
    if "bert" in name:
        return [bert(config, **ends, **given)[0].float()]
    if name == "t5":
        return [t5(config, Family(name).config["num_layers"], **ends, **given)[0].float()]
    tied = given.pop("share_embeddings_and_output_weights")
    assert tied == layout.tied

    if name.startswith("nemotron_h"):
        return [hybrid_model(config, "ME|*-" if layout.pp > 1 else "ME*-/*E", **ends, **given).float()]

    def of_chunk(virtual: dict[str, int]) -> dict[str, Any]:
        spec = block_spec(name, config, **virtual)
        if config.mtp_num_layers:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **virtual)
            given["mtp_block_spec"] = mtp
        return {"transformer_layer_spec": spec, **given}

    return [chunk.float() for chunk in gpt_chunks(layout, config, of_chunk)]


def built_in(name: str) -> Any:
    layouts = (found for found in map(find, builtin_names()) if "megatron" in found.sides)
    (found,) = (found for found in layouts if found.is_for(Family(name).keys()))
    return found


def load_and_save(name: str, layout: Layout, source: str, target: str) -> None:
    initialize_parallel(layout)
    chunks = chunks_of(name, layout)
    report = bytecheckpoint.load(source, {"model": chunks}, layout="auto")
    assert not report.missing and not report.unexpected
    view = HuggingFaceView(layout=built_in(name), files_from=source, max_shard_bytes=1 << 16)
    bytecheckpoint.save(target, {"model": chunks}, view=view).viewed.result()
    dist.barrier()


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, found in CASES.items() for layout in found])
def test_each_rank_gets_its_part(worlds: Worlds, name: str, layout: Layout, tmp_path: Path) -> None:
    family = Family(name)
    source, weights = tmp_path / "hf", family.weights()
    family.write(source)
    worlds.close()
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    worlds.run(layout.world, load_and_save, name, layout, str(source), str(tmp_path / "own"), timeout=200)
    assert before == {path: path.stat().st_mtime_ns for path in source.iterdir()}, "nothing is written"
    with bytecheckpoint.open(tmp_path / "own") as found:
        names = found._catalog.fqns("model")  # without further names, those of Transformer Engine
        tensors = {name: found[f"model/{name}"][...] for name in names}
    right = Side(list(tensors), [tuple(t.shape) for t in tensors.values()])
    bound = bind(built_in(name), Side(list(weights), [a.shape for a in weights.values()]), right, family.keys())
    assert not len(bound.right.unbound)
    for key, array in move(bound.left, bound.right, weights, bound).items():
        assert torch.equal(tensors[key], torch.from_numpy(np.nan_to_num(array, nan=1e9))), key
    index = json.loads((tmp_path / "own" / VIEW_INDEX).read_text())["weight_map"]
    back = {key: value for file in set(index.values()) for key, value in load_file(tmp_path / "own" / file).items()}
    assert back.keys() == index.keys() == weights.keys()
    assert any(not file.startswith("model/") for file in index.values()) == (name in WRITTEN_TWICE)
    assert all(np.array_equal(back[key], weights[key]) for key in weights)
    assert json.loads((tmp_path / "own" / "config.json").read_text()) == family.config
