"""Copies from and to accelerators, of which there is none here: torch's "meta" device stands for one."""

from __future__ import annotations

import pytest
import torch

from bytecheckpoint.engine.tensor_bytes import copy_all


def test_copies_wait_for_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the calling thread's, which is the first one unless that thread has chosen: bytes would be on their way."""
    waited: list[torch.device | None] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: waited.append(device))
    copy_all([torch.empty(3, device="meta")], [torch.ones(3)])
    copy_all([torch.empty(3, device="meta")], [torch.ones(3, device="meta")])
    assert waited == [torch.device("meta")] * 2
    copy_all([torch.empty(3)], [torch.ones(3)])
    assert len(waited) == 2
