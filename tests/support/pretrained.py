"""A model as those of transformers, and a look at folders as `from_pretrained` takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from bytecheckpoint import HuggingFaceView
from bytecheckpoint.engine.view_files import VIEW_INDEX
from bytecheckpoint.layouts import Layout, Rule

__all__ = ["Config", "Net", "Own", "check", "read", "trained", "view_of_own"]


class Config:
    """A configuration as that of transformers."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text(json.dumps({key: str(value) for key, value in vars(self).items()}))


class Net(nn.Module):
    """A model as those of transformers, with tied weights."""

    dtype = torch.float32

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.config = Config()
        self.embed = nn.Embedding(8, 4)
        self.layer = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + number * 100 + value)


class Own(nn.Module):
    """The same weights under names of its own: fused to one, or one of them transposed.

    Args:
        turned: True for the second form.
    """

    def __init__(self, value: float = 1.0, *, turned: bool = True) -> None:
        super().__init__()
        net = Net(value)
        embed, layer = net.embed.weight.detach(), net.layer.weight.detach()
        if turned:
            self.tokens, self.block = nn.Parameter(embed), nn.Parameter(layer.T.contiguous())
        else:
            self.both = nn.Parameter(torch.cat([layer, embed]))


def view_of_own(base: Path, *, turned: bool = True, left: str = "hf") -> HuggingFaceView:
    """Return the view of an `Own` model, with a configuration from the folder `base`."""
    base.mkdir(exist_ok=True)
    Config().save_pretrained(str(base))
    fused = Rule({"layer.weight": "a = f d", "embed.weight": "b = (two f) d"}, {"both": "[a: f | b: (two f)] d"})
    rules = [Rule({"embed.weight": "v d"}, {"tokens": "v d"}), Rule({"layer.weight": "f h"}, {"block": "h f"})]
    layout = Layout("names", left, "own", rules=rules if turned else [fused], dims={} if turned else {"two": "2"})
    return HuggingFaceView(layout=layout, files_from=base)


def trained(value: float = 1.0) -> dict[str, Any]:
    model = Net(value)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def read(folder: Path | str, architecture: str | None = "['Net']") -> dict[str, torch.Tensor]:
    """Read a folder as `from_pretrained` does: all keys of all files that the index names."""
    index = json.loads(Path(folder, VIEW_INDEX).read_text())
    config = json.loads(Path(folder, "config.json").read_text())
    assert config.get("architectures") == architecture
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(Path(folder, name), "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert {key for key, place in index["weight_map"].items() if place == name} == set(file.keys())
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
    return found


def check(folder: Path | str, value: float = 1.0, architecture: str | None = "['Net']") -> None:
    wanted = Net(value).state_dict()
    del wanted["head.weight"]  # tied
    found = read(folder, architecture)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
