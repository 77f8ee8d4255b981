"""Compare saves and loads with the bandwidth of their storage, measured beside the run or given by the user."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from bytecheckpoint.monitoring.alert import Time
from bytecheckpoint.monitoring.analysis.summary import OperationSummary
from bytecheckpoint.monitoring.analysis.words import bandwidth_text, plural

__all__ = ["LIMITS_PREFIX", "Limits", "StorageLimit"]

#: Prefix of the files of `StorageLimit` in the folder of metrics, one per measurement.
LIMITS_PREFIX = "limits-"
_Bandwidth = Annotated[float, msgspec.Meta(gt=0, le=1e18)]


class StorageLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidths of one machine on a storage, with plain writes and reads.

    Attributes:
        host: name of the machine.
        time: time of the measurement, in seconds since 1970.
        write: bandwidth of durable writes, in bytes per second.
        read: bandwidth of reads, in bytes per second; None if the bytes came from the machine's memory.
        nbytes: number of bytes written.
        threads: number of threads that wrote at once.
    """

    host: str
    time: Time
    write: _Bandwidth
    read: _Bandwidth | None
    nbytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The bandwidths that saves and loads are compared with.

    Attributes:
        given: bandwidth of all ranks together from the user, in bytes per second; None if not given.
        measured: measurements of machines. The newest of each machine counts.
    """

    given: float | None = None
    measured: Sequence[StorageLimit] = ()

    def of(self, operation: OperationSummary) -> tuple[float, str] | None:
        """Return the bandwidth that all ranks of an operation could reach, and the source of that number.

        A measurement counts for each machine of the operation, as if the storage had enough for all. So measure on all
        machines at once.
        """
        if self.given is not None:
            return self.given, "was given"
        newest = self._newest()
        known = [limit.write if operation.kind == "save" else limit.read for limit in newest]
        found = [bandwidth for bandwidth in known if bandwidth]
        if not found:
            return None
        machines = max(operation.hosts, 1)
        return machines * sum(found) / len(found), f"was measured for {plural(machines, 'machine')}"

    def words(self, operations: Sequence[OperationSummary]) -> list[str]:
        """Compare the newest save and load with what was measured, a sentence each."""
        newest = {operation.kind: operation for operation in operations if operation.bandwidth and not operation.failed}
        sentences = []
        for kind, operation in newest.items():
            limit = self.of(operation)
            if limit is not None:
                when = max((found.time for found in self._newest()), default=0.0)
                date = f" on {time.strftime('%Y-%m-%d', time.gmtime(when))}" if self.given is None else ""
                sentences.append(
                    f"the last {kind} reached {operation.bandwidth / limit[0]:.0%} of the storage's bandwidth: "
                    f"{bandwidth_text(operation.bandwidth)}, and {bandwidth_text(limit[0])} {limit[1]}{date}"
                )
        return sentences

    def _newest(self) -> list[StorageLimit]:
        return list({limit.host: limit for limit in sorted(self.measured, key=lambda limit: limit.time)}.values())
