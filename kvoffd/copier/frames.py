"""The job protocol between the control process and a copier.

Owns the frames and how they cross the socketpair: one msgpack frame a
SOCK_SEQPACKET message, file descriptors beside it as SCM_RIGHTS. Both ends are
ours and of one version, so an unreadable frame is a bug, not an attack.
Keeps no state; used on the loop thread and in the copier.
"""

from __future__ import annotations

import array
import enum
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from kvoffd.devices.base import PoolDescription  # noqa: TC001 - msgspec reads it at run time
from kvoffd.errors import CopyFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Upper bound of a frame. Well below the socket's send buffer (208 KiB by
#: default), so that a frame always fits once the peer has read the former ones.
FRAME_BYTES_MAX = 64 * 1024
#: Blocks of one frame: 12 bytes a block, and room for the other fields.
FRAME_BLOCKS_MAX = 4096
#: Blocks of one batch: it is put together from frames in the copier's memory.
BATCH_BLOCKS_MAX = 256 * 1024
#: The kernel's SCM_MAX_FD.
FRAME_FDS_MAX = 253

_SLOT_WORD_BYTES = 8
_BLOCK_WORD_BYTES = 4


class Outcome(enum.Enum):
    """How a batch ended."""

    #: All bytes have arrived, and the ticket was still good afterwards.
    COPIED = "copied"
    #: The ticket is revoked or another job's. A store's bytes mean nothing.
    REVOKED = "revoked"
    #: Cancelled, or its pool was closed. A load has written nothing.
    CANCELLED = "cancelled"
    #: A load did not start in time. Nothing is written.
    DEADLINE = "deadline"
    #: See the reason. A load may have written some of its bytes; none will follow.
    FAILED = "failed"


class OpenPoolFrame(msgspec.Struct, tag="open", frozen=True, kw_only=True):
    """Map a pool. Descriptors: one a memory, then the ticket page's."""

    pool_id: int
    description: PoolDescription


class ClosePoolFrame(msgspec.Struct, tag="close", frozen=True, kw_only=True):
    """End what waits for this pool, then unmap it."""

    pool_id: int


class StoreBatch(msgspec.Struct, tag="store", frozen=True, kw_only=True):
    """Copy blocks of a pool into slots."""

    batch_id: int
    pool_id: int
    group: int
    job_id: int
    ticket_cell: int
    #: Not to start before the pool's doorbell has reached this value.
    bell: int
    #: Byte offsets into the arena's data, see pack_slots.
    slots: bytes
    #: See pack_block_ids; one for each slot.
    block_ids: bytes


class LoadBatch(msgspec.Struct, tag="load", frozen=True, kw_only=True):
    """Copy slots into blocks of a pool."""

    batch_id: int
    pool_id: int
    group: int
    job_id: int
    ticket_cell: int
    bell: int
    slots: bytes
    block_ids: bytes
    #: ABSOLUTE, on the clock of monotonic_ms(): not to start after it.
    deadline_ms: int


class BatchPart(msgspec.Struct, tag="part", frozen=True, kw_only=True):
    """Leading blocks of a batch too long for one frame; the batch's own frame follows."""

    batch_id: int
    slots: bytes
    block_ids: bytes


class Cancel(msgspec.Struct, tag="cancel", frozen=True, kw_only=True):
    """End a batch early if that is still possible. Its one BatchEnd comes anyway."""

    batch_id: int


class Ping(msgspec.Struct, tag="ping", frozen=True, kw_only=True):
    """Are you there?"""

    number: int


class Hello(msgspec.Struct, tag="hello", frozen=True, kw_only=True):
    """First frame of a copier: it has mapped the arena and waits for work."""

    incarnation: int
    pid: int
    notes: tuple[str, ...] = ()


class PoolOpened(msgspec.Struct, tag="opened", frozen=True, kw_only=True):
    """The pool is mapped."""

    pool_id: int


class PoolRefused(msgspec.Struct, tag="refused", frozen=True, kw_only=True):
    """The pool is not mapped; the reason is a sentence."""

    pool_id: int
    reason: str


class PoolClosed(msgspec.Struct, tag="closed", frozen=True, kw_only=True):
    """The pool is unmapped; each of its batches has had its end before this."""

    pool_id: int


class BatchEnd(msgspec.Struct, tag="end", frozen=True, kw_only=True):
    """The one end of a batch."""

    batch_id: int
    outcome: Outcome
    reason: str = ""
    bytes_copied: int = 0
    busy_us: int = 0


class Pong(msgspec.Struct, tag="pong", frozen=True, kw_only=True):
    """I am."""

    number: int


Batch = StoreBatch | LoadBatch
ToCopier = OpenPoolFrame | ClosePoolFrame | StoreBatch | LoadBatch | BatchPart | Cancel | Ping
FromCopier = Hello | PoolOpened | PoolRefused | PoolClosed | BatchEnd | Pong

_encoder = msgspec.msgpack.Encoder()
_to_copier: msgspec.msgpack.Decoder[ToCopier] = msgspec.msgpack.Decoder(ToCopier)
_from_copier: msgspec.msgpack.Decoder[FromCopier] = msgspec.msgpack.Decoder(FromCopier)


def monotonic_ms() -> int:
    """Now, on the clock of LoadBatch.deadline_ms: CLOCK_MONOTONIC, one for all processes."""
    return time.monotonic_ns() // 1_000_000


def pack_slots(offsets_bytes: Iterable[int]) -> bytes:
    """Byte offsets of slots as a batch carries them: 64-bit words."""
    return array.array("Q", offsets_bytes).tobytes()


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Block ids as a batch carries them: 32-bit words."""
    return array.array("I", block_ids).tobytes()


def batch_blocks(batch: Batch | BatchPart) -> int:
    """Blocks of a batch or of a part of one."""
    return len(batch.block_ids) // _BLOCK_WORD_BYTES


def split_batch(batch: Batch) -> Iterator[ToCopier]:
    """Frames of a batch, each within the bound; the last one is the batch's own."""
    blocks = batch_blocks(batch)
    start = 0
    while blocks - start > FRAME_BLOCKS_MAX:
        end = start + FRAME_BLOCKS_MAX
        yield BatchPart(
            batch_id=batch.batch_id,
            slots=batch.slots[start * _SLOT_WORD_BYTES : end * _SLOT_WORD_BYTES],
            block_ids=batch.block_ids[start * _BLOCK_WORD_BYTES : end * _BLOCK_WORD_BYTES],
        )
        start = end
    if start == 0:
        yield batch
    else:
        yield msgspec.structs.replace(
            batch,
            slots=batch.slots[start * _SLOT_WORD_BYTES :],
            block_ids=batch.block_ids[start * _BLOCK_WORD_BYTES :],
        )


def encode_frame(frame: ToCopier | FromCopier) -> bytes:
    """Bytes of a frame.

    Raises:
        CopyFailed: it would be longer than FRAME_BYTES_MAX.
    """
    encoded = _encoder.encode(frame)
    if len(encoded) > FRAME_BYTES_MAX:
        raise CopyFailed(
            f"A {type(frame).__name__} of {len(encoded)} bytes is longer than a frame may be "
            f"({FRAME_BYTES_MAX})."
        )
    return encoded


def send_encoded(connection: socket.socket, encoded: bytes, fds: Sequence[int] = ()) -> None:
    """Send one frame. Blocks or raises BlockingIOError as the socket is set up."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([encoded], rights, socket.MSG_NOSIGNAL)


def receive_from_copier(connection: socket.socket) -> FromCopier | None:
    """One frame of a copier; None at its end of the connection."""
    encoded, _ = _receive(connection)
    return _from_copier.decode(encoded) if encoded else None


def receive_to_copier(connection: socket.socket) -> tuple[ToCopier, list[int]] | None:
    """One frame for a copier with its descriptors, now the caller's; None at the end."""
    encoded, fds = _receive(connection)
    return (_to_copier.decode(encoded), fds) if encoded else None


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    encoded, ancillary, flags, _ = connection.recvmsg(
        FRAME_BYTES_MAX, socket.CMSG_SPACE(FRAME_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise CopyFailed("A frame was longer than the protocol between our own processes allows.")
    return encoded, fds.tolist()
