"""The command line: output, JSON, exit status, and one line on stderr for every error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.cli.format import as_json, format_time, parse_size, printable, size_text
from bytecheckpoint.cli.main import run
from bytecheckpoint.tuning import tuned
from tests.support.damage import flip_bit
from tests.support.programs import forked
from tests.support.settings import using

HOSTILE = "evil\x1b[31m\n\u202ename\x00"


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Done]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> Done:
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (9, 10):
        extra = {"step": step, "nan": float("nan"), HOSTILE: b"\x1b"}
        states = {"model": model, "optimizer": optimizer, "extra_states": extra}
        with using(writer="thread"):
            bytecheckpoint.save(folder / f"step_{step}", states)
    (folder / "notes.txt").write_text("not a checkpoint")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root, tmp_path / "root"))


def damage(step: Path) -> str:
    (file,) = (step / "model").glob("rank-*")
    flip_bit(file, -1)
    return f"model/{file.name}"


def one_line(err: str) -> bool:
    return err.startswith("bytecheckpoint: ") and err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err


# --- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_of_a_folder(cli: Cli, copied: Path) -> None:
    (copied / "step_9" / "metadata.parquet").rename(copied / "metadata.kept")
    done = cli("ls", copied)
    assert done.code == 0 and not done.err
    lines = done.out.splitlines()
    assert lines[0].split() == ["name", "status", "created", "size", "tensors", "files", "ranks", "states"]
    assert [line.split()[:2] for line in lines[1:]] == [["step_9", "uncommitted"], ["step_10", "committed"]]
    found = cli("ls", copied, "--json").json
    assert (found["type"], found["path"]) == ("folder", str(copied))
    assert [step["status"] for step in found["checkpoints"]] == ["uncommitted", "committed"]
    committed = found["checkpoints"][1]
    assert committed.keys() == {
        "name", "status", "created", "format", "bytes", "files", "tensors", "state_names", "world_size", "framework"
    }  # fmt: skip
    assert (committed["tensors"], committed["world_size"]) == (3, 1)


def test_ls_of_a_folder_with_a_damaged_catalog_is_a_finding(cli: Cli, copied: Path) -> None:
    (copied / "step_9" / "metadata.parquet").write_bytes(b"nothing")
    done = cli("ls", copied, "--json")
    assert done.code == 1
    assert [step["status"] for step in done.json["checkpoints"]] == ["damaged", "committed"]
    done = cli("ls", copied)
    assert "damaged" in done.out and done.err.startswith("step_9: ") and done.err.count("\n") == 1


def test_progress_is_shown_on_a_terminal_only(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = cli("ls", root)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = cli("ls", root)
    assert done.out == plain.out and not plain.err and "reading checkpoints" in done.err and "checkpoints" in done.err


def test_ls_of_one(cli: Cli, root: Path) -> None:
    done = cli("ls", root / "step_10")
    assert done.code == 0 and re.search(r"model +3 .* no$", done.out, re.MULTILINE)
    found = cli("ls", root / "step_10", "--json").json
    assert found["type"] == "checkpoint"
    assert (
        [state["state"] for state in found["states"]] == found["state_names"] == ["model", "optimizer", "extra_states"]
    )
    assert found["states"][0].keys() == {"state", "tensors", "bytes", "files", "ranks", "plain_values"}
    assert found["bytes"] == sum(f.stat().st_size for f in (root / "step_10").glob("*/*"))


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "repair"])
def test_no_checkpoint_is_2(cli: Cli, root: Path, verb: str) -> None:
    for path in (root / "empty", root / "absent", root / "notes.txt", "hdfs://x/y", ""):
        with tuned(hdfs_first_contact=0.5, hdfs_first_call=0.5):
            done = cli(verb, path)
        assert done.code == 2 and not done.out and one_line(done.err), (path, done)


def test_an_uncommitted_one_says_how_to_go_on(cli: Cli, copied: Path) -> None:
    (copied / "step_9" / "metadata.parquet").unlink()
    done = cli("verify", copied / "step_9")
    assert done.code == 2 and "bytecheckpoint repair" in done.err and one_line(done.err)


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect(cli: Cli, root: Path) -> None:
    done = cli("inspect", root / "step_9", "--boxes", "--values")
    assert done.code == 0
    assert re.search(r"^float32 +\[4, 4\] +64 B +1 +0 +model/a.weight = b.weight$", done.out, re.MULTILINE)
    assert re.search(r"^\[0:4, 0:4\] ", done.out, re.MULTILINE)
    assert "optimizer/param_groups" in done.out
    assert re.search(
        r"^layout: extra_states \(dict\); model \(ModuleDict\) 3 plain; optimizer \(SGD\)$", done.out, re.MULTILINE
    ), done.out
    assert " by 1 rank (" in done.out
    found = cli("inspect", root / "step_9", "model/*", "--json", "--boxes").json
    assert [t["key"] for t in found["tensors"]] == ["model/a.weight", "model/a.bias", "model/b.bias"]
    assert found["tensors"][0] | {"stored": 0} == {
        "key": "model/a.weight", "state": "model", "fqn": "a.weight", "slot": "", "dtype": "float32", "shape": [4, 4],
        "bytes": 64, "requires_grad": True, "device": "cpu", "owner": None, "aliases": ["b.weight"], "boxes": 1,
        "written_by": [0], "stored": 0,
    }  # fmt: skip
    (stored,) = found["tensors"][0]["stored"]
    assert stored.keys() == {"offsets", "lengths", "file", "byte_offset", "byte_length"}
    assert found["writers"] == [{"rank": 0, "files": found["files"], "bytes": found["bytes"]}]
    assert "values" not in found


def test_inspect_refuses_a_rank_that_did_not_save(cli: Cli, root: Path) -> None:
    for options in ([], ["--values"]):
        done = cli("inspect", root / "step_9", "--rank", 7, *options)
        assert done.code != 0 and "has no rank 7: it was saved by rank 0 only" in done.err
        assert cli("inspect", root / "step_9", "--rank", 0, *options).code == 0


def test_inspect_values_as_json(cli: Cli, root: Path) -> None:
    found = cli("inspect", root / "step_9", "extra_states/*", "--values", "--json").json
    values = {value["key"]: (value["type"], value["value"]) for value in found["values"]}
    assert values["extra_states/step"] == ("int", 9)
    assert values["extra_states/nan"] == ("float", "nan")
    assert values[f"extra_states/{HOSTILE}"] == ("bytes", repr(b"\x1b"))


def test_hostile_names_are_shown_escaped(cli: Cli, copied: Path) -> None:
    target = copied / f"step_{HOSTILE[:-1]}"
    (copied / "step_9").rename(target)
    for done in (
        cli("ls", copied),
        cli("ls", target),
        cli("inspect", target, "--values"),
        cli("verify", target),
        cli("diff", target, copied / "step_10"),
        cli("export", target, copied / "hf\x1b[0m"),
        cli("export", target, copied / "hf\x1b[0m"),
        cli("verify", f"{target}\x1b"),
    ):
        assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f\u202e]*", done.out + done.err), done
    assert "evil\\x1b[31m\\n\\u202ename\\x00" in cli("inspect", target, "--values").out


# --- verify, diff, export, repair -------------------------------------------------------------------------------------


def test_verify(cli: Cli, copied: Path) -> None:
    done = cli("verify", copied / "step_9")
    assert done.code == 0 and done.out.endswith(": sound\n") and not done.err
    file = damage(copied / "step_9")
    (copied / "step_9" / "stray").write_text("x")
    done = cli("verify", copied / "step_9", "--threads", 3)
    assert done.code == 1 and f"checksum mismatch in {file}, block 0" in done.out
    assert done.out.endswith(": 1 finding\n") and "note: stray" in done.err
    done = cli("verify", copied / "step_9", "--json")
    assert done.code == 1 and not done.err
    found = done.json
    named = {"ok", "path", "files", "bytes_read", "tensors", "findings", "notes", "restorable", "verdict"}
    assert found.keys() == named
    (finding,) = found["findings"]
    assert finding.keys() == {"kind", "file", "block", "blocks", "tensors", "tensor_count", "message", "copy"}
    assert (finding["kind"], finding["file"], found["ok"]) == ("block", file, False)


def test_verify_of_a_run(cli: Cli, copied: Path) -> None:
    (copied / "step_9").rename(copied / f"step_{HOSTILE[:-1]}")
    done = cli("verify", copied)
    assert done.code == 0 and not done.err and done.out.count("\n") == 3
    assert done.out.endswith(": 2 checkpoints, all sound\n") and "evil\\x1b[31m\\n" in done.out
    damage(copied / "step_10")
    shutil.copytree(copied / "step_10", copied / "step_11")
    (copied / "step_11" / "metadata.parquet").write_bytes(b"PAR1")
    done = cli("verify", copied)
    assert done.code == 1 and done.out.endswith(": 3 checkpoints, 2 of them bad\n")
    assert re.search(r"^step_10: .*: 1 finding\n    .*checksum mismatch", done.out, re.MULTILINE)
    assert re.search(r"^step_11: not readable: ", done.out, re.MULTILINE)
    found = cli("verify", copied, "--json", "--threads", 2)
    assert found.code == 1 and found.json.keys() == {"ok", "path", "steps"} and not found.json["ok"]
    assert [step["ok"] for step in found.json["steps"]] == [False, False, True]
    assert found.json["steps"][1].keys() == {"ok", "path", "error"}


def test_diff(cli: Cli, copied: Path) -> None:
    a, b = copied / "step_9", copied / "step_10"
    assert cli("diff", a, a).code == 0
    done = cli("diff", a, b)
    assert done.code == 1 and "extra_states/step is 9 in the first and 10 in the second checkpoint" in done.out
    done = cli("diff", a, b, "--json", "--rtol", "0.1", "--atol", 0)
    assert done.code == 1
    assert done.json.keys() == {"a", "b", "equal", "tensors", "values", "bytes_compared", "differences", "notes"}
    (difference,) = done.json["differences"]
    assert difference.keys() == {"kind", "key", "rank", "a", "b", "message", "count", "first", "max_abs"}
    assert cli("diff", a, b, "--rtol", "-1").code == 2
    assert cli("diff", a, copied / "absent").code == 2
    damage(b)
    done = cli("diff", a, b)
    assert done.code == 1 and one_line(done.err) and "checksum" in done.err


def test_export(cli: Cli, copied: Path) -> None:
    target = copied / "hf"
    done = cli("export", copied / "step_9", target, "--dtype", "bfloat16", "--max-shard-size", "40B", "--json")
    assert done.code == 0 and (target / "model.safetensors.index.json").is_file()
    assert done.json.keys() == {
        "path",
        "files",
        "tensors",
        "nbytes",
        "cast",
        "overflowed",
        "skipped",
        "left_out",
        "others",
    }
    done = cli("export", copied / "step_9", target)
    assert done.code == 2 and "not empty" in done.err and one_line(done.err)
    done = cli("export", copied / "step_9", target, "--force")
    assert done.code == 0 and os.listdir(target) == ["model.safetensors"]
    for wrong in (["--dtype", "int4"], ["--max-shard-size", "much"], ["--state", "none"]):
        done = cli("export", copied / "step_9", copied / "new", *wrong)
        assert done.code == 2 and one_line(done.err) and not (copied / "new").exists()
    damage(copied / "step_9")
    done = cli("export", copied / "step_9", copied / "new")
    assert done.code == 1 and one_line(done.err) and not (copied / "new").exists()


def test_repair(cli: Cli, copied: Path) -> None:
    step = copied / "step_9"
    done = cli("repair", step)
    assert done.code == 0 and "the catalog is sound" in done.out
    (step / "metadata.parquet").write_bytes(b"broken")
    assert cli("verify", step).code == 2
    done = cli("repair", step, "--json")
    assert done.code == 0
    assert done.json.keys() == {"path", "written", "generation", "generations", "findings", "notes"}
    assert done.json["written"] and cli("diff", step, copied / "step_10").code == 1
    assert cli("verify", step).code == 0
    (step / "metadata.parquet").unlink()
    damage(step)
    done = cli("repair", step)
    assert done.code == 1 and one_line(done.err)
    assert not (step / "metadata.parquet").exists()
    assert cli("repair", step, "--force").code == 1
    assert (step / "metadata.parquet").exists()


# --- the frame --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["ls", "--nonsense"], ["verify"], ["diff", "a"], ["diff", "a", "b", "--rtol", "x"]]
)
def test_wrong_usage_is_2_and_one_line(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.code == 2 and one_line(done.err) and not done.out


def test_version_and_help(cli: Cli) -> None:
    assert cli("--version") == Done(0, f"bytecheckpoint {bytecheckpoint.__version__}\n", "")
    assert cli() == cli("--help")
    for verb in ("ls", "inspect", "verify", "diff", "export", "repair"):
        assert verb in cli("--help").out
        done = cli(verb, "--help")
        assert done.code == 0 and "--json" in done.out


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
        (RuntimeError("a\nb"), 2, "internal error, RuntimeError: a\\nb"),
        (OSError(5, "input/output"), 2, "internal error"),
        (OSError(28, "No space left on device"), 2, "cannot write the output: No space left on device"),
    ],
)
def test_whatever_happens_is_one_line(
    cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("bytecheckpoint.cli.ls.resolve", fail)
    done = cli("ls", root)
    assert done.code == code and text in done.err and (one_line(done.err) or not text)


def test_without_its_extra_it_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bytecheckpoint.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    done = cli("ls", ".")
    assert done.code == 2 and "pip install 'bytecheckpoint-unified[cli]'" in done.err and one_line(done.err)


def test_a_terminal_that_is_not_utf8(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bytecheckpoint.save(tmp_path / "s", {"model": {"größe_重み": torch.ones(1)}})
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    assert run(["inspect", str(tmp_path / "s")]) == 0
    sys.stdout.flush()
    assert b"gr\\xf6\\xdfe_\\u91cd\\u307f" in raw.getvalue()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_and_paths(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "step_9", tmp_path / "my run" / "step_9")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "INPUTRC": os.devnull}
    master, terminal = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "-i"], cwd=tmp_path, env=environment, stdin=terminal, stdout=terminal, stderr=terminal
    ):
        os.close(terminal)
        os.write(master, b"source <(bytecheckpoint --show-completion)\nbytecheckpoint insp\tmy\tst\t --js\t\nexit\n")
        seen = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(master, 4096):
                seen += data
    os.close(master)
    assert rb"bytecheckpoint inspect my\ run/step_9/ --json" in seen and b'"layout": ' in seen, seen


_LIGHT = """
import sys
sys.argv[0] = "/somewhere/bin/bytecheckpoint"
from bytecheckpoint.cli.main import run
for line in {lines!r}:
    assert run(line) == 0, line
assert "torch" not in sys.modules, "torch was imported"
"""


def test_looking_needs_no_torch(root: Path) -> None:
    step = str(root / "step_9")
    lines = [["--version"], ["--help"], ["ls", str(root)], ["inspect", step, "--boxes"], ["verify", step]]
    lines.append(["plan-interval", "--stall", "1s", "--write", "1s", "--mtbf", "1h"])
    lines.append(["measure", str(root), "--size", "1MiB"])
    subprocess.run([sys.executable, "-c", _LIGHT.format(lines=lines)], check=True, timeout=60, capture_output=True)


def test_a_reader_that_goes_away(root: Path) -> None:
    command = forked("-m", "bytecheckpoint.cli.main", "inspect", root / "step_9", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("json", [[], ["--json"]], ids=["table", "json"])
def test_an_output_without_space(root: Path, json: list[str]) -> None:
    command = forked("-m", "bytecheckpoint.cli.main", "inspect", root / "step_9", *json)
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2 and one_line(done.stderr) and "cannot write the output" in done.stderr


def test_small_things() -> None:
    assert [parse_size(t) for t in ("5GB", "2 GiB", "1.5kib", "7", "7b", "1TB")] == [
        5_000_000_000, 2 << 30, 1536, 7, 7, 10**12
    ]  # fmt: skip
    for wrong in ("", "GB", "-1", "5XB", "0", "1e9"):
        with pytest.raises(bytecheckpoint.UsageError):
            parse_size(wrong)
    assert [size_text(n) for n in (0, 1023, 1024, 3 << 40)] == ["0 B", "1023 B", "1.0 KiB", "3.0 TiB"]
    assert (
        format_time(0) == "1970-01-01T00:00:00Z"
        and format_time("x") == format_time(1e300) == format_time(float("nan")) == ""
    )
    assert printable("plain ü") == "plain ü" and printable("\ud800\x7f\U000e0001") == "\\ud800\\x7f\\U000e0001"
    assert as_json({(1, 2): {3}, "b": [float("inf"), None, 2**70]}) == {"(1, 2)": "{3}", "b": ["inf", None, 2**70]}
