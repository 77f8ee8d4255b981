"""Agreement: reports, decisions, and whose failure is raised where."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bytecheckpoint.collectives import Collective, SingleProcess, ThreadWorld
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, StorageError, UsageError
from tests.support.ranks import attempt


def outcomes(size: int, conversation: Any) -> list[Any]:
    """What each rank of a world returned or raised."""

    def body(collective: Collective) -> Any:
        return attempt(conversation, Agreement(collective, "test", 20.0, urgent=(CorruptCheckpointError,)))

    return ThreadWorld(size).run(body)


def test_every_rank_hears_the_decision() -> None:
    assert outcomes(3, lambda a: a.agree("sum", lambda: a.rank, sum)) == [3, 3, 3]


def test_one_decision_per_rank() -> None:
    def double(reports: list[int]) -> list[int]:
        return [2 * report for report in reports]

    assert outcomes(3, lambda a: a.agree_each("double", lambda: a.rank, double)) == [0, 2, 4]


def test_a_decision_for_several_ranks_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the work of rank 0 grows with the square of the number of ranks."""
    encoded: list[Any] = []
    encode = msgspec.msgpack.encode

    def counting(value: Any) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr(msgspec.msgpack, "encode", counting)
    even, odd = {"odd": False}, {"odd": True}

    def decide(reports: list[int]) -> list[dict[str, bool]]:
        return [odd if report % 2 else even for report in reports]

    assert outcomes(5, lambda a: a.agree_each("parity", lambda: a.rank, decide)) == [even, odd, even, odd, even]
    assert sum(value is even or value is odd for value in encoded) == 2


def test_one_process_needs_no_message() -> None:
    alone = Agreement(SingleProcess(), "alone", 0.0)
    assert alone.agree("step", lambda: object, lambda reports: reports[0]) is object


def fail(agreement: Agreement, failures: dict[int, Exception]) -> Any:
    def work() -> int:
        if agreement.rank in failures:
            raise failures[agreement.rank]
        return agreement.rank

    return agreement.agree("step", work, sum)


def test_a_rank_raises_its_own_failure_and_the_others_the_first() -> None:
    first, second = StorageError("full"), UsageError("wrong")
    results = outcomes(4, lambda a: fail(a, {1: first, 3: second}))
    assert results[1] is first and results[3] is second
    for rank in (0, 2):
        assert type(results[rank]) is StorageError and str(results[rank]) == "rank 1: full"


def test_an_urgent_failure_is_raised_on_every_rank() -> None:
    results = outcomes(4, lambda a: fail(a, {1: StorageError("full"), 3: CorruptCheckpointError("replaced")}))
    assert all(type(error) is CorruptCheckpointError and str(error) == "rank 3: replaced" for error in results)


def test_what_decide_raises_reaches_every_rank() -> None:
    results = outcomes(3, lambda a: a.agree("step", lambda: "x", lambda reports: sum(map(int, reports))))
    assert all(isinstance(error, CheckpointError) and "rank 0: ValueError" in str(error) for error in results)


def test_a_report_that_cannot_be_encoded_fails_its_rank() -> None:
    def conversation(agreement: Agreement) -> Any:
        with pytest.raises(CheckpointError if agreement.rank else TypeError):
            agreement.agree("step", lambda: 1 if agreement.rank else object(), len)

    ThreadWorld(2).run(lambda c: conversation(Agreement(c, "test", 20.0)))
