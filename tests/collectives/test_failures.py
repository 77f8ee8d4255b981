"""A failure keeps its class, message, fields, rank and stage over every hop."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bytecheckpoint
from bytecheckpoint import errors
from bytecheckpoint.collectives import Collective, SingleProcess, ThreadWorld
from bytecheckpoint.collectives.agreement import Agreement
from bytecheckpoint.collectives.stop import StopSignal
from bytecheckpoint.errors import CheckpointError, StorageError, UsageError
from bytecheckpoint.failures import Cancellation, Failure
from bytecheckpoint.storage import resolve
from bytecheckpoint.storage.testing.fault_rule import FaultRule
from bytecheckpoint.storage.testing.wrappers import FaultyStorage
from tests.support.settings import using

CLASSES = [cls for name in errors.__all__ if isinstance(cls := getattr(errors, name), type)]
#: Any text, lone surrogates too: file names may hold them.
ANY_TEXT = st.text(st.characters(codec=None), max_size=20)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "file": ANY_TEXT,
    "block": st.integers(-1, 2**40),
    "tensors": st.lists(ANY_TEXT, max_size=3).map(tuple),
    "calls_differ": st.booleans(),
    "undecided": st.booleans(),
}


def fields_of(cls: type[CheckpointError]) -> list[str]:
    return list(getattr(cls.__init__, "__kwdefaults__", None) or ())


@st.composite
def any_error(draw: st.DrawFn) -> CheckpointError:
    cls = draw(st.sampled_from(CLASSES))
    error: CheckpointError = cls(draw(ANY_TEXT), **{name: draw(FIELDS[name]) for name in fields_of(cls)})
    return error


def over_messages(error: CheckpointError) -> list[CheckpointError]:
    return [Failure.decode(Failure.of(error, rank=1, stage="write").encode()).as_error()]


def over_agreements(error: CheckpointError) -> list[CheckpointError]:
    """Raised on rank 1, received on rank 0, passed on by another agreement to ranks 1 and 2."""

    def body(collective: Collective) -> CheckpointError | None:
        def first() -> None:
            if collective.rank == 1:
                Failure.of(error, rank=1, stage="write")
                raise error

        def second() -> None:
            if collective.rank == 0:
                raise received

        received = raised_by(lambda: Agreement(collective, "first", 20.0).agree("step", first, len))
        return raised_by(lambda: Agreement(collective, "second", 20.0).agree("step", second, len))

    return ThreadWorld(3).run(body)[1:]


def over_a_decision(error: CheckpointError) -> list[CheckpointError]:
    def body(collective: Collective) -> CheckpointError:
        def decide(_: list[bytes]) -> list[bytes]:
            Failure.of(error, rank=1, stage="write")
            raise error

        return raised_by(lambda: collective.gather_scatter("tag", b"", decide, timeout=20))

    return ThreadWorld(2).run(body)[1:]


def over_the_broadcast(error: CheckpointError) -> list[CheckpointError]:
    """From rank 1 to the tokens of all ranks, into the wait of rank 0, and on by rank 0's own report."""

    def body(collective: Collective) -> CheckpointError:
        cancel = Cancellation()
        with StopSignal(collective, "tag", cancel) as signal:
            if collective.rank == 1:
                signal.fail(Failure.of(error, rank=1, stage="write"))
                return raised_by(cancel.raise_if_set)
            received = raised_by(lambda: collective.recv(0, "never", timeout=20, cancel=cancel))
            return Failure.of(received, rank=collective.rank, stage="later").as_error()

    return ThreadWorld(3).run(body)


def over_a_repeat(error: CheckpointError) -> list[CheckpointError]:
    """Raised again by the next save here, and there."""
    repeated = Failure.of(error, rank=1, stage="write").as_repeated()
    there = Failure.of(repeated, rank=0, stage="plan").as_error()
    assert (repeated.repeats, there.repeats) == ("here", "elsewhere")
    assert str(repeated) == str(there)
    for each in (repeated, there):
        each.args = (str(each).removeprefix("an earlier asynchronous save failed: "),)
    return [repeated, there]


def raised_by(call: Callable[[], object]) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("hop", [over_messages, over_agreements, over_a_decision, over_the_broadcast, over_a_repeat])
@given(data=st.data())
def test_nothing_is_lost(hop: Callable[[CheckpointError], list[CheckpointError]], data: st.DataObject) -> None:
    error = data.draw(any_error())
    message = str(error)
    for received in hop(error):
        assert type(received) is type(error)
        assert str(received) == f"rank 1, write: {message}"
        for name in fields_of(type(error)):
            assert getattr(received, name) == getattr(error, name)


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_is_lost_in_a_save(cls: type[CheckpointError], tmp_path: Path) -> None:
    """From rank 1's writer over the coordinator to the handles of all ranks, and to the next save."""
    values = {"file": "f\udc80", "block": 3, "tensors": ("t",), "undecided": True, "calls_differ": True}
    fields = {name: values[name] for name in fields_of(cls)}

    def body(collective: Collective) -> list[CheckpointError]:
        rules = [FaultRule("write", cls("gone", **fields), times=-1)] if collective.rank == 1 else []
        storage = FaultyStorage(resolve(str(tmp_path)), rules)
        states = {"extra_states": {"rank": collective.rank, "w": torch.full((9,), collective.rank)}}
        handle = bytecheckpoint.save(storage, states, async_checkpoint=True)
        next_save = raised_by(lambda: (wait([handle.committed]), bytecheckpoint.save(storage, states)))
        return [next_save, raised_by(handle.result)]

    with using(writer="thread"):
        for received in itertools.chain(*ThreadWorld(2).run(body)):
            assert type(received) is cls
            assert re.fullmatch(r"(an earlier asynchronous save failed: )?rank 1, \w+: gone", str(received))
            assert {name: getattr(received, name) for name in fields} == fields


def test_every_field_has_a_strategy() -> None:
    assert {name for cls in CLASSES for name in fields_of(cls)} == FIELDS.keys()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StorageError("rank 2: cannot send"), "rank 2, write: cannot send"),
        (ValueError("bad \udc80"), r"rank 2, write: ValueError: bad \udc80"),
    ],
)
def test_a_rank_is_named_once(error: Exception, message: str) -> None:
    assert str(Failure.of(error, rank=2, stage="write").as_error()) == message


def test_a_class_of_another_package_becomes_its_nearest_known_one() -> None:
    class OwnError(UsageError):
        pass

    assert type(Failure.of(OwnError("wrong")).as_error()) is UsageError


def test_the_first_failure_cancels() -> None:
    cancel, heard = Cancellation(), []
    cancel.raise_if_set()
    cancel.on_set(heard.append)
    failures = [Failure.of(StorageError(str(number)), rank=number) for number in range(2)]
    assert [cancel.set(failure) for failure in failures] == [True, False]
    cancel.on_set(heard.append)
    assert heard == [failures[0]] * 2 and cancel.failure is failures[0]
    assert str(raised_by(lambda: SingleProcess().recv(0, "never", timeout=20, cancel=cancel))) == "rank 0: 0"


def test_rank_0_settles_before_it_commits() -> None:
    def body(collective: Collective) -> None:
        cancel = Cancellation()
        with StopSignal(collective, "tag", cancel) as signal:
            if collective.rank == 0:
                signal.settle()
            collective.barrier("settled", timeout=20)
            if collective.rank == 1:
                signal.fail(Failure.of(StorageError("too late"), rank=1))
            collective.barrier("failed", timeout=20)
            assert (cancel.failure is None) == (collective.rank != 1)

    ThreadWorld(3).run(body)
