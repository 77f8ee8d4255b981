"""Write numbers of an operation over training steps: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.sinks.base import Sink, split_address
from bytecheckpoint.monitoring.table import OperationRecord

__all__ = ["MlflowSink", "ScalarSink", "TensorBoardSink", "WandbSink"]

_NAME = "bytecheckpoint"
#: Training step of the numbers in W&B, as a number of its own.
_STEP = f"{_NAME}/step"


def _scalars(summary: OperationSummary) -> dict[str, float]:
    """Return the numbers of one operation by name, as "bytecheckpoint/save/seconds"."""
    values = {
        "seconds": summary.seconds,
        "blocking_seconds": summary.blocking_seconds,
        "bytes": summary.nbytes,
        "bytes_per_second": summary.bandwidth,
        "balance": summary.balance,
        "retries": summary.retries,
        "retry_seconds": summary.retry_seconds,
        "stragglers": len(summary.stragglers),
        "failed_ranks": len(summary.failures),
        "missing_ranks": len(summary.missing),
    }
    for phase in summary.phases:
        values[f"phase/{phase.name}/longest"] = phase.longest
        values[f"phase/{phase.name}/median"] = phase.median
    return {f"{_NAME}/{summary.kind}/{name}": float(value) for name, value in values.items()}


class ScalarSink(Sink):
    """Writes the numbers of each operation."""

    def deliver(self, record: OperationRecord, summary: OperationSummary) -> None:
        """Write the numbers of an operation."""
        self.write(_scalars(summary), summary.step, summary.began)

    @abstractmethod
    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Write numbers.

        Args:
            scalars: numbers by name.
            step: training step; None if unknown.
            began: beginning of the operation, in seconds since 1970.
        """


class TensorBoardSink(ScalarSink):
    """Writes an event file of its own into a folder. TensorBoard joins it with those of the training there.

    Args:
        address: tensorboard:///absolute/folder, or tensorboard://folder relative to the working directory.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        from torch.utils.tensorboard import SummaryWriter

        folder = address.partition("://")[2]
        if not folder:
            raise UsageError("setting metrics: write tensorboard:///folder")
        self._writer = SummaryWriter(folder, filename_suffix=".bytecheckpoint")

    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Append numbers to the event file."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step, began)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbSink(ScalarSink):
    """Logs into the run that the training has started, or else into an offline run of its own.

    The numbers have a step of their own, `bytecheckpoint/step`: a save ends when the training is steps ahead, and W&B takes
    no numbers for a step that is over.

    Args:
        address: wandb://project. W&B's own variables can also set project, folder and mode of a run of its own.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        import wandb

        self._wandb = wandb
        self._project = address.partition("://")[2].strip("/") or None
        self._own: Any = None
        self._prepared: Any = None  # run in which the step is defined

    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Log numbers."""
        current = self._wandb.run
        is_users = current is not None and current is not self._own
        run = current if is_users else self._own or self._start()
        if run is not self._prepared:
            run.define_metric(_STEP)
            run.define_metric(f"{_NAME}/*", step_metric=_STEP)
            self._prepared = run
        values = scalars if step is None else {**scalars, _STEP: step}
        # In the user's run they join the numbers that the training logs next: a commit would count as a training step.
        run.log(values, commit=not is_users)

    def _start(self) -> Any:
        settings = self._wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True
        )
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._own = self._wandb.init(project=self._project, mode=mode, settings=settings, reinit="create_new")
        return self._own

    def close(self) -> None:
        """End the run, unless it is the training's."""
        if self._own is not None:
            self._own.finish()


class MlflowSink(ScalarSink):
    """Logs into the run that the training has started, or else into a run of its own in the experiment "bytecheckpoint".

    Args:
        address: server of a run of its own: mlflow://host:port, or mlflows:// for HTTPS; mlflow:///folder/mlflow.db for a
            file of SQLite; mlflow:// for MLFLOW_TRACKING_URI. Credentials belong into MLflow's own variables.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        import mlflow
        import mlflow.entities
        from mlflow.tracking import fluent

        self._mlflow, self._fluent = mlflow, fluent
        scheme, _, rest = address.partition("://")
        if not rest:
            self._store = None
        elif rest.startswith("/"):
            self._store = f"sqlite:///{rest}"
        else:
            self._store = f"{'https' if scheme == 'mlflows' else 'http'}://{split_address(address).netloc}"
        self._own: tuple[Any, str] | None = None

    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Log numbers."""
        run = self._fluent._get_latest_active_run()  # `mlflow.active_run` knows the runs of its own thread only
        if run is not None:
            client, identity = self._mlflow.MlflowClient(), run.info.run_id
        else:
            client, identity = self._own or self._start()
        moment, metric = int(began * 1000), self._mlflow.entities.Metric
        client.log_batch(identity, [metric(name, value, moment, step or 0) for name, value in scalars.items()])

    def _start(self) -> tuple[Any, str]:
        client = self._mlflow.MlflowClient(self._store)
        found = client.get_experiment_by_name(_NAME)
        experiment = found.experiment_id if found is not None else client.create_experiment(_NAME)
        run = client.create_run(experiment, start_time=int(time.time() * 1000))
        self._own = client, run.info.run_id
        return self._own

    def close(self) -> None:
        """End the run, unless it is the training's."""
        if self._own is not None:
            client, identity = self._own
            client.set_terminated(identity)
