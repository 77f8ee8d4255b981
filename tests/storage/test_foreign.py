"""Foreign folders and files on object stores are opened and loaded where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint
from tests.loading.test_layouts import assert_holds, folder_of, fused, module_of, weights
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.server


def test_a_folder_and_a_file(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", weights())
    torch.save({"state_dict": weights(), "epoch": 4}, folder / "whole.pt")
    for name in ("model.safetensors", "config.json"):
        s3.request("PUT", f"/{bucket}/hf/{name}", body=(folder / name).read_bytes())
    s3.request("PUT", f"/{bucket}/other/whole.pt", body=(folder / "whole.pt").read_bytes())
    module = module_of(fused(weights()))
    bytecheckpoint.load(f"s3://{bucket}/hf", {"model": module}, layout="llama")
    assert_holds(module, fused(weights()))
    for path in ("hf", "hf/model.safetensors", "other", "other/whole.pt"):
        module = module_of(weights())
        bytecheckpoint.load(f"s3://{bucket}/{path}", {"model": module})
        assert_holds(module, weights())
    with bytecheckpoint.open(f"s3://{bucket}/other/whole.pt") as found:
        assert found["extra_states/epoch"] == 4
