"""Wrong arguments raise at the call, by name. Modes and default devices of the caller change nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bytecheckpoint
from bytecheckpoint import UsageError
from bytecheckpoint.collectives import SingleProcess, use
from bytecheckpoint.world import world_of
from tests.support.settings import undisturbed

Call = Callable[..., object]


@pytest.fixture
def calls(tmp_path: Path) -> dict[str, Call]:
    """The public calls with right arguments, except for those that a test gives."""
    path = tmp_path / "s"
    state = {"t": torch.arange(4)}
    bytecheckpoint.save(path, {"model": state})
    right: dict[str, Any] = {"states": {"model": state}}

    def save(**wrong: Any) -> object:
        return bytecheckpoint.save(tmp_path / "t", **(right | wrong))

    def prepare(**wrong: Any) -> object:
        return bytecheckpoint.prepare(**(right | wrong)).result(60)

    def load(**wrong: Any) -> object:
        return bytecheckpoint.load(path, **(right | wrong))

    return {"save": save, "prepare": prepare, "load": load}


WRONG: list[tuple[str, list[Any]]] = [
    ("timeout", ["5", [], True, math.nan, math.inf, 0, -1, 10**400]),
    ("framework", [None, 3, ["auto"], "FSDP"]),
    ("states", [None, {}, [], "model", {"": {}}, {3: {}}, {None: {}}]),
    ("names", ["x", 3, ["x"], object()]),
]
FLAGS = {"save": ["async_checkpoint", "check_replicas"], "load": ["overlap_loading", "strict", "cast", "prepare_save"]}


@pytest.mark.parametrize("name", ["save", "prepare", "load"])
@pytest.mark.parametrize(("argument", "values"), WRONG, ids=[argument for argument, _ in WRONG])
def test_wrong_arguments(calls: dict[str, Call], tmp_path: Path, name: str, argument: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=argument.removesuffix("s")) as failure:
            calls[name](**{argument: value})
        assert "\n" not in str(failure.value) and not (tmp_path / "t").exists()
    calls[name]()


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_true_or_false(calls: dict[str, Call], name: str) -> None:
    for flag in FLAGS[name]:
        for value in ("False", 3, torch.ones(2)):
            with pytest.raises(UsageError, match=flag):
                calls[name](**{flag: value})


@pytest.mark.parametrize("staging", ["x", None, 1, torch.ones(2)])
def test_staging(calls: dict[str, Call], staging: Any) -> None:
    with pytest.raises(UsageError, match="staging"):
        calls["save"](async_checkpoint=True, staging=staging)


def test_metadata_is_that_of_the_call(tmp_path: Path) -> None:
    metadata = {"run": {"losses": [1.0]}}
    handle = bytecheckpoint.save(tmp_path / "s", {"model": {}}, metadata=metadata, async_checkpoint=True)
    metadata["run"]["losses"].append(2.0)
    handle.result(60)
    assert bytecheckpoint.open(tmp_path / "s").info["metadata"] == {"run": {"losses": [1.0]}}


def test_metadata_is_what_json_gives_back(tmp_path: Path) -> None:
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    for wrong in ("x", [1], {1: 2}, {"a": {1}}, {"a": b"x"}, {"a": math.nan}, {"a": ["\ud800"]}, {"\ud800": 1}, cycle):
        with pytest.raises(UsageError, match="metadata"):
            bytecheckpoint.save(tmp_path / "s", {"model": {}}, metadata=wrong)  # type: ignore[arg-type]
    right = {"loss": 1.5, "run": {"id": 10**30, "tags": ["a", None, True]}}
    bytecheckpoint.save(tmp_path / "s", {"model": {}}, metadata=right)
    assert bytecheckpoint.open(tmp_path / "s").info["metadata"] == right


@pytest.mark.parametrize("mode", ["sync", "process", "thread"])
def test_a_path_that_is_no_unicode(tmp_path: Path, mode: str) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    state = {"t": torch.arange(4)}
    with undisturbed(), use(SingleProcess()):
        if mode != "sync":
            bytecheckpoint.configure(writer=mode)
        bytecheckpoint.save(path, {"model": state}, async_checkpoint=mode != "sync").result(60)
        destination = {"model": {"t": torch.zeros(4, dtype=torch.int64)}}
        bytecheckpoint.load(path, destination)
    assert torch.equal(destination["model"]["t"], state["t"])
    assert torch.equal(bytecheckpoint.open(path)["model/t"][...], state["t"])


# --- futures ------------------------------------------------------------------------------------------------------


def test_nobody_cancels_a_save(tmp_path: Path) -> None:
    state = {"model": {"t": torch.arange(4)}}
    handle = bytecheckpoint.save(tmp_path / "s", state, async_checkpoint=True, staging="background")
    for future in (handle.staged, handle.restorable, handle.committed):
        assert not future.cancel() or future.done()
        assert not future.cancelled()
    assert handle.result(60).bytes_written
    prepared = bytecheckpoint.prepare(state)
    prepared.cancel()
    bytecheckpoint.save(tmp_path / "s", state)
    assert prepared.result(60) is None


def test_a_wait_in_asyncio_may_run_out_of_time(tmp_path: Path) -> None:
    hold = threading.Event()
    state = {"model": {"t": torch.arange(4)}}

    async def wait() -> None:
        with use(SingleProcess()) as collective:
            world_of(collective).saves.submit(lambda: bool(hold.wait(30)) and None)  # the save comes after it
            handle = bytecheckpoint.save(tmp_path / "s", state, async_checkpoint=True, staging="background")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(handle.committed), 0.01)
            hold.set()
            assert (await asyncio.wrap_future(handle.committed)).bytes_written
            bytecheckpoint.save(tmp_path / "t", state)  # would raise an earlier save's failure

    asyncio.run(wait())


# --- what the caller has set up -----------------------------------------------------------------------------------


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode, torch.no_grad, lambda: torch.device("meta"), default_device],
    ids=["inference_mode", "no_grad", "meta", "default_device"],
)
def test_modes_and_default_devices_change_nothing(tmp_path: Path, around: Any) -> None:
    model, optimizer = trained(0)
    extra = {"t": torch.arange(300_000), "small": [torch.ones(2)]}
    states = {"model": model, "optimizer": optimizer, "extra_states": extra}
    with use(SingleProcess()):
        with around():
            bytecheckpoint.save(tmp_path / "a", states)
            bytecheckpoint.save(tmp_path / "b", states, async_checkpoint=True).result(60)
        # This save uses the staging memory of the one before.
        bytecheckpoint.save(tmp_path / "c", states, async_checkpoint=True).result(60)
        for name in "abc":
            destination, _ = trained(1)
            fresh = torch.optim.Adam(destination.parameters())
            found: dict[str, Any] = {}
            with around():
                bytecheckpoint.load(tmp_path / name, {"model": destination, "optimizer": fresh, "extra_states": found})
                with bytecheckpoint.open(tmp_path / name) as checkpoint:
                    entry = checkpoint["extra_states/t"]
                    assert torch.equal(entry[...], extra["t"])
                    assert torch.equal(entry[10:90000:7], extra["t"][10:90000:7])  # type: ignore[call-overload]
                    assert entry[5:5].device.type == "cpu"
            assert torch.equal(found["t"], extra["t"])  # type: ignore[arg-type]
            for one, two in zip(model.parameters(), destination.parameters(), strict=True):
                assert torch.equal(one, two)
                for slot, value in optimizer.state[one].items():
                    assert torch.equal(fresh.state[two][slot], value)
            destination(torch.ones(3, 4)).sum().backward()
            fresh.step()  # the loaded state takes part in training
