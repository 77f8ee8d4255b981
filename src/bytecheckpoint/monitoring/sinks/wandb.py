"""Metrics as numbers of a run of Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

import wandb

from bytecheckpoint.monitoring.sinks.scalars import PREFIX, ScalarSink

__all__ = ["WandbSink"]

_STEP = f"{PREFIX}/step"


class WandbSink(ScalarSink):
    """Writes into the run that the training has started, else into an offline run of its own.

    The numbers have a step of their own, `bytecheckpoint/step`: a save ends when the training is steps ahead, and W&B takes
    no numbers for a step that is over.

    Args:
        address: wandb://project. Project, folder and mode of a run of its own can be set by W&B's own variables too.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._project = address.partition("://")[2].strip("/") or None
        self._own: Any = None
        self._defined: Any = None  # the run that knows of our step

    def write(self, scalars: dict[str, float], step: int | None, began: float) -> None:
        """Log the numbers."""
        users = wandb.run is not None and wandb.run is not self._own
        run = wandb.run if users else self._own or self._start()
        if run is not self._defined:
            run.define_metric(_STEP)
            run.define_metric(f"{PREFIX}/*", step_metric=_STEP)
            self._defined = run
        values = scalars if step is None else {**scalars, _STEP: step}
        # In the user's run they go with the numbers that the training logs next: a commit would count as a training step.
        run.log(values, commit=not users)

    def _start(self) -> Any:
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True
        )
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._own = wandb.init(project=self._project, mode=mode, settings=settings, reinit="create_new")
        return self._own

    def close(self) -> None:
        """End the run, if it is not the training's."""
        if self._own is not None:
            self._own.finish()
