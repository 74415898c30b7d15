"""The gRPC channel of a session: options and metadata, nothing else.

Must be made on the background loop. Retries and back-off are the session's
work, so gRPC's own are kept out of the way.
"""

from __future__ import annotations

from urllib.parse import quote

import grpc.aio

# The daemon's own bound is 4 MiB; steps are cut far below it.
MESSAGE_BYTES_MAX = 4 * 1024 * 1024

_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A subchannel shared with an earlier, failed channel would bring its back-off along.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # The path of a socket is no host name; without this it becomes one, percent-encoded.
    ("grpc.default_authority", "localhost"),
)

Metadata = tuple[tuple[str, str], ...]


def open_channel(socket_path: str) -> grpc.aio.Channel:
    """A channel to the daemon's socket; connects at the first call."""
    return grpc.aio.insecure_channel(f"unix:{quote(socket_path, safe='/')}", options=_OPTIONS)


def session_metadata(token: str) -> Metadata:
    """What each call carries so that the daemon knows its session."""
    return (("kvoffd-session", token),)
