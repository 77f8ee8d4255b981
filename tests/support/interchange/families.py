"""The families of the matrix: layouts that share a model, an optimizer and a precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from tests.support.deepspeed_engines import ENGINES
from tests.support.fsdp1_layouts import WORLD_SIZE
from tests.support.interchange import gpt, tiny_transformer
from tests.support.interchange.runs import Member
from tests.support.megatron.layouts import DENSE, HALF, HALF_MOE, MOE, SGD, SGD_HALF, SGD_MOE
from tests.support.megatron.models import Layout


@dataclass(frozen=True)
class Family:
    """Every ordered pair of its members is a test.

    Attributes:
        name: in test ids.
        members: the layouts; the first, in one process, saves the start that all train from.
        tolerance: relative, of losses, between a resumed run and the uninterrupted one.
        member_tolerance: tolerance between members that train from the same start; None: they differ.
    """

    name: str
    members: tuple[Member, ...]
    tolerance: float
    member_tolerance: float | None = None

    def member(self, name: str) -> Member:
        (found,) = (m for m in self.members if m.name == name)
        return found


#: Members whose pairs are in the part of the matrix that CI runs, by family.
CI_MEMBERS = {
    "tiny-adamw": {"one", "ddp2", "full3-units", "full4-orig", "tp2-fsdp2", "z1x3", "z2x2", "z3x3"},
    "dense-adamw": {"plain", "fsdp1-x3", "z3x2", "dp4", "tp2-pp2-whole"},
    "moe-adamw": {"plain", "fsdp2-x3", "z1x3", "ep2-dp2-moe"},
    "dense-bf16": {"plain", "b3x2", "pp2-dp2-overlap-bf16"},
    "dense-sgd": {"plain", "z2x2", "tp2-pp2-whole"},
}


def _torch(name: str, optimizer: str, dtype: torch.dtype = torch.float32, *, tied: bool = True) -> Member:
    run = partial(tiny_transformer.TorchRun, name, optimizer, dtype, tied=tied)
    return Member(name, WORLD_SIZE[name], run)


def _zero(name: str, optimizer: str) -> Member:
    zero = ENGINES[name]
    return Member(name, zero.size, partial(tiny_transformer.EngineRun, name, optimizer), zero.low, "deepspeed")


def _tiny(name: str, optimizer: str) -> Member:
    return _zero(name, optimizer) if name in ENGINES else _torch(name, optimizer)


def _module(wrapping: str, size: int, layout: Layout) -> Member:
    frameworks = {"plain": "torch", "ddp": "ddp", "fsdp1": "fsdp", "fsdp1-grad": "fsdp1", "fsdp2": "fsdp2"}
    make = partial(gpt.TorchRun, wrapping, replace(layout, bf16=False))
    return Member(wrapping if size == 1 else f"{wrapping}-x{size}", size, make, "", frameworks[wrapping])


def _engine(name: str, layout: Layout) -> Member:
    zero = ENGINES[name]
    return Member(name, zero.size, partial(gpt.EngineRun, name, layout), zero.low, "deepspeed")


def _megatron(layout: Layout) -> Member:
    return Member(
        str(layout), layout.world, partial(gpt.MegatronRun, layout), "bf16" if layout.bf16 else "", "megatron"
    )


_NATIVE = ("one", "ddp2", "fsdp2", "fsdp3", "fsdp4", "hsdp2x2", "tp2-fsdp2")
_MODEL_PARALLEL = ("tp2", "pp2", "pp2-fsdp2", "ep2-fsdp2")
#: Both settings of use_orig_params, all strategies, four world sizes and tensor parallelism.
_FSDP1 = ("full4-orig", "full3-flat", "grad2-flat", "hybrid4-flat", "none2-orig", "full1-flat", "tp2-full2-orig")
_TIED = ("one", "fsdp3", "tp2-fsdp2", "pp2", "pp2-fsdp2", "full4-orig", "full3-flat", "grad2-flat")
_OTHER_FSDP1 = (
    "full2-deep",
    "grad3-orig",
    "hybrid4-orig",
    "none2-flat",
    "tp2-grad2-flat",
    "full3-units",
    "hybrid4-units",
)
_TINY = (
    *_NATIVE,
    *("full4-orig", "full3-units", "full2-deep", "hybrid4-units", "none2-orig"),
    *("z0x2", "z1x3", "z2x2", "z2x4", "z3x2", "z3x3", "z3x1"),
)
_TINY_SGD = ("one", "ddp2", "full3-units", "full4-orig", "fsdp3", "tp2-fsdp2", "z1x3", "z2x2", "z3x3")
_BF16_ENGINES = ("b0x2", "b1x2", "b1x3-own", "b2x3", "b2x1", "b2x4", "b2x2-aligned", "b3x2", "b3x3", "b3x4")
_MODULES = (("plain", 1), ("ddp", 2), ("fsdp1", 3), ("fsdp1-grad", 2), ("fsdp2", 3))
_ZERO_ENGINES = ("z1x3", "z2x2", "z3x2", "z3x3")


def _gpt(
    layouts: tuple[Layout, ...],
    modules: tuple[tuple[str, int], ...] = _MODULES,
    zeros: tuple[str, ...] = _ZERO_ENGINES,
) -> tuple[Member, ...]:
    like = replace(Layout(), moe=layouts[0].moe, bf16=layouts[0].bf16, optimizer=layouts[0].optimizer)
    return (
        *(_module(wrapping, size, like) for wrapping, size in modules),
        *(_engine(name, like) for name in zeros),
        *map(_megatron, layouts),
    )


# Another layout adds in another order. Measured: up to 1.4e-7 in float32, 1.5e-3 in bfloat16.
_EXACT, _ROUGH = 5e-7, 4e-3
_DOUBLE = 1e-9  # in float64
_HALF_MODULES, _HALF_ENGINES = (("plain", 1), ("fsdp1", 2)), ("b1x2", "b2x3", "b3x2")


def _exact(name: str, optimizer: str, *layouts: str, tied: bool = False) -> Family:
    members = tuple(_torch(layout, optimizer, torch.float64, tied=tied) for layout in layouts)
    return Family(name, members, _DOUBLE, _DOUBLE)


#: Families of torch alone, in float64. A flat parameter cannot join param groups, unless its units are chosen for that.
TORCH_FAMILIES = (
    _exact("torch", "adamw-one-group", *_NATIVE, *_MODEL_PARALLEL, *_FSDP1),
    _exact("torch-tied", "adamw-one-group", *_TIED, tied=True),
    _exact("torch-sgd", "sgd", "one", "fsdp3", "full4-orig", "full3-units"),
    _exact("torch-groups", "adamw", "one", "ddp2", "full2-deep", "grad3-orig"),
    _exact("torch-adagrad", "adagrad", "one", "fsdp3", "full4-orig", "full3-flat"),
    _exact("torch-fsdp1", "adamw-one-group", "one", "ddp2", "fsdp3", "tp2-fsdp2", *_FSDP1, *_OTHER_FSDP1),
)
FRAMEWORK_FAMILIES = (
    Family("tiny-adamw", tuple(_tiny(n, "adamw") for n in _TINY), _EXACT, _EXACT),
    Family("tiny-sgd", tuple(_tiny(n, "sgd") for n in _TINY_SGD), _EXACT, _EXACT),
    Family(
        "tiny-bf16",
        tuple(_tiny(n, "adamw") for n in ("one", "full4-orig", "fsdp3", "z1x3", "z3x2", *_BF16_ENGINES)),
        _ROUGH,
    ),
    Family("tiny-bf16-sgd", tuple(_tiny(n, "sgd") for n in ("one", "b1x3-own", "b2x3", "b3x2")), _ROUGH),
    Family("tiny-bf16-cpu", tuple(_tiny(n, "adamw") for n in ("one", "b2x2-cpu", "b3x2-cpu", "b2x3")), _ROUGH),
    Family("tiny-fp16", tuple(_tiny(n, "adamw") for n in ("one", "h2x2", "h3x3")), _ROUGH),
    # Without ZeRO this version of DeepSpeed divides gradients by a scale that it did not multiply the loss with, so no
    # other layout trains like it.
    Family("tiny-fp16-undivided", (_tiny("h0x2", "adamw"),), _ROUGH),
    Family("dense-adamw", _gpt(DENSE), _EXACT, _EXACT),
    Family("moe-adamw", _gpt(MOE), _EXACT, _EXACT),
    Family("dense-bf16", _gpt(HALF, _HALF_MODULES, _HALF_ENGINES), _ROUGH, _ROUGH),
    Family("moe-bf16", _gpt(HALF_MOE, _HALF_MODULES, _HALF_ENGINES), _ROUGH, _ROUGH),
    Family("dense-sgd", _gpt(SGD), _EXACT, _EXACT),
    Family("moe-sgd", _gpt(SGD_MOE, (("plain", 1), ("fsdp1", 3)), ("z2x2",)), _EXACT, _EXACT),
    Family("dense-bf16-sgd", _gpt(SGD_HALF, (("plain", 1),), ("b2x3", "b3x2")), _ROUGH, _ROUGH),
)
FAMILIES = {family.name: family for family in (*TORCH_FAMILIES, *FRAMEWORK_FAMILIES)}
