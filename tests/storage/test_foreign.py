"""Foreign folders and files on object stores and HDFS are opened and loaded where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.cli.main import run
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools import adopt, compare, fingerprint, verify
from tests.formats.test_orbax import GOLDEN, values
from tests.loading.test_layouts import assert_holds, folder_of, fused, module_of, weights
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.server


def test_a_folder_and_a_file(root: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", weights())
    torch.save({"state_dict": weights(), "epoch": 4}, folder / "whole.pt")
    for place, names in (("hf", ("model.safetensors", "config.json")), ("other", ("whole.pt",))):
        for name in names:
            resolve(f"{root}/{place}").publish(name, (folder / name).read_bytes())
    module = module_of(fused(weights()))
    bytecheckpoint.load(f"{root}/hf", {"model": module}, layout="llama")
    assert_holds(module, fused(weights()))
    for path in ("hf", "hf/model.safetensors", "other", "other/whole.pt"):
        module = module_of(weights())
        bytecheckpoint.load(f"{root}/{path}", {"model": module})
        assert_holds(module, weights())
    with bytecheckpoint.open(f"{root}/other/whole.pt") as found:
        assert found["extra_states/epoch"] == 4
    assert fingerprint(f"{root}/hf") == fingerprint(folder / "model.safetensors")


def test_tools(s3: S3Server, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": weights(), "epoch": 4}, tmp_path / "whole.pt")
    s3.request("PUT", f"/{bucket}/a/whole.pt", body=(tmp_path / "whole.pt").read_bytes())
    for path in (f"s3://{bucket}/a", f"s3://{bucket}/a/whole.pt"):
        for tool in (["ls", path], ["inspect", path], ["verify", path], ["diff", path, tmp_path / "whole.pt"]):
            assert run([str(word) for word in tool]) == 0
        assert run(["rm", path]) == run(["gc", path]) == 1 and run(["repair", path]) == 2
        assert capsys.readouterr().err.count("is a checkpoint of another program") == 3
    assert [name for name, _ in resolve(f"s3://{bucket}/a").list()] == ["whole.pt"]


def test_adopt(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    torch.save({"model": weights(), "epoch": 4}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    s3.request("PUT", f"/{bucket}/whole.pt", body=data)
    adopt(f"s3://{bucket}/whole.pt", f"s3://{bucket}/top")
    assert compare(f"s3://{bucket}/top", tmp_path / "whole.pt").equal
    for name in ("sums", "none"):
        s3.request("PUT", f"/{bucket}/{name}/whole.pt", body=data)
        for folder in (f"s3://{bucket}/runs", str(tmp_path / "runs")):
            adopt(f"s3://{bucket}/{name}/whole.pt", f"{folder}/{name}", hash=name == "sums")
            assert compare(f"{folder}/{name}", tmp_path / "whole.pt").equal and verify(f"{folder}/{name}").ok
        s3.request("PUT", f"/{bucket}/{name}/whole.pt", body=bytes([*data[:-4000], data[-4000] ^ 1, *data[-3999:]]))
        for folder in (f"s3://{bucket}/runs", str(tmp_path / "runs")):
            (found,) = verify(f"{folder}/{name}").findings
            assert (found.kind, found.file) == (
                "block" if name == "sums" else "header",
                f"s3://{bucket}/{name}/whole.pt",
            )


@pytest.mark.parametrize("kind", ["ocdbt", "files", "run/5"])
def test_orbax(kind: str, s3: S3Server, bucket: str) -> None:
    """Tensorstore reads the bucket itself, with the same address and credentials."""
    pytest.importorskip("tensorstore")  # the environment of `make test` has it
    for file in (GOLDEN / kind).rglob("*"):
        if file.is_file():
            s3.request("PUT", f"/{bucket}/{file.relative_to(GOLDEN)}", body=file.read_bytes())
    live = {name: torch.zeros_like(value) for name, value in values().items()}
    bytecheckpoint.load(f"s3://{bucket}/{kind}", {"model": live})
    assert all(torch.equal(live[name], value) for name, value in values().items())
    assert verify(f"s3://{bucket}/{kind}").ok
