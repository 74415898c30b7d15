"""Where the daemon's sockets are. The one place of the client that touches the environment.

On any thread. The daemon follows the same rules for its sockets, and looks by itself.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvoffd_client.errors import ClientError

HANDSHAKE_SUFFIX = ".handshake"
# sun_path holds 108 bytes with its final zero.
SOCKET_PATH_BYTES_MAX = 107


def default_socket_path(uid: int, runtime_folder: str | None) -> str:
    """The daemon's socket when nobody says otherwise."""
    if runtime_folder:
        return str(Path(runtime_folder) / "kvoffd" / "kvoffd.sock")
    if uid == 0:
        return "/run/kvoffd/kvoffd.sock"
    # The folder is private by its mode; the handshake checks whose daemon answers there.
    return f"/tmp/kvoffd-{uid}/kvoffd.sock"  # noqa: S108 - see above


def socket_path(argument: str | None = None) -> str:
    """The absolute socket path: the argument, else KVOFFD_SOCKET, else the default.

    Raises:
        ClientError: The path does not fit into a socket address.
    """
    chosen = argument or os.environ.get("KVOFFD_SOCKET")
    if not chosen:
        chosen = default_socket_path(os.geteuid(), os.environ.get("XDG_RUNTIME_DIR"))
    path = str(Path(chosen).absolute())
    length_bytes = len(os.fsencode(path + HANDSHAKE_SUFFIX))
    if length_bytes > SOCKET_PATH_BYTES_MAX:
        raise ClientError(
            f"the socket path {path} is too long: with {HANDSHAKE_SUFFIX} it has {length_bytes} "
            f"bytes, and {SOCKET_PATH_BYTES_MAX} are possible"
        )
    return path


def handshake_path(path: str) -> str:
    """The handshake socket that lies beside a gRPC socket."""
    return path + HANDSHAKE_SUFFIX


def keep_grpc_out_of_forks() -> None:
    """Keep gRPC's fork handlers off, unless the user has chosen; before gRPC is imported.

    With streams open, the handlers start threads in a forked child that crash about
    every third one, although gRPC for Python has its fork support off by default. It
    asks the environment once, when it is imported, and has no other switch. A child
    has no session in any case (`io_thread.is_fork_of_a_user`).
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
