"""What the daemon says of itself, asked by a session of its own, as plain dicts.

A second, minimal client: the tests must not lean on the one they test.
"""

from __future__ import annotations

import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from kvoffd_proto.v1 import admin_pb2, admin_pb2_grpc, handshake_pb2
from tests.engine.daemon import wait_a_little

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CALL_DEADLINE_S = 20.0
_FRAME_BYTES_MAX = 65536


@contextmanager
def _admin(socket_path: Path) -> Iterator[tuple[admin_pb2_grpc.AdminStub, Any]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as handshake:
        handshake.settimeout(_CALL_DEADLINE_S)
        handshake.connect(f"{socket_path}.handshake")
        hello = handshake_pb2.Hello(
            protocol_min=1, protocol_max=1, role=handshake_pb2.SESSION_ROLE_ADMIN
        )
        handshake.send(handshake_pb2.HandshakeRequest(hello=hello).SerializeToString())
        token = None
        while token is None:
            reply = handshake_pb2.HandshakeReply.FromString(handshake.recv(_FRAME_BYTES_MAX))
            assert not reply.HasField("closing"), reply.closing.reason
            token = reply.welcome.session_token or None
        options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"unix:{socket_path}", options=options) as channel:
            yield admin_pb2_grpc.AdminStub(channel), (("kvoffd-session", token),)


def _patiently(ask: Any) -> Any:
    """Ask again while the daemon is starting, within one deadline."""
    ends_s = time.monotonic() + _CALL_DEADLINE_S
    while True:
        try:
            return ask()
        except (OSError, grpc.RpcError):
            if time.monotonic() > ends_s:
                raise
            wait_a_little(0.05)


def daemon_status(socket_path: Path) -> dict[str, Any]:
    """Admin.Status; the reasons of the ledger as dicts."""

    def ask() -> dict[str, Any]:
        with _admin(socket_path) as (admin, metadata):
            status = admin.Status(
                admin_pb2.StatusRequest(), metadata=metadata, timeout=_CALL_DEADLINE_S
            )
        return {
            "boot_id": status.boot_id.hex(),
            "sessions": status.sessions,
            "instances": status.instances,
            "namespaces": status.namespaces,
            "arena": _plain(status.arena),
            "cache": _plain(status.cache),
            "ledger": _ledger(status.ledger),
            "copiers": [_plain(copier) for copier in status.copiers],
        }

    found: dict[str, Any] = _patiently(ask)
    return found


def daemon_instances(socket_path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Each instance's ledger by (id, nonce)."""

    def ask() -> dict[tuple[str, str], dict[str, Any]]:
        with _admin(socket_path) as (admin, metadata):
            reply = admin.Instances(
                admin_pb2.InstancesRequest(), metadata=metadata, timeout=_CALL_DEADLINE_S
            )
        return {(one.id, one.nonce): _ledger(one.ledger) for one in reply.instances}

    found: dict[tuple[str, str], dict[str, Any]] = _patiently(ask)
    return found


def not_idle(status: dict[str, Any]) -> dict[str, Any]:
    """What is left although no engine is there: must become empty."""
    cache = status["cache"]
    left = {
        name: cache[name]
        for name in (
            "blocks_pending",
            "leases",
            "holds",
            "loads_in_flight",
            "slots_quarantined",
        )
        if cache[name]
    }
    ledger = status["ledger"]
    if ledger["in_flight"]:
        left["ledger in flight"] = ledger["in_flight"]
    if not balances(ledger):
        left["ledger does not balance"] = ledger
    batches = sum(copier["batches_in_flight"] for copier in status["copiers"])
    if batches:
        left["batches in flight"] = batches
    if status["instances"]:
        left["instances"] = status["instances"]
    return left


def balances(ledger: dict[str, Any]) -> bool:
    """The conservation law."""
    ended = ledger["stored"] + ledger["present"]
    ended += sum(ledger["rejected"].values()) + sum(ledger["failed"].values())
    return bool(ledger["submitted"] == ended + ledger["in_flight"])


def ledger_differences(
    ours: dict[str, Any], theirs: dict[str, Any] | None, *, exact: bool
) -> list[str]:
    """Sentences on where an instance's account is wrong, or differs from the daemon's.

    Not exact: a connection broke, so the daemon may know of less, or of other ends.
    """
    found = []
    if not balances(ours):
        found.append(f"the client's ledger does not balance: {ours}")
    if ours["in_flight"]:
        found.append(f"the client has blocks in flight: {ours}")
    if not exact:
        return found
    if theirs is None:
        return [*found, "the daemon does not know the instance"]
    if not balances(theirs):
        found.append(f"the daemon's ledger does not balance: {theirs}")
    found += [
        f"{name}: {ours[name]} by the client, {theirs[name]} by the daemon"
        for name in ("stored", "present", "in_flight")
        if ours[name] != theirs[name]
    ]
    return found


def _ledger(ledger: Any) -> dict[str, Any]:
    return {
        "submitted": ledger.submitted,
        "stored": ledger.stored,
        "present": ledger.present,
        "in_flight": ledger.in_flight,
        "rejected": {one.reason: one.blocks for one in ledger.rejected},
        "failed": {one.reason: one.blocks for one in ledger.failed},
    }


def _plain(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
