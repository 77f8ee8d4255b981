"""TLS over the connections of ranks, where the settings name certificates. Without it, what ranks send is readable."""

from __future__ import annotations

import socket
import ssl

from bytecheckpoint.errors import UsageError
from bytecheckpoint.settings import settings

__all__ = ["AGAIN_AFTER_READING", "AGAIN_AFTER_WRITING", "Security", "shut_down_writing"]

#: Errors of a non-blocking call that can continue once bytes have come, and once bytes can be sent.
AGAIN_AFTER_READING = (ssl.SSLWantReadError,)
AGAIN_AFTER_WRITING = (BlockingIOError, InterruptedError, ssl.SSLWantWriteError)


class Security:
    """TLS contexts for the connections of one rank, by the settings in force now.

    Both sides show a certificate that the authority has signed. Addresses prove nothing here: the greeting of ranks does.

    Raises:
        UsageError: the files that the settings name cannot be used.
    """

    def __init__(self) -> None:
        self._dials = self._accepts = None
        if settings().transport.tls_certificate:
            self._dials = _context(ssl.PROTOCOL_TLS_CLIENT)
            self._accepts = _context(ssl.PROTOCOL_TLS_SERVER)

    def over(self, sock: socket.socket, *, dials: bool) -> socket.socket:
        """Wrap a connection in TLS, whose handshake goes with the first data; without certificates, return it as it is.

        Args:
            sock: open connection; one within this machine stays as it is.
            dials: direction of the connection, True if this side has dialled.

        Raises:
            OSError: the connection is broken.
        """
        context = self._dials if dials else self._accepts
        if context is None or sock.family == socket.AF_UNIX:
            return sock
        return context.wrap_socket(sock, server_side=not dials, do_handshake_on_connect=False)


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    now = settings().transport
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(now.tls_certificate, now.tls_key)
        context.load_verify_locations(now.tls_authority)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"setting tls_certificate is {now.tls_certificate!r}, tls_key {now.tls_key!r} and tls_authority "
            f"{now.tls_authority!r}: they cannot be used: {error}"
        ) from error
    return context


def shut_down_writing(sock: socket.socket) -> None:
    """Signal the end of this side's bytes; the connection can still be read."""
    if isinstance(sock, ssl.SSLSocket):  # whose own method would read what still comes as plain bytes
        socket.socket.shutdown(sock, socket.SHUT_WR)
    else:
        sock.shutdown(socket.SHUT_WR)
