"""Steps in the middle of a run as folders of Hugging Face: what `from_pretrained` of Transformers and PEFT reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError, tools
from bytecheckpoint.cli.main import run as run_cli
from bytecheckpoint.integrations.transformers import attach, describe_pretrained
from bytecheckpoint.integrations.transformers.pretrained import adapter_names
from tests.integrations.conformance import collected_warnings
from tests.integrations.transformers.jobs import make, model, run
from tests.support.worlds import on_ranks


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, wanted[name])]


@on_ranks(1)
def test_a_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer, _ = make(tmp_path, max_steps=4)
    attach(trainer)
    trainer.train()
    trainer.save_model(tmp_path / "stock")
    report = tools.export(tmp_path / "step_00000004", tmp_path / "own")
    assert set(report.others) == {"config.json", "generation_config.json"}
    for name in report.others:
        found, wanted = (json.loads((tmp_path / folder / name).read_text()) for folder in ("own", "stock"))
        assert found == wanted, name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    same(loaded.state_dict(), trainer.model.state_dict())
    assert not tools.export(tmp_path / "step_00000004", tmp_path / "optimizer", state="optimizer").others
    tools.export(tmp_path / "step_00000004", tmp_path / "half", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def kinds() -> dict[str, Callable[[Any], Any]]:
    """Return adapters by name: functions of the base model."""
    import peft

    modules = ["q_proj", "v_proj"]

    def adapters(config: Any, name: str = "default") -> Callable[[Any], Any]:
        return lambda base: peft.get_peft_model(base, config, adapter_name=name)

    def two(base: Any) -> Any:
        net = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=modules), adapter_name="first")
        net.add_adapter("second", peft.LoraConfig(r=4, target_modules=modules))
        net.set_adapter("second")
        return net

    lora = {"r": 2, "target_modules": modules, "task_type": "CAUSAL_LM"}
    return {
        "lora": adapters(peft.LoraConfig(**lora)),
        "dora with modules and biases": adapters(
            peft.LoraConfig(**lora, use_dora=True, bias="lora_only", modules_to_save=["lm_head"])
        ),
        "a name as others": adapters(peft.LoraConfig(**lora), "model"),
        "tokens": adapters(peft.LoraConfig(**lora, trainable_token_indices=[1, 3])),
        "frozen projections": adapters(peft.VeraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")),
        "ia3": adapters(peft.IA3Config(target_modules=modules, feedforward_modules=[], task_type="CAUSAL_LM")),
        "prompts": adapters(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "two": two,
    }


@pytest.mark.parametrize(
    "kind",
    [
        "lora",
        "dora with modules and biases",
        "a name as others",
        "tokens",
        "frozen projections",
        "ia3",
        "prompts",
        "two",
    ],
)
@on_ranks(1)
def test_an_adapter(tmp_path: Path, kind: str) -> None:
    """As PEFT itself writes it, in names, values and configuration; and a resumed run has its frozen parts."""
    from peft import PeftModel
    from safetensors.torch import load_file

    build = kinds()[kind]
    trainer, _ = make(tmp_path, max_steps=4, net=build(model()), learning_rate=0.1)
    attach(trainer)
    trainer.train()
    name = trainer.model.active_adapter
    trainer.model.save_pretrained(tmp_path / "stock", selected_adapters=[name])
    stock = tmp_path / "stock" / ("" if name == "default" else name)
    report = tools.export(tmp_path / "step_00000004", tmp_path / "own")
    assert (report.files, report.others) == (("adapter_model.safetensors",), ("adapter_config.json",))
    same(load_file(tmp_path / "own/adapter_model.safetensors"), load_file(stock / "adapter_model.safetensors"))
    found, wanted = (json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "own", stock))
    if "target_modules" in wanted:
        wanted["target_modules"] = sorted(wanted["target_modules"])  # a set: PEFT writes it in any order
    assert found == wanted and describe_pretrained(build(model())) == describe_pretrained(build(model()))
    names = adapter_names(trainer.model, name)
    assert names

    def tensors(net: Any) -> dict[str, torch.Tensor]:
        return {key: value for key, value in net.state_dict().items() if key in names}

    same(tensors(PeftModel.from_pretrained(model(), tmp_path / "own", adapter_name=name)), tensors(trainer.model))
    again, _ = make(tmp_path, max_steps=4, net=build(model()))
    for value in tensors(again.model).values():
        torch.nn.init.normal_(value)
    attach(again)
    again.train("auto")
    same(tensors(again.model), tensors(trainer.model))


@on_ranks(1)
def test_an_adapter_of_a_model_with_new_tokens(tmp_path: Path) -> None:
    """The base model in its folder has no rows for them, so they belong to the adapter, frozen or not."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model().save_pretrained(tmp_path / "base")

    def base(seed: int) -> Any:
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.manual_seed(seed)
        found.resize_token_embeddings(found.config.vocab_size + 3)
        return found

    trainer, _ = make(tmp_path, max_steps=4, net=kinds()["lora"](base(1)))
    attach(trainer)
    trainer.train()
    tools.export(tmp_path / "step_00000004", tmp_path / "own")
    same(PeftModel.from_pretrained(base(2), tmp_path / "own").state_dict(), trainer.model.state_dict())
    again, _ = make(tmp_path, max_steps=4, net=kinds()["lora"](base(3)))
    attach(again)
    again.train("auto")
    same(again.model.state_dict(), trainer.model.state_dict())


@pytest.mark.parametrize("described", [True, False])
@on_ranks(1)
def test_an_adapter_with_tied_copies_of_embeddings(tmp_path: Path, described: bool) -> None:
    import peft

    def net() -> Any:
        base = model()
        base.config.tie_word_embeddings = True
        base.tie_weights()
        lora = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
        return peft.get_peft_model(base, peft.LoraConfig(**lora, ensure_weight_tying=True))

    saved = net()
    for value in saved.parameters():
        torch.nn.init.normal_(value)
    saved.save_pretrained(tmp_path / "stock")
    states = {"model": saved, **({"huggingface": describe_pretrained(saved)} if described else {})}
    bytecheckpoint.save(tmp_path / "step", states)
    files = None if described else tmp_path / "stock"
    tools.export(tmp_path / "step", tmp_path / "own", adapter="default", files_from=files)
    base = net().unload()
    found, wanted = (peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / one) for one in ("own", "stock"))
    same(found.state_dict(), wanted.state_dict())


@on_ranks(1)
def test_folders_of_an_adapter_and_its_base(tmp_path: Path) -> None:
    """They load as they lie into one model, by the names of the how-to pages."""
    saved = kinds()["lora"](model())
    for name, value in saved.state_dict().items():
        if "lora_" in name:
            torch.nn.init.normal_(value)
    saved.save_pretrained(tmp_path / "adapter")
    model().save_pretrained(tmp_path / "base")
    live = kinds()["lora"](model())
    for value in live.parameters():
        torch.nn.init.zeros_(value)
    bytecheckpoint.load(
        tmp_path / "base",
        {"model": live},
        rename=lambda name: name.replace("base_model.model.", "").replace(".base_layer.", "."),
        exclude=["model/*lora_*"],
    )
    bytecheckpoint.load(
        tmp_path / "adapter",
        {"model": live},
        rename=lambda name: name.replace(".default.", "."),
        include=["model/*lora_*"],
    )
    same(live.state_dict(), saved.state_dict())


@on_ranks(1)
def test_a_configuration_that_cannot_be_written(tmp_path: Path) -> None:
    """As a generation configuration that Transformers finds inconsistent: the training goes on."""
    net = model()
    net.generation_config.num_return_sequences = 3  # without sampling or beams
    with collected_warnings() as said:
        run(tmp_path, net=net, max_steps=4)
    assert any("steps will not describe their model" in line for line in said)
    assert tools.export(tmp_path / "step_00000004", tmp_path / "own").others == ()


@on_ranks(1)
def test_prompts_that_peft_computes(tmp_path: Path) -> None:
    """The step is saved and loaded. An export would write no file of PEFT, and Trainer's own folder has too little."""
    import peft

    def prompts() -> Any:
        config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=4)
        return peft.get_peft_model(model(), config)

    run(tmp_path, net=prompts(), max_steps=4)
    with pytest.raises(UsageError, match="no tensors of an adapter 'default' in 'model' that are those of PEFT's file"):
        tools.export(tmp_path / "step_00000004", tmp_path / "own")
    assert run(tmp_path, "auto", net=prompts(), max_steps=5).keys() == {5}
    run(tmp_path / "stock", attached=False, net=prompts(), max_steps=4)
    with collected_warnings() as said:
        run(tmp_path / "stock", "auto", net=prompts(), max_steps=5)
    assert any("checkpoint-4 does not hold prompt_encoder.default.embedding.weight, prompt" in line for line in said)


@on_ranks(1)
def test_a_frozen_part_of_an_adapter_that_peft_computes(tmp_path: Path) -> None:
    import peft

    def cartridge(seed: int) -> Any:
        net = model()
        torch.manual_seed(seed)
        return peft.get_peft_model(net, peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))

    trainer, _ = make(tmp_path, max_steps=4, net=cartridge(1))
    attach(trainer)
    trainer.train()
    again, _ = make(tmp_path, max_steps=4, net=cartridge(2))
    attach(again)
    again.train("auto")
    same(again.model.state_dict(), trainer.model.state_dict())


@on_ranks(1)
def test_a_model_that_another_program_saves(tmp_path: Path) -> None:
    """By the command line, with the tokenizer of the base model; and an adapter without a description."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM

    net = model()
    (tmp_path / "base").mkdir()
    (tmp_path / "base/tokenizer.json").write_text("{}")
    (tmp_path / "base/model.safetensors").write_text("")
    bytecheckpoint.save(tmp_path / "step", {"model": net, "huggingface": describe_pretrained(net)})
    assert (
        run_cli(["export", str(tmp_path / "step"), str(tmp_path / "own"), "--files-from", str(tmp_path / "base")]) == 0
    )
    assert (tmp_path / "own/tokenizer.json").read_text() == "{}"
    same(LlamaForCausalLM.from_pretrained(tmp_path / "own").state_dict(), net.state_dict())
    with pytest.raises(UsageError, match="holds no files to copy"):
        tools.export(tmp_path / "step", tmp_path / "other", files_from=tmp_path / "missing")

    adapted = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.peft_config["default"].save_pretrained(tmp_path / "adapter")
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight)
    bytecheckpoint.save(tmp_path / "adapted", {"model": adapted})
    out = tmp_path / "adapter_out"
    assert run_cli(
        ["export", str(tmp_path / "adapted"), str(out), "--adapter", "default", "--files-from", str(tmp_path / "adapter")]
    ) == 0  # fmt: skip
    same(PeftModel.from_pretrained(model(), out).state_dict(), adapted.state_dict())
    with pytest.raises(UsageError, match="no tensors of an adapter 'other'"):
        tools.export(tmp_path / "adapted", tmp_path / "none", adapter="other")
