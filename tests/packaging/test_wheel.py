"""The wheel holds the package and nothing else, and works with the core dependencies alone."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/bytecheckpoint"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Top-level modules that the extras bring and the core must not need.
OPTIONAL = ["click", "duckdb", "hypothesis", "matplotlib", "pandas", "psutil", "pytest", "rich", "typer"]

CORE_ONLY = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # importing any of them raises ModuleNotFoundError
import bytecheckpoint, torch
assert bytecheckpoint.__file__.startswith(sys.argv[1]), bytecheckpoint.__file__
for name in bytecheckpoint.__all__:
    getattr(bytecheckpoint, name)
model = torch.nn.Linear(2, 2)
weight = model.weight.detach().clone()
bytecheckpoint.save("step_1", {{"model": model}}, async_checkpoint=True).result(60)
torch.nn.init.zeros_(model.weight)
bytecheckpoint.load("step_1", {{"model": model}})
assert torch.equal(model.weight, weight)
assert torch.equal(bytecheckpoint.open("step_1")["model/weight"][...], weight)
"""

NO_COMMAND_LINE = """
import sys
sys.modules["typer"] = None
from bytecheckpoint.cli.main import main
sys.argv = ["bytecheckpoint", "ls"]
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def run(program: str, installed: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", program, str(installed)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_it_holds_the_package_and_its_licence_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assets = (PACKAGE / "monitoring/report/assets").rglob("*.*")
    paths = [
        *PACKAGE.rglob("*.py"),
        *PACKAGE.rglob("*.toml"),
        *PACKAGE.rglob("*.layout"),
        *assets,
        *PACKAGE.rglob("LICENSE*"),
        *PACKAGE.rglob("NOTICE"),
    ]
    sources = {path.relative_to(PACKAGE.parent).as_posix() for path in paths}
    assert files == sources | {"bytecheckpoint/py.typed"}
    (licence,) = (name for name in wheel.namelist() if name.endswith("/licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_it_says_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(needs) == sorted(PROJECT["dependencies"])
    needed_by = {
        extra: sorted(
            need.split(";")[0] for need in metadata.get_all("Requires-Dist", []) if f"extra == '{extra}'" in need
        )
        for extra in metadata.get_all("Provides-Extra", [])
    }
    assert needed_by["objects"] == needed_by["s3"] == needed_by["gcs"] == needed_by["azure"] != []
    assert not {"dev", "docs", "bench", "demo"} & set(needed_by)  # these are dependency groups
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]


def test_the_core_needs_no_extra(installed: Path, tmp_path: Path) -> None:
    done = run(CORE_ONLY, installed, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_authors_package_beside_this_one_is_told(installed: Path, tmp_path: Path) -> None:
    """It has the same import name, so pip puts the files of both into one folder."""
    quiet = run("import bytecheckpoint", installed, tmp_path)
    assert quiet.returncode == 0 and not quiet.stderr
    (tmp_path / "bytecheckpoint/checkpointer").mkdir(parents=True)
    (tmp_path / "bytecheckpoint/checkpointer/base_checkpointer.py").touch()
    told = run("import sys; sys.path.append('.'); sys.path.remove(''); import bytecheckpoint", installed, tmp_path)
    assert told.returncode == 0 and "the distribution 'bytecheckpoint' of the paper's authors" in told.stderr
    assert "beside 'bytecheckpoint-unified'" in told.stderr


def test_the_command_without_its_extra_is_one_line(installed: Path, tmp_path: Path) -> None:
    done = run(NO_COMMAND_LINE, installed, tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "bytecheckpoint: the command line needs an extra: pip install 'bytecheckpoint-unified[cli]'"
    ]
