"""A copier as the service sees it: one per device, restarted when it dies.

Owns the table of open pools and the batches in flight, and the decision to
restart. Runs on the loop thread. Never blocks, and never touches KV bytes.

Each batch that is submitted gets exactly one batch_ended, whatever happens to
the process; events are always called from the loop, never from inside a call
of the service's own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal

from kvoffd.copier import frames
from kvoffd.copier.child import Child
from kvoffd.copier.frames import BatchEnd, LoadBatch, Outcome, StoreBatch
from kvoffd.copier.kept_pool import KeptPool
from kvoffd.copier.ports import CopierEvents, CopierOptions
from kvoffd.devices.base import PoolDescription, Region, check_device_name
from kvoffd.errors import CopyFailed, MemoryRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: All that a user of a copier needs besides the frames.
__all__ = ["Copier", "CopierEvents", "CopierOptions", "PoolDescription", "Region"]


class Copier:
    """The copier of one device. Not to be used after stop()."""

    def __init__(
        self,
        device: str,
        arena_data_fd: int,
        arena_bytes: int,
        options: CopierOptions,
        events: CopierEvents,
    ) -> None:
        check_device_name(device)
        self.device = device
        self.state: Literal["up", "restarting", "down"] = "down"
        self.restarts = 0
        self.store_bytes = 0
        self.load_bytes = 0
        self._arena_data_fd = arena_data_fd
        self._arena_bytes = arena_bytes
        self._options = options
        self._events = events
        self._child: Child | None = None
        self._pools: dict[int, KeptPool] = {}
        self._closing: dict[int, asyncio.Future[None]] = {}
        self._in_flight: dict[int, bool] = {}  # batch id -> is it a load
        self._pool_ids = 0
        self._quick_failures = 0
        self._ping_number = 0
        self._unanswered_since_s: float | None = None
        self._hello: asyncio.Future[None] | None = None
        self._run_task: asyncio.Task[None] | None = None
        self._stop_asked = asyncio.Event()

    # --- Life ---------------------------------------------------------------------

    async def start(self) -> None:
        """Spawn the process and wait until it is up.

        Raises:
            CopyFailed: it did not start. Nothing is left behind.
        """
        assert self._run_task is None, f"The copier of {self.device} was started twice."
        first_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._run_task = asyncio.create_task(self._run(first_up), name=f"copier {self.device}")
        try:
            await first_up
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the process and wait until it is gone. Batches in flight end failed."""
        self._stop_asked.set()
        if self._child is not None:
            await self._end_child(self._child)
        if self._run_task is not None:
            await asyncio.wait([self._run_task])
        for pool in self._pools.values():
            pool.let_go()
        self._pools.clear()
        # What is queued behind us are the last events: they have been called on return.
        await asyncio.sleep(0)
        self.state = "down"

    def kill(self, reason: str) -> None:
        """Last resort: SIGKILL. All its batches fail, for all its engines; then it restarts."""
        if self._child is not None:
            self._child.kill(reason)

    @property
    def incarnation(self) -> int:
        """Of the present process; 0 when there is none."""
        return self._child.incarnation if self._child is not None else 0

    @property
    def pid(self) -> int:
        """Of the present process; 0 when there is none."""
        return self._child.pid if self._child is not None else 0

    @property
    def pidfd(self) -> int | None:
        """Of the present process; dup it to keep it. None when there is none."""
        return self._child.pidfd if self._child is not None else None

    @property
    def batches_in_flight(self) -> int:
        """Batches submitted and not ended."""
        return len(self._in_flight)

    # --- Pools --------------------------------------------------------------------

    async def open_pool(self, pool: PoolDescription, fds: Sequence[int]) -> int:
        """Have a pool mapped, in this process and in each that replaces it.

        `fds`: one a memory, then the ticket page's. They stay the caller's; dups
        are kept until close_pool.

        Raises:
            MemoryRefused: the memory is not what it is described as.
            CopyFailed: the copier is not up, or died over it.
        """
        if self.state != "up" or self._child is None:
            raise CopyFailed(f"The copier of {self.device} is {self.state}.")
        self._pool_ids += 1
        entry = KeptPool.keep(self._pool_ids, pool, fds)
        self._pools[entry.pool_id] = entry
        try:
            await self._ask_to_open(self._child, entry)
        except BaseException:
            await asyncio.shield(self.close_pool(entry.pool_id))
            raise
        if entry.refusal is not None:
            refusal = entry.refusal
            await asyncio.shield(self.close_pool(entry.pool_id))
            raise MemoryRefused(refusal)
        return entry.pool_id

    async def close_pool(self, pool_id: int) -> None:
        """Have a pool unmapped. Returns when it is, or the process that had it is gone.

        Its unstarted batches end cancelled before that. An unknown pool is closed.
        """
        closing = self._closing.get(pool_id)
        entry = self._pools.pop(pool_id, None)
        if closing is None and entry is not None:
            closing = asyncio.get_running_loop().create_future()
            self._closing[pool_id] = closing
            closing.add_done_callback(lambda _: entry.let_go())
            if self._child is None:
                self._settle_closing(pool_id)
            else:
                self._child.send(frames.ClosePoolFrame(pool_id=pool_id))
        if closing is not None:
            await asyncio.shield(closing)

    # --- Batches ------------------------------------------------------------------

    def submit_store(self, batch: StoreBatch) -> None:
        """Hand a store over. Never blocks; its end is batch_ended."""
        self._submit(batch, is_load=False)

    def submit_load(self, batch: LoadBatch) -> None:
        """Hand a load over. Never blocks; its end is batch_ended."""
        self._submit(batch, is_load=True)

    def cancel(self, batch_id: int) -> None:
        """End a batch early if possible; one that has ended already is ignored."""
        if batch_id in self._in_flight and self._child is not None:
            self._child.send(frames.Cancel(batch_id=batch_id))

    def _submit(self, batch: StoreBatch | LoadBatch, *, is_load: bool) -> None:
        assert batch.batch_id not in self._in_flight, f"Batch {batch.batch_id} is in flight."
        refusal = self._refusal(batch)
        if refusal is not None or self._child is None:
            end = BatchEnd(
                batch_id=batch.batch_id, outcome=Outcome.FAILED, reason=refusal or "No copier."
            )
            self._call(self._events.batch_ended, end)
            return
        self._in_flight[batch.batch_id] = is_load
        for frame in frames.split_batch(batch):
            self._child.send(frame)

    def _refusal(self, batch: StoreBatch | LoadBatch) -> str | None:
        if self.state != "up":
            return f"The copier of {self.device} is {self.state}."
        pool = self._pools.get(batch.pool_id)
        if pool is None:
            return f"Pool {batch.pool_id} is not open."
        if pool.refusal is not None:
            return pool.refusal
        if frames.batch_blocks(batch) > frames.BATCH_BLOCKS_MAX:
            return f"A batch has at most {frames.BATCH_BLOCKS_MAX} blocks."
        if len(self._in_flight) >= self._options.batches_in_flight_max:
            return f"The copier of {self.device} has too many batches in flight."
        return None

    # --- One process after the other ------------------------------------------------

    async def _run(self, first_up: asyncio.Future[None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            reason = await self._live(first_up)
            if not first_up.done():
                first_up.set_exception(CopyFailed(reason))
                return
            quick = loop.time() - began_s < self._options.quick_failure_s
            self._quick_failures = self._quick_failures + 1 if quick else 0
            if self._quick_failures >= self._options.quick_failures_max:
                self.state = "down"
            try:
                await asyncio.wait_for(self._stop_asked.wait(), self._pause_s())
            except TimeoutError:
                self.restarts += 1
            else:
                self.state = "down"
                return

    def _pause_s(self) -> float:
        doublings = min(self._quick_failures, 30)
        pause_s: float = self._options.restart_pause_s * 2**doublings
        return min(pause_s, self._options.restart_pause_max_s)

    async def _live(self, first_up: asyncio.Future[None]) -> str:
        """The life of one process, from spawn to death; says why it ended."""
        try:
            child = Child(
                self.device,
                self._arena_data_fd,
                self._arena_bytes,
                self._options.environment,
                self._on_frame,
            )
        except OSError as error:
            return f"The copier of {self.device} cannot be spawned: {error}"
        self._child = child
        announced = False
        try:
            if await self._bring_up(child):
                announced = True
                self._call(self._events.copier_up, child.incarnation, child.pidfd)
                # Queued behind the event: nothing is sent before the service knows.
                self._call(self._now_up, child)
                self._call(_set_done, first_up)
                await self._watch(child)
            await asyncio.wait([child.died])
        finally:
            child.end_now()
            self._bury(child, announced=announced)
        return child.died.result()

    async def _bring_up(self, child: Child) -> bool:
        """Wait for Hello and have all pools opened. False when it died or was killed."""
        self._hello = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._options.start_timeout_s):
                await _wait_either(self._hello, child.died)
                for entry in list(self._pools.values()):
                    # Closed meanwhile: it must not come back.
                    if entry.pool_id in self._pools:
                        await self._ask_to_open(child, entry)
        except TimeoutError:
            child.kill(f"not up within {self._options.start_timeout_s} s")
        except CopyFailed:
            pass  # it died; the caller sees that
        return self._hello.done() and not child.died.done() and not child.is_condemned

    def _now_up(self, child: Child) -> None:
        if self._child is child and not child.died.done() and not self._stop_asked.is_set():
            self.state = "up"

    async def _watch(self, child: Child) -> None:
        """Ping until it is dead; kill it when it is idle and deaf."""
        loop = asyncio.get_running_loop()
        self._unanswered_since_s = None
        while not child.died.done():
            await asyncio.wait([child.died], timeout=self._options.ping_interval_s)
            if self._in_flight:
                # A long copy is no fault; overdue ones are the service's to judge.
                self._unanswered_since_s = None
            elif self._unanswered_since_s is None:
                self._ping_number += 1
                self._unanswered_since_s = loop.time()
                child.send(frames.Ping(number=self._ping_number))
            elif loop.time() - self._unanswered_since_s > self._options.ping_timeout_s:
                child.kill(f"silent for {self._options.ping_timeout_s} s")

    def _bury(self, child: Child, *, announced: bool) -> None:
        """Everything that hung on this process ends; the order of the events is a promise."""
        self._child = None
        self.state = "restarting"
        reason = child.died.result()
        if announced and not self._stop_asked.is_set():
            self._call(self._events.copier_died, child.incarnation, reason)
        for batch_id in self._in_flight:
            end = BatchEnd(batch_id=batch_id, outcome=Outcome.FAILED, reason=reason)
            self._call(self._events.batch_ended, end)
        self._in_flight.clear()
        for entry in self._pools.values():
            entry.forget_answer()
        for pool_id in list(self._closing):
            self._settle_closing(pool_id)
        # Behind copier_up, which may still be queued and is to see it open.
        self._call(child.close_pidfd)

    async def _end_child(self, child: Child) -> None:
        child.hang_up()
        await asyncio.wait([child.died], timeout=self._options.stop_timeout_s)
        child.kill("did not stop in time")
        await asyncio.wait([child.died])

    # --- Frames -------------------------------------------------------------------

    async def _ask_to_open(self, child: Child, entry: KeptPool) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.answer = answer
        child.send(entry.open_frame(), entry.fds)
        await _wait_either(answer, child.died)
        if not answer.done():
            raise CopyFailed(child.died.result())

    def _on_frame(self, frame: frames.FromCopier) -> None:
        self._unanswered_since_s = None
        match frame:
            case BatchEnd():
                self._on_batch_end(frame)
            case frames.Hello():
                _set_done(self._hello)
            case frames.PoolOpened():
                self._on_pool_answer(frame.pool_id, None)
            case frames.PoolRefused():
                self._on_pool_answer(frame.pool_id, frame.reason)
            case frames.PoolClosed():
                self._settle_closing(frame.pool_id)
            case frames.Pong():
                pass

    def _on_batch_end(self, end: BatchEnd) -> None:
        is_load = self._in_flight.pop(end.batch_id, None)
        assert is_load is not None, f"Batch {end.batch_id} ended twice, or was never submitted."
        if is_load:
            self.load_bytes += end.bytes_copied
        else:
            self.store_bytes += end.bytes_copied
        self._call(self._events.batch_ended, end)

    def _on_pool_answer(self, pool_id: int, refusal: str | None) -> None:
        entry = self._pools.get(pool_id)
        if entry is not None:
            entry.refusal = refusal
            _set_done(entry.answer)

    def _settle_closing(self, pool_id: int) -> None:
        _set_done(self._closing.pop(pool_id, None))

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call from the loop, in order. An event that raises hurts no other."""
        asyncio.get_running_loop().call_soon(function, *arguments)


async def _wait_either(answer: asyncio.Future[None], died: asyncio.Future[str]) -> None:
    both: list[asyncio.Future[Any]] = [answer, died]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)


def _set_done(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
