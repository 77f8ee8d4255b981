"""Save a run in the workers of Ray Train (v2), and report its commits to Ray."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from bytecheckpoint.errors import UsageError
from bytecheckpoint.handles import SaveHandle
from bytecheckpoint.manager import CheckpointManager, Restored, SaveOptions
from bytecheckpoint.manager.boundary import Boundaries, Committed
from bytecheckpoint.manager.rules import finite_metrics
from bytecheckpoint.representation.names import CATALOG_NAME
from bytecheckpoint.settings import settings
from bytecheckpoint.world import world_of

__all__ = ["RayCheckpointManager"]

#: Type of pyarrow's file system -> scheme of its addresses.
_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
#: Arguments of `CheckpointManager` that are refused -> reason.
_NOT_FOR_RAY = {
    "keep": "which fails to restore a run whose reported steps are gone: let Ray delete, by "
    "RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))",
    "just_in_time": "whose workers run in a thread, where SIGTERM cannot be handled: save more often, or use torchrun",
}


class RayCheckpointManager(CheckpointManager):
    """Saves the run of a training function into Ray's folder of the run, and reports each step to Ray after its commit.

    All workers make it in the training function, with the same arguments. Nothing is copied: ranks write to
    `storage_path` themselves, and `ray.train.report` gets the path. Ray keeps `CheckpointConfig(num_to_keep=...)` steps.

    Args:
        states: live objects, as for `CheckpointManager`.
        root: URL of the run's folder (`storage_path` and the name of the run), for file systems that Ray reaches in
            another way than this package.
        **options: arguments of `CheckpointManager` but for `keep` and `just_in_time`.

    Raises:
        UsageError: an argument is out of its range, or the URL of the run's folder is not known.
    """

    def __init__(
        self,
        states: MutableMapping[str, Any],
        *,
        root: str | None = None,
        **options: Any,
    ) -> None:
        for name, why in _NOT_FOR_RAY.items():
            if options.get(name):
                raise UsageError(f"{name}= is not for Ray, {why}")
        self._ray = _ray_train()
        storage = self._ray.get_context().get_storage()
        super().__init__(_address(storage) if root is None else root, states, **options)
        self._filesystem, self._ray_folder = storage.storage_filesystem, storage.experiment_fs_path
        self._waits = not (options.get("save_options") or SaveOptions()).async_checkpoint
        self._unreported: dict[int, tuple[SaveHandle, dict[str, float]]] = {}
        self._known: set[str] | None = None  # paths that Ray knows
        self._boundary = 0
        number = world_of(self._collective).calls.begin("manager", self.root, settings().timeout)
        self._commits = Boundaries(self._collective, f"ray/{number}/commits", settings().timeout)
        self._stack.enter_context(self._commits)

    def pin(self, step: int) -> None:
        """Refuse pins, which Ray does not know.

        Raises:
            UsageError: always.
        """
        raise UsageError("Ray deletes steps, and knows no pins: copy the step, or let CheckpointConfig keep more")

    def maybe_save(
        self, step: int, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle | None:
        """Save as `CheckpointManager.maybe_save`, and report the steps that were committed meanwhile."""
        handle = super().maybe_save(step, metrics, metadata)
        self._report_commits()
        return handle

    def save(
        self, step: int, metrics: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> SaveHandle | None:
        """Save as `CheckpointManager.save`, and report the steps that were committed meanwhile."""
        handle = super().save(step, metrics, metadata)
        self._report_commits()
        return handle

    def close(self) -> None:
        """Close as `CheckpointManager.close`, and report the steps that are committed by then."""
        super().close()
        for step in sorted(self._unreported):
            handle, _ = self._unreported[step]
            if Future.exception(handle.committed) is None:
                self._report_saved(step)

    def _begin(self, restored: Restored | None) -> Restored | None:
        super()._begin(restored)
        self._report_restored()
        return restored

    def _save(self, overlap: str = "wait") -> SaveHandle | None:
        handle = super()._save(overlap)
        if handle is not None:
            self._unreported[self.step] = handle, finite_metrics(self._progress.metrics, self.step)
            if self._collective.rank == 0:
                handle.committed.add_done_callback(partial(self._on_commit, self.step))
        return handle

    def _on_commit(self, step: int, done: Future[Any]) -> None:
        """Have all ranks report a step at one boundary. Runs in a thread of the save."""
        if Future.exception(done) is None:
            self._commits.request(Committed(step))

    def _report_commits(self) -> None:
        """Report the steps that all ranks report at this boundary: `report` waits for all workers."""
        self._boundary += 1
        found = {act.step for act in self._commits.reach(self._boundary) if isinstance(act, Committed)}
        if self._waits:
            found |= {step for step, (handle, _) in self._unreported.items() if handle.done()}
        for step in sorted(found & self._unreported.keys()):
            self._report_saved(step)

    def _report_saved(self, step: int) -> None:
        handle, metrics = self._unreported.pop(step)
        handle.result()  # rank 0 knows of the commit
        self._report(step, metrics)

    def _report_restored(self) -> None:
        """Report the steps up to the restored one that are newer than all steps that Ray knows.

        Older ones are left out: Ray takes the step that was reported last for the newest, and deletes the others first.
        """
        if self.restored is None:
            return
        self._known_paths()  # of the same moment on all ranks
        restored = self.restored.step
        for step, metrics in self.ask_rank_0(lambda: self._unknown(restored)):
            self._report(step, metrics)

    def _unknown(self, restored: int) -> list[tuple[int, Mapping[str, float]]]:
        """Return the committed steps up to `restored` that are newer than all steps that Ray knows, with their metrics."""
        steps = [info for info in self.steps() if info.step <= restored and not info.superseded]
        newest = max((info.step for info in steps if self._path(info.step) in self._known_paths()), default=-1)
        return [(info.step, info.metrics) for info in steps if info.step > newest]

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a committed step. All ranks call it at the same boundary."""
        path, known = self._path(step), self._known_paths()
        checkpoint = None
        if path not in known:  # a second report of a path would make Ray delete it for the first one's sake
            checkpoint = self._ray.Checkpoint(path, filesystem=self._filesystem)
            catalog = self._filesystem.get_file_info(f"{path}/{CATALOG_NAME}")
            if not catalog.is_file:
                raise UsageError(f"{self.root} is not where Ray sees {self._ray_folder}: pass the URL of that as root=")
            known.add(path)
        self._ray.report(
            {"step": step, **metrics},
            checkpoint=checkpoint,
            checkpoint_upload_mode=self._ray.CheckpointUploadMode.NO_UPLOAD,
        )

    def _path(self, step: int) -> str:
        return f"{self._ray_folder}/step_{step:08d}"

    def _known_paths(self) -> set[str]:
        if self._known is None:
            mode = self._ray.CheckpointConsistencyMode.COMMITTED
            found = self._ray.get_all_reported_checkpoints(consistency_mode=mode)
            self._known = {reported.checkpoint.path for reported in found}
        return self._known


def _ray_train() -> Any:
    """Return the module ray.train.

    Raises:
        UsageError: the module is not that of Ray Train v2.
    """
    import ray.train

    if not hasattr(ray.train, "CheckpointUploadMode"):
        raise UsageError(
            f"Ray {ray.__version__} reports no checkpoints without an upload: use Ray Train v2 (RAY_TRAIN_V2_ENABLED=1)"
        )
    return ray.train


def _address(storage: Any) -> str:
    """Return the address of the run's folder.

    Raises:
        UsageError: the address is not known.
    """
    kind = storage.storage_filesystem.type_name
    if storage.custom_fs_provided or kind not in _SCHEMES:
        raise UsageError(
            f"the run is in Ray's file system {kind!r} at {storage.experiment_fs_path}: pass the URL of that as root="
        )
    return f"{_SCHEMES[kind]}{storage.experiment_fs_path}"
