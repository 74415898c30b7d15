"""Block entry: one attempt to keep one block, from its slots' allocation to their return.

A record. Blocks alone changes it, on the loop thread; everybody else reads.
An entry never comes back: storing the block again makes a new entry with a new
sequence, also while an aborted one still waits for its copies to end.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvoffd.core.types import SlotRecord

if TYPE_CHECKING:
    from kvoffd.core.types import BlockKey, JobRef, SlotId


class BlockState(enum.Enum):
    """Where an attempt stands. Nothing leads back, and ABORTED never becomes READY."""

    PENDING = "pending"
    READY = "ready"
    ABORTED = "aborted"


class BlockEntry:
    """One attempt to keep a block. Compared by identity.

    Rank sets are bit masks: `occupied` are the ranks whose slot is still ours,
    `open` those with a copy that may be running, `committed` those done well.
    """

    __slots__ = (
        "committed",
        "evictable",
        "extents",
        "generation",
        "holds",
        "key",
        "length_bytes",
        "linked",
        "occupied",
        "open",
        "parent",
        "position",
        "ranks_all",
        "sequence",
        "slot_bytes",
        "slots",
        "state",
        "writer",
    )

    def __init__(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        generation: int,
        sequence: int,
        length_bytes: int,
        slot_bytes: int,
        writer: JobRef,
        position: int,
    ) -> None:
        self.key = key
        self.parent = parent
        self.generation = generation
        self.sequence = sequence
        #: Bytes of one shard, and of the slot that it lies in.
        self.length_bytes = length_bytes
        self.slot_bytes = slot_bytes
        #: The job that writes this attempt, and the block's position in it.
        self.writer = writer
        self.position = position
        self.state = BlockState.PENDING
        #: By rank. Means something only for the ranks in `occupied`.
        self.slots: tuple[SlotId, ...] = ()
        #: The extents that the slots lie in, each once.
        self.extents: tuple[int, ...] = ()
        #: The mask of all ranks.
        self.ranks_all = 0
        self.occupied = 0
        self.open = 0
        self.committed = 0
        self.holds = 0
        #: In the index. False: can never be found again.
        self.linked = False
        #: In the policy.
        self.evictable = False

    def occupied_slots(self) -> tuple[SlotId, ...]:
        """The slots that are still ours."""
        occupied = self.occupied
        if occupied == self.ranks_all:
            return self.slots
        return tuple(slot for rank, slot in enumerate(self.slots) if occupied >> rank & 1)

    def record(self, rank: int) -> SlotRecord:
        """What the slot table is to say of one rank's slot."""
        return SlotRecord(
            self.slots[rank], self.key, self.generation, rank, self.sequence, self.length_bytes
        )

    def __repr__(self) -> str:
        return (
            f"<block {self.key.namespace}/{self.key.group}/{self.key.block_hash.hex()[:12]} "
            f"sequence {self.sequence} {self.state.value} linked={self.linked} holds={self.holds} "
            f"occupied={self.occupied:b} open={self.open:b} committed={self.committed:b} "
            f"slots={self.slots}>"
        )
