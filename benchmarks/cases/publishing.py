"""Versions of weights that change a little: publish and follow beside a save and a load of all bytes.

`rollouts` trains a small transformer for real, with master weights in float32 and AdamW, at the learning rates of
reinforcement learning and of fine-tuning, and publishes its weights in bfloat16 after each step.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import torch

import bytecheckpoint
from benchmarks.bench import Bench
from benchmarks.cases.verl_delta import VerlDelta
from benchmarks.measure import Arm, read_bytes
from benchmarks.state import Tensors, dense, size_of
from bytecheckpoint.publishing import Follower, Publisher

__all__ = ["RATES", "publish_training", "publishing", "rollouts"]

#: Share of the elements that change between two versions, as PULSE reports of reinforcement learning in bfloat16.
_CHANGED = 0.01
#: Learning rates of reinforcement learning (1e-6) and of fine-tuning.
RATES = (1e-6, 1e-5, 1e-4)
_STEPS = 20


def publishing(bench: Bench) -> None:
    """Measure a version of which one element of a hundred has changed, and what takes it over."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in dense(bench.options.nbytes).items()}
    engine, other = ({name: torch.zeros_like(tensor) for name, tensor in state.items()} for _ in range(2))
    plain, root = f"{bench.folder}/plain", f"{bench.folder}/versions"
    follower, steps = Follower(root), iter(range(1, 10_000))
    with Publisher(root, full_every=None) as publisher:

        def publish() -> dict[str, float]:
            _change(state)
            return {"bytes_sum": float(publisher.publish({"model": state}, next(steps)).result().bytes_written)}

        def follow() -> dict[str, float]:
            report = follower.update({"model": engine})
            assert report is not None
            return {"bytes_sum": float(report.bytes_read)}

        publish()
        follow()
        arms = [
            Arm("change the elements", lambda: _change(other)),
            Arm("change and save", _save(plain, other)),
            Arm("change and publish", publish, after=follow),
            Arm("follow", follow, before=publish),
            Arm("load", lambda: bytecheckpoint.load(plain, {"model": other}, prepare_save=False) and None),
            *_verl_arms(state),
        ]
        bench.measure("publishing", size_of(state), arms)
    bench.clear_all()
    _whole_versions(bench, state, engine)


def _verl_arms(state: Tensors) -> list[Arm]:
    if not VerlDelta.available():
        return []
    state = {name: tensor.clone() for name, tensor in state.items()}
    engine = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    verl = VerlDelta(state, engine)

    def publish() -> dict[str, float]:
        _change(state)
        return {"bytes_sum": verl.publish()}

    def check() -> None:
        assert all(torch.equal(engine[name].view(torch.int16), state[name].view(torch.int16)) for name in state)

    return [
        Arm("verl: change and encode", publish, after=verl.follow),
        Arm("verl: apply", verl.follow, before=publish, after=check),
    ]


def _whole_versions(bench: Bench, state: Tensors, engine: Tensors) -> None:
    """Measure a follower one version behind a whole version, with the differences beside its files and without them."""
    root = f"{bench.folder}/versions"
    follower, steps = Follower(root), itertools.count(1)
    with Publisher(root, full_every=1, keep=1, grace=0.0) as publisher:

        def publish() -> None:
            _change(state)
            publisher.publish({"model": state}, next(steps)).result()

        def publish_alone() -> None:
            publish()
            if bench.world.rank == 0:
                for path in bench.folder.rglob("*.delta"):
                    path.unlink()

        def follow(versions: int) -> dict[str, float]:
            before = read_bytes()
            report = follower.update({"model": engine})
            assert report is not None
            assert report.versions == versions  # 0: loaded whole
            return {"read_sum": float(read_bytes() - before)}

        publish()
        follow(0)
        arms = [
            Arm("by its differences", lambda: follow(1), before=publish),
            Arm("without differences", lambda: follow(0), before=publish_alone),
        ]
        bench.measure("follow a whole version", size_of(state), arms)
    bench.clear_all()


def rollouts(bench: Bench) -> None:
    """Measure the bytes of a version, and a follower's, after real training steps at several learning rates."""
    number = itertools.count()
    arms = [Arm(f"lr {rate:.0e}", lambda rate=rate: _train(f"{bench.folder}/{next(number)}", rate)) for rate in RATES]
    bench.measure("rollouts", size_of({"all": torch.empty(_parameters(_transformer()), dtype=torch.bfloat16)}), arms)
    bench.clear_all()


def _transformer() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    parts = torch.nn.Embedding(2048, 256), torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(256, 2048, bias=False)
    model = torch.nn.Sequential(*parts)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)  # as language models are
    return model


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _train(root: str, rate: float) -> dict[str, float]:
    """Return averages over versions after the first ones."""
    found = publish_training(root, rate)[_STEPS // 2 :]
    written, changed = (sum(column) / len(found) for column in zip(*found, strict=True))
    return {"bytes_share": written, "changed_share": changed}


def publish_training(root: str, rate: float) -> list[tuple[float, float]]:
    """Train, publish and follow; return the shares of the weights' bytes and elements in each version."""
    master = _transformer()
    weights = copy.deepcopy(master).to(torch.bfloat16)
    engine = copy.deepcopy(weights)
    optimizer = torch.optim.AdamW(master.parameters(), lr=rate, betas=(0.9, 0.95))
    follower, found = Follower(root), list[tuple[float, float]]()
    count, seed = _parameters(master), torch.Generator().manual_seed(1)
    with Publisher(root, full_every=None) as publisher:
        for step in range(1, _STEPS + 1):
            tokens = torch.randint(0, 2048, (4, 64), generator=seed) ** 2 // 2048  # small numbers are more frequent
            logits = master(tokens)
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, trained in zip(weights.parameters(), master.parameters(), strict=True):
                    mine.copy_(trained)
            report = publisher.publish(weights, step).result()
            followed = follower.update(engine)
            assert followed is not None
            assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), weights.parameters(), strict=True))
            found.append((report.bytes_written / (2 * count), followed.changed / count))
    return found


def _change(state: Tensors) -> None:
    for tensor in state.values():
        tensor.view(torch.int16).bitwise_xor_((torch.rand(tensor.shape) < _CHANGED).to(torch.int16))


def _save(path: str, state: Tensors) -> Callable[[], None]:
    def run() -> None:
        _change(state)
        bytecheckpoint.save(path, {"model": state}).result()

    return run
