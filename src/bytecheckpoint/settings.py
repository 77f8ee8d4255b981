"""The settings of one process, from their defaults, the environment and `configure`."""

from __future__ import annotations

import functools
import ipaddress
import os
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from bytecheckpoint.errors import UsageError

__all__ = ["Settings", "configure", "settings"]

# Locks and sockets refuse timeouts not far above 1e9 s.
_Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a positive number of seconds, up to 1e+09")]
_Count = Annotated[int, Meta(ge=0, description="an integer that is at least 0")]
_PositiveCount = Annotated[int, Meta(ge=1, description="an integer that is at least 1")]
_Chunk = Annotated[int, Meta(gt=0, multiple_of=1 << 20, description="a positive multiple of 1 MiB, in bytes")]
_Text = Annotated[str, Meta(description="a str")]
_Ip = Annotated[str, Meta(description="an IP address of this machine, or an empty str")]
_Ports = Annotated[str, Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$", description="a range of ports, as '29600-29700'")]
_Mesh = Annotated[
    str,
    Meta(pattern=r"^([a-z_0-9]+=[1-9][0-9]*(,[a-z_0-9]+=[1-9][0-9]*)*)?$", description="extents, as 'pp=4,dp=8,tp=2'"),
]
_Address = Annotated[str, Meta(min_length=1, description="a str that is not empty")]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process. Every field can be set by `configure` or by BYTECHECKPOINT_<FIELD> in the environment.

    Attributes:
        staging_bytes: size of the staging pool in bytes. 0: as large as the state, up to this rank's share of half of the
            memory that is free when the pool grows, on the machine and in the cgroups of this process (page cache counts as
            free). The ranks of the machine share it. A larger state passes through the pool in parts, and a warning says
            so. Also the most that a synchronous save to a storage across a network keeps in memory.
        chunk_bytes: bytes that one write or read call moves; a multiple of 1 MiB.
        writer: "process" writes asynchronous saves from a helper process over shared memory, so that the training
            loop keeps the interpreter lock to itself; "thread" writes them from threads of this process.
        write_threads: concurrent writes per rank.
        read_threads: concurrent reads per rank; 0: as many as suit the storage, 2 for file systems, 8 or 16 across a
            network.
        direct_io: "auto" bypasses the page cache on file systems of block devices; "on" also on others that can, such
            as network file systems; "off" never.
        timeout: seconds that a rank waits for the others in one step of a save or load, or for an answer of a file
            system. The time for moving bytes comes on top.
        storage_timeout: seconds for which one operation of a remote storage or a network file system is retried after
            transient errors; on a network file system at most half of `timeout`.
        commit: "exclusive" publishes a checkpoint on an object store by a conditional put, so that of two jobs that
            save to one path one gets an error; "plain" by an ordinary put, for stores that lack conditional ones.
        spool_dir: folder for bytes that an object store takes later and that do not fit in memory; by default the
            system's folder for temporary files.
        listen_address: IP address of this machine at which ranks listen for each other; by default those of all interfaces.
        listen_ports: the ports that they may take, as "29600-29700"; by default any. A rank takes one or two.
        tls_certificate: file with the certificate that this rank shows to others, in PEM; with it, all connections between
            machines go over TLS, on all ranks or none. By default they do not.
        tls_key: file with its private key.
        tls_authority: file with the certificates of those who may sign the certificates of ranks.
        message_tree: "on" passes messages between ranks through one rank of each machine, which joins them; "off" sends
            all directly to rank 0; "auto" does the former in worlds of more than 2,000 ranks, and where rank 0 may not
            open a descriptor for each rank.
        fabric: over what bytes of a load pass between machines. "auto": a process group of NCCL where all ranks load onto
            devices and the job's own group has NCCL; "on": a group of gloo too, where there is nothing better; "off":
            sockets. Sockets also where ranks differ in this.
        metrics: where rank 0 sends the metrics of all ranks, as addresses with commas between them
            (docs/how-to/monitoring.md): "files" is a folder beside the checkpoints of the run, "off" is nowhere.
        mesh: extents of the job's mesh by dimension, the outermost first, as "pp=4,dp=8,tp=2", for the coordinates of ranks
            in metrics; by default those of Megatron, or of the device mesh of a state.
        memory_dir: a memory file system, for `mem://`.
        tier_hot: where `tier+...` paths store their hot copies on each machine: mem://name, or a folder of a local disk.
        tier_replicas: other machines that hold a copy of each machine's hot files.
        tier_keep: flushed hot steps of a run that each machine keeps.
        tier_waiting: hot steps that may wait for their flush; a save that would make one more waits.
    """

    staging_bytes: _Count = 0
    chunk_bytes: _Chunk = 8 << 20
    writer: Literal["process", "thread"] = "process"
    write_threads: _PositiveCount = 2
    read_threads: _Count = 0
    direct_io: Literal["auto", "on", "off"] = "auto"
    timeout: _Seconds = 600.0
    storage_timeout: _Seconds = 180.0
    commit: Literal["exclusive", "plain"] = "exclusive"
    spool_dir: _Text = ""
    listen_address: _Ip = ""
    listen_ports: _Ports = ""
    tls_certificate: _Text = ""
    tls_key: _Text = ""
    tls_authority: _Text = ""
    message_tree: Literal["auto", "on", "off"] = "auto"
    fabric: Literal["auto", "on", "off"] = "auto"
    metrics: _Text = "files"
    mesh: _Mesh = ""
    memory_dir: _Text = "/dev/shm"
    tier_hot: _Address = "mem://tier"
    tier_replicas: _Count = 1
    tier_keep: _Count = 1
    tier_waiting: _PositiveCount = 2

    def __post_init__(self) -> None:
        """Refuse values that would fail later, far from their cause."""
        for name, kind in _kinds().items():
            value = getattr(self, name)
            # msgspec refuses subclasses of numbers, such as numpy's. True and False are subclasses that it shall refuse.
            number = next((base for base in (float, int) if isinstance(value, base)), None)
            plain = number(value) if number is not None and not isinstance(value, bool) else value
            try:
                msgspec.convert(plain, kind)
            except msgspec.ValidationError:
                huge = isinstance(value, int) and abs(value) > 1 << 64
                shown = "a huge number" if huge else repr(value)
                raise UsageError(f"settings.{name} is {shown}: give {_wanted(kind)}") from None
        if self.listen_address:
            try:
                ipaddress.ip_address(self.listen_address)
            except ValueError:
                wanted = _wanted(_kinds()["listen_address"])
                raise UsageError(f"settings.listen_address is {self.listen_address!r}: give {wanted}") from None
        first, last = self.port_range
        if not 0 <= first <= last < 1 << 16 or (self.listen_ports and not first):
            raise UsageError(
                f"settings.listen_ports is {self.listen_ports!r}: give {_wanted(_kinds()['listen_ports'])}"
            )

    @property
    def port_range(self) -> tuple[int, int]:
        """The first and the last port that ranks may take; (0, 0): any."""
        first, _, last = (self.listen_ports or "0-0").partition("-")
        return int(first), int(last)


@functools.cache
def _kinds() -> dict[str, Any]:
    """Return the type of each setting with its limits, by name."""
    return get_type_hints(Settings, include_extras=True)


def _wanted(kind: Any) -> str:
    """Describe the values that a setting of type `kind` accepts, for an error."""
    for limits in getattr(kind, "__metadata__", ()):
        return str(limits.description)
    return " or ".join(map(repr, get_args(kind)))


def _from_environment() -> Settings:
    """Read the settings from BYTECHECKPOINT_<FIELD> in the environment."""
    found: dict[str, Any] = {}
    for name, kind in _kinds().items():
        variable = f"BYTECHECKPOINT_{name.upper()}"
        text = os.environ.get(variable)
        if text is None:
            continue
        number = get_args(kind)[0] in (int, float)
        try:
            found[name] = msgspec.convert(text.strip().replace("_", "") if number else text, kind, strict=not number)
        except msgspec.ValidationError:
            raise UsageError(f"{variable}={text!r}: give {_wanted(kind)}") from None
    return Settings(**found)


_current: Settings | None = None


def settings() -> Settings:
    """Return the settings in force."""
    global _current  # noqa: PLW0603  one process-wide value, replaced whole
    if _current is None:
        _current = _from_environment()
    return _current


def configure(**changes: Any) -> Settings:
    """Change settings for the saves and loads that start from now on.

    Args:
        **changes: fields of `Settings`.

    Returns:
        The settings now in force.

    Raises:
        UsageError: an unknown field or an impossible value.
    """
    global _current  # noqa: PLW0603  one process-wide value, replaced whole
    unknown = changes.keys() - {f.name for f in fields(Settings)}
    if unknown:
        known = ", ".join(f.name for f in fields(Settings))
        raise UsageError(f"unknown setting {sorted(unknown)[0]!r}; the settings are: {known}")
    _current = replace(settings(), **changes)
    return _current
