"""One daemon a socket."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from kvoffd.errors import SocketTaken
from kvoffd.rpc.lock import SocketLock
from kvoffd.rpc.options import RpcOptions

if TYPE_CHECKING:
    from pathlib import Path


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(path))


def test_stale_sockets_are_removed_and_the_lock_is_exclusive(tmp_path: Path) -> None:
    options = RpcOptions(socket=str(tmp_path / "k.sock"))
    for path in (options.socket, options.handshake_socket):
        leave_socket(tmp_path / path)
    lock, other = SocketLock(options), SocketLock(options)
    lock.take()
    assert {path.name for path in tmp_path.iterdir()} == {"k.sock.lock"}
    leave_socket(tmp_path / "k.sock")
    with pytest.raises(SocketTaken, match="Another daemon"):
        other.take()
    assert (tmp_path / "k.sock").exists()
    other.drop()
    assert (tmp_path / "k.sock").exists()
    lock.drop()
    lock.drop()
    assert not (tmp_path / "k.sock").exists()
    other.take()
    other.drop()


def test_other_files_are_not_removed(tmp_path: Path) -> None:
    options = RpcOptions(socket=str(tmp_path / "k.sock"))
    (tmp_path / "k.sock.handshake").mkdir()
    lock = SocketLock(options)
    with pytest.raises(SocketTaken, match="no socket"):
        lock.take()
    assert (tmp_path / "k.sock.handshake").is_dir()
    (tmp_path / "k.sock.handshake").rmdir()
    lock.take()
    lock.drop()
