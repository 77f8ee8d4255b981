"""Saves with fingerprints: those of every mode, layout and storage equal those of the live states and of the files."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bytecheckpoint
from bytecheckpoint import CheckpointManager, CorruptCheckpointError, IncompatibleCheckpointError, UsageError
from bytecheckpoint.collectives import Collective, ThreadWorld
from bytecheckpoint.manager import restores
from bytecheckpoint.representation import catalog_footer
from bytecheckpoint.representation.catalog_file import decode, encode
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.saving.file_layout import PlannedFile
from bytecheckpoint.tools import fingerprint
from bytecheckpoint.tuning import tuned
from tests.saving.test_tiles import FSDP, SHAPES, TP, states
from tests.support.catalogs import catalog_at
from tests.support.coded import ROWS
from tests.support.coded import states as coded_states
from tests.support.frozen import Training, save_steps
from tests.support.memory import new_memory
from tests.support.modes import MODES
from tests.support.ranks import outcomes, save_all, succeeded
from tests.support.settings import using
from tests.support.variants import crossed


def expected(step: int, rows: int = ROWS) -> dict[str, str]:
    """Return the fingerprints of the states of one process."""
    whole = coded_states(0, 1, step, rows)
    return dict(fingerprint({name: whole[name] for name in ("model", "optimizer")}).states)


def reports(found: list[Any]) -> list[Any]:
    """Return the reports of ranks that all succeeded."""
    succeeded(found)
    return found


@pytest.mark.parametrize(
    ("mode", "staging_bytes", "direct_io", "world"), crossed(list(MODES), [0, 4 << 20], ["on", "off"], [1, 3])
)
def test_every_mode(tmp_path: Path, mode: str, staging_bytes: int, direct_io: str, world: int) -> None:
    path, rows = tmp_path / "step", 20_011
    with using(
        fingerprint=True, chunk_bytes=1 << 20, staging_bytes=staging_bytes, direct_io=direct_io, writer="thread"
    ):
        for step in (1, 2):  # the second by a cached plan
            for report in reports(save_all(ThreadWorld(world), path, step, rows=rows, **MODES[mode])):
                assert {**report.fingerprint, "extra_states": ""} == expected(step, rows) | {"extra_states": ""}
    found = fingerprint(path)
    assert found == fingerprint(path, recompute=True)
    assert found.states == expected(2, rows)


def test_the_helper_process_and_memory(tmp_path: Path) -> None:
    with using(fingerprint=True, writer="process"), new_memory() as memory:
        for path in (str(tmp_path / "step"), f"{memory}/step"):
            (report,) = reports(save_all(ThreadWorld(1), path, 1, async_checkpoint=True))
            assert report.fingerprint["model"] == expected(1)["model"] == fingerprint(path).states["model"]


def test_tiles_of_many_ranks(tmp_path: Path) -> None:
    def save(collective: Collective) -> Any:
        return bytecheckpoint.save(tmp_path / "step", states(collective.rank, FSDP, TP, salt=1)).result().fingerprint

    for group_bytes in (1, 1 << 22):
        tiled = {"tiled_rows": 0, "all_tables_bytes": 0, "catalog_group_bytes": group_bytes}
        with tuned(**tiled), using(fingerprint=True, writer="thread"):
            found = outcomes(ThreadWorld(FSDP * TP), save)
        whole = fingerprint({"model": states(0, 1, 1, salt=1)["model"]})
        assert [one["model"] for one in found] == [whole.states["model"]] * FSDP * TP
        assert fingerprint(tmp_path / "step").tensors.keys() >= {f"model/{name}" for name in SHAPES}


@pytest.mark.parametrize("mode", MODES)
def test_shared_files_of_earlier_steps(tmp_path: Path, mode: str) -> None:
    with using(fingerprint=True, writer="thread"), tuned(frozen_look_bytes=1 << 16):
        _, (_, report) = save_steps(tmp_path, 1, 2, **MODES[mode])
        assert report.bytes_adopted
        assert fingerprint(tmp_path / "step_2") == fingerprint(tmp_path / "step_2", recompute=True)


def test_ranks_with_different_settings_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the settings, so one rank leaves out what the setting asks for."""
    lazy = threading.local()
    boxes = PlannedFile.boxes
    monkeypatch.setattr(PlannedFile, "boxes", lambda file: () if hasattr(lazy, "rank") else boxes(file))

    def save(collective: Collective) -> None:
        if collective.rank == 1:
            lazy.rank = 1
        bytecheckpoint.save(tmp_path / "step", coded_states(collective.rank, 3, 1))

    with using(fingerprint=True, writer="thread"):
        found = outcomes(ThreadWorld(3), save)
    assert all(isinstance(error, UsageError) and "rank 1 made no fingerprints" in str(error) for error in found), found
    assert not (tmp_path / "step" / CATALOG_NAME).exists()


def test_copies_that_differ_are_named() -> None:
    def live(collective: Collective) -> Any:
        weight = torch.nn.Linear(8, 4)
        torch.nn.init.ones_(weight.weight)
        torch.nn.init.ones_(weight.bias)
        if collective.rank == 2:
            weight.weight.data[1, 3] = 2
        return fingerprint({"model": weight})

    found = outcomes(ThreadWorld(3), live)
    assert all(isinstance(error, IncompatibleCheckpointError) for error in found)
    assert "model/weight on rank 2 differ" in str(found[0])


def test_conjugates_and_negatives_are_those_that_a_save_writes() -> None:
    values = torch.randn(6, dtype=torch.complex64)
    lazy = {"a": values.conj(), "b": torch._neg_view(values.real)}
    written = {"a": values.conj().resolve_conj(), "b": -values.real}
    assert fingerprint({"model": lazy}) == fingerprint({"model": written})


def test_part_of_a_model_has_none() -> None:
    with pytest.raises(UsageError, match=r"each element of model/[wv] once"):
        fingerprint({"model": coded_states(0, 2, 1)["model"]})


def test_a_damaged_list_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(fingerprint=True, writer="thread"):
        succeeded(save_all(ThreadWorld(1), tmp_path / "step", 1))
    catalog = catalog_at(tmp_path / "step")
    assert np.array_equal(decode(encode(catalog)).fingerprints, catalog.fingerprints)
    for text in ("!", base64.b64encode(b"1234567").decode(), base64.b64encode(bytes(1600)).decode()):
        monkeypatch.setattr(catalog_footer.base64, "b64encode", lambda _, text=text: text.encode())
        data = encode(catalog)
        monkeypatch.undo()
        with pytest.raises(CorruptCheckpointError, match="does not have fingerprints of"):
            decode(data)


def test_a_resume_proves_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, load = Training(), restores.load
    with using(fingerprint=True, writer="thread"), caplog.at_level("INFO"):
        with CheckpointManager(tmp_path, training.states()) as manager:
            for step in (1, 2):
                training.step()
                manager.save(step)
        fresh = Training(seed=1)
        with CheckpointManager(tmp_path, fresh.states()) as manager:
            assert manager.restore_latest() is not None and "13 tensors are proven by fingerprints" in caplog.text

            def faulty(path: str, *arguments: Any, **options: Any) -> Any:
                report = load(path, *arguments, **options)
                fresh.model.base[0].bias[7] += int(path.endswith("2"))
                return report

            monkeypatch.setattr(restores, "load", faulty)
            restored = manager.restore_latest()
            assert restored is not None and restored.step == 1
            assert "after the load model/base.0.bias hold other elements than were saved" in restored.skipped[2]
