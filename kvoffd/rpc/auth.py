"""Who may come: users at the handshake, session tokens at each call.

Keeps no state. The token is 128 random bits that crossed a socket on which the kernel
named the peer, so the gRPC socket needs to know no more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvoffd.errors import Forbidden, SessionNotFound

if TYPE_CHECKING:
    import grpc.aio

    from kvoffd.rpc.options import RpcOptions
    from kvoffd.service.sessions import Peer, Session, Sessions

SESSION_METADATA = "kvoffd-session"


def check_peer(peer: Peer, options: RpcOptions) -> None:
    """Raises Forbidden for a user and group that are not on the allow-list."""
    if peer.uid in {0, os.geteuid()} or peer.uid in options.allowed_uids:
        return
    if peer.gid in options.allowed_gids:
        return
    raise Forbidden(
        f"User {peer.uid} with group {peer.gid} is not on the daemon's allow-list "
        "(allowed_uids, allowed_gids)."
    )


def session_of(context: grpc.aio.ServicerContext, sessions: Sessions) -> Session:
    """The session whose token a call carries. Raises SessionNotFound."""
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_METADATA:
            return sessions.get(value)
    raise SessionNotFound(f"The call carries no session token ({SESSION_METADATA}).")
