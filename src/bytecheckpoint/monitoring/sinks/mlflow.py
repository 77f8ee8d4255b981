"""Metrics as numbers of a run of MLflow."""

from __future__ import annotations

import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Run
from mlflow.tracking import fluent

from bytecheckpoint.monitoring.sinks.base import split_address
from bytecheckpoint.monitoring.sinks.scalars import PREFIX, ScalarSink

__all__ = ["MlflowSink"]


class MlflowSink(ScalarSink):
    """Writes into the run that the training has started, else into a run of its own in the experiment "bytecheckpoint".

    Args:
        address: for a run of its own: mlflow://host:port (mlflows:// for HTTPS); mlflow:///folder/mlflow.db is a file of
            SQLite; mlflow:// what MLFLOW_TRACKING_URI says. Credentials belong into MLflow's own variables.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        scheme, _, rest = address.partition("://")
        if not rest:
            self._store = None
        elif rest.startswith("/"):
            self._store = f"sqlite:///{rest}"
        else:
            self._store = f"{'https' if scheme == 'mlflows' else 'http'}://{split_address(address).netloc}"
        self._own: tuple[MlflowClient, str] | None = None

    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Log the numbers."""
        run = _users_run()
        client, identity = (MlflowClient(), run.info.run_id) if run is not None else self._own or self._start()
        moment = int(began * 1000)
        client.log_batch(identity, [Metric(name, value, moment, step or 0) for name, value in scalars.items()])

    def _start(self) -> tuple[MlflowClient, str]:
        client = MlflowClient(self._store)
        found = client.get_experiment_by_name(PREFIX)
        experiment = found.experiment_id if found is not None else client.create_experiment(PREFIX)
        run = client.create_run(experiment, start_time=int(time.time() * 1000))
        self._own = client, run.info.run_id
        return self._own

    def close(self) -> None:
        """End the run, if it is not the training's."""
        if self._own is not None:
            client, identity = self._own
            client.set_terminated(identity)


def _users_run() -> Run | None:
    """Return the run that any thread has started: `mlflow.active_run` knows of those of its own thread only."""
    return fluent._get_latest_active_run()
