"""Frames with descriptors: whatever comes, no descriptor is lost and none is made up."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvoffd.errors import ProtocolMismatch
from kvoffd.rpc import seqpacket

if TYPE_CHECKING:
    from collections.abc import Iterator

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(0)
    with ours, theirs:
        yield ours, theirs


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def send_raw(theirs: socket.socket, payload: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    theirs.sendmsg([payload], rights)


def test_frame_and_descriptors_arrive_together(pair: Pair) -> None:
    ours, theirs = pair
    seqpacket.send(theirs, b"first", [0, 1])
    seqpacket.send(theirs, b"second")
    payload, fds = seqpacket.receive(ours)
    assert (payload, len(fds)) == (b"first", 2)
    assert not any(os.get_inheritable(fd) for fd in fds)
    seqpacket.close_fds(fds)
    assert seqpacket.receive(ours) == (b"second", [])
    with pytest.raises(BlockingIOError):
        seqpacket.receive(ours)


@pytest.mark.parametrize("fds", [0, 1, seqpacket.FDS_MAX])
def test_frame_that_is_too_long_keeps_no_descriptor(pair: Pair, fds: int) -> None:
    ours, theirs = pair
    before = open_descriptors()
    send_raw(theirs, b"x" * (seqpacket.FRAME_BYTES_MAX + 1), [0] * fds)
    with pytest.raises(ProtocolMismatch, match="longer"):
        seqpacket.receive(ours)
    assert open_descriptors() == before


@pytest.mark.parametrize("fds", [seqpacket.FDS_MAX + 1, 200])
def test_too_many_descriptors_are_all_closed(pair: Pair, fds: int) -> None:
    ours, theirs = pair
    before = open_descriptors()
    send_raw(theirs, b"x", [0] * fds)
    with pytest.raises(ProtocolMismatch, match="descriptors"):
        seqpacket.receive(ours)
    assert open_descriptors() == before


def test_last_word_is_read_although_frames_were_not(pair: Pair) -> None:
    """Without discard(), the peer's next read would fail instead of bringing the reason."""
    ours, theirs = pair
    before = open_descriptors()
    for payload in (b"a", b"b" * 70_000, b"c"):
        send_raw(theirs, payload, [0, 0])
    send_raw(theirs, b"d", [0] * 50)
    seqpacket.send(ours, b"goodbye")
    seqpacket.discard(ours)
    assert open_descriptors() == before
    ours.close()
    assert theirs.recv(100) == b"goodbye"
    assert theirs.recv(100) == b""


def test_peer_is_named_by_the_kernel(pair: Pair) -> None:
    ours, _ = pair
    assert seqpacket.peer_credentials(ours) == (os.getpid(), os.geteuid(), os.getegid())
