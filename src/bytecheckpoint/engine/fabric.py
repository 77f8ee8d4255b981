"""Move bytes straight into the memory of devices, over a process group of one load: the job's own fabric.

The group belongs to the load alone, so its operations meet none of the training's, and a failure breaks nothing else. It
is made over the store of the training's group and is not registered with torch: `dist.new_group` needs every rank of
the job, and counts on all of them the groups that were made (decision 0041).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from bytecheckpoint.collectives import Collective
from bytecheckpoint.concurrency import Workers
from bytecheckpoint.engine.device_copies import DeviceCopies
from bytecheckpoint.errors import CheckpointError, CheckpointTimeoutError, PeerLostError
from bytecheckpoint.liveness import busy
from bytecheckpoint.settings import settings
from bytecheckpoint.threads import try_start
from bytecheckpoint.tuning import tuning

__all__ = ["Fabric", "FabricOffer", "Transfers", "offer_fabric", "warn_no_fabric"]

_T = TypeVar("_T")
_log = logging.getLogger("bytecheckpoint")
_ADVICE = "; restart the job from its last committed checkpoint"
#: Backends that carry the memory of devices without the host.
_DEVICE_BACKENDS = {"nccl"}
#: Seconds after a failed transfer in which a message may still name the rank that is gone.
_NEWS = 5.0
#: Seconds that the end of a load waits for the end of its group.
_SHUTDOWN = 10.0


class FabricOffer(NamedTuple):
    """The fabric that one rank could use.

    Attributes:
        kind: backend and type of device, "nccl cuda"; "" for none.
        reason: reason why there is none.
        device: device at which bytes arrive.
        asked: True if the setting demands a fabric.
    """

    kind: str
    reason: str = ""
    device: torch.device = torch.device("cpu")
    asked: bool = False


class Transfers(NamedTuple):
    """The transfers of one rank in one stage. Transfers between two ranks have the same order on both.

    Attributes:
        sends: (destination rank, number, bytes) of each transfer.
        receives: (source rank, number, memory) of each transfer.
    """

    sends: list[tuple[int, int, torch.Tensor]]
    receives: list[tuple[int, int, torch.Tensor]]


def offer_fabric(collective: Collective, mode: str, devices: set[torch.device], nbytes: int) -> FabricOffer:
    """Return the fabric that this rank could use for the bytes of a load.

    Args:
        collective: ranks of the load.
        mode: value of the setting `fabric`.
        devices: devices of this rank's destinations.
        nbytes: number of bytes that the ranks share, equal on all of them.
    """
    offer = _offer(collective, mode, devices, nbytes)
    return offer._replace(asked=mode == "on")


def warn_no_fabric(reason: str) -> None:
    """Warn that a load uses sockets, although a fabric was demanded or some rank has one."""
    _log.warning("bytes of this load pass between machines over sockets, not over the fabric: %s", reason)


def _offer(collective: Collective, mode: str, devices: set[torch.device], nbytes: int) -> FabricOffer:
    if mode == "off":
        return FabricOffer("", "fabric='off' there")
    if mode == "auto" and nbytes < tuning().min_fabric_bytes:
        return FabricOffer("", "too few bytes")
    if mode == "auto" and settings().transport.tls_certificate:
        return FabricOffer("", "connections go over TLS, which NCCL does not know")
    backends = _backends_of(collective)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and (backend := backends.get(accelerator.type)) in _DEVICE_BACKENDS:
        used = sorted((d for d in devices if d.type == accelerator.type), key=lambda device: device.index)
        # A rank that loads to the host may have chosen no device: auto makes no context on one.
        if used or not devices or mode == "on":
            device = used[0] if used else torch.device(accelerator.type, torch.accelerator.current_device_index())
            return FabricOffer(f"{backend} {accelerator.type}", device=device)
        return FabricOffer("", "it loads into the memory of the host")
    if mode == "on" and (backend := backends.get("cpu")) in _BUILDERS:
        return FabricOffer(f"{backend} cpu")
    return FabricOffer("", f"no process group of it carries tensors of {accelerator or 'the host'}")


def _backends_of(collective: Collective) -> dict[str, str]:
    """Return the backend of the ranks' process group for each type of device; none after the group was destroyed."""
    group = collective.process_group()
    if group is None:
        return {}
    try:
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    except (RuntimeError, ValueError):  # the group was destroyed
        return {}
    pairs = (each.partition(":") for each in config.split(","))
    return {device: backend for device, _, backend in pairs}


class Fabric:
    """One rank's part in the process group of one load. All ranks construct it at the same time.

    Calls that may hang run on a thread. This rank waits for the call, for the loss of another rank, for the failure of the
    load and for the time limit.

    Args:
        collective: ranks of the load.
        name: name of the load; never used before in this world.
        offer: offer of this rank; the kinds of all ranks are equal.
        timeout: seconds for one exchange.
        stopped: future whose exception ends every wait.

    Raises:
        CheckpointError: the group cannot be made, or does not work.
    """

    def __init__(
        self, collective: Collective, name: str, offer: FabricOffer, timeout: float, stopped: Future[NoReturn]
    ) -> None:
        self.offer = offer
        self._rank = collective.rank
        self._timeout = timeout
        self._stopped = stopped
        self._lost: Future[NoReturn] = Future()
        self._group: Any = None
        # After the caller's work, so that operations of the training's groups come first on every rank.
        self._copies = DeviceCopies([offer.device], to_host=False)
        self._worker = Workers(1, "bytecheckpoint-fabric")
        if not self._worker.count:
            raise CheckpointError(f"rank {self._rank} cannot start a thread")
        self._end_watch = collective.watch_losses(self._note_loss)
        build = _BUILDERS[offer.kind.split()[0]]

        def start() -> None:
            group = collective.process_group()
            assert group is not None
            # A copy of the store: a wait for a rank that is gone must not keep the training from its store.
            base: Any = group.get_group_store()
            store = PrefixStore(f"bytecheckpoint/{collective.world_id}/{name}", base.clone())
            with self._copies.queued():
                self._group = build(store, collective.rank, collective.world_size, timeout, self.device)
                # The first operation of a group takes all its ranks. It shows whether the fabric works.
                sum_ = torch.ones(1, device=self.device)
                self._group.allreduce([sum_]).wait()
                if (found := sum_.cpu().item()) != collective.world_size:
                    raise CheckpointError(f"the sum of {collective.world_size} ones is {found:g}")

        self._call(start, "starting", min(timeout, tuning().fabric_start), news=0.0)

    @property
    def device(self) -> torch.device:
        """Device at which bytes arrive."""
        return self.offer.device

    def run(self, work: Callable[[Callable[[Transfers], None]], _T]) -> _T:
        """Return `work(transfer)`, called on the fabric's thread with its stream, when its transfers are done.

        Args:
            work: function that calls `transfer(transfers)` for each stage. Later stages may send the bytes that earlier
                ones have received.

        Raises:
            CheckpointError: as `_call`. The fabric cannot be used any more, and touches only memory that `work` has made.
        """

        def run() -> _T:
            with self._copies.queued():
                try:
                    return work(self._transfer)
                except BaseException:
                    if self._group is not None:
                        self._group.abort()  # ends what is queued
                    raise

        return self._call(run, "an exchange", self._timeout, news=_NEWS, hint="; fabric='off' loads over sockets")

    def close(self) -> None:
        """End the group. All ranks have received everything by now."""
        self._end_watch()
        group, self._group = self._group, None
        if group is not None:
            wait([self._worker.submit(group.shutdown)], _SHUTDOWN)
        self._worker.shutdown(seconds=0.0)

    def _transfer(self, transfers: Transfers) -> None:
        group = self._group
        coalesces = group.supports_coalescing
        if coalesces:
            group._start_coalescing()
        works = [group.send([data], to, number) for to, number, data in transfers.sends]
        works += [group.recv([data], source, number) for source, number, data in transfers.receives]
        if coalesces:
            works = [group._end_coalescing()]
        for work in works:
            # Groups of devices let the stream wait, and not the thread.
            work.wait() if coalesces else work.wait(timedelta(seconds=self._timeout))

    def _call(self, function: Callable[[], _T], what: str, seconds: float, *, news: float, hint: str = "") -> _T:
        """Return `function()`, called on the thread.

        Args:
            function: function that may hang.
            what: name of the work in errors.
            seconds: time limit.
            news: seconds to wait, after a failure, for the message that a rank is lost.
            hint: advice at the end of the error.

        Raises:
            PeerLostError: a rank is gone.
            CheckpointTimeoutError: it takes longer than `seconds`.
            CheckpointError: the failure of the load on another rank, or of the fabric.
        """
        future: Future[_T] = self._worker.submit(function)
        try:
            with busy(seconds + news):
                waited: list[Future[Any]] = [future, self._lost, self._stopped]
                wait(waited, seconds, FIRST_COMPLETED)
                error = future.exception() if (done := future.done()) else None
                if done and error is None:
                    return future.result()
                if error is not None:
                    # An error that is kept must not keep the group and the staging memory.
                    traceback.clear_frames(error.__traceback__)
                    # The others' death often shows here first, without a name.
                    wait([self._lost, self._stopped], news, FIRST_COMPLETED)
            for cause in (self._lost, self._stopped):
                if cause.done():
                    cause.result()
            where = f"rank {self._rank}: {what} over {self.offer.kind}"
            if error is None:
                raise CheckpointTimeoutError(
                    f"{where} has not ended within {seconds:g} s; look for a hung rank, or raise the time-out"
                )
            lines = str(error).splitlines() or [type(error).__name__]
            raise CheckpointError(f"{where} failed: {lines[0]}{hint}")
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Abort a group in which other ranks may wait; its thread ends by itself."""
        self._end_watch()
        group, self._group = self._group, None
        if group is not None:
            try_start(threading.Thread(target=group.abort, name="bytecheckpoint-abort", daemon=True))
        self._worker.shutdown(seconds=0.0)

    def _note_loss(self, rank: int, reason: str) -> None:
        if not self._lost.done():
            lost = f"lost rank {rank}: {reason.removesuffix(_ADVICE)}{_ADVICE}"
            self._lost.set_exception(PeerLostError(f"rank {self._rank}: an exchange over {self.offer.kind}: {lost}"))


def _build_gloo(store: Any, rank: int, size: int, timeout: float, device: torch.device) -> Any:
    # For the start; each transfer brings its own time limit.
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=min(timeout, tuning().fabric_start)))


def _build_nccl(store: Any, rank: int, size: int, timeout: float, device: torch.device) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout + 60)  # this rank gives up first
    # NCCL's watchdog ends the process when a rank is lost. The load shall end with an error instead.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


#: backend -> (store, rank, world size, timeout, device) -> its group. May wait for the other ranks for ever.
_BUILDERS: dict[str, Callable[[Any, int, int, float, torch.device], Any]] = {
    "gloo": _build_gloo,
    "nccl": _build_nccl,
}


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
