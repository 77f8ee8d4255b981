"""The loader that SGLang calls in each process of an engine: it opens a checkpoint of any layout and fills the model."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.model_loader.loader import DefaultModelLoader

from bytecheckpoint.errors import UsageError
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.integrations.engines.checkpoints import EngineCheckpoints, EngineOptions, check_loaded
from bytecheckpoint.integrations.engines.following import FollowedWeights
from bytecheckpoint.integrations.engines.lazy_weights import WantedWeight
from bytecheckpoint.layouts.layout import Layout
from bytecheckpoint.opening import Checkpoint
from bytecheckpoint.publishing import FollowReport

__all__ = ["SGLangLoader"]

_log = logging.getLogger("bytecheckpoint")


@dataclass
class _Served:
    """The memory that the loaders of one model share: SGLang makes another loader for each update.

    Attributes:
        options: options of the engine, which SGLang gives the first loader only.
        model: path of the model, with which the engine began.
        tensors: shapes of the checkpoint's tensors.
        path: checkpoint whose weights the model has, "" before the first ones.
        failed: True if an update failed after it began to replace weights; SGLang then wants the former ones.
        followed: weights that follow a publisher.
    """

    options: EngineOptions
    model: str
    tensors: dict[str, tuple[int, ...]] | None = None
    path: str = ""
    failed: bool = False
    followed: FollowedWeights | None = None


@dataclass
class _Opened:
    """A checkpoint whose weights are being loaded.

    Attributes:
        served: memory that the loaders of the model share.
        path: address of the checkpoint.
        checkpoint: the checkpoint.
        layouts: layouts through which it is seen.
        again: True if SGLang wants the weights back that the model had before an update.
        wanted: parts that the model has copied, to be read together.
        direct: names of tensors of which the model has read parts by other operations.
    """

    served: _Served
    path: str
    checkpoint: Checkpoint
    layouts: Sequence[Layout] | None
    again: bool
    wanted: dict[str, WantedWeight] = field(default_factory=dict)
    direct: set[str] = field(default_factory=set)


class SGLangLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights of a checkpoint, or of the newest step of a run, into a model of SGLang.

    `--model-loader-extra-config` takes a JSON object with `EngineOptions`. With `follow`, each rank keeps its part of the
    weights in host memory too, and an update reads only what changed.

    The ranks of the engine read each byte that any of them wants once, and send each other their parts. The model's
    attribute `bytecheckpoint_report` is the `LoadReport`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        plain = copy.copy(load_config)
        plain.model_loader_extra_config = {}  # the options here are none of those of files
        super().__init__(plain)
        self._options = EngineOptions.of(load_config.model_loader_extra_config or {})
        self._opened: _Opened | None = None

    def _get_weights_iterator(self, source: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Open the checkpoint of a source, and return its weights. SGLang keeps the old ones if this raises."""
        config = source.model_config
        if config is None:  # further files that a model names by itself
            return iter(super()._get_weights_iterator(source, **options))
        served: _Served = vars(config).setdefault("_bytecheckpoint", _Served(self._options, source.model_or_path))
        place = source.model_or_path
        root = served.options.checkpoint or served.model
        if served.options.follow and place not in {served.model, root}:
            raise UsageError(f"this engine follows the versions in {root}: update its weights from there")
        again, served.failed = served.failed, False
        if again and not served.options.follow:
            place = served.path
        elif place == served.model:
            place = root
        checkpoints = EngineCheckpoints(served.options, get_world_group())
        path = checkpoints.path(place)
        checkpoint, layouts = checkpoints.opened(path, config.hf_text_config)
        checkpoints.check_same(checkpoint, served.tensors)
        self._opened = opened = _Opened(served, path, checkpoint, layouts, again)
        return checkpoints.weights(checkpoint, opened.wanted, direct=opened.direct)

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: torch.device) -> None:
        """Load weights into a model: note what is copied where, and read all of it."""
        weights = iter(weights)
        first = [next(weights)]  # which opens the checkpoint
        opened = self._opened
        assert opened is not None
        served, checkpoints = opened.served, EngineCheckpoints(opened.served.options, get_world_group())
        try:
            with opened.checkpoint:
                served.tensors = checkpoints.shapes(opened.checkpoint)
                self.load_weights_only(model, itertools.chain(first, weights), target_device)
                _check_filled(opened, model)
            model.bytecheckpoint_weights = checkpoints.held(model, opened.wanted, opened.direct)
            model.bytecheckpoint_report = report = _filled(opened, checkpoints)
            if not opened.again:
                path = served.followed.path if served.followed else opened.path
                checkpoints.prove(path, model, opened.layouts)
        except BaseException:
            served.failed = bool(served.path)
            raise
        _log.info("weights of %s: this rank read %d bytes", opened.path, report.bytes_read if report else 0)
        served.path = opened.path
        self.postprocess_weights(model, target_device)


def _filled(opened: _Opened, checkpoints: EngineCheckpoints) -> LoadReport | FollowReport | None:
    """Read what the model has copied, or what has changed of it."""
    served = opened.served
    if not served.options.follow:
        return checkpoints.fill(opened.path, opened.wanted, opened.layouts)
    if opened.direct:
        raise UsageError(
            f"follow=true is for models that copy their weights: this one computes with {min(opened.direct)}"
        )
    if served.followed is None:
        root = served.options.checkpoint or served.model
        served.followed = checkpoints.followed(root, opened.checkpoint, opened.layouts, opened.wanted)
    report = None if opened.again else served.followed.update()
    served.followed.fill(opened.wanted)
    return report


def _check_filled(opened: _Opened, model: Any) -> None:
    """Refuse a model that has parameters of which nothing was copied: SGLang itself does not look."""
    if getattr(model, "quant_config", None) is not None or opened.direct:
        return  # parameters may be made of weights that were read by other operations
    memory = {m.untyped_storage().data_ptr() for one in opened.wanted.values() for m in one.boxes.values()}
    memory |= {m.untyped_storage().data_ptr() for one in opened.wanted.values() for m, _ in one.copies}
    filled = {name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() in memory}
    check_loaded(opened.path, model, filled)
