"""Typed errors for what the HDFS client library and NameNodes raise.

The library has one exception for nearly everything, whose text is a dump of its own error, often with a Java stack trace or
a description of every DataNode. This module takes the facts out of the text and drops the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bytecheckpoint.errors import StorageError, StorageFullError, StorageUnavailableError
from bytecheckpoint.storage.hdfs.config import Address
from bytecheckpoint.storage.hdfs.rpc import RemoteError

__all__ = ["HdfsFacts", "absent", "facts_of", "storage_error"]

_DUMP = re.compile(r"^(\w+)(?:\((.*)\))?$", re.DOTALL)
_REMOTE = re.compile(r'^"([\w.$]*)", "(.*)"?$', re.DOTALL)
_LINE_END = re.compile(r"\\n|\n|\\t|\t")
_NO_ROOM = "could only be written to 0 of"
_RUNNING = re.compile(r"There are (\d+) datanode\(s\) running")

#: Java exceptions after which the same call can succeed later.
_TRANSIENT = {
    "SafeModeException", "StandbyException", "RetriableException", "NotReplicatedYetException", "LeaseExpiredException",
    "RecoveryInProgressException", "ServerTooBusyException", "RpcServerException", "RetryStartFileException",
    "ObserverRetryOnActiveException", "SocketTimeoutException", "ConnectException", "InterruptedIOException",
    "NoSuchMethodException",
}  # fmt: skip
#: Transient errors of the client library itself, by the names of its variants. They come from DataNodes.
_TRANSIENT_DUMPS = {"DataTransferError", "ChecksumError", "OperationFailed", "BlocksNotFound"}
_PERMISSION = {"AccessControlException", "AuthorizationException", "InvalidToken", "SaslException", "GSSException"}
_PERMISSION_DUMPS = {"SASLError", "GSSAPIError", "NoSASLMechanism"}


@dataclass(frozen=True, slots=True)
class HdfsFacts:
    """The facts about a failed call.

    Attributes:
        kind: name of the Java exception, of the client library's error, or of Python's.
        reason: the error in a few words.
        absent: there is no such file.
        exists: the name is taken.
        transient: another attempt may succeed.
        answered: the error comes from a NameNode; otherwise perhaps no server has answered.
        no_room: the NameNode found no DataNode for a block.
        running: number of DataNodes that the NameNode reports as running; -1: not reported.
    """

    kind: str
    reason: str
    absent: bool = False
    exists: bool = False
    transient: bool = False
    answered: bool = True
    no_room: bool = False
    running: int = -1


def facts_of(error: BaseException) -> HdfsFacts:
    """Extract the facts from an error of the client library or of `rpc`."""
    text = str(error)
    if isinstance(error, FileNotFoundError):
        return HdfsFacts("FileNotFound", "no such file", absent=True)
    if isinstance(error, FileExistsError):
        return HdfsFacts("FileExists", _short(text), exists=True)
    if isinstance(error, RemoteError):
        return _remote(error.kind, error.text)
    if isinstance(error, TimeoutError):
        return HdfsFacts("Timeout", _short(text) or "no answer in time", transient=True, answered=False)
    if isinstance(error, OSError):
        reason = error.strerror or text
        return HdfsFacts("IOError", re.sub(r" \(os error \d+\)", "", _short(reason)), transient=True, answered=False)
    found = _DUMP.match(text)
    kind, inner = (found[1], found[2] or "") if found else (type(error).__name__, text)
    if kind in ("RPCError", "FatalRPCError") and (remote := _REMOTE.match(inner)):
        return _remote(remote[1].rpartition(".")[2], remote[2])
    if kind == "IsADirectoryError":
        return HdfsFacts(kind, "it is a folder", absent=True)
    inner = inner.strip('"').partition(": [")[0]  # a list of DataNodes follows
    if kind == "IOError":
        return HdfsFacts(kind, _short(inner), transient=True, answered=False)
    if kind in _PERMISSION_DUMPS:
        return HdfsFacts("AccessControlException", f"{kind}: {_short(inner)}".removesuffix(": "))
    return HdfsFacts(kind, _short(inner) or kind, transient=kind in _TRANSIENT_DUMPS)


def _remote(kind: str, message: str) -> HdfsFacts:
    first = _short(_LINE_END.split(message, maxsplit=1)[0])
    if kind == "ParentNotDirectoryException" or (kind == "AccessControlException" and "is not a directory" in first):
        return HdfsFacts(kind, first, absent=True)
    if kind in ("FileNotFoundException", "PathNotFoundException"):
        return HdfsFacts(kind, first, absent=True)
    if kind in ("FileAlreadyExistsException", "AlreadyBeingCreatedException"):
        return HdfsFacts(kind, first, exists=True)
    no_room = _NO_ROOM in first
    running = int(found[1]) if (found := _RUNNING.search(first)) else -1
    return HdfsFacts(
        kind,
        f"{kind}: {first}" if first else kind,
        transient=kind in _TRANSIENT or no_room,
        no_room=no_room,
        running=running,
    )


def _short(text: str) -> str:
    line = " ".join(_LINE_END.split(text, maxsplit=1)[0].split()).rstrip('",')
    return line.replace('\\"', '"').replace("\\'", "'")[:300]


def absent(label: str) -> FileNotFoundError:
    """Return the error for a name that does not exist."""
    return FileNotFoundError(2, "no such file", label)


def storage_error(
    facts: HdfsFacts, action: str, label: str, attempts: int, namenodes: Sequence[Address], *, undecided: bool = False
) -> Exception:
    """Return the typed error for a failed call.

    Args:
        facts: the facts about the failure.
        action: verb for messages, "read".
        label: address of the file or folder, for messages.
        attempts: attempts so far.
        namenodes: addresses of the NameNodes, for the message.
        undecided: the call may have taken effect all the same.

    Returns:
        A StorageError, or FileNotFoundError for a file that does not exist.
    """
    if facts.absent:
        return absent(label)
    tries = f" (attempt {attempts})"
    what = f"cannot {action} {label}: {facts.reason}"
    if "Quota" in facts.kind:
        return StorageFullError(f"{what}{tries}; free space or raise the quota, then save again")
    if facts.no_room and facts.running != 0:
        return StorageFullError(
            f"{what}{tries}; no DataNode has room, or none that runs can be reached: look at the cluster, then save again"
        )
    if facts.transient:
        where = ", ".join(f"{host}:{port}" for host, port in namenodes)
        advice = f"check that the NameNode ({where}) and its DataNodes run and can be reached"
        return StorageUnavailableError(f"{what}{tries}; {advice}", undecided=undecided)
    if facts.kind in _PERMISSION:
        return StorageError(
            f"{what}{tries}; check who you are there (HADOOP_USER_NAME or Kerberos) and what that user may do"
        )
    return StorageError(f"{what}{tries}")
