"""Define the rules of alerts, and read them from a file."""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bytecheckpoint.errors import UsageError
from bytecheckpoint.monitoring.alert import Alert
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, rank_text, ranks_text, seconds_text, size_text
from bytecheckpoint.monitoring.progress import OperationProgress

__all__ = ["OFF", "AlertRule", "OverdueRule", "StorageRule", "UnflushedRule", "load_rules", "rules_in_force"]

_log = logging.getLogger("bytecheckpoint")
#: Value of the setting `alerts` for no rules.
OFF = "off"
#: Finite numbers: TOML also has inf and nan.
_Number = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
#: Numbers of a total and of a summary that may have a threshold.
_TOTALS = ("count", "seconds", "nbytes")
_METRICS = ("seconds", "blocking_seconds", "bandwidth", "nbytes", "balance", "retries", "retry_seconds")
#: Error for damaged bytes.
_CORRUPT = "CorruptCheckpointError"
#: Errors without an alert: a first start finds no checkpoint, and the user knows of a Ctrl-C.
_EXPECTED = ("CheckpointNotFoundError:", "KeyboardInterrupt:")
_TIER = "tier+"


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """A rule that makes alerts.

    Attributes:
        name: name of the rule in alerts; "" for its kind.
        severity: severity of its alerts.
        operations: kinds of operations that the rule applies to.
        repeat: seconds within which the same alert (rule, rank and phase) is raised once.
    """

    name: str = ""
    severity: Literal["info", "warning", "critical"] = "warning"
    operations: Literal["save", "load", "all"] = "all"
    repeat: _Number = 3600.0

    @property
    def title(self) -> str:
        """Name of the rule in its alerts."""
        return self.name or str(self.__struct_config__.tag)

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        """Yield the alerts about an operation that has ended.

        Args:
            now: summary of the operation.
            before: earlier operations of the same kind, run and world size that succeeded, the oldest first.
        """
        return iter(())

    def alert(self, text: str, about: OperationSummary, **more: Any) -> Alert:
        """Return an alert about an operation."""
        facts: dict[str, Any] = {
            "path": about.path, "operation": about.id, "step": about.step, "time": about.began
        } | more  # fmt: skip
        return Alert(rule=self.title, severity=self.severity, text=f"{about.name}: {text}", **facts)


class ThresholdRule(AlertRule, frozen=True, kw_only=True, tag="threshold"):
    """Alerts if a metric is above or below a limit."""

    metric: str
    above: _Number | None = None
    below: _Number | None = None

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError("a threshold has either `above` or `below`")
        first, *more = self.metric.split(".")
        known = self.metric in _METRICS or (first == "phase" and len(more) == 1)
        if not known and not (first == "total" and len(more) == 2 and more[1] in _TOTALS):
            raise ValueError(f"no metric is called {self.metric!r}")

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        value = _metric(now, self.metric)
        if value is None:
            return
        limit = self.above if self.above is not None else self.below
        assert limit is not None
        if value > limit if self.above is not None else value < limit:
            side = "above" if self.above is not None else "below"
            yield self.alert(f"{self.metric} is {value:g}, {side} {limit:g}", now, value=value, limit=limit)


class StragglerRule(AlertRule, frozen=True, kw_only=True, tag="straggler"):
    """Alerts if a rank is much slower than the others in a phase."""

    ratio: _Positive = 2.0
    seconds: _Number = 2.0

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        by_phase: dict[str, list[Any]] = {}
        for found in now.stragglers:
            limit = max(self.ratio * found.median, found.median + self.seconds)
            if found.seconds > limit:
                by_phase.setdefault(found.phase, []).append((found, limit))
        for phase, all_found in by_phase.items():
            slowest, limit = all_found[0]
            others = f", {ranks_text([found.rank for found, _ in all_found[1:]])} too" if len(all_found) > 1 else ""
            load = f"; it has {slowest.load:.1f} times the mean bytes" if slowest.load > 1.5 else ""
            yield self.alert(
                f"{rank_text(slowest.rank, slowest.host)} takes {seconds_text(slowest.seconds)} for {phase}{others}; "
                f"the median is {seconds_text(slowest.median)}{load}",
                now, rank=slowest.rank, host=slowest.host, phase=phase, value=slowest.seconds, limit=limit,
            )  # fmt: skip


class BandwidthRule(AlertRule, frozen=True, kw_only=True, tag="bandwidth"):
    """Alerts if all ranks together are much slower than before."""

    fraction: _Positive = 0.4
    after: int = 5
    seconds: _Number = 2.0
    nbytes: _Number = 64 << 20

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        known = [summary.bandwidth for summary in before if summary.bandwidth]
        if now.failed or not now.bandwidth or now.nbytes < self.nbytes or len(known) < max(self.after, 1):
            return
        usual = statistics.median(known)
        limit = self.fraction * usual
        lost = now.nbytes / now.bandwidth - now.nbytes / usual
        by_stragglers = max(
            (slow.seconds - slow.median for slow in now.stragglers), default=0.0
        )  # another rule reports these
        if now.bandwidth < limit and lost - by_stragglers > self.seconds:
            yield self.alert(
                f"{bandwidth_text(now.bandwidth)} of all ranks, {now.bandwidth / usual:.0%} of the usual "
                f"{bandwidth_text(usual)}, which costs {seconds_text(lost)}",
                now, phase="read" if now.kind == "load" else "write", value=now.bandwidth, limit=limit,
            )  # fmt: skip


class RetriesRule(AlertRule, frozen=True, kw_only=True, tag="retries"):
    """Alerts if requests are repeated."""

    per_rank: _Positive = 3.0
    seconds: _Number = 10.0

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        rank, longest = now.most_retries
        if now.retries > self.per_rank * now.world_size or longest > self.seconds:
            yield self.alert(
                f"{now.retries} requests were repeated, {seconds_text(now.retry_seconds)} were waited before them, most "
                f"on rank {rank}: {seconds_text(longest)}",
                now, rank=rank, value=float(now.retries), limit=self.per_rank * now.world_size,
            )  # fmt: skip


class MissingRule(AlertRule, frozen=True, kw_only=True, tag="missing"):
    """Alerts if ranks have reported nothing."""

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        if now.missing and not now.cut_off:
            text = f"{ranks_text(now.missing)} reported nothing: gone, hanging, or cut off"
            yield self.alert(text, now, rank=now.missing[0], value=float(len(now.missing)), limit=0.0)


class FailedRule(AlertRule, frozen=True, kw_only=True, tag="failed"):
    """Alerts if an operation failed."""

    corrupt = False

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        if not now.failures or now.first_failure.error.startswith(_EXPECTED):
            return
        first = now.first_failure
        if (_CORRUPT in first.error) == self.corrupt:
            stage = f" in {first.stage}" if first.stage else ""
            yield self.alert(
                f"failed{stage} on rank {first.rank}: {first.error}", now, rank=first.rank, phase=first.stage
            )


class VerificationRule(FailedRule, frozen=True, kw_only=True, tag="verification"):
    """Alerts if stored bytes do not match their checksums."""

    corrupt = True


class StorageRule(AlertRule, frozen=True, kw_only=True, tag="storage"):
    """Alerts if the storage is nearly full."""

    saves: _Positive = 3.0

    def check_room(self, now: OperationSummary, lacking: Callable[[str, int], str]) -> Iterator[Alert]:
        """Yield the alerts about the storage of a save.

        Args:
            now: summary of the save.
            lacking: function of a path and a number of bytes; returns why the storage cannot take them, "" if it can.
        """
        wanted = int(self.saves * now.nbytes)
        if now.kind == "save" and wanted and (why := lacking(now.path, wanted)):
            text = f"the storage is nearly full; a save takes {size_text(now.nbytes)}: {why}"
            yield self.alert(text, now, limit=float(wanted))


class OverdueRule(AlertRule, frozen=True, kw_only=True, tag="overdue"):
    """Alerts if no checkpoint comes for long."""

    factor: _Positive = 3.0
    seconds: _Number = 600.0

    def limit(self, saves: Sequence[OperationSummary]) -> float | None:
        """Return the seconds from the beginning of the last save until the next is overdue; None after too few saves."""
        if len(saves) < 4:
            return None
        begins = [save.began for save in saves]
        usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(begins))
        return max(self.factor * usual, self.seconds) + saves[-1].seconds

    def check_time(self, saves: Sequence[OperationSummary], time: float) -> Iterator[Alert]:
        """Yield the alerts at a time: now, or the beginning of the next save."""
        limit = self.limit(saves)
        if limit is not None and time - saves[-1].began > limit:
            waited = time - saves[-1].began
            text = f"is the newest checkpoint, and {seconds_text(waited)} old; saves were more frequent before"
            yield self.alert(text, saves[-1], value=waited, limit=limit, time=time)


class UnflushedRule(AlertRule, frozen=True, kw_only=True, tag="unflushed"):
    """Alerts if a step of a tier does not become durable."""

    seconds: _Number = 1800.0

    def check(self, now: OperationSummary, before: Sequence[OperationSummary]) -> Iterator[Alert]:
        """Yield the alerts about a save that became durable late."""
        if now.path.startswith(_TIER) and now.seconds > self.seconds:
            yield self.alert(
                f"was durable after {seconds_text(now.seconds)} only", now, phase="flush", value=now.seconds,
                limit=self.seconds,
            )  # fmt: skip

    def check_running(self, running: OperationProgress) -> Iterator[Alert]:
        """Yield the alerts about a running operation."""
        waited = running.time - running.began
        if running.kind == "save" and running.path.startswith(_TIER) and not running.ended and waited > self.seconds:
            text = f"save to {running.path}: in memory only, not in the durable storage after {seconds_text(waited)}"
            yield Alert(
                rule=self.title, severity=self.severity, text=text, path=running.path,
                operation=running.operation, step=running.step, phase="flush", value=waited, limit=self.seconds,
                time=running.time,
            )  # fmt: skip


AnyRule = (
    ThresholdRule | StragglerRule | BandwidthRule | RetriesRule | MissingRule | FailedRule | VerificationRule | StorageRule
    | OverdueRule | UnflushedRule
)  # fmt: skip


class RuleSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of rules."""

    rule: list[AnyRule] = []


def load_rules(path: str = "") -> list[AlertRule]:
    """Read rules from a TOML file.

    Args:
        path: path of the file; "" for the built-in rules.

    Raises:
        UsageError: the file cannot be read, or a rule is wrong.
    """
    try:
        text = Path(path).read_bytes() if path else resources.files(__package__).joinpath("defaults.toml").read_bytes()
        return [*msgspec.toml.decode(text, type=RuleSet).rule]
    except OSError as error:
        raise UsageError(f"setting alerts: {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"setting alerts: {path}: {error}") from error


@functools.cache
def rules_in_force(setting: str) -> Sequence[AlertRule]:
    """Return the rules of the setting `alerts`; the built-in ones, with a warning, if its file is wrong."""
    if setting == OFF:
        return ()
    try:
        return load_rules(setting)
    except UsageError as error:
        _log.warning("%s; the built-in rules hold", error)
        return load_rules()


def _metric(summary: OperationSummary, name: str) -> float | None:
    """Return a number of a summary by its name in thresholds; None if the operation lacks it."""
    first, *more = name.split(".")
    if first == "phase":
        return next((phase.longest for phase in summary.phases if phase.name == more[0]), None)
    if first == "total":
        values = summary.totals.get(more[0])
        return None if values is None else float(values[_TOTALS.index(more[1])])
    return float(getattr(summary, name))
