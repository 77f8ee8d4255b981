"""Plain values in the configurations of live modules."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.frameworks.configurations import configuration_of
from bytecheckpoint.layouts import Layout


class NestedConfig:
    """A configuration as transformers has them."""

    model_type = "llama"

    def to_dict(self):
        return {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "more": {"deep": 1}},
            "rope_scaling": None,
            "layer_types": ["full_attention"],
            "vocab_size": 32,
            "id2label": {0: "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "nan": float("nan"),
        }


def test_nested_values_count_under_joined_names():
    module = nn.Linear(1, 1)
    module.config = NestedConfig()
    assert configuration_of({"model": nn.Sequential(module), "steps": 4}) == {
        "hf.model_type": "llama",
        "hf.rope_parameters.rope_type": "llama3",
        "hf.rope_parameters.factor": 8.0,
        "hf.rope_parameters.more.deep": 1,
        "hf.layer_types": "full_attention",
        "hf.vocab_size": 32,
    }


def module_with(config):
    module = nn.Linear(2, 1, bias=False)
    module.config = config
    return module


def test_a_configuration_that_fails_is_left_out_with_one_warning(caplog):
    """Those of other modules are kept, and nothing of the one that fails: its missing keys would have defaults."""

    class Failing(NestedConfig):
        @property
        def model_type(self):
            raise ZeroDivisionError("no kind")

    class Raising(nn.Linear):
        @property
        def config(self):
            raise LookupError("no configuration")

    kept = configuration_of({"model": module_with(NestedConfig())})
    assert not caplog.records
    for _ in range(2):
        states = {"model": [module_with(NestedConfig()), module_with(Failing())], "ema": Raising(1, 1)}
        assert configuration_of(states) == kept
    named = [
        record.getMessage().partition("(")[2].partition("):")[0].rpartition("<locals>.")[2] for record in caplog.records
    ]
    assert named == ["Failing: ZeroDivisionError: no kind", "Raising: LookupError: no configuration"]


LAYOUT = """layout t hf <-> megatron
require hf.eps = megatron.eps
require hf.scale | 1 = megatron.scale | 1
rules
w : x y
    <-> weight : x y
"""


def test_a_fault_in_the_facts_of_megatron_fails_nothing_and_is_named(tmp_path, caplog):
    """A model whose configuration cannot be read loads, and the notes name each comparison that was not made."""

    class ModelParallelConfig:
        eps, scale = 1, 2  # and no num_layers, without which the facts cannot be told

    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(1, 2)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "t", "eps": 3}')
    module, layout = module_with(ModelParallelConfig()), Layout.from_text(LAYOUT)
    report = bytecheckpoint.load(tmp_path / "hf", {"model": module}, layout=layout)
    assert module.weight.tolist() == [[1, 1]]
    for requirement in ("hf.eps = megatron.eps", "hf.scale | 1 = megatron.scale | 1"):
        assert f"the layout cannot compare {requirement} here" in report.notes
    bytecheckpoint.save(tmp_path / "step_1", {"model": module})
    with bytecheckpoint.open(tmp_path / "step_1") as found:
        assert found.info["layout"]["config"] == {}
    (warning,) = caplog.records
    assert "ModelParallelConfig" in warning.getMessage() and "num_layers" in warning.getMessage()
    assert warning.exc_info[1].__traceback__ is not None


@pytest.mark.parametrize("size", [1, 2])
def test_each_save_has_the_configuration_of_its_model(tmp_path, size):
    """Also if the plan of an earlier save is used, which holds for any model with equal tensors."""

    def save(collective: Collective) -> None:
        for number in range(3):
            module = nn.LayerNorm(4)
            module.config = NestedConfig()
            module.config.to_dict = lambda number=number: {"vocab_size": number}
            bytecheckpoint.save(tmp_path / str(number), {"model": module})

    ThreadWorld(size).run(save, timeout=60)
    for number in range(3):
        with bytecheckpoint.open(tmp_path / str(number)) as found:
            assert found.info["layout"]["config"] == {"hf.vocab_size": number}
            assert found.info["layout"]["kinds"]
