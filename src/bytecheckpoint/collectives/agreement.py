"""Agreement among ranks: every rank reports or fails, rank 0 decides, every rank receives the decision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from bytecheckpoint.collectives.base import Collective
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.errors import CheckpointError, PeerLostError
from bytecheckpoint.failures import Failure

__all__ = ["Agreement"]

_Report = TypeVar("_Report")
_Decision = TypeVar("_Decision")


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """The message of one rank to rank 0.

    Attributes:
        failure: failure of the rank, or of the rank that has stopped it; None when it can continue.
        payload: report of the rank as msgpack, empty when it failed.
    """

    failure: Failure | None = None
    payload: bytes = b""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The message of rank 0 to one rank.

    Attributes:
        failure: failure that ends this step, None when all ranks continue.
        payload: the decision as msgpack, empty after a failure.
    """

    failure: Failure | None = None
    payload: bytes = b""


_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_decoders_lock = threading.Lock()


def _decode(data: bytes, kind: Any) -> Any:
    """Decode a message of type `kind`; raise `PeerLostError` if it is none.

    The lock matters: msgspec (0.22) crashes if two threads use a type for the first time at once.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _decoders_lock:
            decoder = _decoders.setdefault(kind, msgspec.msgpack.Decoder(kind))
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PeerLostError(f"another rank sent what is not a message of this version: {error}") from error


class Agreement:
    """One rank's part in several steps of all ranks. Every rank makes the same calls in the same order.

    Args:
        collective: the ranks.
        tag: name of the steps, equal on all ranks, never used twice in one world.
        timeout: seconds that one step may take.
        urgent: error classes whose failures every rank raises in place of all others, also in place of its own. The caller
            can then act on them on all ranks alike.
        stop: broadcast of a failure, for ranks that still work.
    """

    def __init__(
        self,
        collective: Collective,
        tag: str,
        timeout: float,
        *,
        urgent: tuple[type[CheckpointError], ...] = (),
        stop: StopSignal | None = None,
    ) -> None:
        self.collective = collective
        self.rank = collective.rank
        self.tag = tag
        self.timeout = timeout
        self._urgent = urgent
        self._stop = stop

    def part(self, tag: str) -> Agreement:
        """Return an agreement for steps inside of one of these steps, which the same failures end."""
        return Agreement(self.collective, f"{self.tag}/{tag}", self.timeout, urgent=self._urgent, stop=self._stop)

    def agree(
        self,
        step: str,
        work: Callable[[], _Report],
        decide: Callable[[list[_Report]], _Decision],
        *,
        reports: Any = Any,
        decisions: Any = Any,
    ) -> _Decision:
        """Run `work` on every rank, let rank 0 decide upon all reports, return the decision on every rank.

        Args:
            step: unique name of the step.
            work: function that makes this rank's report, which msgpack can encode. Its error is this rank's failure.
            decide: function of the reports, in order of rank. Runs on rank 0 only, and only when no rank failed.
            reports: type of a report, for decoding.
            decisions: type of the decision, for decoding.

        Raises:
            CheckpointError: the first failure of any rank or of `decide`. A rank that failed itself raises its own,
                unless the failure is urgent.
            CheckpointTimeoutError, PeerLostError: not every rank reported in time.
        """
        return self.agree_each(
            step, work, lambda gathered: [decide(gathered)] * len(gathered), reports=reports, decisions=decisions
        )

    def agree_each(
        self,
        step: str,
        work: Callable[[], _Report],
        decide: Callable[[list[_Report]], Sequence[_Decision]],
        *,
        reports: Any = Any,
        decisions: Any = Any,
    ) -> _Decision:
        """Run `work` on every rank, let rank 0 make one decision per rank, return its decision on every rank.

        Arguments and errors are those of `agree`. A decision object for several ranks is encoded once.
        """
        if self.collective.world_size == 1:
            return decide([work()])[0]
        own: BaseException | None = None
        try:
            report = RankReport(payload=msgspec.msgpack.encode(work()))
        except BaseException as error:  # noqa: BLE001  reported to rank 0, then raised
            own, report = error, RankReport(self._failure(error))

        def answer(messages: list[bytes]) -> Sequence[bytes]:
            return self._answer(messages, decide, reports)

        try:
            message = self.collective.gather_scatter(
                f"{self.tag}/{step}", msgspec.msgpack.encode(report), answer, timeout=self.timeout
            )
        except CheckpointError:
            if own is not None:
                raise own from None
            raise
        decision = _decode(message, Decision)
        stopped = report.failure is not None and report.failure.rank != self.rank
        if decision.failure is not None and (own is None or stopped or self._is_urgent(decision.failure)):
            raise decision.failure.as_error() from own
        if own is not None:
            raise own
        result: _Decision = _decode(decision.payload, decisions)
        return result

    def _failure(self, error: BaseException) -> Failure:
        """Return the failure to report for an error of this rank: its own, or that of another rank that led to it."""
        failure = Failure.of(error, rank=self.rank)
        if self._stop is not None:
            first = self._stop.cancel.failure
            if first is not None and isinstance(error, CheckpointError) and not self._is_urgent(failure):
                return first
            self._stop.fail(failure)
        return failure

    def _is_urgent(self, failure: Failure) -> bool:
        return issubclass(failure.error_class, self._urgent)

    def _answer(
        self, messages: list[bytes], decide: Callable[[list[_Report]], Sequence[_Decision]], reports: Any
    ) -> list[bytes]:
        """Make rank 0's answer to every rank. Runs on rank 0."""
        received = [_decode(message, RankReport) for message in messages]
        failures = [report.failure for report in received if report.failure is not None]
        # The sort is stable: among equally urgent failures the lowest rank's comes first.
        failures.sort(key=lambda failure: not self._is_urgent(failure))
        if failures:
            return [msgspec.msgpack.encode(Decision(failures[0]))] * len(received)
        try:
            decisions = decide([_decode(report.payload, reports) for report in received])
            distinct = {id(decision): decision for decision in decisions}
            encoded = {
                key: msgspec.msgpack.encode(Decision(payload=msgspec.msgpack.encode(decision)))
                for key, decision in distinct.items()
            }
            return [encoded[id(decision)] for decision in decisions]
        except Exception as error:  # noqa: BLE001  raised on every rank
            return [msgspec.msgpack.encode(Decision(Failure.of(error, rank=0)))] * len(received)
