"""The settings of one process, from their defaults, the environment and `configure`.

A setting has one flat name, such as "staging_bytes": `configure` takes it as a keyword, and the environment as
BYTECHECKPOINT_STAGING_BYTES. Programs read it in its group: `settings().staging.bytes`.
"""

from __future__ import annotations

import functools
import ipaddress
import os
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from bytecheckpoint.errors import UsageError

__all__ = [
    "MonitoringSettings",
    "Settings",
    "StagingSettings",
    "StorageSettings",
    "TierSettings",
    "TransportSettings",
    "configure",
    "flat_settings",
    "settings",
]

# Locks and sockets refuse timeouts not far above 1e9 s.
_Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a positive number of seconds, up to 1e+09")]
_Count = Annotated[int, Meta(ge=0, description="an integer that is at least 0")]
_PositiveCount = Annotated[int, Meta(ge=1, description="an integer that is at least 1")]
_Chunk = Annotated[int, Meta(gt=0, multiple_of=1 << 20, description="a positive multiple of 1 MiB, in bytes")]
_Flag = Annotated[bool, Meta(description="True or False")]
_Text = Annotated[str, Meta(description="a str")]
_Ip = Annotated[str, Meta(description="an IP address of this machine, or an empty str")]
_Ports = Annotated[str, Meta(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$", description="a range of ports, as '29600-29700'")]
_Mesh = Annotated[
    str,
    Meta(pattern=r"^([a-z_0-9]+=[1-9][0-9]*(,[a-z_0-9]+=[1-9][0-9]*)*)?$", description="extents, as 'pp=4,dp=8,tp=2'"),
]
_Address = Annotated[str, Meta(min_length=1, description="a str that is not empty")]


class _Checked:
    """Base of the groups: refuses values that would fail later, far from their cause."""

    def __post_init__(self) -> None:
        for name, expected in _types(type(self)).items():  # type: ignore[arg-type]
            if not is_dataclass(expected):
                _check(_flat_name(type(self), name), getattr(self, name), expected)


@dataclass(frozen=True, slots=True)
class StorageSettings(_Checked):
    """Settings of reads and writes, and of the storages behind them.

    Attributes:
        chunk_bytes: bytes that one write or read call moves; a multiple of 1 MiB.
        write_threads: concurrent writes per rank.
        read_threads: concurrent reads per rank; 0: as many as suit the storage, 2 for file systems, 8 or 16 across a
            network.
        direct_io: use of O_DIRECT. "auto" bypasses the page cache on file systems of block devices; "on" also on others
            that can, such as network file systems; "off" never.
        timeout: seconds for which one operation of a remote storage or a network file system is retried after transient
            errors; on a network file system at most half of the setting `timeout`. Flat name: storage_timeout.
        commit: way to publish on an object store. "exclusive" publishes a checkpoint by a conditional put, so that of two
            jobs that save to one path one gets an error; "plain" by an ordinary put, for stores that lack conditional ones.
        spool_dir: folder for bytes that an object store takes later and that do not fit in memory; by default the
            system's folder for temporary files.
        memory_dir: memory file system for `mem://` paths.
        trusted_folders: paths and URLs, with commas between them, below which a checkpoint may lie in part: its catalog or
            its symbolic links may lead there. By default a checkpoint leads out of its folder only to where a cooldown of
            its run moves steps.
    """

    chunk_bytes: _Chunk = 8 << 20
    write_threads: _PositiveCount = 2
    read_threads: _Count = 0
    direct_io: Literal["auto", "on", "off"] = "auto"
    timeout: _Seconds = field(default=180.0, metadata={"flat": "storage_timeout"})
    commit: Literal["exclusive", "plain"] = "exclusive"
    spool_dir: _Text = ""
    memory_dir: _Text = "/dev/shm"
    trusted_folders: _Text = ""


@dataclass(frozen=True, slots=True)
class TransportSettings(_Checked):
    """Settings of the connections between ranks.

    Attributes:
        listen_address: IP address of this machine at which ranks listen for each other; by default those of all
            interfaces.
        listen_ports: range of ports that ranks may take, as "29600-29700"; by default any. A rank takes one or two.
        tls_certificate: file with the certificate that this rank shows to others, in PEM; with it, all connections between
            machines use TLS, on all ranks or none. By default they do not.
        tls_key: file with the private key of that certificate.
        tls_authority: file with the certificates of those who may sign the certificates of ranks.
        message_tree: way of messages. "on" passes messages between ranks through one rank of each machine, which joins
            them; "off" sends all directly to rank 0; "auto" does the former in worlds of more than 2,000 ranks, and where
            rank 0 may not open a descriptor for each rank.
        fabric: transport for the bytes of a load that pass between machines. "auto": a process group of NCCL where all
            ranks load onto devices and the job's own group has NCCL; "on": a group of gloo too, where there is nothing
            better; "off": sockets. Sockets also where ranks differ in this.
        peer_timeout: seconds for which another machine may be out of reach before its ranks count as lost. A connection
            that works again before that continues. TCP sends again at growing intervals: give twice the outage to survive.
    """

    listen_address: _Ip = ""
    listen_ports: _Ports = ""
    tls_certificate: _Text = ""
    tls_key: _Text = ""
    tls_authority: _Text = ""
    message_tree: Literal["auto", "on", "off"] = "auto"
    fabric: Literal["auto", "on", "off"] = "auto"
    peer_timeout: _Seconds = 120.0

    def __post_init__(self) -> None:
        """Refuse values of a wrong type, addresses that are none and empty ranges of ports."""
        super(TransportSettings, self).__post_init__()  # a class with slots is made twice, so the short form fails
        if self.listen_address:
            try:
                ipaddress.ip_address(self.listen_address)
            except ValueError:
                raise _wrong("listen_address", self.listen_address, _Ip) from None
        first, last = self.port_range
        if not 0 <= first <= last < 1 << 16 or (self.listen_ports and not first):
            raise _wrong("listen_ports", self.listen_ports, _Ports)

    @property
    def port_range(self) -> tuple[int, int]:
        """The first and the last port that ranks may take; (0, 0): any."""
        first, _, last = (self.listen_ports or "0-0").partition("-")
        return int(first), int(last)


@dataclass(frozen=True, slots=True)
class StagingSettings(_Checked):
    """Settings of the copy that an asynchronous save takes.

    Attributes:
        bytes: size of the staging pool in bytes. 0: as large as the state, up to this rank's share of half of the memory
            that is free when the pool grows, on the machine and in the cgroups of this process (page cache counts as free).
            The ranks of the machine share it. A larger state passes through the pool in parts, and a warning says so. Also
            the most that a synchronous save to a storage across a network keeps in memory. Flat name: staging_bytes.
        writer: place of the writer. "process" writes asynchronous saves from a helper process over shared memory, so that
            the training loop keeps the interpreter lock to itself; "thread" writes them from threads of this process.
        check: proof of the copy that a save with `staging="background"` makes. "sampled" compares eight bytes at eight
            places of each 8 MiB; "full" hashes everything in the call and after the copy, for tests and bug reports. Flat
            name: staging_check.
        guard: True to wait for such a copy also in accesses to the memory of a tensor that is being copied: `.data`,
            `numpy()`, `untyped_storage()`, `data_ptr()`. From the first such save on, `.data` of any tensor takes some
            tenths of a microsecond more. Flat name: staging_guard.
    """

    bytes: _Count = field(default=0, metadata={"flat": "staging_bytes"})
    writer: Literal["process", "thread"] = "process"
    check: Literal["sampled", "full"] = field(default="sampled", metadata={"flat": "staging_check"})
    guard: _Flag = field(default=False, metadata={"flat": "staging_guard"})


@dataclass(frozen=True, slots=True)
class TierSettings(_Checked):
    """Settings of `tier+...` paths. Flat names: tier_hot, tier_replicas, tier_keep, tier_waiting.

    Attributes:
        hot: place of the hot copies on each machine: mem://name, or a folder of a local disk.
        replicas: number of other machines that hold a copy of each machine's hot files.
        keep: number of flushed hot steps of a run that each machine keeps.
        waiting: number of hot steps that may wait for their flush; a save that would make one more waits.
    """

    hot: _Address = field(default="mem://tier", metadata={"flat": "tier_hot"})
    replicas: _Count = field(default=1, metadata={"flat": "tier_replicas"})
    keep: _Count = field(default=1, metadata={"flat": "tier_keep"})
    waiting: _PositiveCount = field(default=2, metadata={"flat": "tier_waiting"})


@dataclass(frozen=True, slots=True)
class MonitoringSettings(_Checked):
    """Settings of metrics and alerts.

    Attributes:
        metrics: addresses to which rank 0 sends the metrics of all ranks, with commas between them
            (docs/how-to/monitoring.md): "files" is a folder beside the checkpoints of the run, "off" is nowhere.
        alerts: file of rules that say which saves and loads are reported as alerts (docs/how-to/slow-saves.md): "" for the
            built-in ones, "off" for none.
        mesh: extents of the job's mesh by dimension, the outermost first, as "pp=4,dp=8,tp=2", for the coordinates of ranks
            in metrics; by default those of Megatron, or of the device mesh of a state.
    """

    metrics: _Text = "files"
    alerts: _Text = ""
    mesh: _Mesh = ""


@dataclass(frozen=True, slots=True)
class Settings(_Checked):
    """The settings of one process, in groups.

    Attributes:
        timeout: seconds that a rank waits for the others in one step of a save or load, or for an answer of a file
            system. The time for moving bytes comes on top.
        fingerprint: True to put fingerprints of all tensors into the catalogs of saves, which takes 0.3 to 0.5 s of a core
            for each GiB that a rank writes (docs/how-to/prove-equality.md). All ranks give the same.
        storage: settings of reads and writes, and of storages.
        transport: settings of the connections between ranks.
        staging: settings of the copy that an asynchronous save takes.
        tier: settings of `tier+...` paths.
        monitoring: settings of metrics and alerts.
    """

    timeout: _Seconds = 600.0
    fingerprint: _Flag = False
    storage: StorageSettings = field(default_factory=StorageSettings)
    transport: TransportSettings = field(default_factory=TransportSettings)
    staging: StagingSettings = field(default_factory=StagingSettings)
    tier: TierSettings = field(default_factory=TierSettings)
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)

    def with_changes(self, **changes: Any) -> Settings:
        """Return settings with other values.

        Args:
            **changes: values by flat name.

        Raises:
            UsageError: an unknown name or an impossible value.
        """
        known = flat_settings(self)
        unknown = changes.keys() - known
        if unknown:
            names = ", ".join(known)
            raise UsageError(f"unknown setting {sorted(unknown)[0]!r}; the settings are: {names}")
        by_group: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            group, attribute, _ = _places()[name]
            by_group.setdefault(group, {})[attribute] = value
        plain = by_group.pop("", {})
        groups = {group: replace(getattr(self, group), **values) for group, values in by_group.items()}
        return replace(self, **plain, **groups)


def _flat_name(group: type, attribute: str) -> str:
    """Return the flat name of a group's field."""
    (found,) = (f for f in fields(group) if f.name == attribute)
    return str(found.metadata.get("flat", attribute))


@functools.cache  # a load or save with a time limit of its own makes settings, and Python would compile each type anew
def _types(group: type) -> dict[str, Any]:
    """Return the type of each field of a group, by the field's name."""
    return get_type_hints(group, include_extras=True)


@functools.cache
def _places() -> dict[str, tuple[str, str, Any]]:
    """Return the group ("" for none), the attribute and the type of each setting, by its flat name."""
    places: dict[str, tuple[str, str, Any]] = {}
    for name, expected in _types(Settings).items():
        if is_dataclass(expected):
            inner = _types(expected)  # type: ignore[arg-type]
            places |= {_flat_name(expected, a): (name, a, t) for a, t in inner.items()}  # type: ignore[arg-type]
        else:
            places[name] = ("", name, expected)
    return places


def flat_settings(values: Settings) -> dict[str, Any]:
    """Return the value of each setting by its flat name."""
    return {
        name: getattr(getattr(values, group) if group else values, attribute)
        for name, (group, attribute, _) in _places().items()
    }


def _check(name: str, value: Any, expected: Any) -> None:
    """Check one value.

    Raises:
        UsageError: the value is not of the type, or out of its limits.
    """
    # msgspec refuses subclasses of numbers, such as numpy's. True and False are subclasses that it shall refuse.
    number = next((base for base in (float, int) if isinstance(value, base)), None)
    plain = number(value) if number is not None and not isinstance(value, bool) else value
    try:
        msgspec.convert(plain, expected)
    except msgspec.ValidationError:
        raise _wrong(name, value, expected) from None


def _wrong(name: str, value: Any, expected: Any) -> UsageError:
    """Make the error for a value that a setting does not accept."""
    huge = isinstance(value, int) and abs(value) > 1 << 64
    shown = "a huge number" if huge else repr(value)
    return UsageError(f"setting {name} is {shown}: give {_wanted(expected)}")


def _wanted(expected: Any) -> str:
    """Describe the values that a setting of type `expected` accepts, for an error."""
    for limits in getattr(expected, "__metadata__", ()):
        return str(limits.description)
    return " or ".join(map(repr, get_args(expected)))


def _from_environment() -> Settings:
    """Read the settings from BYTECHECKPOINT_<NAME> in the environment."""
    found: dict[str, Any] = {}
    for name, (_, _, expected) in _places().items():
        variable = f"BYTECHECKPOINT_{name.upper()}"
        text = os.environ.get(variable)
        if text is None:
            continue
        number = get_args(expected)[0] in (int, float, bool)
        try:
            found[name] = msgspec.convert(
                text.strip().replace("_", "") if number else text, expected, strict=not number
            )
        except msgspec.ValidationError:
            raise UsageError(f"{variable}={text!r}: give {_wanted(expected)}") from None
    return Settings().with_changes(**found)


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
        **changes: values by flat name, as `staging_bytes=1 << 30`.

    Returns:
        The settings now in force.

    Raises:
        UsageError: an unknown name or an impossible value.
    """
    global _current  # noqa: PLW0603  one process-wide value, replaced whole
    _current = settings().with_changes(**changes)
    return _current
