"""The calls of the NameNode's ClientProtocol that the client library lacks: concat, and the bytes that are left.

Hadoop's RPC sends protocol buffers in frames over TCP. These calls need few of their features, so this module encodes them
by hand: strings, bytes, numbers and messages, each under a field number.

A retried call carries the same client id and call id. The NameNode caches its answers by both (the retry cache, which
survives a restart), so a concat whose answer was lost is neither repeated nor refused.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bytecheckpoint.storage.hdfs.config import Address
from bytecheckpoint.tracing.operation import count_retries

__all__ = ["RemoteError", "concat", "remaining_bytes"]

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
#: "hrpc", version 9, service class 0, authentication 0: simple.
_PREAMBLE = b"hrpc\x09\x00\x00"
_CONTEXT_CALL = -3
_CALL = 0
_MAX_ANSWER_BYTES = 16 << 20
_STANDBY = "StandbyException"
#: A machine without power does not even refuse connections.
_CONNECT_SECONDS = 10.0


class RemoteError(Exception):
    """An error that a NameNode returns instead of a result.

    Attributes:
        kind: the Java class without its package, "SafeModeException".
        text: its message, first line only.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind.rpartition(".")[2]
        self.text = text.partition("\n")[0].strip()
        super().__init__(f"{self.kind}: {self.text}")


class _Field(NamedTuple):
    number: int
    value: int | bytes


def concat(
    namenodes: Sequence[Address], user: str, target: str, sources: Sequence[str], client_id: bytes, *, timeout: float
) -> Address:
    """Append the blocks of `sources` to `target` and remove the sources, in one atomic metadata operation.

    The files must be closed, not empty, and in one folder.

    Args:
        namenodes: asked in this order, until one answers that is not a standby.
        user: user name for the NameNode.
        target: absolute path of the file that remains.
        sources: absolute paths.
        client_id: 16 bytes, the same in all attempts of this call and in no other call.
        timeout: seconds for each step of the exchange.

    Returns:
        The NameNode that answered.

    Raises:
        RemoteError: the NameNode refuses.
        OSError: no NameNode answers.
    """
    request = _text(1, target) + b"".join(_text(2, source) for source in sources)
    return _ask(namenodes, user, "concat", request, client_id, timeout)[0]


def remaining_bytes(namenodes: Sequence[Address], user: str, *, timeout: float) -> int | None:
    """Return the bytes that all DataNodes together have left; None while the NameNode knows no DataNode.

    Arguments and errors are those of `concat`.
    """
    stats = _numbers(_ask(namenodes, user, "getFsStats", b"", os.urandom(16), timeout)[1])
    capacity, remaining = stats.get(1, 0), stats.get(3, 0)
    assert isinstance(remaining, int)
    return remaining if capacity else None


def _numbers(message: bytes) -> dict[int, int | bytes]:
    return {field.number: field.value for field in _fields(message)}


def _ask(
    namenodes: Sequence[Address], user: str, method: str, request: bytes, client_id: bytes, timeout: float
) -> tuple[Address, bytes]:
    """Call the first NameNode that answers and is no standby; return it and the answer."""
    *others, last = namenodes
    for address in others:
        try:
            return address, _call(address, user, method, request, client_id, timeout)
        except RemoteError as error:
            if error.kind != _STANDBY:
                raise
        except OSError:
            pass
        count_retries()
    return last, _call(last, user, method, request, client_id, timeout)


def _call(address: Address, user: str, method: str, request: bytes, client_id: bytes, timeout: float) -> bytes:
    host, port = address
    with socket.create_connection((host.strip("[]"), port), min(timeout, _CONNECT_SECONDS)) as connection:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = _bytes(2, _text(1, user)) + _text(3, _PROTOCOL)
        method_header = _text(1, method) + _text(2, _PROTOCOL) + _number(3, 1)
        connection.sendall(
            _PREAMBLE
            + _frame(_header(_CONTEXT_CALL, client_id, -1), context)
            + _frame(_header(_CALL, client_id, 0), method_header, request)
        )
        (length,) = struct.unpack(">I", _receive(connection, 4))
        if length > _MAX_ANSWER_BYTES:
            raise RemoteError("ProtocolException", f"an answer of {length} bytes, which is no Hadoop RPC")
        return _result(_receive(connection, length))


def _result(answer: bytes) -> bytes:
    """Return the message behind the header of an answer. Raises RemoteError if it is an error."""
    length, start = _varint(answer, 0)
    fields = _numbers(answer[start : start + length])
    if fields.get(2, 0) != 0:
        kind, text = fields.get(4, b""), fields.get(5, b"")
        assert isinstance(kind, bytes) and isinstance(text, bytes)
        raise RemoteError(kind.decode("utf-8", "replace"), text.decode("utf-8", "replace"))
    if start + length == len(answer):
        return b""
    size, first = _varint(answer, start + length)
    return answer[first : first + size]


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            raise ConnectionResetError("the NameNode closed the connection")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _header(call_id: int, client_id: bytes, retries: int) -> bytes:
    """RpcRequestHeaderProto: protocol buffers, final packet."""
    return _number(1, 2) + _number(2, 0) + _signed(3, call_id) + _bytes(4, client_id) + _signed(5, retries)


def _frame(*messages: bytes) -> bytes:
    """Return a frame: its length, then each message after its own length."""
    body = b"".join(_to_varint(len(message)) + message for message in messages)
    return struct.pack(">I", len(body)) + body


def _to_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _to_varint(field << 3) + _to_varint(value)


def _signed(field: int, value: int) -> bytes:
    return _number(field, value << 1 if value >= 0 else (-value << 1) - 1)


def _bytes(field: int, value: bytes) -> bytes:
    return _to_varint(field << 3 | 2) + _to_varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number; return it and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[_Field]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        else:
            length, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
            value = data[at : at + length]
            at += length
        yield _Field(tag >> 3, value)
