"""The main loop of a copier process: frames in, copies, ends out.

Owns the pools, the waiting batches and the one store that is under way. One
thread does everything, so a pool is never closed under a copy, and a ticket's
lock is never held while anything else is done. A store is done in slices:
between two of them frames are read, and loads go first.

Started by kvoffd.copier.child only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from kvoffd.copier import frames
from kvoffd.copier.batch import WaitingBatches
from kvoffd.copier.frames import BatchEnd, LoadBatch, Outcome, StoreBatch
from kvoffd.copier.transfer import PoolInCopier, StoreUnderWay, end_unstarted, run_load
from kvoffd.devices.opening import open_device
from kvoffd.errors import KvoffdError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffd.copier.frames import Batch
    from kvoffd.devices.base import Device

#: How often a doorbell or a taken lock is looked at while something waits for it.
_POLL_S = 0.0005
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


class CopierLoop:
    """Everything that a copier does after its start."""

    def __init__(
        self, connection: socket.socket, device: Device, arena_bytes: int, incarnation: int
    ) -> None:
        self._connection = connection
        self._device = device
        self._arena_bytes = arena_bytes
        self._incarnation = incarnation
        self._pools: dict[int, PoolInCopier] = {}
        self._waiting = WaitingBatches()
        self._store: StoreUnderWay | None = None
        #: Leading parts of batches whose own frame has not come yet.
        self._parts: dict[int, list[frames.BatchPart]] = {}

    def run(self) -> None:
        """Until the control process hangs up."""
        self._send(frames.Hello(incarnation=self._incarnation, pid=os.getpid()))
        while self._read_frames():
            self._waiting.poll(lambda pool_id: self._pools[pool_id].tickets.doorbell)
            for overdue in list(self._waiting.take_overdue(frames.monotonic_ms())):
                self._end_unstarted(overdue, Outcome.DEADLINE)
            self._work()

    def _read_frames(self) -> bool:
        """Read what is there; sleep first when there is nothing to do. False at the end."""
        if self._waiting.has_runnable or self._store is not None:
            timeout_s: float | None = 0.0
        else:
            timeout_s = _POLL_S if self._waiting.must_poll else None
        # select, since poll() rounds up to whole milliseconds.
        while select.select([self._connection], [], [], timeout_s)[0]:
            received = frames.receive_to_copier(self._connection)
            if received is None:
                return False
            self._take_frame(*received)
            timeout_s = 0.0
        return True

    def _work(self) -> None:
        """One load, or else one slice of a store."""
        while (load := self._waiting.take_load()) is not None:
            assert isinstance(load, LoadBatch), f"{load} is among the loads."
            end = run_load(self._device, self._pools[load.pool_id], load, self._incarnation)
            if end is not None:
                self._send(end)
                return
            # Its client has the lock: whatever comes next goes on, stores included.
            self._waiting.put_back(load)
        if self._store is None:
            store = self._waiting.take_store()
            if store is None:
                return
            assert isinstance(store, StoreBatch), f"{store} is among the stores."
            self._store = StoreUnderWay(self._device, self._pools[store.pool_id], store)
        end = self._store.copy_slice()
        if end is not None:
            self._store = None
            self._send(end)

    # --- Frames -------------------------------------------------------------------

    def _take_frame(self, frame: frames.ToCopier, fds: Sequence[int]) -> None:
        try:
            match frame:
                case StoreBatch() | LoadBatch():
                    self._queue(frame)
                case frames.BatchPart():
                    self._parts.setdefault(frame.batch_id, []).append(frame)
                case frames.Cancel():
                    self._cancel(frame.batch_id)
                case frames.OpenPoolFrame():
                    self._open_pool(frame, fds)
                case frames.ClosePoolFrame():
                    self._close_pool(frame.pool_id)
                case frames.Ping():
                    self._send(frames.Pong(number=frame.number))
        finally:
            for fd in fds:
                os.close(fd)

    def _queue(self, batch: Batch) -> None:
        parts = self._parts.pop(batch.batch_id, [])
        if parts:
            batch = msgspec.structs.replace(
                batch,
                slots=b"".join(part.slots for part in parts) + batch.slots,
                block_ids=b"".join(part.block_ids for part in parts) + batch.block_ids,
            )
        pool = self._pools.get(batch.pool_id)
        if pool is None:
            # Its closing frame came first: it waits for nothing any more.
            self._send(BatchEnd(batch_id=batch.batch_id, outcome=Outcome.CANCELLED))
            return
        self._waiting.put(batch, pool.tickets.doorbell)

    def _cancel(self, batch_id: int) -> None:
        batch = self._waiting.take(batch_id)
        if batch is not None:
            self._end_unstarted(batch, Outcome.CANCELLED)
        elif self._store is not None and self._store.batch.batch_id == batch_id:
            self._cancel_store_under_way()

    def _open_pool(self, frame: frames.OpenPoolFrame, fds: Sequence[int]) -> None:
        try:
            assert frame.pool_id not in self._pools, f"Pool {frame.pool_id} is open."
            self._pools[frame.pool_id] = PoolInCopier.open(
                self._device, self._arena_bytes, frame.description, fds
            )
        except (KvoffdError, OSError) as error:
            self._send(frames.PoolRefused(pool_id=frame.pool_id, reason=str(error)))
        else:
            self._send(frames.PoolOpened(pool_id=frame.pool_id))

    def _close_pool(self, pool_id: int) -> None:
        for batch in self._waiting.take_pool(pool_id):
            self._end_unstarted(batch, Outcome.CANCELLED)
        if self._store is not None and self._store.batch.pool_id == pool_id:
            self._cancel_store_under_way()
        pool = self._pools.pop(pool_id, None)
        if pool is not None:
            pool.close()
        self._send(frames.PoolClosed(pool_id=pool_id))

    def _cancel_store_under_way(self) -> None:
        assert self._store is not None, "No store is under way."
        end = self._store.cancelled()
        self._store = None
        self._send(end)

    def _end_unstarted(self, batch: Batch, outcome: Outcome) -> None:
        self._send(end_unstarted(self._pools[batch.pool_id], batch, outcome))

    def _send(self, frame: frames.FromCopier) -> None:
        frames.send_encoded(self._connection, frames.encode_frame(frame))


def _die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill us with our parent; leave at once if it is gone already."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit("The control process was gone before its copier had started.")


def _name_process(device: str) -> None:
    """What top and ps show; 15 bytes are all that the kernel keeps."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"kvoffd-{device}".encode()[:15], 0, 0, 0)


def main() -> None:
    """Entry point of `python -m kvoffd.copier.process`."""
    # The control process decides when we end; a terminal's or a unit's signal
    # reaches it, too, and it will still want its copies finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    parser = argparse.ArgumentParser(prog="kvoffd-copier")
    parser.add_argument("device")
    for name in ("socket-fd", "arena-fd", "arena-bytes", "incarnation", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    _die_with_parent(arguments.parent_pid)
    _name_process(arguments.device)
    # Its number came from a process with many descriptors; select() wants a low one.
    with socket.socket(fileno=arguments.socket_fd) as inherited:
        connection = inherited.dup()
    try:
        device = open_device(arguments.device, arguments.arena_fd, arguments.arena_bytes)
    except KvoffdError as error:
        sys.exit(f"The copier of {arguments.device} cannot start: {error}")
    os.close(arguments.arena_fd)
    # The control process may hang up while we are telling it something.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        CopierLoop(connection, device, arguments.arena_bytes, arguments.incarnation).run()


if __name__ == "__main__":
    main()
