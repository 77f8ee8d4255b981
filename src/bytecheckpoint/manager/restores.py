"""Load steps of a run on all ranks, and let the ranks agree on the step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from bytecheckpoint.arguments import check_layout
from bytecheckpoint.collectives import Collective
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, UsageError, listed
from bytecheckpoint.frameworks.modules import as_modules
from bytecheckpoint.handles import LoadReport
from bytecheckpoint.loading import load
from bytecheckpoint.manager.run_folder import RunFolder, step_folder
from bytecheckpoint.options import LoadOptions
from bytecheckpoint.saving.steps import check_step
from bytecheckpoint.settings import settings
from bytecheckpoint.storage import resolve
from bytecheckpoint.tools.fingerprints import prove_loaded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Conversations", "Progress", "Reached", "Restored", "Restores", "check_facts"]

_log = logging.getLogger("bytecheckpoint")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Reached:
    """A boundary that the ranks have reached.

    Attributes:
        step: number of steps that are done.
        acts: requests of all ranks.
        due: True if a save is due.
    """

    step: int
    acts: Set[Any] = frozenset()
    due: bool = False


@dataclass
class Progress:
    """Progress of a run.

    Attributes:
        step: number of steps that are done.
        metrics: metrics of that step.
        metadata: facts about that step.
        preempted: True once the job is to stop.
        closed: True once the manager is closed.
        asked: boundary at which `should_save` was called last, until a save is asked for.
    """

    step: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    preempted: bool = False
    closed: bool = False
    asked: Reached | None = None

    def begin_at(self, step: int) -> None:
        """Continue from a step. What was due before is not any more."""
        self.step, self.asked = step, None

    def advance(self, step: object, metrics: object, metadata: object) -> int:
        """Reach a step with its metrics and facts; return its number.

        Raises:
            UsageError: the step is none, or behind the last one, or the metrics or facts have no names.
        """
        number = check_step(step)
        if number < self.step:
            raise UsageError(
                f"step {number} comes after step {self.step}: the steps of a run ascend, because the highest counts as the "
                f"newest and the rules delete the others; count on over epochs, or call restore(...) or go_back({number}) "
                "before if the run went back"
            )
        if not isinstance(metrics, Mapping | None):
            raise UsageError(f"metrics={metrics!r}: give names with numbers, such as {{'loss': 0.5}}")
        self.step, self.metrics, self.metadata = number, metrics or {}, check_facts(metadata)
        return number


def check_facts(metadata: object) -> Mapping[str, Any]:
    """Return the metadata of a program. Those without names, or with that of the manager's own facts, are refused."""
    if not isinstance(metadata, Mapping | None) or not all(isinstance(name, str) for name in metadata or ()):
        raise UsageError(f"metadata={metadata!r}: give names with plain values, such as {{'commit': '1a2b3c'}}")
    if "manager" in (metadata or ()):
        raise UsageError("metadata={'manager': ...}: the manager stores its own facts under this name; use another one")
    return metadata or {}


@dataclass(frozen=True)
class Origin:
    """A checkpoint from whose weights a run begins.

    Attributes:
        path: address of the checkpoint.
        layout: layout through which it is seen, as for `load`.
        states: names of the states that are loaded: those of modules.
    """

    path: str
    layout: Any
    states: Collection[str]

    @classmethod
    def of(cls, path: object, layout: object, states: Mapping[str, Any]) -> Origin | None:
        """Check the arguments of a manager; return None if it has no such checkpoint.

        Raises:
            UsageError: there is a layout without a checkpoint, or no state is made of modules.
        """
        if path is None:
            if layout is not None:
                raise UsageError("layout= says how start_from= is seen: give start_from, the path of a checkpoint")
            return None
        check_layout(layout)
        names = [name for name, value in states.items() if as_modules(name, value) is not None]
        if not names:
            raise UsageError(f"start_from={path!r} has weights for modules, and the states are {listed(list(states))}")
        return cls(resolve(path).url, layout, names)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Restored:
    """Result of a restore.

    Attributes:
        step: step that was loaded.
        path: address of its checkpoint.
        report: report of the load.
        skipped: newer steps that could not be loaded, with the reasons.
    """

    step: int
    path: str
    report: LoadReport
    skipped: Mapping[int, str] = field(default_factory=dict)


class Conversations:
    """Agreements of the ranks of a manager, one after the other.

    Args:
        collective: ranks of the run.
        tag: name of the manager, never used twice in one world.
    """

    def __init__(self, collective: Collective, tag: str) -> None:
        self.collective, self.tag, self._count = collective, tag, 0

    def begin(self, timeout: float | None = None) -> Agreement:
        """Return the next agreement; `timeout` is in seconds, by default as in the settings."""
        self._count += 1
        return Agreement(
            self.collective, f"{self.tag}/{self._count}", settings().timeout if timeout is None else timeout
        )

    def ask_rank_0(self, look: Callable[[], _T], kind: Any = Any, timeout: float | None = None) -> _T:
        """Return on all ranks the result of a function on rank 0; see `CheckpointManager.ask_rank_0`."""

        def find() -> Any:
            return look() if self.collective.rank == 0 else None

        found: _T = self.begin(timeout).agree("rank 0", find, lambda answers: answers[0], decisions=kind)
        return found


class Restores:
    """Loads steps and other checkpoints into the states of a run.

    Args:
        states: live objects, as for `load`.
        options: options of the loads.
        group: ranks that load together.
        folder: folder of the run.
        conversations: agreements of the ranks.
        origin: checkpoint from whose weights a run without steps begins.

    Attributes:
        last: result of the last restore; None if nothing was restored.
        count: number of steps that were loaded so far.
        prepare: function that gets the address of a checkpoint before the whole of it is loaded, on all ranks.
    """

    def __init__(
        self,
        states: MutableMapping[str, Any],
        options: LoadOptions,
        group: ProcessGroup | None,
        folder: RunFolder,
        conversations: Conversations,
        origin: Origin | None = None,
    ) -> None:
        self._origin = origin
        self._states, self._options, self._group = states, options, group
        self._folder, self._conversations = folder, conversations
        self._is_rank_0 = conversations.collective.rank == 0
        self.last: Restored | None = None
        self.count = 0
        self.prepare: Callable[[str], None] = lambda _: None

    def load(self, path: str, only: Collection[str] | None = None, **arguments: Any) -> LoadReport:
        """Load a checkpoint, or the states that `only` names, with arguments in place of the options."""
        if only is None:
            self.prepare(path)
        states = self._states if only is None else {name: self._states[name] for name in only}
        report = load(path, states, **{"process_group": self._group, **self._options.arguments(), **arguments})
        if self._is_rank_0:
            for note in report.notes:
                _log.warning("%s: %s", path, note)
        return report

    def load_step(self, step: int, skipped: Mapping[int, str] | None = None) -> Restored:
        """Load a step of the run.

        Args:
            step: step number.
            skipped: newer steps that could not be loaded, with the reasons.
        """
        path = step_folder(self._folder.url, step)
        report = self.load(path)
        if self._conversations.ask_rank_0(lambda: bool(settings().fingerprint), bool):
            self._prove(path)
        self.last = Restored(step, path, report, skipped or {})
        self.count += 1
        return self.last

    def _prove(self, path: str) -> None:
        """Compare what was loaded with the fingerprints of the save, and log the result."""
        if self._options.rename is not None:
            proven, why = 0, "the load renames tensors"
        else:
            proven, why = prove_loaded(path, self._states, self._options, self._group), "the save made no fingerprints"
        if self._is_rank_0:
            _log.info(
                "%s: %s", path, f"{proven} tensors are proven by fingerprints" if proven else f"not proven: {why}"
            )

    def load_latest(self) -> Restored | None:
        """Load the newest step that verifies; see `CheckpointManager.restore_latest`."""
        url, skipped = self._folder.url, dict[int, str]()
        # Another job may commit and delete steps meanwhile: list them again after each that is skipped.
        while candidates := [step for step in self._agree_on_steps() if step not in skipped]:
            step = candidates[-1]
            try:
                return self.load_step(step, skipped)
            except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                skipped[step] = str(error)
                if self._is_rank_0:
                    _log.warning("step %d cannot be loaded, trying an older one: %s", step, error)
        if skipped:
            raise CorruptCheckpointError(
                f"none of the {len(skipped)} steps in {url} can be loaded: "
                + "; ".join(f"step {step}: {why}" for step, why in skipped.items())
            )
        if self._is_rank_0:
            begins = "" if self._origin is None else f" from the weights of {self._origin.path}"
            _log.info("%s holds no committed step: the run begins%s", url, begins)
        self.last = None
        if self._origin is not None:
            self.load(self._origin.path, self._origin.states, layout=self._origin.layout)
        return None

    def _agree_on_steps(self) -> list[int]:
        """Return the committed steps that any rank sees, by age, because each machine has a hot tier of its own."""

        def look() -> list[tuple[bool, int]]:
            return self._folder.committed() if self._is_rank_0 or self._folder.machine_only else []

        def join(seen: list[list[tuple[bool, int]]]) -> list[int]:
            found = [entry for steps in seen for entry in steps]
            current = {step for is_current, step in found if is_current}
            return sorted({step for _, step in found}, key=lambda step: (step in current, step))

        agreement = self._conversations.begin()
        return agreement.agree("steps", look, join, reports=list[tuple[bool, int]], decisions=list[int])
