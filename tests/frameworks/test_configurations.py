"""Plain values in the configurations of live modules."""

import pytest
from torch import nn

import bytecheckpoint
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.frameworks.configurations import configuration_of


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


def test_a_configuration_that_fails_is_none():
    module = nn.Linear(1, 1)
    module.config = NestedConfig()
    module.config.to_dict = lambda: 1 / 0
    assert configuration_of({"model": module}) == {}


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
