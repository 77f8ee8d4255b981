"""Real vLLM on the CPU serves training checkpoints: its tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.publishing import Publisher
from bytecheckpoint.tools import fingerprint
from tests.support.damage import damage
from tests.support.engines import Engine, change_some, describe, llama, mixture, save_sharded, tokens_of

pytestmark = pytest.mark.timeout(500)
PROGRAM = Path(__file__).with_name("engine.py")
TWO = {"tensor_parallel_size": 2}


def save_as_megatron(model: torch.nn.Module, folder: Path) -> str:
    """Save the weights as Megatron names and fuses them; return the path."""
    bytecheckpoint.save(folder / "hf", {"model": model})
    with bytecheckpoint.open(folder / "hf", layout="llama") as checkpoint:
        tensors = {key.removeprefix("model/"): entry[...] for key, entry in checkpoint.tensors.items()}
    assert any("linear_qkv" in name for name in tensors)
    bytecheckpoint.save(folder / "fused", {"model": tensors})
    return str(folder / "fused")


def test_two_ranks_serve_a_run_and_load_newer_steps(tmp_path: Path, engines: list[Engine]) -> None:
    first, second, third = llama(0), llama(1), llama(2)
    describe(first, tmp_path / "config")
    bytecheckpoint.configure(fingerprint=True)
    run = tmp_path / "run"
    save_sharded(run / "step_00000001", first, 4)
    size = sum(tensor.nbytes for tensor in first.state_dict().values())
    engines.append(Engine(PROGRAM, tmp_path / "config", {"checkpoint": str(run), "held": True, "engine": TWO}))
    result = engines[0].result()
    assert result["tokens"] == tokens_of(first)
    assert result["fingerprints"] == 2 * [fingerprint(run / "step_00000001").states]
    reads = [read for read, _ in result["reports"]]
    assert sum(reads) < 1.2 * size, "each byte is read once, blocks at borders twice"
    assert max(reads) < 0.65 * size
    fused = engines[0].reload(save_as_megatron(third, tmp_path))
    assert not fused["failed"] and fused["tokens"] == tokens_of(third) != tokens_of(first)
    assert not engines[0].reload("call bytecheckpoint_prove")["failed"]
    save_sharded(run / "step_00000002", second, 3)
    other = engines[0].reload(str(run))
    assert not other["failed"] and other["tokens"] == tokens_of(second) != tokens_of(first)
    assert other["fingerprints"] == 2 * [fingerprint(run / "step_00000002").states]
    assert not engines[0].reload("call bytecheckpoint_prove")["failed"]
    drifted = engines[0].reload("flip model.layers.1.mlp.down_proj.weight bytecheckpoint_prove")
    assert "model/model.layers.1.mlp.down_proj.weight hold other elements" in drifted["failed"]
    bytecheckpoint.save(tmp_path / "smaller", {"model": {"lm_head.weight": torch.zeros(256, 128)}})
    for place, why in (("nothing", "no checkpoint at"), ("smaller", "is of another model")):
        refused = engines[0].reload(str(tmp_path / place))
        assert why in refused["failed"] and refused["tokens"] == other["tokens"], "the old weights stay"
    save_sharded(run / "step_00000003", first, 2)
    # vLLM reads one rank's reply to a call that failed: the other's, still of a call before, may come back here.
    assert engines[0].reload("")["tokens"] == tokens_of(first), "without a path, the newest step of the run"


def test_two_ranks_follow_a_publisher(tmp_path: Path, engines: list[Engine]) -> None:
    model, root = llama(0), tmp_path / "versions"
    describe(model, tmp_path / "config")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with Publisher(root) as publisher:
        publisher.publish(model, 1).result()
        options = {"checkpoint": str(root), "held": True, "engine": TWO, "follow": True, "prove": True}
        engines.append(Engine(PROGRAM, tmp_path / "config", options))
        result = engines[0].result()
        assert result["tokens"] == tokens_of(model)
        assert max(read for read, _ in result["reports"]) < 0.8 * size
        seen = {tuple(result["tokens"])}
        for step in (2, 3, 4, 5):
            change_some(model)
            publisher.publish(model, step).result()
            if step == 3:
                continue  # the next one brings both
            if step == 5:
                drifted = engines[0].reload("flip model.norm.weight bytecheckpoint_fingerprint")
                assert "the copies of model/model.norm.weight on rank 1 differ" in drifted["failed"]
                file = next((root / "step_00000005" / "model").glob("rank-*.delta"))
                whole = file.read_bytes()
                damage(file)
                refused = engines[0].reload("")
                assert refused["failed"] and refused["tokens"] == result["tokens"], "the old weights stay"
                file.write_bytes(whole)
                # vLLM may reply with the error of the other rank to the next call.
                assert engines[0].reload("")["tokens"] == tokens_of(model)
                break
            result = engines[0].reload("")
            assert not result["failed"] and result["tokens"] == tokens_of(model)
            assert result["fingerprints"] == 2 * [fingerprint({"model": model}).states]
            assert all(read < 0.25 * size for read, _ in result["reports"])
            assert not engines[0].reload("call bytecheckpoint_prove")["failed"], "of the version that was followed"
            seen.add(tuple(result["tokens"]))
    assert len(seen) > 1


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_experts_of_transformers_by_a_layout(ranks: int, tmp_path: Path, engines: list[Engine]) -> None:
    model = mixture()
    describe(model, tmp_path / "config")
    bytecheckpoint.save(tmp_path / "step", {"model": model})
    options = {"checkpoint": str(tmp_path / "step"), "prove": True, "held": True}
    engines.append(Engine(PROGRAM, tmp_path / "config", options | {"engine": {"tensor_parallel_size": ranks}}))
    assert engines[0].result()["tokens"] == tokens_of(model)
    refused = engines[0].reload("call bytecheckpoint_fingerprint")["failed"]
    assert "does not hold model.layers.0.mlp.experts.0.down_proj.weight" in refused, "which vLLM packs on a CPU"


@pytest.mark.parametrize("kind", [pytest.param("stages", marks=pytest.mark.slow), "experts"])
def test_stages_and_experts_of_an_engine(kind: str, tmp_path: Path, engines: list[Engine]) -> None:
    """Each rank reads its layers, or its experts, once. vLLM itself generates nothing with them on a CPU."""
    model = llama(0) if kind == "stages" else mixture(512)
    describe(model, tmp_path / "config")
    model.save_pretrained(tmp_path / "hf")
    save_sharded(tmp_path / "step", model, 3)
    size = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    engine = {"pipeline_parallel_size": 2} if kind == "stages" else TWO | {"enable_expert_parallel": True}
    ours = Engine(
        PROGRAM, tmp_path / "config", {"checkpoint": str(tmp_path / "step"), "engine": engine, "generate": False}
    )
    theirs = Engine(PROGRAM, tmp_path / "hf", {"engine": engine | {"load_format": "auto"}, "generate": False})
    engines += [ours, theirs]
    result, expected = ours.result(), theirs.result()
    assert result["weights"] == expected["weights"] and len({*map(str, result["weights"])}) == 2
    reads = [read for read, _ in result["reports"]]
    assert sum(reads) < 1.2 * size and max(reads) < 0.75 * size, (reads, size)


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, engines: list[Engine]) -> None:
    model = llama()
    model.config.num_hidden_layers = 5
    describe(model, tmp_path / "config")
    bytecheckpoint.save(tmp_path / "step", {"model": model})
    # Its process finds the loader by the entry point, as those of a user do.
    engines.append(Engine(PROGRAM, tmp_path / "config", {"checkpoint": str(tmp_path / "step"), "spawned": True}))
    with pytest.raises(AssertionError, match=r"lacks weights of \d+ parameters of LlamaForCausalLM"):
        engines[0].result()
