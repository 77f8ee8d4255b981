"""Saves in the background at each step, with the next step right behind the call, in real layouts."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import bytecheckpoint
from bytecheckpoint.frameworks.native import NativeFramework
from tests.support.modes import MODES
from tests.support.tiny_model import source_values
from tests.support.torch_layouts import LAYOUTS, build, in_layout


def data_files(path: Path) -> dict[str, bytes]:
    """Bytes of the tensors in each file of a checkpoint."""
    found = {}
    for file in path.rglob("*.safetensors"):
        content = file.read_bytes()
        name = f"{file.parent.name}/{file.name.split('.')[0]}"
        found[name] = content[8 + int.from_bytes(content[:8], "little") :]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@in_layout
def test_a_lazy_save_holds_what_a_blocking_one_holds(layout: str, path: str) -> None:
    trainer = build(layout, source_values)
    with patch.object(NativeFramework, "capture", autospec=True, side_effect=NativeFramework.capture) as captured:
        for number in range(5):
            trainer.step()
            if number == 3 and "fsdp" in layout and "pp" not in layout:
                with torch.no_grad():
                    trainer.model(trainer.local_batch()[0])  # leaves the root's parameters gathered
            root = Path(path) / str(number)
            bytecheckpoint.save(root / "blocking", trainer.states())
            lazy = bytecheckpoint.save(root / "lazy", trainer.states(), **MODES["background"])
            trainer.step()
            assert lazy.result(60).staging == "background", lazy.result().staging
            if dist.is_initialized():
                dist.barrier()
            blocking, found = data_files(root / "blocking"), data_files(root / "lazy")
            assert blocking and found.keys() == blocking.keys()
            assert [name for name in found if found[name] != blocking[name]] == []
    assert captured.call_count == 1
