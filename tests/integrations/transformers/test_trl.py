"""TRL's SFTTrainer, and models with adapters of PEFT: only what is trained is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.integrations.transformers import attach
from tests.integrations.conformance import after, collected_warnings
from tests.integrations.transformers.jobs import Losses, arguments, die_at_commit, make, model, prepare_rank, run
from tests.support.runs import steps_in
from tests.support.worlds import Worlds, on_ranks


def lora(dropout: float = 0.2) -> Any:
    """Return the tiny model with adapters whose weights are always the same."""
    return with_adapters(model(), dropout)


def with_adapters(net: Any, dropout: float = 0.2) -> Any:
    """Return a model with adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(net, config)


@on_ranks(1)
def test_tied_embeddings_are_not_saved(tmp_path: Path) -> None:
    """They have two names, and are frozen under both."""
    base = model()
    base.config.tie_word_embeddings = True
    base.tie_weights()
    net = with_adapters(base)
    assert len(list(net.named_parameters())) < len(list(net.named_parameters(remove_duplicate=False)))
    wanted = run(tmp_path, "auto", net=net)
    with bytecheckpoint.open(tmp_path / "step_00000008") as checkpoint:
        assert all("lora_" in key for key in checkpoint if key.startswith("model/"))
    assert wanted


def run_lora(folder: Path, resume: Any = None, **options: Any) -> dict[int, float]:
    return run(folder, resume, net=lora(), **options)


def die_with_lora(folder: Path) -> None:
    die_at_commit(folder, 2, net=lora())


def test_adapters_of_a_killed_run(worlds: Worlds, tmp_path: Path) -> None:
    wanted = worlds.run(1, run_lora, tmp_path / "whole", attached=False)[0]
    worlds.fresh(1).start(die_with_lora, tmp_path / "run").outcomes()
    assert steps_in(tmp_path / "run") == [4]
    assert worlds.run(1, run_lora, tmp_path / "run", "auto")[0] == after(4, wanted)
    with bytecheckpoint.open(tmp_path / "run" / "step_00000008") as checkpoint:
        names = [key for key in checkpoint if key.startswith("model/")]
    assert names and all("lora_" in name for name in names)


@on_ranks(1)
def test_adapter_files_and_the_best_step(tmp_path: Path) -> None:
    from peft import PeftModel

    options: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True,
        "metric_for_best_model": "loss", "learning_rate": 0.5,
    }  # fmt: skip
    stock, _ = make(tmp_path / "stock", net=lora(), **options)
    stock.train()
    trainer, _ = make(tmp_path / "run", net=lora(), **options)
    attach(trainer, tmp_path / "steps", hf_weights="last")
    trainer.train()
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    loaded = PeftModel.from_pretrained(model(), tmp_path / "run").state_dict()
    wanted = stock.model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in trainer.model.state_dict().items())
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.items())


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghij"]
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")


@on_ranks(1)
def test_a_reference_model_that_follows(tmp_path: Path) -> None:
    """It is no longer the model that the run was given, so steps hold it. Trainer's own checkpoints do not."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_list([{"prompt": "a b", "chosen": f" {c} d", "rejected": f" e {c}"} for c in "abcdefghij" * 2])

    def train(folder: Path, attached: bool, **options: Any) -> dict[int, float]:
        prepare_rank()
        losses = Losses()
        given = arguments(
            folder, bf16=False, gradient_checkpointing=False, save_steps=2, lr_scheduler_type="constant", **options
        )
        trainer = DPOTrainer(
            model=model(), ref_model=model(), train_dataset=data, processing_class=tokenizer(), callbacks=[losses.callback],
            args=DPOConfig(**given, sync_ref_model=True, ref_model_sync_steps=1),
        )  # fmt: skip
        if attached:
            attach(trainer)
        trainer.train("auto" if attached else None)
        return losses.found

    wanted = train(tmp_path / "whole", False, max_steps=4)
    train(tmp_path / "run", True, max_steps=2)
    assert train(tmp_path / "run", True, max_steps=4) == after(2, wanted)
    train(tmp_path / "own", False, max_steps=2)
    with collected_warnings() as said:
        train(tmp_path / "own", True, max_steps=4)
    assert "do not hold the reference model" in said[-1]


@on_ranks(1)
def test_a_resume_in_the_middle_of_completions(tmp_path: Path) -> None:
    """TRL does not save them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def train(steps: int) -> list[str]:
        prepare_rank()
        options = {"bf16": False, "gradient_checkpointing": False, "num_iterations": 2, "num_generations": 2}
        given = arguments(tmp_path, max_steps=steps, save_steps=1, max_completion_length=2, **options)
        trainer = GRPOTrainer(
            model=model(), args=GRPOConfig(**given), processing_class=tokenizer(),
            reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
            train_dataset=Dataset.from_list([{"prompt": f"{a} b"} for a in "abcdefghij" * 2]),
        )  # fmt: skip
        attach(trainer)
        with collected_warnings() as said:
            trainer.train("auto")
        return [line for line in said if "in the middle of completions for 2 batches" in line]

    assert [len(train(steps)) for steps in (1, 2, 3)] == [0, 1, 0]


def sft(folder: Path, resume: Any = None, *, attached: bool = True, stop_at: int = 0) -> dict[int, float]:
    """Train with SFTTrainer on texts; return the losses."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    prepare_rank()
    numbers = torch.randint(0, 10, (48, 6), generator=torch.Generator().manual_seed(5)).tolist()
    data = Dataset.from_list([{"text": " ".join("abcdefghij"[n] for n in row)} for row in numbers])
    losses = Losses({stop_at: lambda: setattr(trainer.control, "should_training_stop", True)} if stop_at else None)
    trainer = SFTTrainer(
        model=model(),
        args=SFTConfig(**arguments(folder, max_length=8, bf16=False, gradient_checkpointing=False)),
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        callbacks=[losses.callback],
    )
    if attached:
        attach(trainer, hf_weights="last")
        assert isinstance(trainer, SFTTrainer) and type(trainer).__name__ == "SFTTrainer"
    trainer.train(resume_from_checkpoint=resume)
    return losses.found


@pytest.mark.parametrize("ranks", [1, 2])
def test_sft(worlds: Worlds, tmp_path: Path, ranks: int) -> None:
    wanted = worlds.run(ranks, sft, tmp_path / "whole", attached=False)
    worlds.run(ranks, sft, tmp_path / "run", "auto", stop_at=8)
    assert steps_in(tmp_path / "run") == [4, 8]
    assert worlds.run(ranks, sft, tmp_path / "run", "auto") == [after(8, losses) for losses in wanted]
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["r"] == 2
