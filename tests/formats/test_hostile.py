"""Hostile files run nothing, take little memory and time, and the error names the file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.formats.dcp import read_dcp
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.storage import resolve
from tests.formats.golden.make import states
from tests.formats.hostile import corpus, folders

#: Files that hold data, however it looks: calls are records there.
HARMLESS = {
    f"{name}.{kind}.pt"
    for kind in ("zip", "old")
    for name in (
        *(
            "os_system",
            "posix_system",
            "eval",
            "exec",
            "inst",
            "obj",
            "newobj",
            "newobj_ex",
            "open",
            "import",
            "runpy",
            "frame",
        ),
        *(
            "module_with_effects",
            "torch_load",
            "numpy_load",
            "rebuild_calls",
            "build_slots",
            "numpy_shape",
            "getattr_chain",
        ),
    )
}

PROGRAM = """
import json, os, re, sys, time
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.formats.huggingface import read_huggingface
from bytecheckpoint.formats.torch_save import read_torch_save
from bytecheckpoint.storage import resolve
folder, names = sys.argv[1], sorted(os.listdir(sys.argv[1]))
storage = resolve(folder)
def read(name):
    if os.path.isdir(os.path.join(folder, name)):
        read_huggingface(resolve(os.path.join(folder, name)))
    else:
        read_torch_save(storage, name)
read("sound.pt")
read("sound")
events, results = [], {}
WATCHED = ("import", "exec", "compile", "open", "os.", "subprocess.", "socket.", "ctypes.", "pickle.", "marshal.")
def watch(event, args):
    if event.startswith(WATCHED):
        events.append([event, str(args[:2])])
def peak():  # unlike ru_maxrss, without that of the process which forked this one
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
before = peak()
sys.addaudithook(watch)
for name in names:
    del events[:]
    began = time.process_time()
    try:
        read(name)
        text = ""
    except CheckpointError as error:
        text = str(error)
    except BaseException as error:
        text = "!" + repr(error)
    # The storage itself opens the file, lists the folder, and looks for mounts whose server is gone.
    own = ("open", "os.scandir", "os.listdir")
    ours = [e for e in events if not (e[0] in own and (folder in e[1] or "/proc/self/mountinfo" in e[1]))]
    results[name] = [text, ours, time.process_time() - began]
print(json.dumps({"results": results, "bytes": (peak() - before) << 10}))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    torch.save({"w": torch.ones(3)}, folder / "sound.pt")
    (folder / "sound").mkdir()
    # The first use of each type of JSON compiles something.
    sharding = {"DCP_SHARDING_INFO": json.dumps({"v": {"saved_offsets": [0], "global_shape": [4]}})}
    for name, metadata in (("w", None), ("v", sharding)):
        save_file({name: torch.ones(4)}, folder / "sound" / f"{name}.safetensors", metadata)
    weight_map = {"w": "w.safetensors", "v": "v.safetensors"}
    (folder / "sound" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "sound" / "config.json").write_text('{"a": Infinity}')
    files, hostile = corpus(), {name: name for name in corpus()}
    for name, content in folders().items():
        hostile[name] = f"{name}/{next(iter(content))}"
        (folder / name).mkdir()
        files |= {f"{name}/{file}": data for file, data in content.items()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]  # no crash
    return {**json.loads(done.stdout), "folder": str(folder), "files": hostile}


def test_nothing_runs(outcome):
    assert len(outcome["files"]) >= 40
    assert {name: ours for name, (_, ours, _) in outcome["results"].items() if ours} == {}
    assert not os.path.exists("/tmp/bytecheckpoint-hostile")


def test_errors_name_the_file(outcome):
    for name, file in outcome["files"].items():
        text = outcome["results"][name][0]
        assert not text.startswith("!"), (name, text)
        assert bool(text) == (name not in HARMLESS), (name, text)
        assert not text or (f"{outcome['folder']}/{name}" in text and os.path.basename(file) in text), (name, text)
        assert len(text) < 600, name


def test_memory_and_time_are_bounded(outcome):
    print(f"{outcome['bytes'] >> 20} MiB")
    assert outcome["bytes"] < 256 << 20
    slow = {name: seconds for name, (_, _, seconds) in outcome["results"].items() if seconds > 5}
    assert not slow


@pytest.mark.parametrize("name", ["new.pt", "old.pt", "dcp/.metadata", "dcp/__0_0.distcp"])
def test_random_damage_is_an_error_that_names_the_file(tmp_path, name):
    torch.save(states(), tmp_path / "new.pt")
    torch.save(states(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    dcp.save(states(), checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    path, draw = tmp_path / name, random.Random(name)
    data, texts = path.read_bytes(), []
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.choice((0, 1, 1, 1, 8))] = draw.randbytes(draw.choice((0, 1, 1, 8)))
        path.write_bytes(damaged)
        try:
            if name.startswith("dcp"):
                read_dcp(resolve(str(tmp_path / "dcp")))
            else:
                read_torch_save(resolve(str(tmp_path)), name)
        except CheckpointError as error:
            texts.append(str(error))
    assert texts and all(str(tmp_path) in text for text in texts)
