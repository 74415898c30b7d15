"""Frames with descriptors on a SEQPACKET socket, without blocking.

Keeps no state; used on the loop thread. Whatever a peer sends, no descriptor is lost:
each one that the kernel installs is either answered or closed.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from kvoffd.errors import ProtocolMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FRAME_BYTES_MAX = 64 * 1024
#: One is ever asked for; a few more are taken, to be refused with a sentence.
FDS_MAX = 4
_FD_BYTES = array.array("i").itemsize
_SO_PEERPIDFD = 77  # since Linux 6.5; Python has no name for it
_CREDENTIALS = struct.Struct("iII")


class Frame(NamedTuple):
    """What one recvmsg brought. The descriptors are the caller's."""

    payload: bytes
    fds: list[int]


def receive(connection: socket.socket) -> Frame:
    """One frame; an empty one is the end of the connection, or a peer's mistake.

    Raises:
        BlockingIOError: there is none.
        OSError: the connection is broken.
        ProtocolMismatch: the frame is too long, or brings too many descriptors.
    """
    payload, ancillary, flags, _ = connection.recvmsg(
        FRAME_BYTES_MAX, socket.CMSG_SPACE(FDS_MAX * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
    )
    received = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(content[: len(content) - len(content) % _FD_BYTES])
    fds = received.tolist()
    if flags & socket.MSG_TRUNC:
        close_fds(fds)
        raise ProtocolMismatch(f"The frame is longer than {FRAME_BYTES_MAX} bytes.")
    if flags & socket.MSG_CTRUNC:
        close_fds(fds)
        raise ProtocolMismatch(f"The frame brings more than {FDS_MAX} descriptors.")
    return Frame(payload, fds)


def send(connection: socket.socket, payload: bytes, fds: Sequence[int] = ()) -> None:
    """Send one frame. Raises BlockingIOError when the peer does not read; OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([payload], rights, socket.MSG_NOSIGNAL)


def discard(connection: socket.socket) -> None:
    """Take no more, and drop what is unread: else the peer's next read fails. Raises OSError."""
    connection.shutdown(socket.SHUT_RD)
    while True:
        try:
            payload, fds = receive(connection)
        except ProtocolMismatch:
            continue
        close_fds(fds)
        if not payload:
            return


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that came or were kept."""
    for fd in fds:
        os.close(fd)


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, by the kernel's word."""
    encoded = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(encoded)
    return pid, uid, gid


def peer_pidfd(connection: socket.socket) -> int | None:
    """A pidfd of the process that connected; None when the kernel has none to give."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return None
