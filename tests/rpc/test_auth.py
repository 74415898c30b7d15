"""Who is let in."""

from __future__ import annotations

import os

import pytest

from kvoffd.errors import Forbidden
from kvoffd.rpc.auth import check_peer
from kvoffd.rpc.options import RpcOptions
from kvoffd.service.sessions import Peer

OPTIONS = RpcOptions(
    socket="/nowhere/k.sock", allowed_uids=frozenset({5001}), allowed_gids=frozenset({6001})
)


@pytest.mark.parametrize(("uid", "gid"), [(0, 9), (os.geteuid(), 9), (5001, 9), (5002, 6001)])
def test_allowed(uid: int, gid: int) -> None:
    check_peer(Peer(uid, gid, 1), OPTIONS)


@pytest.mark.parametrize(("uid", "gid"), [(5002, 9), (6001, 5001), (5002, 0)])
def test_refused_with_a_sentence(uid: int, gid: int) -> None:
    with pytest.raises(Forbidden, match=f"User {uid} with group {gid}"):
        check_peer(Peer(uid, gid, 1), OPTIONS)
