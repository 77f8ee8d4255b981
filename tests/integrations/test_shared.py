"""The helpers that all integrations share; the tests need none of the tools."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bytecheckpoint import CheckpointManager
from bytecheckpoint.errors import UsageError
from bytecheckpoint.integrations.attaching import (
    OPTIMIZER,
    CheckpointOfTool,
    ManagerArguments,
    check_has,
    differences,
    newest_of_tool,
    refuse_newer,
    seen_by_all,
    subclass_in_place,
)
from bytecheckpoint.integrations.generators import DelayedGenerators
from bytecheckpoint.integrations.loaders import generators_of, length_of, sampler_of
from bytecheckpoint.manager import Cadence, Latest, Retention
from tests.support.worlds import on_ranks


def test_retention_of_a_tool() -> None:
    def of_tool(keep: Any, default: Any = None) -> Retention:
        return ManagerArguments.of("/run", keep, default, Cadence(), None, None, None).retention

    assert of_tool(None) == Retention()
    assert of_tool(None, Latest(2)) == of_tool(2, Latest(3)) == Retention(2)
    assert of_tool(Retention(grace=5), Latest(2)) == Retention(grace=5)


def test_attributes_of_a_tool() -> None:
    check_has(math, ["sin", "cos"], "torch", "")
    with pytest.raises(UsageError, match=r"a module of torch \S+ has no tangent: use another"):
        check_has(math, ["sin", "tangent"], "torch", "use another")


def test_a_subclass_in_place() -> None:
    class Tool:
        def work(self) -> str:
            return "tool"

    class Users(Tool):
        def work(self) -> str:
            return "user's on " + super().work()

    class Front:
        def work(self) -> str:
            return "front of " + super().work()  # type: ignore[misc]

    one: Any = Tool()
    subclass_in_place(one, Front, Tool)
    assert one.work() == "front of tool" and isinstance(one, Tool) and type(one).__name__ == "Tool"
    assert Tool().work() == "tool"
    one = Users()
    subclass_in_place(one, Front, Tool)
    assert one.work() == "user's on front of tool" and isinstance(one, Users) and type(one).__name__ == "Users"


def test_a_run_continues_from_a_checkpoint_of_a_tool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bytecheckpoint")
    with CheckpointManager(tmp_path, {"progress": {"step": 0}}) as manager:

        def choose(*found: Any, lacks: Any = lambda _: "") -> str | None:
            caplog.clear()
            checkpoints = [CheckpointOfTool(step, str(tmp_path), modified) for step, modified in found]
            chosen = newest_of_tool(manager, "Tool", lambda: checkpoints, lacks)
            assert len(caplog.messages) == len(found[:1])
            return None if chosen is None else f"{chosen.step}: {caplog.messages[0]}"

        assert choose() is None
        assert choose((7, 1.0)) == f"7: the run continues from {tmp_path}, saved by Tool: {tmp_path} has no step yet"
        assert choose((7, 1.0), lacks=lambda _: "its end") is None
        assert caplog.messages == [f"{tmp_path} of Tool is passed over: it lacks its end"]
        with pytest.raises(UsageError, match=f"without the optimizer, and {tmp_path} has no step: begin a new run"):
            choose((7, 1.0), lacks=lambda _: OPTIMIZER)
        manager.save(4)
        manager.wait()
        assert choose((4, 2e9), (3, 0.0)) is None and "has no higher step" in caplog.text
        assert choose((5, 1.0)) is None and "is older, with a higher step" in caplog.text
        assert "has no step above 4" in (choose((5, 0.0)) or "") and "above 4" in (choose((5, 2e9)) or "")
        assert choose((7, 2e9), lacks=lambda _: OPTIMIZER) is None


@on_ranks(2)
def test_a_checkpoint_that_some_ranks_do_not_see(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    with CheckpointManager(tmp_path, {"progress": {"step": 0}}) as manager:
        assert seen_by_all(manager, "/x", lambda: True) and not seen_by_all(manager, "/x", lambda: False)
        with pytest.raises(UsageError, match="rank 1 does not see /x, which rank 0 would load"):
            seen_by_all(manager, "/x", lambda: rank == 0)
        found = [CheckpointOfTool(3, str(tmp_path))] if rank == 0 else []
        assert newest_of_tool(manager, "Tool", lambda: found, lambda _: "") == CheckpointOfTool(3, str(tmp_path))


def test_newer_steps_are_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, {"progress": {"step": 0}}) as manager:
        refuse_newer(manager, -1, "")
        manager.save(0)
        manager.save(4)
        manager.wait()
        refuse_newer(manager, 4, "")
        with pytest.raises(UsageError, match="holds a run up to step 4: begin elsewhere"):
            refuse_newer(manager, 3, "begin elsewhere")


def test_differences_in_words() -> None:
    assert differences({"models": 1, "ranks": 2}, {"models": 1}) == ""
    assert differences({"models": 1}, {"models": 2, "scalers": 1}) == "1 models, now 2; None scalers, now 1"


def test_generators_wait_for_their_restore(tmp_path: Path) -> None:
    generators = DelayedGenerators()
    with CheckpointManager(tmp_path, {"rng": generators}) as manager:
        manager.save(1)
        manager.wait()
        wanted = torch.rand(3)
        manager.restore(1)
        assert not torch.equal(torch.rand(3), wanted), "they stay until then"
        generators.restore()
        assert torch.equal(torch.rand(3), wanted)
        generators.restore()  # does nothing any more
        assert not torch.equal(torch.rand(3), wanted)


def test_parts_of_a_loader() -> None:
    class Rows(IterableDataset[int]):
        generator = torch.Generator()

        def __iter__(self) -> Iterator[int]:
            yield from range(8)

    own = torch.Generator()
    loader = DataLoader(TensorDataset(torch.zeros(8)), batch_size=2, shuffle=True, generator=own)
    assert generators_of(loader, loader.dataset) == {"loader": own, "sampler": own}
    assert sampler_of(loader) is loader.sampler and length_of(loader) == 4
    stream = DataLoader(Rows(), batch_size=2)
    assert generators_of(stream, stream.dataset) == {"dataset": Rows.generator}
    assert length_of(stream) is None
    assert sampler_of(object()) is None and generators_of(object(), None) == {}
