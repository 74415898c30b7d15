"""What the connector's halves cost an engine's threads in each step.

Owns one instance of one rank over a real daemon. Every call into a half is timed on the
calling thread; what a vLLM adaptor adds around them is measured with vLLM, not here.
"""

from __future__ import annotations

import hashlib
import select
import time
import uuid
from typing import TYPE_CHECKING, Any

from kvoffd_client.descriptions import (
    EngineIdentity,
    RankDescription,
    RegionDescription,
    SessionOptions,
)
from kvoffd_client.engine.rank import RankHalf
from kvoffd_client.engine.scheduler import SchedulerHalf
from kvoffd_client.engine.types import RankOptions, RequestProgress, SchedulerOptions, StepView
from kvoffd_client.memory import SharedMemory
from kvoffd_client.ports import SessionState
from kvoffd_client.rank_session import RankSession
from kvoffd_client.scheduler_session import SchedulerSession
from kvoffd_client.tickets import TicketPage

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTS = 64
BLOCK_TOKENS = 16
_PREFIX_BLOCKS = 32
_BLOCK_BYTES = 4096
_POOL_BLOCKS = 1 << 14
# A decode step of a small model; in it our background thread may have the interpreter.
_FORWARD_S = 0.005
_WAIT_S = 30.0


class StepTime:
    """A batch of decoding requests, stepped with and without blocks to store."""

    def __init__(self, socket_path: str) -> None:
        options = SessionOptions(socket_path=socket_path)
        engine = EngineIdentity(
            "bench-steps", uuid.uuid4().hex, (("bench", uuid.uuid4().hex),), ranks_total=1
        )
        self._pool = SharedMemory.create("bench-steps", _POOL_BLOCKS * _BLOCK_BYTES)
        self._tickets = TicketPage.create(4096)
        region = RegionDescription(0, 0, 0, _BLOCK_BYTES, _BLOCK_BYTES)
        description = RankDescription(0, "cpu:0", _POOL_BLOCKS, (self._pool,), (region,))
        self._sessions = (
            SchedulerSession(options, engine),
            RankSession(options, engine, description, self._tickets),
        )
        for session in self._sessions:
            session.start()
        for session in self._sessions:
            assert session.wait_until(SessionState.UP, _WAIT_S), session.status
        while not self._sessions[0].instance_complete:
            select.select([], [], [], 0.01)
        self._scheduler = SchedulerHalf(
            self._sessions[0], BLOCK_TOKENS, SchedulerOptions(ranks_total=1), time.monotonic
        )
        self._rank = RankHalf(self._sessions[1], self._tickets, RankOptions(rank=0), time.monotonic)
        self._spent_s = 0.0

    def run(self, steps: int, *, working: bool) -> list[float]:
        """Seconds a step: idle steps cross no block's boundary, working ones do in turn.

        A working step completes a block of REQUESTS / BLOCK_TOKENS requests, as a decoding
        batch does in the long run.
        """
        requests = self._admit(working=working)
        self._step(StepView())
        times = []
        for number in range(steps):
            progress = []
            for index, request in enumerate(requests):
                grows = working and (number + index) % BLOCK_TOKENS == 0
                if grows:
                    self._grow(request)
                    progress.append(
                        RequestProgress(
                            request["id"],
                            (request["blocks"][-1],),
                            len(request["hashes"]) * BLOCK_TOKENS,
                            is_resumed=False,
                            block_hashes=request["hashes"],
                        )
                    )
            self._spent_s = 0.0
            self._step(StepView(progress=progress))
            times.append(self._spent_s)
            select.select([], [], [], _FORWARD_S)
        self._finish(requests)
        return times

    def close(self) -> None:
        self._rank.shutdown()
        for session in self._sessions:
            session.close()
        self._tickets.close()
        self._pool.close()

    def _admit(self, *, working: bool) -> list[dict[str, Any]]:
        self._free_blocks = iter(range(1, _POOL_BLOCKS))
        requests = []
        for index in range(REQUESTS):
            request: dict[str, Any] = {
                "id": f"{'working' if working else 'idle'}-{index}-{uuid.uuid4().hex}",
                "blocks": [],
                "hashes": [],
            }
            for _ in range(_PREFIX_BLOCKS):
                self._grow(request)
            self._scheduler.allocated(request["id"], tuple(request["blocks"]), 0)
            requests.append(request)
        progress = [
            RequestProgress(
                request["id"],
                tuple(request["blocks"]),
                _PREFIX_BLOCKS * BLOCK_TOKENS,
                is_resumed=False,
                block_hashes=request["hashes"],
            )
            for request in requests
        ]
        self._step(StepView(progress=progress))
        return requests

    def _grow(self, request: dict[str, Any]) -> None:
        request["blocks"].append(next(self._free_blocks))
        name = f"{request['id']} {len(request['blocks'])}"
        request["hashes"].append(hashlib.sha256(name.encode()).digest())

    def _finish(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            tokens = len(request["hashes"]) * BLOCK_TOKENS
            self._scheduler.finished(
                request["id"], tokens, tokens + 1, request["hashes"], tuple(request["blocks"])
            )
        for _ in range(50):
            self._step(StepView())
            select.select([], [], [], 0.01)

    def _step(self, view: StepView) -> None:
        """All hooks of a step, in their order."""
        metadata = self._timed(self._scheduler.build_step, view)
        self._timed(self._rank.handle_fences, metadata)
        self._timed(self._rank.start_loads, metadata)
        self._timed(self._rank.finish_step, metadata)
        self._timed(self._rank.take_failed_blocks)
        report = self._timed(self._rank.take_report)
        self._timed(self._rank.end_step)
        if report is not None:
            self._timed(self._scheduler.absorb, report)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began_s = time.perf_counter()
        answer = call(*arguments)
        self._spent_s += time.perf_counter() - began_s
        return answer
