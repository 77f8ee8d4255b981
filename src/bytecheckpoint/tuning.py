"""Internal sizes and times: no user needs to set them, and tests make them small.

A constant belongs here when a test needs another value. A value that a user may want to change belongs in `settings`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Tuning", "tuned", "tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Sizes in bytes, times in seconds. Each group names the package that reads it.

    Attributes:
        max_entries_per_file: representation: entries in one storage file; a rank that writes more splits the file.
            An entry with an ordinary name takes 200 to 400 bytes of header, and safetensors limits the header.
        catalog_group_bytes: representation: size of a group of a large catalog, which is one of more than two groups.
        max_value_bytes: representation: smallest size that is too large for one plain value; MessagePack's lengths have
            32 bits.
        array_tensor_bytes: representation: smallest numpy array among plain values that is stored as a tensor.
        intersect_pairs: planning: candidate pairs that `intersect` compares at once; temporary columns of this length
            stay in the processor's cache.
        intersect_rows: planning: rows of the left table that `intersect` filters at once.
        small_group_part: planning: a group of equal boxes counts as small when it has less than this part (1/n) of the
            mean share of its holders.
        all_tables_bytes: saving: size of all ranks' tables from which on each rank sends only its place in the mesh, and
            rank 0 asks one of them for the rest.
        tiled_rows: planning: rows of all ranks' tables from which on the boxes of ranks in a mesh are planned and listed
            together (`planning.tile_plan`), not one by one.
        tile_ranks: planning: ranks of an average class, and of the smallest one whose boxes are planned together.
        assembly_bytes: planning: bytes that a rank receives at once, about, of tensors that it joins for a view.
        min_exchange_bytes: planning: ranks that have fewer bytes than this in common read them twice, which costs less
            than an exchange.
        fragment_boxes: frameworks: this many boxes of one tensor in one memory, at least, become one shard.
        relay_bytes: collectives: ranks relay a longer answer for all ranks, in worlds larger than the fan-out.
        relay_fan_out: collectives: ranks to which one rank relays an answer.
        star_ranks: collectives: the largest world in which each rank is connected with rank 0, if nothing else is set.
        direct_links: collectives: connections of rank 0 in a larger world; what comes later connects to another machine.
        pack_delay: collectives: time for which a message on its way up waits for others that may travel with it.
        handshake_timeout: collectives: time in which a new connection must authenticate itself.
        strangers: collectives: connections that have not authenticated themselves and are open at the same time; for rank
            0, while ranks connect, as many as there are to be. With one more the oldest is closed.
        call_check: collectives: time after which a rank that waits asks the others whether they are in another call.
        outlook_timeout: collectives: time in which a rank that is waited for must say that it is alive.
        data_piece: collectives: bytes per frame of the data plane; a transfer that starts may have to wait for one piece.
        peer_memory: engine: ranks of one machine read each other's memory; False: they exchange bytes over sockets.
        exchange_round_bytes: engine: what all ranks together read in one round of an exchange. Each machine holds two
            rounds, so memory does not grow with the number of ranks.
        min_fabric_bytes: engine: shared bytes below which `fabric="auto"` uses sockets: making a group of NCCL takes long.
        fabric_bytes: engine: what a rank stages at most at once for the fabric, on its device.
        fabric_start: engine: time in which the group of a load must connect; else sockets are used.
        scatter_run_bytes: engine: average run length below which a range passes through a scratch buffer.
        frozen_look_bytes: saving: bytes of a file of frozen parameters that are compared before the next optimizer step.
        open_files: engine: storage files of a checkpoint that stay open while no thread uses them.
        helper_end: engine: time that the helper process gets to end by itself, and then to die.
        stopped_calls: engine: time that a call which another rank has stopped waits for its own reads or writes to end.
        tier_save_timeout: tiers: time that a save waits for the durable storage's state before it continues without it.
        tier_load_timeout: tiers: the same for a load or `ls`; longer, because without that state a load cannot know
            whether the hot copy was replaced.
        idle_call_thread: storage: time after which a thread for calls with a timeout ends when it has no call.
        stale_pauses: storage: pauses between attempts to open a name that a network file system's cache knows wrongly.
        object_clients: storage: clients of object stores in the cache.
        object_first_contact: storage: time to retry the first request to a bucket. A wrong endpoint is reported soon, and
            a restarting server is waited for.
        object_conflict_retry: storage: time to retry a conditional put that is refused although nothing has changed.
        hdfs_clients: storage: clients of HDFS clusters in the cache.
        hdfs_first_contact: storage: time to retry a NameNode that has never answered this process.
        hdfs_first_write: storage: the same for writes, because the process that writes may make its first call while the
            NameNode restarts.
        hdfs_call: storage: timeout of one call once a NameNode has answered this process. Several NameNodes share it.
        hdfs_first_call: storage: timeout of one call before the NameNode has answered.
        hdfs_shortest_call: storage: lower bound of a NameNode's share of these timeouts.
        hdfs_write_stall: storage: upper bound for one write or close of a stream; past it, the stream counts as hung.
        hdfs_shortest_stall: storage: lower bound for the same. The client gives up on a DataNode after one minute, and a
            close may wait 16 s for a DataNode's report.
        hdfs_part_bytes: storage: minimum length of a sub-file.
        hdfs_lock_expiry: storage: time after which the lock of a publisher counts as abandoned.
        hdfs_abandoned: storage: age at which the temporary file of a publisher counts as abandoned.
        source_piece: dataloader: bytes of a file of text or tokens that are read at once.
        spans_per_rank: tracing: spans of an operation that a rank keeps, the longest ones; totals count all.
        spans_per_world: monitoring: spans of an operation that all ranks together report.
        progress_interval: tracing, monitoring: time between two reports of how far an operation is.
        progress_rate: monitoring: such reports per second of all ranks together; ranks of a large world report less often.
        metrics_wait: monitoring: time that rank 0 waits for the metrics of the other ranks while none makes progress.
        files_delay: monitoring: time after which the file of an operation is written beside the run.
        files_joined: monitoring: number of small files that are joined into one; until then their tables stay in memory.
        metrics_end: monitoring: time that a process which ends waits for its metrics to be delivered.
        lease_renewal: tiers: time between two renewals of a lease that is held.
        lease_expiry: tiers: time for which a lease must stay unchanged for its holder to count as dead.
    """

    # --- representation ---
    max_entries_per_file: int = 100_000
    catalog_group_bytes: int = 4 << 20
    max_value_bytes: int = 1 << 32
    array_tensor_bytes: int = 64 << 10

    # --- planning ---
    intersect_pairs: int = 1 << 18
    intersect_rows: int = 1 << 20
    small_group_part: int = 64
    tiled_rows: int = 1 << 20
    tile_ranks: int = 8
    all_tables_bytes: int = 64 << 20
    assembly_bytes: int = 64 << 20
    min_exchange_bytes: int = 8 << 20

    # --- frameworks ---
    fragment_boxes: int = 64

    # --- collectives ---
    relay_bytes: int = 256 << 10
    relay_fan_out: int = 8
    star_ranks: int = 2000
    direct_links: int = 1000
    pack_delay: float = 0.005
    handshake_timeout: float = 30.0
    strangers: int = 128
    call_check: float = 5.0
    outlook_timeout: float = 10.0
    data_piece: int = 4 << 20

    # --- saving ---
    frozen_look_bytes: int = 8 << 20

    # --- storage ---
    idle_call_thread: float = 5.0
    stale_pauses: tuple[float, ...] = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0, 1.5)
    object_clients: int = 16
    object_first_contact: float = 30.0
    object_conflict_retry: float = 30.0
    hdfs_clients: int = 8
    hdfs_first_contact: float = 5.0
    hdfs_first_write: float = 30.0
    hdfs_call: float = 60.0
    hdfs_first_call: float = 20.0
    hdfs_shortest_call: float = 5.0
    hdfs_write_stall: float = 120.0
    hdfs_shortest_stall: float = 20.0
    hdfs_part_bytes: int = 16 << 20
    hdfs_lock_expiry: float = 30.0
    hdfs_abandoned: float = 3600.0

    # --- engine ---
    peer_memory: bool = True
    exchange_round_bytes: int = 2 << 30
    min_fabric_bytes: int = 1 << 30
    fabric_bytes: int = 256 << 20
    fabric_start: float = 120.0
    scatter_run_bytes: int = 1 << 10
    open_files: int = 256
    helper_end: float = 5.0
    stopped_calls: float = 5.0

    # --- dataloader ---
    source_piece: int = 4 << 20

    # --- tracing and monitoring ---
    spans_per_rank: int = 256
    spans_per_world: int = 100_000
    progress_interval: float = 1.0
    progress_rate: float = 500.0
    metrics_wait: float = 30.0
    files_delay: float = 1.0
    files_joined: int = 64
    metrics_end: float = 10.0

    # --- tiers ---
    tier_save_timeout: float = 5.0
    tier_load_timeout: float = 15.0
    lease_renewal: float = 5.0
    lease_expiry: float = 60.0


_current = Tuning()


def tuning() -> Tuning:
    """Return the values now in use."""
    return _current


@contextlib.contextmanager
def tuned(**changes: Any) -> Iterator[None]:
    """Use other values inside a `with` block, in all threads of this process. For tests."""
    global _current  # noqa: PLW0603  one process-wide value, replaced whole
    before = _current
    _current = replace(before, **changes)
    try:
        yield
    finally:
        _current = before
