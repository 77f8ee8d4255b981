"""Real SGLang on the CPU serves training checkpoints: its tokens are those of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.publishing import Publisher
from tests.support.damage import damage
from tests.support.engines import Engine, change_some, describe, llama, mixture, save_sharded, tokens_of

pytestmark = pytest.mark.timeout(500)
PROGRAM = Path(__file__).with_name("engine.py")


def test_two_ranks_serve_a_run_and_load_newer_steps(tmp_path: Path, engines: list[Engine]) -> None:
    first, second = llama(0), llama(1)
    describe(first, tmp_path / "config")
    run = tmp_path / "run"
    save_sharded(run / "step_00000001", first, 4)
    size = sum(tensor.nbytes for tensor in first.state_dict().values())
    engines.append(engine := Engine(PROGRAM, tmp_path / "config", {"checkpoint": str(run), "ranks": 2}))
    result = engine.result()
    assert result["tokens"] == tokens_of(first)
    reads = [int(count) for count in re.findall(r"this rank read (\d+) bytes", engine.log.read_text())]
    assert len(reads) == 2 and sum(reads) < 1.2 * size and max(reads) < 0.65 * size, (reads, size)
    save_sharded(run / "step_00000002", second, 3)
    newer = engine.reload(str(run))
    assert newer["updated"] and newer["tokens"] == tokens_of(second) != tokens_of(first)
    bytecheckpoint.save(tmp_path / "smaller", {"model": {"lm_head.weight": torch.zeros(256, 128)}})
    save_sharded(tmp_path / "damaged", first, 1)
    damage(next((tmp_path / "damaged").rglob("*.safetensors")))
    for place, why in (("nothing", "no checkpoint at"), ("smaller", "is of another model"), ("damaged", "damaged")):
        refused = engine.reload(str(tmp_path / place))
        assert not refused["updated"] and why in refused["message"], refused
        assert refused["tokens"] == newer["tokens"], "the old weights stay"
    assert engine.reload(str(run / "step_00000001"))["tokens"] == tokens_of(first)


def test_two_ranks_follow_a_publisher(tmp_path: Path, engines: list[Engine]) -> None:
    model, root = llama(0), tmp_path / "versions"
    describe(model, tmp_path / "config")
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    with Publisher(root) as publisher:
        publisher.publish(model, 1).result()
        options = {"checkpoint": str(root), "ranks": 2, "follow": True, "prove": True}
        engines.append(engine := Engine(PROGRAM, tmp_path / "config", options))
        assert (newer := engine.result())["tokens"] == tokens_of(model)
        for step in (2, 3, 4, 5):
            change_some(model)
            publisher.publish(model, step).result()
            if step == 3:
                continue  # the next one brings both
            if step == 5:
                file = next((root / "step_00000005" / "model").glob("rank-*.delta"))
                whole = file.read_bytes()
                damage(file)
                refused = engine.reload(str(root))
                assert not refused["updated"] and refused["tokens"] == newer["tokens"], "the old weights stay"
                file.write_bytes(whole)
            newer = engine.reload(str(root))
            assert newer["updated"] and newer["tokens"] == tokens_of(model)
    other = engine.reload(str(tmp_path / "other"))
    assert not other["updated"] and "this engine follows the versions in" in other["message"]
    reads = [int(count) for count in re.findall(r"this rank read (\d+) bytes", engine.log.read_text())]
    assert all(read < 0.25 * size for read in reads[2:]) and len(reads) >= 8, (reads, size)
    proven = re.findall(r"fingerprints prove \d+ tensors of (\S+)", engine.log.read_text())
    assert [path[-1] for path in proven] == [*"11", *"22", *"44", *"55"], "on both ranks, at each version"


def test_experts_of_transformers_by_a_layout(tmp_path: Path, engines: list[Engine]) -> None:
    model = mixture(tied=False)  # SGLang leaves a tied head of this family as it is
    describe(model, tmp_path / "config")
    bytecheckpoint.save(tmp_path / "step", {"model": model})
    engines.append(Engine(PROGRAM, tmp_path / "config", {"checkpoint": str(tmp_path / "step")}))
    assert engines[0].result()["tokens"] == tokens_of(model)


def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, engines: list[Engine]) -> None:
    model = llama()
    save_sharded(tmp_path / "step", model, 2)
    model.config.num_hidden_layers += 1
    describe(model, tmp_path / "config")
    engines.append(Engine(PROGRAM, tmp_path / "config", {"checkpoint": str(tmp_path / "step")}))
    with pytest.raises(AssertionError, match="lacks weights of 6 parameters of LlamaForCausalLM"):
        engines[0].result()
