"""Each published extra does its work in an environment that has nothing else beside the core (`make test-extras`)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.servers.s3 import versitygw

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
UV = shutil.which("uv") or str(ROOT / ".cache/bootstrap/bin/uv")
#: Pinned versions of the extras that constraints.txt leaves out.
PINNED = {
    **dict.fromkeys(["accelerate", "transformers", "lightning"], "integrations"),
    **dict.fromkeys(["tensorboard", "wandb", "mlflow"], "metrics"),
    **{name: name for name in ("torchtitan", "ray")},
}

#: Extras with a target of their own: vLLM's wheel is for CUDA, and the one for CPUs has another name (`make test-vllm`).
ELSEWHERE = {"vllm"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEAD = """
import os, sys, time, urllib.request
from pathlib import Path
import torch, bytecheckpoint
model = torch.nn.Linear(2, 2)
def round_trip(url):
    weight = model.weight.detach().clone()
    bytecheckpoint.save(url, {"model": model})
    torch.nn.init.zeros_(model.weight)
    bytecheckpoint.load(url, {"model": model})
    assert torch.equal(model.weight, weight)
def unreachable(url, **settings):
    bytecheckpoint.configure(timeout=2.0, storage_timeout=2.0)
    try:
        bytecheckpoint.save(url, {"model": model})
    except bytecheckpoint.StorageError as error:
        print(error)
    else:
        raise AssertionError("there is no server")
def sends(address):
    bytecheckpoint.configure(metrics=address)
    bytecheckpoint.save(os.path.abspath("run/step_1"), {"model": model})
def wait_until(there):
    deadline = time.monotonic() + 100
    while not there():
        assert time.monotonic() < deadline, list(Path(".").rglob("*"))
        time.sleep(0.2)
"""
COMMAND = (
    "from bytecheckpoint.cli.main import main; round_trip('run/step_1'); sys.argv = ['bytecheckpoint', *{}]; main()"
)
OBJECTS = "round_trip(os.environ['TEST_URL'])"
PROGRAMS = {
    "cli": COMMAND.format(["verify", "run/step_1"]),
    **dict.fromkeys(["objects", "s3", "s3-profiles"], OBJECTS),
    "gcs": "os.environ['STORAGE_EMULATOR_HOST'] = 'http://127.0.0.1:1'; unreachable('gs://bucket/run/step_1')",
    "azure": "os.environ.update(AZURE_STORAGE_ACCOUNT_NAME='a', AZURE_STORAGE_ACCOUNT_KEY='a2V5', "
    "AZURE_STORAGE_ENDPOINT='http://127.0.0.1:1'); unreachable('az://bucket/run/step_1')",
    "fsspec": "round_trip('fsspec+memory://run/step_1'); round_trip(f'fsspec+file://{os.getcwd()}/step_2')",
    "hdfs": "unreachable('hdfs://127.0.0.1:1/run/step_1')",
    "orbax": f"with bytecheckpoint.open('{ROOT}/tests/formats/golden/orbax-0.12.8/ocdbt') as found: "
    "assert found['model/dense.kernel'][...].shape == (6, 10)",
    "accelerate": """
from accelerate import Accelerator
from bytecheckpoint.integrations.accelerate import attach
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(model)
attach(accelerator, root="run")
accelerator.save_state(step=1)
assert accelerator.load_state() is not None
accelerator.end_training()
""",
    "transformers": """
from transformers import Trainer, TrainingArguments, PretrainedConfig, PreTrainedModel
from bytecheckpoint.integrations.transformers import attach
class Model(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)
        self.post_init()
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}
args = TrainingArguments("out", max_steps=2, save_steps=1, use_cpu=True, report_to=[], remove_unused_columns=False)
trainer = Trainer(model=Model(PretrainedConfig()), args=args, train_dataset=[{"x": torch.ones(2)}] * 16)
attach(trainer)
trainer.train()
assert bytecheckpoint.open("out/step_00000002")
""",
    "lightning": """
from lightning.pytorch import LightningModule, Trainer
from bytecheckpoint.integrations.lightning import ModelCheckpoint
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, _):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
checkpoints = ModelCheckpoint("run", save_last=True)
trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[checkpoints], enable_progress_bar=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 2)))
assert checkpoints.last_model_path
""",
    # Their own steps of continuous integration train with these (`make test-torchtitan test-ray`).
    "torchtitan": "from bytecheckpoint.integrations.torchtitan import CheckpointManager; CheckpointManager.Config()",
    "ray": "from bytecheckpoint.integrations.ray import CheckpointManager",
    "monitor": """
import subprocess
command = [sys.executable, "-m", "bytecheckpoint.cli.main", "monitor", "run", "--port", "0"]
round_trip("run/step_1")
monitor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
page = urllib.request.urlopen(monitor.stdout.readline().split()[0]).read()
monitor.terminate()
assert b"<html" in page.lower()
""",
    "prometheus": """
sends("prometheus://127.0.0.1:9465")
def page():
    try:
        return urllib.request.urlopen("http://127.0.0.1:9465/metrics").read()
    except OSError:
        return b""
wait_until(lambda: b"bytecheckpoint" in page())
""",
    "otlp": """
import http.server, threading
got = []
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        got.append(self.path)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
sends(f"otlp://127.0.0.1:{server.server_port}")
wait_until(lambda: "/v1/traces" in got)
""",
    "tensorboard": "sends(f'tensorboard://{os.getcwd()}/board'); wait_until(lambda: [*Path('board').rglob('events*')])",
    "wandb": "sends('wandb://project'); wait_until(lambda: [*Path('.').rglob('*.wandb')])",
    "mlflow": "sends(f'mlflow://{os.getcwd()}/mlflow.db'); wait_until(Path('mlflow.db').exists)",
}


def test_every_extra_has_a_program() -> None:
    assert PROGRAMS.keys() | ELSEWHERE == EXTRAS.keys()


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_alone_does_its_work(extra: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # All environments of a worker have one path, so that Python compiles torch for the first one only.
    folder = tmp_path_factory.getbasetemp() / "env"
    python = str(folder / "bin/python")
    pinned = f"constraints-{PINNED[extra]}.txt" if extra in PINNED else "constraints.txt"
    for command in (
        ["venv", "--clear", "--python", sys.executable, str(folder)],
        ["pip", "install", "--python", python, "--constraint", pinned, f".[{extra}]"],
    ):
        made = subprocess.run([UV, "--quiet", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
    compiled = str(folder.with_name("compiled"))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONPYCACHEPREFIX": compiled}
    with contextlib.ExitStack() as stack:
        if PROGRAMS[extra] == OBJECTS:
            (tmp_path / "s3").mkdir()
            s3 = versitygw(tmp_path / "s3")
            stack.callback(s3.server.stop)
            s3.make_bucket("bucket")
            environment |= s3.environment() | {"TEST_URL": "s3://bucket/run/step_1"}
        command = [python, "-c", HEAD + PROGRAMS[extra]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert not re.search("ModuleNotFoundError|ImportError", done.stderr), done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
