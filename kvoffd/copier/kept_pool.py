"""A pool that each process of a copier is to have open.

Owns dups of the pool's descriptors, so that it can be opened again after a
restart. Runs on the loop thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffd.copier import frames
from kvoffd.errors import CopyFailed, MemoryRefused

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from kvoffd.devices.base import PoolDescription

_NOT_ASKED = "The pool is not open yet."


@dataclass(slots=True, eq=False)
class KeptPool:
    """A pool, and what the present process has said of it."""

    pool_id: int
    description: PoolDescription
    #: One a memory, then the ticket page's.
    fds: list[int]
    #: Waits for the present process's answer; None when nobody waits.
    answer: asyncio.Future[None] | None = None
    #: Why the present process has not got it; None when it has.
    refusal: str | None = _NOT_ASKED

    @classmethod
    def keep(cls, pool_id: int, description: PoolDescription, fds: Sequence[int]) -> KeptPool:
        """Check a description and dup its descriptors, which stay the caller's.

        Raises:
            MemoryRefused: the description contradicts itself or is too long.
        """
        description.check()
        if len(fds) != len(description.memory_sizes) + 1 or len(fds) > frames.FRAME_FDS_MAX:
            raise MemoryRefused(
                f"{len(description.memory_sizes)} memories and a ticket page came with {len(fds)} "
                f"descriptors; at most {frames.FRAME_FDS_MAX} can be taken."
            )
        kept = cls(pool_id, description, [])
        try:
            frames.encode_frame(kept.open_frame())
            for fd in fds:
                kept.fds.append(os.dup(fd))
        except (OSError, CopyFailed) as error:
            kept.let_go()
            raise MemoryRefused(f"The pool cannot be handed to a copier: {error}") from error
        return kept

    def open_frame(self) -> frames.OpenPoolFrame:
        """The frame that asks a process to open it, with `fds` beside it."""
        return frames.OpenPoolFrame(pool_id=self.pool_id, description=self.description)

    def forget_answer(self) -> None:
        """The process that had it is gone."""
        self.refusal = _NOT_ASKED

    def let_go(self) -> None:
        """Close the descriptors. No process may have to open it again."""
        while self.fds:
            os.close(self.fds.pop())
